"""Runs a fuzzer's cases in a process of its own, so that a crash or a hang is a failure with a name, and counts them.

The worker (`python -m <module> <arguments> --worker FIRST`) prints `case NUMBER NAME` before a case and `done OUTCOME`
after it, where an outcome that begins with "fail" is a failure.
"""

import collections
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from cuda_ops._files import write_file
from cuda_ops.training.facts import commit

# A case takes milliseconds, of hundreds of tensors seconds; PyTorch's import and the first launch on a GPU seconds too,
# and all of it ten times as long on a machine with other work.
CASE_SECONDS = 300
START_SECONDS = 600
ROOT = Path(__file__).resolve().parents[2]


class Worker:
    def __init__(self, module, arguments, first, wrapper=(), environment=None):
        command = [*wrapper, sys.executable, "-m", module, *arguments, "--worker", str(first)]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            start_new_session=True,
        )
        self.lines, self.stderr = queue.SimpleQueue(), collections.deque(maxlen=40)
        self.findings = []  # what compute-sanitizer told first of the case
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=lambda: self.stderr.extend(self.process.stderr), daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def line(self, timeout):
        """The next line, None at the end; queue.Empty after `timeout` seconds."""
        return self.lines.get(timeout=timeout)

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def last_words(stderr):
    """Of what a process has written, the exception that it ended with, whose text may be of many lines, or the end."""
    lines = [line.rstrip() for line in stderr]
    begins = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    lines = lines[begins[-1] :][:3] if begins else lines[-3:]
    return [line.strip() for line in lines]


def ended_by(status):
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def add_bounds(parser):
    bounds = parser.add_mutually_exclusive_group()
    bounds.add_argument("--seconds", type=float, default=60)
    bounds.add_argument("--cases", type=int, help="this many, however long they take: the same ones for the same seed")


def supervise(
    module,
    arguments,
    *,
    seconds,
    seed,
    device,
    cases=None,
    out=None,
    wrapper=(),
    environment=None,
    case_seconds=CASE_SECONDS,
):
    """Runs cases for so long, or if `cases` is given the first so many, prints failures as they come, writes the
    figures; the exit status, 1 with failures."""
    if cases is not None:
        seconds = float("inf")
    bound = f"{seconds:g} s" if cases is None else f"{cases} cases"
    print(f"{module.split('.')[-1]}: seed {seed}, {bound} on {device}", flush=True)
    start = time.monotonic()
    outcomes, failures, targets = collections.Counter(), [], collections.Counter()
    first, worker, name = 0, None, None

    def failed(text):
        options = "" if device == "cpu" else f" --device {device}"
        command = f"PYTHONPATH=.:tests python -m {module}{options} --case {name}"
        failures.append({"case": name, "what": text, "command": command})
        print(f"FAIL {name}: {text}\n  {command}", flush=True)

    try:
        while (left := seconds - (time.monotonic() - start)) > 0:
            if cases is not None and first >= cases and name is None:
                break
            if worker is None:
                worker, name = Worker(module, arguments, first, wrapper, environment), None
            try:
                # A case may end after the time is over: what it finds counts.
                line = worker.line(case_seconds if name else min(left, START_SECONDS))
            except queue.Empty:
                if name is None and time.monotonic() - start >= seconds:
                    break
                if name is None:
                    raise SystemExit(f"{module}: the worker does not start") from None
                failed(f"does not end in {case_seconds} s")
                worker.end()
                worker = name = None
                continue
            if line is None:
                status = worker.end()
                if name is None:
                    raise SystemExit(f"{module}: the worker {ended_by(status)}\n{''.join(worker.stderr)}")
                text = " | ".join([*worker.findings, *last_words(worker.stderr)])
                failed(f"{ended_by(status)} {text}".strip())
                outcomes["fail"] += 1
                worker = name = None
            elif line.startswith("case "):
                _, number, name = line.split(" ", 2)
                first = int(number) + 1
                worker.findings.clear()
            elif line.startswith("=========     ") or line.startswith("========= Invalid"):
                worker.findings += [line.lstrip("= ")] if len(worker.findings) < 3 else []
            elif line.startswith("done "):
                outcome, _, text = line[5:].partition(" ")
                outcomes[outcome] += 1
                if outcome != "none":
                    targets[name.split(":")[0]] += 1
                if outcome == "fail":
                    failed(text)
                elif outcome == "ours":
                    outcomes["ours: " + name.split(":")[0] + " " + text] += 1
                name = None
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        if worker is not None:
            worker.end()
    return report(module, outcomes, targets, failures, time.monotonic() - start, seed, device, out)


def report(module, outcomes, targets, failures, seconds, seed, device, out):
    cases = sum(targets.values())
    figures = {
        "cases": cases,
        "failures": len(failures),
        "seconds": round(seconds),
        "seed": seed,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": commit(),
        "targets": dict(sorted(targets.items())),
        "failed": failures,
    }
    for outcome, count in sorted(outcomes.items()):
        if outcome.startswith("ours:"):
            print(f"  {count} x {outcome}")
    told = ", ".join(f"{outcomes[o]} {o}" for o in ("compared", "refused", "ours", "passed") if outcomes[o])
    print(f"{cases} cases ({told}), {len(failures)} failures, {seconds:.0f} s, seed {seed}", flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, (json.dumps(figures, indent=1) + "\n").encode())
    return 1 if failures or not cases else 0
