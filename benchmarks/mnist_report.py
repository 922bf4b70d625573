"""What mnist_step.py has measured, as CSV, JSON, Markdown and a plot."""

import csv
import io
import json
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


def race_table(race, precision: str) -> str:
    """Variants down, batch sizes across; the fastest of PyTorch's over the fastest of ours at the end."""
    rows = [row for row in race.rows if row["precision"] == precision]
    batches = sorted({row["batch"] for row in rows})
    found = {(row["variant"], row["batch"]): row for row in rows}
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells = [found.get((variant, batch)) for batch in batches]
        lines.append([variant, *("–" if cell is None else number(cell["median_us"]) for cell in cells)])
    floors = race.floors.get(precision, {})
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


def plot(race) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    precisions = list(dict.fromkeys(row["precision"] for row in race.rows)) or ["fp32"]
    figure, axes = pyplot.subplots(
        1, len(precisions), figsize=(6 * len(precisions), 6), layout="constrained", squeeze=False, sharey=True
    )
    for axis, precision in zip(axes[0], precisions, strict=True):
        rows = [row for row in race.rows if row["precision"] == precision]
        for i, variant in enumerate(dict.fromkeys(row["variant"] for row in rows)):
            points = sorted((r["batch"], r["median_us"], r["ours"]) for r in rows if r["variant"] == variant)
            batches, times, ours = zip(*points, strict=True)
            style = {"linewidth": 2.5, "marker": "o"} if ours[0] else {"linewidth": 1.2, "marker": "s", "markersize": 4}
            axis.plot(batches, times, label=variant, color=f"C{i}", **style)
        floors = sorted(race.floors.get(precision, {}).items())
        if floors:
            axis.plot(*zip(*floors, strict=True), color="black", linestyle="--", label="floor")
        ticks = sorted({row["batch"] for row in rows})
        axis.set(xscale="log", yscale="log", xlabel="batch size", title=precision)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("microseconds a step")
    axes[0, 0].legend(fontsize=8)
    figure.suptitle(f"One training step of the MNIST CNN on {race.facts.get('device', '')}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()
