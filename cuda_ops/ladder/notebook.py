"""The notebooks of the ladders but gemm's, and what their cells call.

    python -m cuda_ops.ladder.notebook [name ...]      writes notebooks/<name>.ipynb; --check: is it up to date?

A notebook is made of what the ladder has anyway: its introduction, the comment that opens each rung's file, the kernel,
the simulator's report of the rungs that have a kernel for it, the models, and the committed results. None of it needs a
GPU.
"""

import argparse
import csv
import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path

import numpy as np
from torch import Tensor

from ._ladder import Ladder, Numbers, ladders

ROOT = Path(__file__).resolve().parents[2]
GPU = "nvidia-h200"


# --- what the cells call ---------------------------------------------------------------------------------------------


def header(ladder: Ladder, number: int) -> str:
    """The comment that opens a rung's file, as text."""
    comment = re.match(r"(//[^\n]*\n)+", ladder.source(number).read_text())[0]
    return "\n".join(line.removeprefix("//").removeprefix(" ") for line in comment.splitlines())


def kernels(ladder: Ladder, number: int) -> str:
    """The __global__ functions of a rung's file."""
    return "\n\n".join(
        re.findall(r"^(?:template[^\n]*\n)?__global__.*?^\}", ladder.source(number).read_text(), re.M | re.S)
    )


def simulate(ladder: Ladder, number: int) -> None:
    """Runs the rung's kernel for the simulator on the ladder's first case, and prints its result's error and report."""
    twin, case = ladder.simulated[number], ladder.cases[0]
    inputs = case.inputs(Numbers("cpu", twin.dtypes[0]))
    expected = ladder.reference(*inputs)  # before the kernel, which may work in place
    outputs, report = twin.launch(twin.kernel, *(t.numpy() if isinstance(t, Tensor) else t for t in inputs))
    if not isinstance(outputs, tuple):
        outputs, expected = (outputs,), (expected,)
    worst = max(np.abs(a - b.numpy()).max() for a, b in zip(outputs, expected, strict=True))
    print(f"{case.name}: the largest error is {worst:.2g}")
    print(report)


def rows(ladder: Ladder, gpu: str = GPU) -> list[dict]:
    """The committed results, by GPU time; none where there are none."""
    path = ROOT / "benchmarks" / "results" / gpu / f"ladder_{ladder.name}.csv"
    if not path.is_file():
        return []
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    return [row for row in csv.DictReader(lines) if row["clock"] == "kernel"]


def results(ladder: Ladder) -> None:
    """Prints microseconds and share of a copy's speed, or TFLOP/s and share of the yardstick's, a line for each
    implementation, a column for each case."""
    found = rows(ladder)
    if not found:
        print(f"not measured yet: `python -m cuda_ops bench ladder {ladder.name}` on a GPU does it")
    percent = ladder.shares(found)

    def cell(key, row):
        if row is None:
            return "–"
        speed = f"{float(row['tflop_per_s']):,.3g} TFLOP/s" if ladder.yardstick else f"{float(row['median_us']):,.1f}"
        return speed if percent[key] is None else f"{speed}, {percent[key]:3.0f} %"

    names = sorted({row["implementation"] for row in found}, key=lambda name: (not name.startswith("rung "), name))
    for dtype in dict.fromkeys(row["dtype"] for row in found):
        at = {(row["case"], dtype, row["implementation"]): row for row in found if row["dtype"] == dtype}
        cases = [case.name for case in ladder.cases if any(case.name == name for name, _, _ in at)]
        print(f"{dtype}: {'speed' if ladder.yardstick else 'µs'}, % of {ladder.against}")
        print(" " * 26 + "".join(f"{case:>22}" for case in cases))
        for name in names:
            keys = [(case, dtype, name) for case in cases]
            print(f"{name:<26}" + "".join(f"{cell(key, at.get(key)):>22}" for key in keys))
        print()


def figure(ladder: Ladder):
    """Share of a copy's speed over the rungs, or TFLOP/s, at the ladder's largest case; a panel for each dtype."""
    found = [row for row in rows(ladder) if row["case"] == ladder.shown]
    if not found or importlib.util.find_spec("matplotlib") is None:
        print("no plot: there are no results yet, or matplotlib is not installed")
        return
    from matplotlib import pyplot

    dtypes = list(dict.fromkeys(row["dtype"] for row in found))
    column = "tflop_per_s" if ladder.yardstick else "percent_of_ceiling"
    _, axes = pyplot.subplots(1, len(dtypes), figsize=(4.5 * len(dtypes), 4), sharey=True, squeeze=False)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        rungs = [row for row in found if row["dtype"] == dtype and row["implementation"].startswith("rung ")]
        numbers = [int(row["implementation"].split()[1]) for row in rungs]
        axis.bar(numbers, [float(row[column]) for row in rungs], color="tab:blue")
        yards = [float(r[column]) for r in found if r["dtype"] == dtype and r["implementation"] == ladder.yardstick]
        for yard in yards if ladder.yardstick else [100]:
            axis.axhline(yard, color="grey", linestyle="--")
        label = f"TFLOP/s (dashed: {ladder.against})" if ladder.yardstick else f"% of {ladder.against}"
        axis.set(title=f"{dtype}, {ladder.shown}", xlabel="rung", ylabel=label)
        axis.set_xticks(numbers)


# --- the maker -------------------------------------------------------------------------------------------------------


def cells(ladder: Ladder) -> list[tuple[str, str]]:
    """(kind, text) of each."""
    module = f"cuda_ops.ladder.{ladder.name}"
    found = [
        (
            "markdown",
            f"# {ladder.name}, rung by rung\n\n$${ladder.formula}$$\n\n{ladder.introduction}\n\nThe kernels are in "
            f"`csrc/cuda/{ladder.name}/ladder/`, a rung a file. This notebook needs no GPU: kernels run in\n"
            "`cuda_ops.ladder.simulator`, a CUDA device written in Python, and the times are those of the committed\n"
            "results. It is made by `python -m cuda_ops.ladder.notebook`.",
        ),
        ("code", f"import inspect\n\nfrom cuda_ops.ladder import notebook\nfrom {module} import LADDER"),
    ]
    for number, name in enumerate(ladder.kernels, 1):
        # What it changes, the formula, and the rest.
        what, _, rest = re.match(r"[^:]*: (.*?)\n((?:    [^\n]*\n)+)(.*)", header(ladder, number), re.S).groups()
        found.append(("markdown", f"## Rung {number}: {name}\n\n{what[0].upper()}{what[1:]}\n\n{rest}"))
        code = f"print(notebook.kernels(LADDER, {number}))"
        if number in ladder.simulated:
            code += f"\nprint()\nprint(inspect.getsource(LADDER.simulated[{number}].kernel))"
            code += f"\nnotebook.simulate(LADDER, {number})"
        found.append(("code", code))
    for model in ladder.models:
        found.append(("markdown", f"## A model: {model.__name__.replace('_', ' ')}\n\n{inspect.getdoc(model)}"))
        found.append(
            (
                "code",
                f"from {module} import {model.__name__}\n\n"
                f"print(inspect.getsource({model.__name__}))\n{model.__name__}()",
            )
        )
    measure = (
        f"{ladder.against}."
        if ladder.yardstick
        else "what a\ncopy of 1 GB reaches; an op that mostly reads can be above 100 %."
    )
    found.append(
        (
            "markdown",
            f"## What was measured\n\n`python -m cuda_ops bench ladder {ladder.name}` writes `runs/bench/<gpu>/ladder_"
            f"{ladder.name}.csv`. What is committed in `benchmarks/results` is shown below:\nGPU time of one call, "
            "from replays of a CUDA graph over inputs that are cold in the L2, and the share that this is of "
            f"{measure}",
        )
    )
    found.append(("code", "notebook.results(LADDER)"))
    found.append(("code", "notebook.figure(LADDER)"))
    return found


def make(ladder: Ladder) -> str:
    """The text of its notebook."""
    made = []
    for number, (kind, text) in enumerate(cells(ladder)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        made.append(cell | ({"outputs": [], "execution_count": None} if kind == "code" else {}))
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    whole = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main():
    parser = argparse.ArgumentParser(prog="python -m cuda_ops.ladder.notebook", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="ladders; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a notebook is out of date")
    arguments = parser.parse_args()
    for name in arguments.names or ladders():
        if name not in ladders():
            sys.exit(f"there is no ladder {name}; there are: {', '.join(ladders())}")
        path, text = ROOT / "notebooks" / f"{name}.ipynb", make(ladders()[name])
        if not arguments.check:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            sys.exit(f"{path.relative_to(ROOT)} is out of date: run python -m cuda_ops.ladder.notebook {name}")


if __name__ == "__main__":
    main()
