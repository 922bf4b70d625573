"""Checks the CUDA kernels on this machine's GPU and writes the report that is committed with them.

    python benchmarks/check_gpu.py [--only tests sanitizer mnist] [--commit ID]

Runs the test suite; compute-sanitizer's memcheck, racecheck and initcheck over one small case of every kernel
(tests/kernel_cases.py); and `python -m cuda_ops mnist --epochs 3`. Writes benchmarks/results/<gpu>/check.json and
mnist/; exits 1 if anything failed.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# synccheck as well: it finds barriers that not all threads reach.
SANITIZERS = ["memcheck", "racecheck", "initcheck", "synccheck"]
STEPS = ["tests", "sanitizer", "mnist"]


def gpu_name():
    """The folder of this GPU's results: 'NVIDIA H200' is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def run(command, log, **environment):
    """Runs `command` in the repository, its output in the file `log`; (exit status, seconds, last lines)."""
    start = time.monotonic()
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with open(log, "w") as output:
        status = subprocess.run(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": paths, **environment},
            check=False,
        ).returncode
    return status, round(time.monotonic() - start, 1), log.read_text().splitlines()[-12:]


def check_tests(logs, arguments):
    junit = logs / "tests.xml"
    command = [sys.executable, "-m", "pytest", f"--junitxml={junit}", "-q", *arguments]
    status, seconds, tail = run(command, logs / "tests.log")
    suite = next(iter(xml.etree.ElementTree.parse(junit).getroot()))
    counts = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    return {"ok": status == 0, "seconds": seconds, **counts, "tail": tail}


def check_sanitizer(logs, _):
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"ok": False, "tail": ["compute-sanitizer is not on PATH; it is a part of the CUDA toolkit"]}
    processes = {}
    results = {"ok": True}
    for name in SANITIZERS:
        # Without the caching allocator every tensor is an allocation of its own, so that memcheck sees its bounds and
        # initcheck its bytes.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        if extra := os.environ.get("PYTHONPATH"):
            environment["PYTHONPATH"] += f":{extra}"
        log = open(logs / f"{name}.log", "w")  # noqa: SIM115, closed below
        command = [tool, f"--tool={name}", "--error-exitcode=9", "--kernel-name-exclude=kernel_substring=at::", "--"]
        if name != "initcheck":
            command = [tool, f"--tool={name}", "--error-exitcode=9", "--"]
        command += [sys.executable, "tests/kernel_cases.py"]
        processes[name] = (
            subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment),
            log,
        )
    for name, (process, log) in processes.items():
        status = process.wait()
        log.close()
        text = (logs / f"{name}.log").read_text()
        summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
        results[name] = {"ok": status == 0 and bool(summaries), "summary": summaries[-1] if summaries else text[-500:]}
        results["ok"] &= results[name]["ok"]
    return results


def check_mnist(logs, _):
    out = RESULTS / gpu_name() / "mnist"
    command = [sys.executable, "-m", "cuda_ops", "mnist", "--epochs", "3", "--device", "cuda", "--out", str(out)]
    status, seconds, tail = run(command, logs / "mnist.log")
    return {"ok": status == 0, "seconds": seconds, "tail": tail}


def commit_id():
    command = ["git", "rev-parse", "HEAD"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--commit", default=commit_id(), help="the commit that is checked (default: HEAD)")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs" / "check_gpu", help="where the full logs go")
    parser.add_argument("--pytest", nargs="*", default=[], metavar="ARGUMENT", help="arguments for pytest")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("check_gpu: PyTorch sees no GPU here; `python -m cuda_ops doctor` says why")
    arguments.logs.mkdir(parents=True, exist_ok=True)
    report = {
        "commit": arguments.commit,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    checks = {"tests": check_tests, "sanitizer": check_sanitizer, "mnist": check_mnist}
    for step in arguments.only:
        print(f"{step} …", flush=True)
        report[step] = checks[step](arguments.logs, arguments.pytest)
        print(json.dumps(report[step], indent=1, ensure_ascii=False), flush=True)
    folder = RESULTS / gpu_name()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "check.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    failed = [step for step in arguments.only if not report[step]["ok"]]
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
