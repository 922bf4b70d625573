"""Checks the CUDA kernels on this machine's GPU and writes the report that is committed with them.

    python benchmarks/check_gpu.py [--only tests large sanitizer fuzz mnist] [--commit ID] [--limit SECONDS]

Runs the test suite; the tests of sizes above 2^31 elements; compute-sanitizer's memcheck, racecheck, initcheck and
synccheck over one small case of every kernel (tests/support/kernel_cases.py); both fuzzers, each process with a seed of
its own; and `python -m cuda_ops mnist --epochs 3`. Writes benchmarks/results/<gpu>/check.json and mnist/; exits 1 if
anything failed. Steps that are left out keep their earlier entry in the report; each entry names its commit.
"""

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import torch
from harness import slug

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# synccheck as well: it finds barriers that not all threads reach.
SANITIZERS = ["memcheck", "racecheck", "initcheck", "synccheck"]
# What attention's kernels write by bulk copies (TMA), initcheck 2025.3 took for unwritten where kernels read it, though
# results are right; so these kernels are left to the other tools, and what others read of their results (a sum of
# flash_attention's with sinks, by PyTorch's kernels) is told as unwritten. In cuBLAS's products, which tests compare
# with, racecheck 2025.3 reports races.
UNSEEN = {
    "initcheck": ["--kernel-name-exclude", "kernel_substring=attention_sm90"],
    "racecheck": ["--kernel-name-exclude", "kernel_substring=nvjet"],
}
KERNEL_CASES = [sys.executable, "-m", "support.kernel_cases"]
FUZZERS = [("support.fuzz", "cuda"), ("support.fuzz", "cpu"), ("support.fuzz_raw", "cuda"), ("support.fuzz_raw", "cpu")]
STEPS = ["tests", "large", "sanitizer", "fuzz", "mnist"]


def gpu_name():
    """The folder of this GPU's results, the same as that of `bench`."""
    return slug(torch.cuda.get_device_name())


def python_path():
    """The environment's PYTHONPATH with the repository and its tests in front."""
    return os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))


def run(command, log, **environment):
    """Runs `command` in the repository, its output in the file `log`; (exit status, seconds, last lines)."""
    start = time.monotonic()
    with open(log, "w") as output:
        status = subprocess.run(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": python_path(), **environment},
            check=False,
        ).returncode
    return status, round(time.monotonic() - start, 1), log.read_text().splitlines()[-12:]


def pytest(name, arguments, logs):
    junit = logs / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", f"--junitxml={junit}", "-q", *arguments]
    # One thread a worker of pytest-xdist, or they fight for the cores.
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    status, seconds, tail = run(command, logs / f"{name}.log", OMP_NUM_THREADS=threads)
    result = {"ok": status == 0, "seconds": seconds, "arguments": shlex.join(arguments)}
    if not junit.exists():
        return {**result, "tail": tail}
    suite = next(iter(xml.etree.ElementTree.parse(junit).getroot()))
    count = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    result["failed"] = count["failures"] + count["errors"]
    result["passed"] = count["tests"] - result["failed"] - count["skipped"]
    result["skipped"] = count["skipped"]
    wrong = [
        case for case in suite.iter("testcase") if case.find("failure") is not None or case.find("error") is not None
    ]
    if wrong:
        result["failures"] = [f"{case.get('classname')}::{case.get('name')}" for case in wrong]
    return result


def check_tests(logs, options):
    return pytest("tests", options.pytest, logs)


def check_large(logs, _):
    # One at a time: each takes most of a GPU's memory.
    return pytest("large", ["--large", "tests/test_large.py"], logs)


def sanitize(name, cases, logs, limit):
    """One of compute-sanitizer's tools over the kernels of some ops; (cases that ran clean, what was wrong or None).
    limit: seconds, or None; a process that takes longer is ended, and what it had found by then counts."""
    # Without the caching allocator every tensor is an allocation of its own, so that memcheck sees its bounds and
    # initcheck its bytes.
    log = logs / f"{name}-{cases[0]}.log"
    command = ["compute-sanitizer", f"--tool={name}", "--error-exitcode=9", *UNSEEN.get(name, []), *KERNEL_CASES]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": python_path()}
    environment["PYTHONFAULTHANDLER"] = "1"  # of a crash of the host the tool tells nothing
    with open(log, "w") as output:
        # A session of its own: the tool's children end with it.
        process = subprocess.Popen(
            [*command, *cases],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
    return verdict(log.read_text(), cases, status)


def verdict(text, cases, status):
    """(cases that ran clean, what was wrong or None) by the log of a process; status: None if it was ended."""
    lines = text.splitlines()
    ran = [case for case in cases if case in lines]
    # A finding is told when its kernel ends, beside the tool's first and last lines.
    found = [line for line in lines if line.startswith("=========") and not re.search("COMPUTE-SAN|SUMMARY", line)]
    if status is None and not found:
        return ran, None
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text)
    if status == 0 and summaries and ran == list(cases):
        return ran, None
    if summaries and summaries[-1].startswith("0 errors"):
        said = [line for line in lines if not line.startswith(("=========", "#")) and line not in cases]
        return [], f"0 errors, but the process ended with status {status}: {' '.join(said[-2:])}"
    return [], f"exit {status}: {' '.join(found[:3])} {text[-800:]}"


def check_sanitizer(logs, arguments):
    if shutil.which("compute-sanitizer") is None:
        return {"ok": False, "tail": ["compute-sanitizer is not on PATH; it is a part of the CUDA toolkit"]}
    listing, logged = [*KERNEL_CASES, "--list"], logs / "cases.log"
    if run(listing, logged)[0] != 0:
        return {"ok": False, "tail": logged.read_text().splitlines()[-12:]}
    cases = arguments.cases or logged.read_text().split()
    # PyTorch starts slowly under the sanitizer: a process for several cases. racecheck takes longest: it has more
    # processes, and they start first.
    pairs = []
    for name, jobs in [("racecheck", 2), *((name, len(SANITIZERS)) for name in SANITIZERS if name != "racecheck")]:
        groups = min(len(cases), max(1, arguments.jobs // jobs))
        pairs += [(name, cases[group::groups]) for group in range(groups)]
    start = time.monotonic()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(lambda pair: sanitize(*pair, logs, arguments.limit), pairs))
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=False).stdout
    results = {"ok": True, "seconds": round(time.monotonic() - start, 1)}
    results["version"] = next(iter(re.findall(r"Version ([\d.]+)", version)), None)
    for name in SANITIZERS:
        own = [(group, *outcome) for (tool, group), outcome in zip(pairs, outcomes, strict=True) if tool == name]
        wrong = {" ".join(group): problem for group, _, problem in own if problem}
        clean = {case for _, ran, problem in own if not problem for case in ran}
        left = [case for case in cases if case not in clean]
        results[name] = wrong or f"clean over {len(clean)} cases"
        if left and not wrong:
            results[name] += f"; not reached within {arguments.limit:g} s: {' '.join(left)}"
        results["ok"] &= not left
    return results


def check_fuzz(logs, arguments):
    """The fuzzers side by side, half of the processes on the differential one for CUDA."""
    others = FUZZERS[1:]
    chosen = [FUZZERS[0]] * max(1, arguments.jobs // 2)
    chosen += [others[i % len(others)] for i in range(max(len(others), arguments.jobs - len(chosen)))]

    def one(index):
        module, device = chosen[index]
        out = logs / f"fuzz-{index}.json"
        out.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            module,
            "--seconds",
            str(arguments.fuzz),
            "--device",
            device,
            "--out",
            str(out),
        ]
        status, _, tail = run(command, logs / f"fuzz-{index}.log", OMP_NUM_THREADS="1")
        figures = json.loads(out.read_text()) if out.exists() else {"cases": 0, "failures": 1, "failed": tail}
        return status, figures

    with ThreadPoolExecutor(len(chosen)) as pool:
        outcomes = list(pool.map(one, range(len(chosen))))
    results = {"ok": all(status == 0 for status, _ in outcomes), "seconds": arguments.fuzz}
    for fuzzer in FUZZERS:
        own = [figures for pair, (_, figures) in zip(chosen, outcomes, strict=True) if pair == fuzzer]
        results[" ".join(fuzzer)] = {
            "processes": len(own),
            "cases": sum(figures["cases"] for figures in own),
            "failures": sum(figures["failures"] for figures in own),
            "seeds": [figures.get("seed") for figures in own],
            "failed": [failed for figures in own for failed in figures.get("failed", [])],
        }
    return results


def check_mnist(logs, _):
    out = (RESULTS / gpu_name() / "mnist").relative_to(ROOT)  # no path of this machine in a committed report
    command = [sys.executable, "-m", "cuda_ops", "mnist", "--epochs", "3", "--device", "cuda", "--out", str(out)]
    status, seconds, _ = run(command, logs / "mnist.log")
    return {"ok": status == 0, "seconds": seconds, "report": "mnist/report.md"}


def commit_id():
    command = ["git", "rev-parse", "HEAD"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--commit", default=commit_id(), help="the commit that is checked (default: HEAD)")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs" / "check_gpu", help="where the full logs go")
    parser.add_argument("--pytest", type=shlex.split, default=[], metavar="ARGUMENTS", help="arguments for pytest")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="sanitizer: these cases (default: all)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="for each sanitizer process (default: none)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="sanitizer processes at a time")
    parser.add_argument("--fuzz", type=float, default=60, metavar="SECONDS", help="for the fuzzers (default: 60)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("check_gpu: PyTorch sees no GPU here; `python -m cuda_ops doctor` says why")
    arguments.logs.mkdir(parents=True, exist_ok=True)
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    checks = {
        "tests": check_tests,
        "large": check_large,
        "sanitizer": check_sanitizer,
        "fuzz": check_fuzz,
        "mnist": check_mnist,
    }
    for step in arguments.only:
        print(f"{step} …", flush=True)
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        report[step] = {"commit": arguments.commit, "date": date, **checks[step](arguments.logs, arguments)}
        print(json.dumps(report[step], indent=1, ensure_ascii=False), flush=True)
    folder = RESULTS / gpu_name()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "check.json"
    if path.exists():  # the other steps, each with its commit
        report = {**json.loads(path.read_text()), **report}
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    failed = [step for step in arguments.only if not report[step]["ok"]]
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
