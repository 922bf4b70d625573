"""What mnist_step.py has measured, as CSV, JSON, Markdown and a plot.

python benchmarks/mnist_report.py benchmarks/results/<device>     makes the others anew from mnist_step.json
"""

import csv
import io
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

from cuda_ops._files import write_files

COLUMNS = ["precision", "batch", "variant", "ours", "median_us", "p10_us", "p90_us", "samples"]


def write(race, folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "mnist_step.csv": csv_text(race).encode(),
        "mnist_step.json": (json.dumps(asdict(race), indent=1) + "\n").encode(),
        "mnist_step.md": markdown(race).encode(),
        "mnist_step.png": plot(race),
    }
    write_files({folder / name: content for name, content in contents.items()})


def csv_text(race) -> str:
    buffer = io.StringIO()
    buffer.writelines(f"# {name}: {value}\n" for name, value in race.facts.items())
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in race.rows:
        rounded = {name: f"{row[name]:.2f}" for name in ("median_us", "p10_us", "p90_us")}
        writer.writerow({**row, **rounded, "ours": int(row["ours"])})
    return buffer.getvalue()


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def number(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def floors_of(race, precision: str) -> dict[int, float]:
    """Microseconds that no step of a batch size goes below. They are computed from the rates of a matrix product and a
    copy; where a step was faster, the machine has shown higher rates, and all floors are those of these."""
    floors = race.floors.get(precision, {})
    times = [(r["batch"], r["median_us"]) for r in race.rows if r["precision"] == precision and r["batch"] in floors]
    shown = min((time / floors[batch] for batch, time in times), default=1)
    return {batch: floor * min(1, shown) for batch, floor in sorted(floors.items())}


def race_table(race, precision: str) -> str:
    """Variants down, batch sizes across; the fastest of PyTorch's over the fastest of ours at the end."""
    rows = [row for row in race.rows if row["precision"] == precision]
    batches = sorted({row["batch"] for row in rows})
    found = {(row["variant"], row["batch"]): row for row in rows}
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells = [found.get((variant, batch)) for batch in batches]
        lines.append([variant, *("–" if cell is None else number(cell["median_us"]) for cell in cells)])
    floors = floors_of(race, precision)
    lines.append(["floor", *(number(floors[batch]) if batch in floors else "–" for batch in batches)])
    ratios = []
    for batch in batches:
        times = {
            ours: [r["median_us"] for r in rows if r["batch"] == batch and r["ours"] == ours] for ours in (False, True)
        }
        ratios.append(f"{min(times[False]) / min(times[True]):.2f}×" if times[False] and times[True] else "–")
    lines.append(["**fastest PyTorch / fastest ours**", *(f"**{ratio}**" for ratio in ratios)])
    return table([f"{precision}, µs a step", *(f"batch {batch}" for batch in batches)], lines)


def timeline_row(line: dict) -> list[str]:
    known = [line["bytes"] / 1e6, line["flops"] / 1e6, line["floor_us"]] if "bytes" in line else []
    cells = [f"{value:,.1f}" for value in known] or ["–"] * 3
    return [line["kernel"], f"{line['start_us']:.1f}", f"{line['us']:.1f}", *cells]


def markdown(race) -> str:
    parts = ["# One training step of the MNIST CNN", "![microseconds a step](mnist_step.png)"]
    parts += [race_table(race, precision) for precision in dict.fromkeys(row["precision"] for row in race.rows)]
    for name, lines in race.timelines.items():
        total = max((line["start_us"] + line["us"] for line in lines), default=0)
        rows = [timeline_row(line) for line in lines]
        parts += [
            f"## Time line of the fused step, {name}",
            f"{len(lines)} kernels, {total:.1f} µs from the first one's start to the last one's end, traced.",
            table(["kernel", "start, µs", "duration, µs", "least MB", "MFLOP", "floor, µs"], rows),
        ]
    if race.cold:
        names = list(next(iter(race.cold.values())))
        rows = [[variant, *(f"{parts[name]:.2f}" for name in names)] for variant, parts in race.cold.items()]
        parts += ["## Cold start", "Seconds, each in a fresh process, batch 64, fp32.", table(["", *names], rows)]
    if race.preparation:
        slowest = [f"{name} {seconds:.1f}" for name, seconds in race.preparation.items()]
        parts.append("Seconds until a variant was ready to be timed, at most: " + ", ".join(slowest) + ".")
    if race.left_out:
        parts += ["Left out:", "\n".join(f"- {line}" for line in race.left_out)]
    parts.append("\n".join(f"- {name}: {value}" for name, value in race.facts.items()))
    return "\n\n".join(parts) + "\n"


# A variant has its colour in all panels, whichever variants a panel has: ours are warm, PyTorch's cold.
COLORS = {
    "PyTorch eager NCHW": "tab:gray",
    "PyTorch eager": "tab:blue",
    "PyTorch graph": "tab:cyan",
    "PyTorch compiled NCHW": "tab:olive",
    "PyTorch compiled": "tab:green",
    "PyTorch compiled, graph": "tab:green",
    "PyTorch max-autotune, graph": "tab:purple",
    "custom": "tab:orange",
    "custom eager": "tab:orange",
    "custom graph": "tab:brown",
    "fused": "tab:red",
    "fused eager": "tab:pink",
    "fused graph": "tab:red",
    "one kernel": "darkred",
}
LABEL_GAP = 0.042  # between labels, as a part of the axis


def apart(positions: list[float], gap: float) -> list[float]:
    """The positions, moved as little as keeps them `gap` apart, in their order."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    groups: list[list] = []  # [centre, members], which lie gap apart around their centre
    for i in order:
        groups.append([positions[i], [i]])
        while len(groups) > 1:
            (below, some), (above, others) = groups[-2:]
            if above - (len(others) - 1) * gap / 2 >= below + (len(some) - 1) * gap / 2 + gap * (1 - 1e-9):
                break
            members = some + others
            groups[-2:] = [[sum(positions[m] for m in members) / len(members), members]]
    moved = [0.0] * len(positions)
    for centre, members in groups:
        for number, i in enumerate(members):
            moved[i] = centre + (number - (len(members) - 1) / 2) * gap
    return moved


def label_lines(axis, ends: dict[str, tuple[float, float, str]], last: float, limits: tuple[float, float]):
    """Each line's name in its colour: at the right edge of the panel, with a stroke from the line's last point, or
    beside that point where the line ends before the others."""
    for name, (x, y, color) in ends.items():
        if x != last:
            axis.annotate(name, (x, y), (7, 0), textcoords="offset points", color=color, fontsize=9, va="center")
    ends = {name: end for name, end in ends.items() if end[0] == last}
    low, high = (math.log(limit) for limit in limits)
    heights = apart([(math.log(y) - low) / (high - low) for _, y, _ in ends.values()], LABEL_GAP)
    for (name, (x, y, color)), height in zip(ends.items(), heights, strict=True):
        axis.annotate(
            name,
            (x, y),
            (1.03, height),
            textcoords="axes fraction",
            color=color,
            fontsize=9,
            va="center",
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "alpha": 0.6},
            annotation_clip=False,
        )


def plot(race) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    precisions = list(dict.fromkeys(row["precision"] for row in race.rows)) or ["fp32"]
    others = [name for name in dict.fromkeys(row["variant"] for row in race.rows) if name not in COLORS]
    colors = {**COLORS, **{name: f"C{i % 10}" for i, name in enumerate(others)}}
    figure, axes = pyplot.subplots(
        1, len(precisions), figsize=(7.5 * len(precisions), 6), layout="constrained", squeeze=False, sharey=True
    )
    drawn = []
    for axis, precision in zip(axes[0], precisions, strict=True):
        rows = [row for row in race.rows if row["precision"] == precision]
        ends = {}
        for variant in dict.fromkeys(row["variant"] for row in rows):
            points = sorted((r["batch"], r["median_us"], r["ours"]) for r in rows if r["variant"] == variant)
            batches, times, ours = zip(*points, strict=True)
            style = {"linewidth": 2.5, "marker": "o"} if ours[0] else {"linewidth": 1.2, "marker": "s", "markersize": 4}
            axis.plot(batches, times, color=colors[variant], **style)
            ends[variant] = batches[-1], times[-1], colors[variant]
        floors = list(floors_of(race, precision).items())
        if floors:
            axis.plot(*zip(*floors, strict=True), color="black", linestyle="--")
            ends["floor"] = *floors[-1], "black"
        ticks = sorted({row["batch"] for row in rows})
        drawn.append((axis, ends, ticks[-1] if ticks else 0))
        axis.set(xscale="log", yscale="log", xlabel="batch size", title=precision)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis, ends, last in drawn:  # the panels share their limits, which all of their lines have a part in
        label_lines(axis, ends, last, axis.get_ylim())
    axes[0, 0].set_ylabel("microseconds a step")
    figure.suptitle(f"One training step of the MNIST CNN on {race.facts.get('device', '')}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()


def main():
    from mnist_step import Race

    for folder in map(Path, sys.argv[1:]):
        race = Race(**json.loads((folder / "mnist_step.json").read_text()))
        # JSON has no numbers as keys.
        race.floors = {name: {int(k): v for k, v in floors.items()} for name, floors in race.floors.items()}
        write(race, folder)


if __name__ == "__main__":
    main()
