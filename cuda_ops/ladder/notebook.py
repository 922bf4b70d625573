"""The notebooks of the ladders, and what their cells call.

    python -m cuda_ops.ladder.notebook [name ...]      writes notebooks/<name>.ipynb; --check: is it up to date?

A notebook is made of what the ladder has anyway: its introduction, the comment that opens each rung's file, the kernel,
the simulator's report of the rungs that have a kernel for it, the models, and the committed results. gemm's
text is its own. All are run, and have in them what their cells print and draw. None of it needs a GPU.
"""

import argparse
import ast
import base64
import contextlib
import copy
import csv
import importlib.util
import inspect
import io
import json
import linecache
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


def make(ladder: Ladder) -> dict:
    """Its notebook, before it is run."""
    made = []
    for number, (kind, text) in enumerate(cells(ladder)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        made.append(cell | ({"outputs": [], "execution_count": None} if kind == "code" else {}))
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def run(notebook: dict, name: str) -> dict:
    """The notebook with what its code cells print and draw. They run in this process as one program, so that no Jupyter
    is needed for it; pictures need matplotlib."""
    notebook, namespace, count = copy.deepcopy(notebook), {"__name__": "__main__"}, 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        cell["execution_count"], cell["outputs"] = count, []
        source, file = "".join(cell["source"]), f"{name}, cell {count}"
        # Known to linecache, so that a cell can show the source of its own functions.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        tree, last = ast.parse(source, file), None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, file, "exec"), namespace)
            value = eval(compile(last, file, "eval"), namespace) if last else None
        if printed.getvalue():
            lines = printed.getvalue().splitlines(keepends=True)
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": lines})
        pictures = drawn()
        for picture in pictures:
            cell["outputs"].append({"output_type": "display_data", "data": {"image/png": picture}, "metadata": {}})
        if value is not None and not pictures:
            data = {"text/plain": repr(value).splitlines(keepends=True)}
            result = {"output_type": "execute_result", "execution_count": count, "data": data, "metadata": {}}
            cell["outputs"].append(result)
    return notebook


def drawn() -> list[str]:
    """The open figures of matplotlib as PNG files in base 64; they are closed."""
    pyplot, found = sys.modules.get("matplotlib.pyplot"), []
    for number in pyplot.get_fignums() if pyplot else []:
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        found.append(base64.b64encode(file.getvalue()).decode())
        pyplot.close(number)
    return found


def without_outputs(notebook: dict) -> dict:
    notebook = copy.deepcopy(notebook)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    return notebook


def main():
    parser = argparse.ArgumentParser(prog="python -m cuda_ops.ladder.notebook", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="ladders; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a notebook is out of date")
    arguments = parser.parse_args()
    folder = ROOT / "notebooks"
    known = sorted({*ladders(), *(path.stem for path in folder.glob("*.ipynb"))})
    if not arguments.check and importlib.util.find_spec("matplotlib") is None:
        sys.exit("the pictures need matplotlib: pip install matplotlib")
    for name in arguments.names or known:
        if name not in known:
            sys.exit(f"there is no ladder {name}; there are: {', '.join(known)}")
        path = folder / f"{name}.ipynb"
        committed = json.loads(path.read_text()) if path.is_file() else None
        wanted = make(ladders()[name]) if name in ladders() else without_outputs(committed)
        if not arguments.check:
            import matplotlib

            matplotlib.use("Agg")
            path.write_text(json.dumps(run(wanted, path.name), indent=1, ensure_ascii=False) + "\n")
        elif committed is None or without_outputs(committed) != wanted:
            sys.exit(f"{path.relative_to(ROOT)} is out of date: run python -m cuda_ops.ladder.notebook {name}")


if __name__ == "__main__":
    main()
