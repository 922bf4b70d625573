"""A roofline of all that has been measured on a device, from the CSV files of a folder.

    python -m cuda_ops bench --roofline softmax gelu      measures these, and draws all that is in the folder
    python -m benchmarks.harness.roofline benchmarks/results/nvidia-h200

The roofs are those of the runs themselves: the copy and the torch.mm that each run timed (percent_of_ceiling). Method:
Williams, Waterman, Patterson, Roofline: an insightful visual performance model, CACM 52 (2009).
"""

import statistics
import sys
from pathlib import Path

from .results import COLUMNS, read_csv

# From here on a case is too large for the caches, and long beside a launch.
LEAST_BYTES = 64e6
PRECISIONS = ["bfloat16", "float16", "tf32", "float32", "float64"]
OURS_COLOUR, NATIVE_COLOUR = "#0b6e4f", "#c8553d"


def best_rows(rows):
    """{(op, case, dtype, direction): (the fastest row of ours, of PyTorch's)} by GPU time, or by wall time where there
    is no other."""
    found = {}
    clocks = {row["clock"] for row in rows}
    for row in rows:
        name = row["implementation"]
        if row["clock"] != ("kernel" if "kernel" in clocks else "wall") or name.startswith(("rung ", "peer ")):
            continue
        pair = found.setdefault((row["op"], row["case"], row["dtype"], row["direction"]), [None, None])
        side = 0 if name.startswith("ours") else 1
        if pair[side] is None or float(row["median_us"]) < float(pair[side]["median_us"]):
            pair[side] = row
    return {key: pair for key, pair in found.items() if None not in pair}


def bytes_of(row) -> float:
    return float(row["gb_per_s"]) * float(row["median_us"]) * 1e3


def roofs(rows) -> tuple[float, dict[str, float]]:
    """GB/s of a copy, and TFLOP/s of torch.mm by precision, as the shares of the ceiling say them."""
    copies, products = [], {}
    for row in rows:
        share = float(row["percent_of_ceiling"]) / 100
        if share < 0.05:  # too few digits
            continue
        flops = float(row["tflop_per_s"])
        if flops == 0:
            copies.append(float(row["gb_per_s"]) / share)
        else:  # the roof itself where arithmetic bounds the row, less where memory does
            products[row["dtype"]] = max(products.get(row["dtype"], 0.0), flops / share)
    return statistics.median(copies) if copies else 0.0, products


def memory_panel(axes, pairs, copy):
    """For each op the GB/s of its cases, as a share of a copy's; ours beside PyTorch's."""
    shares = {}
    for (op, _, _, direction), sides in pairs.items():
        if float(sides[0]["tflop_per_s"]) == 0 and bytes_of(sides[0]) >= LEAST_BYTES:
            shares.setdefault((op, direction), []).append([float(row["gb_per_s"]) / copy for row in sides])
    order = sorted(shares, key=lambda key: statistics.median(mine for mine, _ in shares[key]))
    for y, key in enumerate(order):
        for side, (colour, marker) in enumerate(((OURS_COLOUR, "o"), (NATIVE_COLOUR, "x"))):
            values = [100 * pair[side] for pair in shares[key]]
            axes.plot(
                values, [y + 0.15 - 0.3 * side] * len(values), marker, color=colour, markersize=4, linestyle="none"
            )
    axes.set_yticks(range(len(order)), [f"{op} {direction}" for op, direction in order], fontsize=7)
    axes.axvline(100, color="black", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"useful bytes a second, % of a copy's {copy / 1000:.2f} TB/s (cases from 64 MB up)")
    axes.set_title("ops that memory bounds", fontsize=10)


def product_panel(axes, pairs, copy, products):
    """The classic picture: arithmetic a byte against arithmetic a second, under the roofs."""
    for side, (colour, marker) in enumerate(((OURS_COLOUR, "o"), (NATIVE_COLOUR, "x"))):
        rows = [sides[side] for sides in pairs.values() if float(sides[0]["tflop_per_s"]) > 0]
        points = [(1e3 * float(r["tflop_per_s"]) / float(r["gb_per_s"]), float(r["tflop_per_s"])) for r in rows]
        label = ("cuda_ops", "PyTorch, its fastest variant")[side]
        axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=3, linestyle="none", label=label)
    intensities = [10 ** (i / 20) for i in range(-10, 90)]
    for name in (p for p in PRECISIONS if p in products):
        axes.plot(intensities, [min(products[name], copy * i / 1e3) for i in intensities], color="black", linewidth=0.8)
        if name != "float16":  # whose roof is bfloat16's
            axes.text(intensities[-1], products[name], f" {name}", fontsize=7, va="center")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=1e-2)
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("TFLOP/s")
    axes.legend(loc="lower right", fontsize=8)
    axes.set_title("ops that count operations, under the roofs of a copy and of torch.mm", fontsize=10)


def draw(folder: Path) -> Path:
    """Draws roofline.png in `folder` from the CSV files there; ValueError if there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = []
    for path in sorted(folder.glob("*.csv")):
        # The ladders time the same ops again, with rungs beside them.
        if not path.name.endswith(".partial.csv") and not path.name.startswith("ladder_"):
            rows += [row for row in read_csv(path) if set(COLUMNS) <= set(row)]
    pairs = best_rows(rows)
    copy, products = roofs(rows)
    if not pairs or copy == 0 or not products:
        raise ValueError(f"{folder} has no results of both a memory-bound op and a product to draw a roofline of")
    memory_ops = {key[0] for key, sides in pairs.items() if float(sides[0]["tflop_per_s"]) == 0}
    figure, axes = pyplot.subplots(
        1, 2, figsize=(15, max(6, 0.25 * len(memory_ops) + 3)), layout="constrained", width_ratios=[2, 3]
    )
    memory_panel(axes[0], pairs, copy)
    product_panel(axes[1], pairs, copy, products)
    path = folder / "roofline.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
