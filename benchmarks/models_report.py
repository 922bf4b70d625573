"""What `bench models` has measured, as CSV and Markdown."""

import csv
import io
import json
import statistics
from collections import defaultdict
from pathlib import Path

from mnist_report import table
from models_row import COMPILED, EAGER, GRAPH, NAMES, OURS, OURS_EAGER, RATIOS, Row

COLD = {"PyTorch": (EAGER, GRAPH), "compiled": (COMPILED,), "ours": (OURS_EAGER, OURS)}
AIMS = {"compiled graph / ours": 1.0, "graph / ours": 1.3, "eager / ours eager": 1.0}


def earlier(folder: Path) -> list[Row]:
    try:
        found = json.loads((folder / "models.json").read_text())
        return [Row(**row) for row in found["rows"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}/models.json is not what this bench writes ({error}): move it away") from error


def columns_of(row: Row) -> dict[str, str]:
    """A line of models.csv."""

    def number(value, digits):
        return "" if value is None else f"{value:.{digits}f}"

    found = {"model": row.model, "precision": row.precision, "mode": row.mode, "sizes": row.sizes}
    found |= {f"{name}, ms": number(row.median(name), 4) for name in NAMES}
    found |= {name: number(row.ratio(name), 3) for name in RATIOS}
    found |= {"compile, s": number(row.compile_seconds, 1)}
    found |= {f"{name}, first after, s": number(row.first_seconds.get(name), 2) for name in NAMES}
    found |= {"problems": "; ".join(f"{name}: {why}" for name, why in row.problems.items())}
    return found | {"commit": row.commit}


def csv_text(rows: list[Row], facts: dict[str, str]) -> str:
    buffer = io.StringIO()
    buffer.writelines(f"# {name}: {value}\n" for name, value in facts.items())
    writer = csv.DictWriter(buffer, list(columns_of(Row("", "", ""))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(columns_of(row) for row in rows)
    return buffer.getvalue()


def markdown(rows: list[Row], facts: dict[str, str], about: str) -> str:
    parts = ["# Whole models, PyTorch's against ours", about]
    parts.append(
        "Medians, in milliseconds. Ratios are PyTorch's time over ours. Cold start, in seconds: *compile*, what "
        "torch.compile took beside the other processes on the machine's cores, of the time *until the first step*, in "
        "which libraries and kernels are loaded and algorithms chosen, too. Eager steps, which the host's speed may "
        "decide, ran beside the other rows' compilation as well."
    )
    for name, aim in AIMS.items():
        found = [row.ratio(name) for row in rows if row.ratio(name)]
        if found:
            reached = sum(ratio >= aim for ratio in found)
            parts.append(
                f"- {name}: geometric mean {statistics.geometric_mean(found):.3f}, worst {min(found):.3f}, "
                f"{reached} of {len(found)} rows at {aim} or more"
            )
    titled = defaultdict(list)
    for row in rows:
        if row.milliseconds:
            titled[row.mode, row.precision, row.sizes].append(row)
    for title, chosen in titled.items():
        parts += [f"## {', '.join(filter(None, title))}", table(*as_table(chosen))]
    for row in rows:
        for name, kernels in row.kernels.items():
            if kernels:
                header = ["kernel", "grid", "times", "µs a step", "µs each", "%"]
                parts += [f"## Kernels of {', '.join(row.key)}: {name}", table(header, kernels)]
    problems = defaultdict(list)
    for row in rows:
        for name, why in row.problems.items():
            problems[why].append(" ".join(row.key) + f" ({name})" * (name != "row"))
    if problems:
        parts += ["## What has no times, and why"]
        parts.append("\n".join(f"- {why}: {', '.join(where)}" for why, where in problems.items()))
    old = sorted({(row.commit, row.date) for row in rows if row.commit and row.commit != facts["commit"]})
    parts += [f"- some rows are of another run: commit {commit}, {date}" for commit, date in old]
    parts.append("\n".join(f"- {name}: {value}" for name, value in facts.items()))
    return "\n\n".join(parts) + "\n"


def as_table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    def number(value, text):
        return "–" if value is None else format(value, text)

    lines = []
    for row in rows:
        cells = [number(row.median(name), ".2f") for name in NAMES]
        cells += [number(row.ratio(name), ".2f") for name in RATIOS]
        cells += [number(row.compile_seconds, ".0f") + " (cache)" * row.cached]
        cells += [number(row.first(*names), ".1f") for names in COLD.values()]
        lines.append([row.model, *cells])
    return ["model", *NAMES, *RATIOS, "compile", *(f"until the first step, {side}" for side in COLD)], lines
