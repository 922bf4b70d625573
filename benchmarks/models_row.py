"""The rows of `bench models` that one process measures: python benchmarks/models_row.py JOBS, a list of Job as JSON."""

import contextlib
import fcntl
import gc
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from cuda_ops._errors import UserError
from cuda_ops._files import write_file

MODES = ("training", "inference")
PRECISIONS = ("bf16", "tf32", "fp32")
EAGER, GRAPH, COMPILED, OURS_EAGER, OURS = (
    "PyTorch",
    "PyTorch, graph",
    "PyTorch, compiled, graph",
    "ours",
    "ours, graph",
)
NAMES = (EAGER, GRAPH, COMPILED, OURS_EAGER, OURS)
RATIOS = {
    "compiled graph / ours": (COMPILED, OURS),
    "graph / ours": (GRAPH, OURS),
    "eager / ours eager": (EAGER, OURS_EAGER),
}

ROUNDS, LEAST_ROUNDS = 9, 3
BLOCK_SECONDS = 0.04  # of steps that are timed together, at least
TIMED_SECONDS = {"eager": 0.6, "graphs": 1.5}  # all contestants together, once they have LEAST_ROUNDS
TRACED_BELOW, TRACED_KERNELS = 1.05, 12  # of compiled graph / ours, and how many kernels a row keeps
COMPILING_PRIORITY = 10
HOLD_SECONDS = 90  # that a process may have a GPU for; a step that stands still would stop all others


@dataclass(frozen=True)
class Job:
    """A row to be measured."""

    model: str
    precision: str
    mode: str
    batch: int | None
    """None for race's own, and so `size`."""
    compiled: bool
    quick: bool
    device: str
    lock: str
    """The file that a process locks for as long as it takes the device."""
    row: str
    """The file that the row is written to."""
    parent: int
    compiles_first: bool
    """Or takes its eager steps first."""
    size: int | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.precision, self.mode


@dataclass
class Row:
    model: str
    precision: str
    mode: str
    sizes: str = ""
    milliseconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """{contestant: {mean, p10, median, p90, blocks}} of a step."""
    first_seconds: dict[str, float] = field(default_factory=dict)
    """{contestant: seconds until its first step was done}, without waiting for the device."""
    compile_seconds: float | None = None
    device_seconds: float | None = None
    """For which the row had the device to itself."""
    cached: bool = False
    """Whether the compiler found the model in its cache."""
    kernels: dict[str, list[list[str]]] = field(default_factory=dict)
    """{contestant: what gpt2_step.by_kernel tells of its step}."""
    problems: dict[str, str] = field(default_factory=dict)
    """{contestant, or "row": why it has no times}."""
    commit: str = ""
    date: str = ""
    settled: bool = False
    """Whether nothing is to come."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.precision, self.mode

    def median(self, name: str) -> float | None:
        return self.milliseconds.get(name, {}).get("median")

    def first(self, *names: str) -> float | None:
        """Seconds until the first step of a side was done: the first of these contestants has paid for the others."""
        return max((self.first_seconds[name] for name in names if name in self.first_seconds), default=None)

    def ratio(self, name: str) -> float | None:
        theirs, ours = (self.median(contestant) for contestant in RATIOS[name])
        return theirs / ours if theirs and ours else None


class Turn:
    """The device, for one process at a time. The lock goes with the process, however that ends."""

    def __init__(self, job: Job):
        self.parent, self.cuda = job.parent, job.device != "cpu"
        self.file = os.open(job.lock, os.O_RDWR)
        self.held = False
        self.waited = self.used = 0.0

    def take(self):
        if self.held:
            return
        begin = time.perf_counter()
        fcntl.flock(self.file, fcntl.LOCK_EX)
        self.waited += time.perf_counter() - begin
        self.held, self.since = True, time.perf_counter()
        prefer(self.cuda)
        if os.getppid() != self.parent:  # nobody is left who would read the row
            sys.exit(1)
        if self.cuda:
            signal.alarm(HOLD_SECONDS)

    def give(self):
        if self.held:
            if self.cuda:
                signal.alarm(0)
            fcntl.flock(self.file, fcntl.LOCK_UN)
            self.held = False
            prefer(False)
            self.used += time.perf_counter() - self.since


def prefer(first: bool):
    """Whether this thread comes before those that compile: others wait for who has the GPU, and cuDNN builds plans on
    the host. For it to come first again a process needs the right to, as root has it."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0 if first else COMPILING_PRIORITY)


def work(job: Job):
    """Measures a row, and writes it down after each part."""
    from cuda_ops import race
    from cuda_ops.training.race.measure import Conditions
    from cuda_ops.training.race.subject import find

    device = torch.device(job.device)
    row = Row(job.model, job.precision, job.mode)
    try:
        subject = find(job.model, device.type, job.batch, job.size)
    except UserError as error:
        row.problems["row"] = str(error)
        settle(job, row)
        return
    if race.FORMATS[device.type] == "channels_last":
        subject = subject.in_channels_last()
    row.sizes = subject.note
    autocast = torch.bfloat16 if race.PRECISIONS[job.precision] == torch.bfloat16 else None
    conditions = Conditions(device, autocast, ROUNDS, 1, job.mode == "training")
    race._set_precision(job.precision)
    turn = Turn(job)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.empty(0, device=device)  # the driver's context
    parts = [measure_eager, measure_graphs] if device.type == "cuda" else [measure_eager]
    for part in reversed(parts) if job.compiles_first else parts:
        part(job, row, subject, conditions, turn)
        gc.collect()  # the other processes need the memory, too
        if device.type == "cuda":
            torch.cuda.empty_cache()
        turn.give()
    row.device_seconds = turn.used
    settle(job, row)


def settle(job: Job, row: Row):
    row.settled = True
    save(job, row)


def save(job: Job, row: Row):
    write_file(Path(job.row), json.dumps(asdict(row)).encode())


def measure_eager(job, row, subject, conditions, turn: Turn):
    from cuda_ops.training.race.measure import Contestant

    turn.take()
    contestants = {EAGER: Contestant(EAGER, False), OURS_EAGER: Contestant(OURS_EAGER, True)}
    measure(job, row, subject, conditions, contestants, {}, 2, "eager")


def measure_graphs(job, row, subject, conditions, turn: Turn):
    """With the device, which is taken once the model is compiled, and kept."""
    from cuda_ops.training.race.measure import Contestant

    on_cuda = conditions.device.type == "cuda"
    contestants = {COMPILED: Contestant(COMPILED, False, compiled=True, graph=True)} if job.compiled else {}
    if on_cuda:
        contestants |= {GRAPH: Contestant(GRAPH, False, graph=True), OURS: Contestant(OURS, True, graph=True)}
    before, begin = turn.waited, time.perf_counter()

    def taken():
        if not turn.held:
            row.compile_seconds = time.perf_counter() - begin
        turn.take()

    try:
        measure(job, row, subject, conditions, contestants, {"compiler": compiler(taken)}, 3, "graphs", turn.take)
    finally:
        if COMPILED in row.first_seconds:
            row.first_seconds[COMPILED] -= turn.waited - before
            row.cached = contestants[COMPILED].cached
        elif COMPILED in contestants:
            row.compile_seconds = None
        save(job, row)


def compiler(done):
    """torch.compile, which calls `done` when it has compiled, before the first kernel is run. Backward is compiled with
    forward for it, and not when it is first called."""

    def compiled(model):
        import torch._functorch.config
        from torch._inductor.compile_fx import compile_fx

        torch._functorch.config.force_non_lazy_backward_lowering = True

        def inductor(module, inputs):
            function = compile_fx(module, inputs)
            done()
            return function

        return torch.compile(model, backend=inductor)

    return compiled


def measure(job, row, subject, conditions, contestants, options, steps, part, take=lambda: None):
    """Prepares them in order, and times them in turns. `take` takes the device, where it is not taken yet: what is
    compiled does so itself."""
    from cuda_ops.training.race.measure import batch_on, milliseconds, pool_for, prepared, problem_of
    from cuda_ops.training.timing import summarize_blocks

    device = conditions.device
    batch, pool = batch_on(subject, device), pool_for(device)
    ready = {}
    for name, contestant in contestants.items():
        if not contestant.compiled:
            take()
        try:
            ready[name] = prepared(subject, contestant, conditions, batch, pool=pool, steps=steps, **options)
            row.first_seconds[name] = contestant.first_seconds
        except Exception as error:  # a row says of each contestant why it has no times
            row.problems[name] = problem_of(error)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        take()
    rounds, least = (2, 1) if job.quick else (ROUNDS, LEAST_ROUNDS)
    times, blocks = {name: [] for name in ready}, {}
    begin = time.perf_counter()
    for number in range(rounds):
        if number >= least and time.perf_counter() - begin > TIMED_SECONDS[part]:
            break
        for name, step in list(ready.items()) if number % 2 == 0 else reversed(list(ready.items())):
            try:
                if name not in blocks:  # a step that is not counted says how many make a block
                    seconds = milliseconds(step, batch, device, 1) / 1e3
                    blocks[name] = 1 if job.quick else max(1, min(50, round(BLOCK_SECONDS / max(seconds, 1e-6))))
                times[name].append(milliseconds(step, batch, device, blocks[name]))
            except Exception as error:
                row.problems[name] = problem_of(error)
                del ready[name], times[name]
    for name, found in times.items():
        row.milliseconds[name] = summarize_blocks(found) | {"blocks": len(found), "steps": blocks[name]}
    save(job, row)
    ratio = row.ratio("compiled graph / ours") if part == "graphs" else None
    if ratio is not None and ratio < TRACED_BELOW and not job.quick:
        for name in (COMPILED, OURS):
            row.kernels[name] = traced(ready[name], batch, device)


def traced(step, batch, device) -> list[list[str]]:
    """The kernels that take most of a step, by the time from the end of those before them to their own: what was
    launched ahead waits for these, which is none of its own time."""
    from types import SimpleNamespace

    from gpt2_step import by_kernel, timeline

    try:
        found = timeline(SimpleNamespace(step=step, batch=batch, device=device))
    except RuntimeError:  # a tracer that cannot start is no reason to lose the row
        return []
    lines, before = [], 0.0
    for line in found:
        end = line["start_us"] + line["us"]
        lines.append({**line, "us": max(0.0, end - max(before, line["start_us"]))})
        before = max(before, end)
    return by_kernel(lines)[:TRACED_KERNELS]


def row_of(job: Job) -> Row | None:
    try:
        return Row(**json.loads(Path(job.row).read_text()))
    except FileNotFoundError:
        return None


def main(jobs: list[Job]):
    """One after the other: what cuDNN has chosen for one it need not choose again for the next."""
    prefer(False)
    for job in jobs:
        work(job)
        torch._dynamo.reset()
        gc.collect()


if __name__ == "__main__":
    main([Job(**job) for job in json.loads(sys.argv[1])])
