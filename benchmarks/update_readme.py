"""Writes the measured parts of README.md from the committed results.

    python benchmarks/update_readme.py [--check]

Each part lies between `<!-- begin: name -->` and `<!-- end: name -->`. With --check nothing is written, and the exit
status is 1 if README.md is not what the results make of it (a test does that).
"""

import argparse
import csv
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GPU = "nvidia-h200"
PRODUCTS = ["gemm", "matmul", "linear", "linear_gelu", "conv2d"]


def load(name):
    """The JSON of that name among the results, or None where it has not been committed yet."""
    path = RESULTS / GPU / name
    return json.loads(path.read_text()) if path.is_file() else None


def nothing_yet(command):
    return [f"Not measured yet: `{command}` does it, and writes the result into `benchmarks/results`."]


def table(header, lines):
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)]


def rows(op):
    lines = [line for line in (RESULTS / GPU / f"{op}.csv").read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def mnist():
    report = load("mnist/report.json")
    if report is None:
        return nothing_yet("python -m cuda_ops mnist --epochs 3 --device cuda")
    settings, native = report["settings"], report["backends"]["native"]
    ours = {name: result for name, result in report["backends"].items() if name != "native"}
    commit = ((load("check.json") or {}).get("mnist") or {}).get("commit") or report["versions"]["commit"]

    def line(what, number, value):
        theirs = value(native)
        return [what, *(number.format(value(r)) for r in ours.values()), number.format(theirs)] + [
            f"{theirs / value(r):.2f}" for r in ours.values()
        ]

    def milliseconds(phase):
        return lambda result: result["milliseconds"][phase]["median"]

    lines = [
        line(f"{phase}, ms (median)", "{:.3f}", milliseconds(phase))
        for phase in ("batch load", "forward", "backward", "update", "zero_grad", "whole step")
    ]
    if all((result.get("graph_milliseconds") or {}).get("median") for result in report["backends"].values()):
        name = "whole step as one CUDA graph, ms (median)"
        lines.append(line(name, "{:.3f}", lambda result: result["graph_milliseconds"]["median"]))
    lines.append(line("peak memory, MB", "{:.0f}", lambda result: result["peak_memory_bytes"] / 1e6))
    accuracy = [f"{r['test_accuracy']:.2%}" for r in (*ours.values(), native)]
    lines.append(["test accuracy", *accuracy, *[""] * len(ours)])
    names = list(ours) if len(ours) > 1 else ["cuda_ops"]
    return [
        f"![MNIST with cuda_ops and with PyTorch, side by side](benchmarks/results/{GPU}/mnist/report.png)",
        "",
        f"On one {report['device']['name']}, eager, {settings['dtype']} without TF32, {settings['epochs']} epochs of "
        f"batches of {settings['batch_size']} (`{report['command']}`, commit `{commit[:7]}`):",
        "",
        *table(["", *names, "PyTorch", *(f"PyTorch / {name}" for name in names)], lines),
    ]


def race():
    """The whole step: PyTorch as most use it, the fastest of PyTorch, the fastest of ours."""
    report = load("mnist_step.json")
    if report is None:
        return nothing_yet("python -m cuda_ops bench mnist")
    facts, lines = report["facts"], []

    def cell(row):
        return f"{row['median_us']:,.{1 if row['median_us'] < 1000 else 0}f}"

    for precision in dict.fromkeys(row["precision"] for row in report["rows"]):
        for batch in sorted({row["batch"] for row in report["rows"] if row["precision"] == precision}):
            found = {r["variant"]: r for r in report["rows"] if (r["precision"], r["batch"]) == (precision, batch)}
            theirs, ours = (
                min((r for r in found.values() if r["ours"] == mine), key=lambda r: r["median_us"], default=None)
                for mine in (False, True)
            )
            if theirs is None or ours is None:
                continue
            floor = report["floors"].get(precision, {}).get(str(batch))
            eager = [found.get(name) for name in ("PyTorch eager NCHW", "fused eager")]
            lines.append(
                [
                    f"{precision}, {batch:,}",
                    *("–" if row is None else cell(row) for row in eager),
                    f"{cell(theirs)} ({theirs['variant'].removeprefix('PyTorch ')})",
                    f"{cell(ours)} ({ours['variant']})",
                    f"**{theirs['median_us'] / ours['median_us']:.2f}**",
                    "–" if floor is None else f"{floor:,.1f}",
                ]
            )
    header = ["precision, batch", "PyTorch eager, µs", "fused eager, µs", "fastest PyTorch, µs", "fastest ours, µs"]
    doubt = " A quick run, of few samples." if facts.get("quick") else ""
    if not any("compiled" in row["variant"] for row in report["rows"]):
        doubt += " torch.compile, which may be faster than the PyTorch shown, had no part in this run."
    for name, run in facts.items():
        if name.startswith("of "):  # mnist_step.keep_other_precisions
            doubt += f" The rows {name} are of {run}."
    if report["left_out"]:
        kinds = {line.split(",")[0] for line in report["left_out"]}
        count = len(report["left_out"])
        missing = "1 time of {} is missing" if count == 1 else f"{count} times of {{}} are missing"
        doubt += f" {missing.format(', '.join(sorted(kinds)))} (see `mnist_step.md`)."
    return [
        f"![microseconds a step against the batch size](benchmarks/results/{GPU}/mnist_step.png)",
        "",
        f"One training step on one {facts['device']} (PyTorch {facts['torch']}), wall time, medians "
        f"(`python -m cuda_ops bench mnist`, commit `{facts['commit']}`, {facts['date']}). The floor is what a copy "
        f"and torch.mm of this run would need for the least bytes and operations.{doubt}",
        "",
        *table([*header, "PyTorch / ours", "floor, µs"], lines),
    ]


def goal():
    """Time to 99 % of the test set."""
    report = load("mnist_99.json")
    if report is None:
        return nothing_yet("python -m cuda_ops bench mnist-99")
    facts, lines = report["facts"], []
    for name, result in report["variants"].items():
        ms, accuracy, cold = result["milliseconds"], result["accuracy"], result["cold_seconds"]
        lines.append(
            [
                name,
                f"{ms['mean']:.1f} ± {ms['std']:.1f}",
                f"{100 * accuracy['mean']:.2f} ± {100 * accuracy['std']:.2f}",
                f"{100 * accuracy['min']:.2f}",
                f"{result['seeds_at_goal']} of {result['seeds']}",
                "–" if cold is None else f"{cold:.1f}",
            ]
        )
    return [
        f"From initial weights to 99 % of the test set, by plain SGD over {report['pictures']:,} pictures on one "
        f"{facts['device']}, mean ± standard deviation over seeds; cold counts from the start of the process "
        f"(`python -m cuda_ops bench mnist-99`, commit `{facts['commit']}`, {facts['date']}):",
        "",
        *table(["", "training, ms", "test accuracy, %", "lowest, %", "seeds at 99 %", "cold, s"], lines),
    ]


def check():
    """What check_gpu.py has written: each step may name a commit of its own, where steps were run at several."""
    report = load("check.json")
    if report is None:
        return nothing_yet("make check-gpu")

    def at(step):
        commit = step.get("commit")
        return f" (commit `{commit[:7]}`)" if commit else ""

    whole = f" at commit `{report['commit'][:7]}`" if report.get("commit") else ""
    lines = [
        f"Checked on {report['gpu']}{whole} (PyTorch {report['torch']}, CUDA {report['cuda']}; `make check-gpu`, "
        f"written to `benchmarks/results/{GPU}/check.json`):",
        "",
    ]
    for name, what in (("tests", "tests"), ("large", "tests of more than 2³¹ elements")):
        step = report.get(name) or {}
        if "passed" in step:
            counts = f"{step['passed']} passed, {step['failed']} failed, {step['skipped']} skipped"
            chosen = f" (`pytest {step['arguments']}`)" if "-m " in step.get("arguments", "") else ""
            lines.append(f"- {what}{chosen}: {counts}{at(step)}")
        failures = step.get("failures", {})
        reasons = failures.items() if isinstance(failures, dict) else ((test, "failed") for test in failures)
        lines += [f"  - {test}: {why}" for test, why in reasons]
    sanitizer = report.get("sanitizer") or {}
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        if tool in sanitizer:
            found = sanitizer[tool]
            if not isinstance(found, str):
                found = "; ".join(f"{ops}: {what.splitlines()[0]}" for ops, what in found.items()) + "; clean elsewhere"
            version = f" {sanitizer['version']}" if sanitizer.get("version") else ""
            lines.append(f"- compute-sanitizer{version} {tool}: {found}{at(sanitizer)}")
    return lines


def ratios(op):
    """{(case, direction): {dtype: (fastest of ours, of PyTorch's variants)}}, in microseconds of GPU time."""
    cases = {}
    for row in rows(op):
        if row["clock"] == "kernel" and not row["implementation"].startswith(("rung ", "peer ")):
            times = cases.setdefault((row["case"], row["direction"]), {}).setdefault(row["dtype"], {})
            times[row["implementation"]] = float(row["median_us"])
    return {
        key: {
            dtype: tuple(
                min(time for name, time in times.items() if name.startswith("ours") == mine) for mine in (True, False)
            )
            for dtype, times in by_dtype.items()
        }
        for key, by_dtype in cases.items()
    }


def products():
    """What tensor cores multiply, in all precisions."""
    names, lines, runs = ["bfloat16", "float16", "tf32", "float32", "float64"], [], []
    for op in PRODUCTS:
        if not (RESULTS / GPU / f"{op}.csv").is_file():
            continue
        facts = dict(re.findall(r"^# (\w+): (.*)$", (RESULTS / GPU / f"{op}.csv").read_text(), re.MULTILINE))
        runs.append(f"{op} at commit `{facts['commit'][:7]}`, {facts['date']}")
        for (case, direction), by_dtype in ratios(op).items():
            cells = [f"{by_dtype[name][1] / by_dtype[name][0]:.2f}" if name in by_dtype else "–" for name in names]
            lines.append([f"{op}, {case}", direction, *cells])
    if not lines:
        return nothing_yet("python -m cuda_ops bench matmul conv2d")
    return [
        "Products: PyTorch's time (cuBLAS; of cuDNN the faster of NCHW and channels_last) over ours, one NVIDIA H200, "
        "GPU time of one call by replays of a CUDA graph over inputs that are cold in the L2, with the kernels of that "
        f"time: {'; '.join(runs)}. What has been measured since is in `benchmarks/notes/` "
        f"(`python -m cuda_ops bench {' '.join(PRODUCTS)} --dtype bfloat16 --dtype tf32 …`). Above 1 ours is faster.",
        "",
        f"<details><summary>{len(lines)} shapes</summary>",
        "",
        *table(["op, case", "direction", *names], lines),
        "",
        "</details>",
    ]


def ops():
    lines = []
    for path in sorted((RESULTS / GPU).glob("*.csv")):
        if not (ROOT / "benchmarks" / f"bench_{path.stem}.py").is_file() or path.stem in PRODUCTS:
            continue  # a race, of columns of its own
        for (case, direction), by_dtype in ratios(path.stem).items():
            if "float32" in by_dtype:
                ours, theirs = by_dtype["float32"]
                lines.append(
                    [f"{path.stem}, {case}", direction, f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}"]
                )
    if not lines:
        return nothing_yet("python -m cuda_ops bench")
    return [
        "GPU time of one call, float32 without TF32, from replays of a CUDA graph over inputs that are cold in the L2 "
        "(`python -m cuda_ops bench`; the csv files hold all cases and dtypes, p10, p90 and the wall time of eager "
        "calls). PyTorch's side is the fastest of its variants; below 1 it is ahead.",
        "",
        f"<details><summary>{len(lines)} measurements</summary>",
        "",
        *table(["op, case", "direction", "cuda_ops, µs", "PyTorch, µs", "PyTorch / cuda_ops"], lines),
        "",
        "</details>",
    ]


PARTS = {"mnist": mnist, "race": race, "goal": goal, "check": check, "products": products, "ops": ops}


def render(text):
    for name, part in PARTS.items():
        pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        body = "\n".join(part()) + "\n"
        text, count = pattern.subn(lambda match, body=body: match.group(1) + body + match.group(2), text)
        if count != 1:
            sys.exit(f"README.md has {count} places for '{name}', expected one")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if README.md is out of date")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    new = render(text)
    if arguments.check:
        sys.exit("README.md is out of date: run python benchmarks/update_readme.py" if new != text else 0)
    readme.write_text(new)


if __name__ == "__main__":
    main()
