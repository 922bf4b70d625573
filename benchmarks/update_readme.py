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


def rows(op):
    lines = [line for line in (RESULTS / GPU / f"{op}.csv").read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def mnist():
    report = json.loads((RESULTS / GPU / "mnist" / "report.json").read_text())
    settings, check = report["settings"], json.loads((RESULTS / GPU / "check.json").read_text())
    custom, native = report["backends"]["custom"], report["backends"]["native"]
    lines = [
        f"![MNIST with cuda_ops and with PyTorch, side by side](benchmarks/results/{GPU}/mnist/report.png)",
        "",
        f"On one {report['device']['name']}, eager, {settings['dtype']} without TF32, {settings['epochs']} epochs of "
        f"batches of {settings['batch_size']} (`{report['command']}`, commit `{check['commit'][:7]}`):",
        "",
        "| | cuda_ops | PyTorch | PyTorch / cuda_ops |",
        "|---|---|---|---|",
    ]
    for phase in ("batch load", "forward", "backward", "update", "zero_grad", "whole step"):
        ours, theirs = custom["milliseconds"][phase]["median"], native["milliseconds"][phase]["median"]
        lines.append(f"| {phase}, ms (median) | {ours:.3f} | {theirs:.3f} | {theirs / ours:.2f} |")
    ours, theirs = custom["peak_memory_bytes"] / 1e6, native["peak_memory_bytes"] / 1e6
    lines.append(f"| peak memory, MB | {ours:.0f} | {theirs:.0f} | {theirs / ours:.2f} |")
    lines.append(f"| test accuracy | {custom['test_accuracy']:.2%} | {native['test_accuracy']:.2%} | |")
    return lines


def check():
    report = json.loads((RESULTS / GPU / "check.json").read_text())
    lines = [
        f"Checked on {report['gpu']} at commit `{report['commit'][:7]}` (PyTorch {report['torch']}, CUDA "
        f"{report['cuda']}; `python benchmarks/check_gpu.py`, written to `benchmarks/results/{GPU}/check.json`):",
        "",
    ]
    for step, what in (("tests", "tests"), ("large", "tests of more than 2³¹ elements")):
        result = report[step]
        lines.append(f"- {what}: {result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped")
        lines += [f"  - failed: {name}" for name in result.get("failures", [])]
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        found = report["sanitizer"][tool]
        lines.append(f"- compute-sanitizer {tool}: {found if isinstance(found, str) else f'errors in {list(found)}'}")
    return lines


def ops():
    lines = [
        "GPU time of one call, float32 without TF32, from replays of a CUDA graph over inputs that are cold in the L2 "
        "(`python -m cuda_ops bench`; the csv files hold all cases and dtypes, p10, p90 and the wall time of eager "
        "calls). PyTorch's side is the fastest of its variants; below 1 it is ahead:",
        "",
        "| op, case | direction | cuda_ops, µs | PyTorch, µs | PyTorch / cuda_ops |",
        "|---|---|---|---|---|",
    ]
    for path in sorted((RESULTS / GPU).glob("*.csv")):
        cases = {}
        for row in rows(path.stem):
            beside = row["implementation"].startswith(("rung ", "peer "))
            if row["dtype"] == "float32" and row["clock"] == "kernel" and not beside:
                times = cases.setdefault((row["case"], row["direction"]), {})
                times[row["implementation"]] = float(row["median_us"])
        for (case, direction), times in cases.items():
            ours = times.pop("ours", None)
            if ours and times:
                best = min(times.values())
                lines.append(f"| {path.stem}, {case} | {direction} | {ours:.1f} | {best:.1f} | {best / ours:.2f} |")
    return lines


PARTS = {"mnist": mnist, "check": check, "ops": ops}


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
