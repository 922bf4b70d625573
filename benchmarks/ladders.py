"""`python -m cuda_ops bench ladder [name ...]`: every rung of the teaching ladders but gemm's (which is `bench gemm`),
beside PyTorch and what other tools reach, as GB/s and as a share of a copy's speed; where arithmetic bounds the op, as
TFLOP/s and as a share of what the ladder names as its yardstick.

`ours` is the library's own op, or the top rung where there is none for it. Peers: torch.compile of PyTorch's op; CUB
(peers/cub_<name>.cu) and Triton (peers/triton_<name>.py) where a file for the ladder is there and runs. Beside
ladder_<name>.csv a plot is written; `python benchmarks/ladders.py a.csv` draws that of a file.
"""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path

import torch
from harness import Bench, BenchError, Case, Implementation, read_csv

from cuda_ops._table import print_table
from cuda_ops.ladder import Numbers, ladders

PREFIX = "ladder_"
PEERS = ("cub", "triton")
NAMES = {"cub": "CUB", "triton": "Triton"}


@functools.cache
def peer(tool, ladder):
    """The function of benchmarks/peers/<tool>_<ladder>.py; None where there is no such file, or, said once, where
    what it needs is not here."""
    if importlib.util.find_spec(f"peers.{tool}_{ladder}") is None:
        return None
    try:
        return getattr(importlib.import_module(f"peers.{tool}_{ladder}"), ladder)
    except ModuleNotFoundError as error:
        print(f"{ladder}: peer {NAMES[tool]} is left out, the package {error.name} is not installed")
    except Exception as error:  # a package that is there and does not run
        print(f"{ladder}: peer {NAMES[tool]} is left out: {error}")
    return None


def beside(ladder, device, dtype, case):
    """The rungs that take the case, and on CUDA the peers."""
    (of_ladder,) = (c for c in ladder.cases if c.name == case.name)
    inputs = of_ladder.inputs(Numbers(device, dtype))
    found = [
        Implementation(f"rung {rung.number} {rung.name}", rung.function)
        for rung in ladder.rungs.values()
        if (rung.largest is None or of_ladder.elements <= rung.largest) and rung.runs(*inputs)
    ]
    if device.type != "cuda":
        return found
    if ladder.compiled:
        torch._dynamo.reset()  # else PyTorch would give up after eight cases, and run the function as it is
        native = next(iter(ladder.native.values()))
        found.append(Implementation("peer compiled", torch.compile(native, dynamic=False)))
    functions = ladder.peers(dtype) | {NAMES[tool]: peer(tool, ladder.name) for tool in PEERS}
    return found + [Implementation(f"peer {name}", function) for name, function in functions.items() if function]


def bench_of(name: str) -> Bench:
    if name not in ladders():
        raise BenchError(f"there is no ladder {name}; there are: {', '.join(ladders())}; and gemm, by `bench gemm`")
    ladder = ladders()[name]
    top = list(ladder.rungs.values())[-1]
    native = next(iter(ladder.native.values()))  # stands for ours where there is neither op nor GPU
    ours = ladder.ours or (lambda *inputs: (top if inputs[0].is_cuda else native)(*inputs))
    return Bench(
        op=PREFIX + name,
        ours=Implementation("ours", ours),
        native=[Implementation(*item) for item in ladder.native.items()],
        cases=[
            Case(
                case.name,
                lambda make, case=case: case.inputs(Numbers(make.device, make.dtype, make.generator)),
                elements=(case.elements, 0),
                bytes=(case.bytes, 0),
                flops=(case.flops, 0),
                # On a CPU the first case alone, for the simulator.
                devices=("cpu", "cuda") if case is ladder.cases[0] else ("cuda",),
            )
            for case in ladder.cases
        ],
        backward=False,
        random=ladder.in_place,
        beside=functools.partial(beside, ladder),
        report=functools.partial(report, ladder),
    )


# --- the table and the plot ------------------------------------------------------------------------------------------


def measured(rows):
    """The rows by GPU time; where there is no GPU, by the host's clock. As they were measured, but with the rungs first
    in each case."""
    clocks = {row["clock"] for row in rows}
    rows = [row for row in rows if row["clock"] == ("kernel" if "kernel" in clocks else "wall")]
    groups = list(dict.fromkeys((row["case"], row["dtype"]) for row in rows))
    return sorted(
        rows,
        key=lambda row: (groups.index((row["case"], row["dtype"])), not row["implementation"].startswith("rung ")),
    )


def speed(ladder):
    """The CSV's column of the speed, and its unit."""
    return ("tflop_per_s", "TFLOP/s") if ladder.yardstick else ("gb_per_s", "GB/s")


def table(ladder, rows):
    """A line for each case, dtype and implementation, as the ladder goes."""
    rows, lines = measured(rows), []
    percents = ladder.shares(rows)
    for row in rows:
        percent = percents[row["case"], row["dtype"], row["implementation"]]
        shown = (row[column] for column in ("case", "dtype", "implementation", "median_us", speed(ladder)[0]))
        lines.append([*shown, "–" if percent is None else f"{percent:.1f}"])
    return lines


def plot(ladder, rows, path):
    """Bars from the bottom rung up, a panel for each dtype: the share of a copy's speed, or TFLOP/s, with the time
    beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in measured(rows) if row["case"] == ladder.shown]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    if not rows:
        print(f"{ladder.name}: no plot, {ladder.shown} has not been measured")
        return
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    shape = {"figsize": (6.5 * len(dtypes), 1 + 0.42 * len(names)), "layout": "constrained", "squeeze": False}
    figure, axes = pyplot.subplots(1, len(dtypes), sharey=True, **shape)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        of_dtype = [row for row in rows if row["dtype"] == dtype]
        column, unit = ("tflop_per_s", "TFLOP/s") if ladder.yardstick else ("percent_of_ceiling", "%")
        most = max(float(row[column]) for row in of_dtype) if ladder.yardstick else 100
        for row in of_dtype:
            name = row["implementation"]
            colour = "tab:blue" if name.startswith("rung ") else "black" if name == "ours" else "tab:orange"
            length, place = float(row[column]), names.index(name)
            axis.barh(place, length, color=colour, height=0.7)
            label = f" {length:.3g} {unit}, {float(row['median_us']):,.4g} µs"
            inside = length > 0.6 * most  # where the label would not fit behind the bar
            axis.text(
                length,
                place,
                label + (" " if inside else ""),
                va="center",
                ha="right" if inside else "left",
                color="white" if inside else "black",
                fontsize=9,
            )
        yard = [float(row[column]) for row in of_dtype if row["implementation"] == ladder.yardstick]
        for at in yard if ladder.yardstick else [100]:
            axis.axvline(at, color="grey", linewidth=1, linestyle="--")
        label = unit if ladder.yardstick else f"% of {ladder.against}"
        axis.set(title=f"{dtype}, {ladder.shown}", xlabel=label, xlim=(0, 1.1 * most))
        axis.set_yticks(range(len(names)), names)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def report(ladder, rows, csv_path: Path):
    clock = measured(rows)[0]["clock"]
    columns = ["case", "dtype", "implementation", "µs", speed(ladder)[1], f"% of {ladder.against}"]
    print_table(f"the ladder of {ladder.name}, {clock} time", columns, table(ladder, rows))
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{ladder.name}: no plot, matplotlib is not installed")
        return
    plot(ladder, read_csv(csv_path), csv_path.with_suffix(".png"))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        report(ladders()[path.stem.removeprefix(PREFIX)], read_csv(path), path)
