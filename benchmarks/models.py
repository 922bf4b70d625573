"""python -m cuda_ops bench models: whole models, PyTorch's against ours, in training and in inference.

Seven classification models of torchvision's in float32, TF32 and bfloat16 (by autocast), as `python -m cuda_ops race`
takes them, each a row: batch 64 at 224x224 in channels_last on a GPU, forward, backward and SGD with momentum, or the
forward pass alone. Contestants: PyTorch eager, in a CUDA graph, and compiled in a CUDA graph; ours, made by
cuda_ops.convert, eager and in a CUDA graph; on the CPU, which has no graphs, the eager ones alone. Parity and layers
are `race`'s to tell.

A model in a precision is a process of its own, training before inference. Many are alive at a time, one a core, and
share the compiler's cache: what needs no GPU (imports, weights, compilation) they do side by side. A GPU is taken by
one process at a time, with a lock on a file, also for what looks like preparation: cuDNN and Triton choose by timing.
For each row it is taken once for eager steps and once, when the model is compiled, for the graphs, all three in turns,
block by block; half of the processes compile first, so that neither the GPU nor the cores wait for the other.

Results are written anew whenever a row has something new, and stay when the run is interrupted or out of time. A row
that the run did not come to keeps what an earlier run measured, with the commit that it was measured at.

Where ours is slower than the compiled graph, or hardly faster, both are traced, and their kernels shown.

Writes <out>/<device>/models.csv, models.json and models.md.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import models_row
import torch
from models_report import csv_text, earlier, markdown
from models_row import HOLD_SECONDS, MODES, NAMES, RATIOS, Job, Row, row_of

import cuda_ops
from cuda_ops._files import write_files

MODELS = (
    "resnet50",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "densenet121",
    "convnext_tiny",
    "vgg11_bn",
    "vit_b_16",
)
PRECISIONS = {"cuda": models_row.PRECISIONS, "cpu": ("fp32", "bf16")}


@dataclass
class Running:
    jobs: list[Job]
    process: subprocess.Popen
    log: Path


def devices_of(device: torch.device) -> list[tuple[str, dict[str, str]]]:
    """(device, environment) for processes: each GPU is the only one that its processes see, as cuda:0."""
    if device.type == "cpu":
        return [("cpu", {})]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    chosen = names if device.index is None else [names[device.index]]
    few = {"TORCHINDUCTOR_COMPILE_THREADS": "4", "OMP_NUM_THREADS": "2"}  # the cores are for many of them
    return [("cuda:0", {"CUDA_VISIBLE_DEVICES": name, **few}) for name in chosen]


def start(jobs: list[Job], environment: dict[str, str], folder: Path) -> Running:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), **environment}
    paths = os.pathsep.join(filter(None, (str(cuda_ops._library.FOLDER.parent), os.environ.get("PYTHONPATH"))))
    log = Path(jobs[0].row).with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, models_row.__file__, json.dumps([asdict(job) for job in jobs])],
            env={**os.environ, **environment, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it can be ended with its compilers
        )
    return Running(jobs, process, log)


def stop(running: list[Running]):
    """Ends them, with the processes that compile for them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for one in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(one.process.pid, number)
        until = time.monotonic() + 3
        for one in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0, until - time.monotonic()))


def how_it_ended(one: Running) -> str:
    status = one.process.returncode
    if status == -signal.SIGALRM:
        return f"stood still: it had the GPU for {HOLD_SECONDS} s"
    lines = one.log.read_text(errors="replace").strip().splitlines()
    what = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return what + (f": {lines[-1]}" if lines else "")


class Run:
    """Rows as they come, and the files that show them."""

    def __init__(self, facts: dict[str, str], groups: list[list[Job]], folder: Path):
        self.facts, self.folder = facts, folder
        self.rows = {job.key: Row(*job.key) for jobs in groups for job in jobs}
        self.kept = [row for row in earlier(folder) if row.milliseconds]

    def take(self, row: Row) -> bool:
        """Whether anything is new."""
        row.commit, row.date = self.facts["commit"], self.facts["date"]
        new = self.rows[row.key] != row
        self.rows[row.key] = row
        return new

    def merged(self) -> list[Row]:
        """This run's, and an earlier one's where this has none, or none of that size."""
        found = {(row.key, row.sizes): row for row in self.kept}
        found |= {(key, row.sizes): row for key, row in self.rows.items() if row.milliseconds}
        measured = {key for key, _ in found}
        found |= {(key, row.sizes): row for key, row in self.rows.items() if key not in measured}
        order = {model: i for i, model in enumerate(MODELS)}
        return sorted(
            found.values(),
            key=lambda r: (
                MODES.index(r.mode),
                models_row.PRECISIONS.index(r.precision),
                order.get(r.model, len(MODELS)),
                r.model,
            ),
        )

    def write(self) -> list[Path]:
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = self.merged()
        data = {"facts": self.facts, "rows": [asdict(row) for row in rows]}
        contents = {
            "models.csv": csv_text(rows, self.facts),
            "models.json": json.dumps(data, indent=1) + "\n",
            "models.md": markdown(rows, self.facts, " ".join(__doc__.split("\n\n")[1].split())),
        }
        paths = {self.folder / name: text.encode() for name, text in contents.items()}
        write_files(paths)
        return list(paths)


def planned(device: torch.device, precisions, batch, compiled: bool, quick: bool, folder: Path) -> list[list[Job]]:
    """Those of each process, in the order in which they begin: what an interrupted run is to have comes first."""
    models = MODELS[:1] if quick else MODELS
    common = {"batch": batch, "compiled": compiled, "quick": quick, "parent": os.getpid()}
    groups = []
    for precision in precisions:
        for model in models:
            first = len(groups) // 2 % 2 == 1  # by pairs: with two GPUs on both of them
            rows = {mode: str(folder / f"{model.replace('/', '_')}-{precision}-{mode}.json") for mode in MODES}
            common |= {"device": "", "lock": "", "compiles_first": first}
            groups.append([Job(model, precision, mode, row=row, **common) for mode, row in rows.items()])
    return groups


def announce(row: Row):
    times = ", ".join(f"{name} {row.median(name):.2f}" for name in NAMES if row.median(name))
    ratios = ", ".join(f"{name} {row.ratio(name):.2f}" for name in RATIOS if row.ratio(name))
    problems = "".join(f"; {name}: {why}" for name, why in row.problems.items())
    print(f"{' '.join(row.key)}: {times} ms; {ratios}{problems}", flush=True)


def measure_all(run: Run, groups: list[list[Job]], device: torch.device, until: float, processes: int, folder: Path):
    """Starts a process for each group, as many at a time, and takes up what they write."""
    places = devices_of(device)
    locks = [folder / f"device{i}.lock" for i in range(len(places))]
    for lock in locks:
        lock.touch()
    waiting, running, load = list(groups), [], [0] * len(places)
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                place = load.index(min(load))
                load[place] += 1
                name, environment = places[place]
                jobs = [replace(job, device=name, lock=str(locks[place])) for job in waiting.pop(0)]
                running.append(start(jobs, environment, folder))
            ended = [one for one in running if one.process.poll() is not None]
            new = collect(run, running)
            stop(ended)  # compilers that it has left
            for one in ended:
                running.remove(one)
                load[[str(lock) for lock in locks].index(one.jobs[0].lock)] -= 1
                for row in (run.rows[job.key] for job in one.jobs):
                    if not row.settled:
                        row.problems["row"] = how_it_ended(one)
                        row.settled = new = True
                        announce(row)
            if new:
                run.write()
            if time.monotonic() > until:
                break
            time.sleep(0.2)
    finally:
        stop(running)
        collect(run, running)
        for row in run.rows.values():
            if not row.settled:
                row.problems.setdefault("row", "no time left")


def collect(run: Run, running: list[Running]) -> bool:
    """Whether any of their rows is new."""
    new = False
    for job in (job for one in running for job in one.jobs):
        row = row_of(job)
        if row is not None and run.take(row):
            new = True
            if row.settled:
                announce(row)
    return new


def run(device, out: Path, seconds: float, quick: bool, with_compile: bool, batches=None, precisions=None) -> Run:
    """Measures all rows, and writes models.csv, .json and .md into <out>/<device>."""
    import harness

    every = PRECISIONS[device.type]
    for precision in precisions or ():
        if precision not in every:
            raise ValueError(f"--precision {precision}: on this device models are raced in {', '.join(every)}")
    if batches and len(batches) > 1:
        raise ValueError("models takes one --batch")
    try:
        import torchvision  # noqa: F401
    except ImportError as error:
        raise ValueError('torchvision is missing: run `pip install "cuda_ops[app]"`') from error
    begin = time.monotonic()
    chosen = [p for p in every if p in precisions] if precisions else list(every[:1] if quick else every)
    facts = harness.environment(device) | {"seconds": f"at most {seconds:g}"} | ({"quick": "yes"} if quick else {})
    # A compiler that is being ended may still write into it.
    with interrupted_once(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        groups = planned(device, chosen, batches[0] if batches else None, with_compile, quick, folder)
        processes = process_count(device)
        facts |= {"processes": str(processes), "compiler's cache": "empty at the beginning, shared by the rows"}
        facts |= {"a process": "a model in a precision, training before inference"}
        facts |= {"kernels": "from the end of those before to their own"} if device.type == "cuda" else {}
        facts |= {"GPUs": str(len(devices_of(device)))} if device.type == "cuda" else {}
        found = Run(facts, groups, out / harness.slug(facts["device"]))
        try:
            measure_all(found, groups, device, begin + seconds, processes, folder)
        finally:
            facts["seconds"] = f"{time.monotonic() - begin:.0f} of at most {seconds:g}"
            paths = found.write()
    print(f"models: {', '.join(map(str, paths))}")
    return found


def process_count(device) -> int:
    """On the CPU, where all of them would be timed on the same cores, one."""
    return len(os.sched_getaffinity(0)) if device.type == "cuda" else 1


@contextlib.contextmanager
def interrupted_once():
    """SIGTERM is taken as Ctrl-C is. Of several signals, as `timeout` sends them, the first is: what comes later would
    interrupt the writing of what was measured."""
    noted = False

    def interrupt(number, frame):
        nonlocal noted
        if not noted:
            noted = True
            raise KeyboardInterrupt

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
