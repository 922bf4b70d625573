"""python -m cuda_ops bench models: whole models, PyTorch's against ours, in training and in inference.

Seven classification models of torchvision's in float32, TF32 and bfloat16 (by autocast), as `python -m cuda_ops race`
takes them, each a row: batch 64 at 224x224 in channels_last on a GPU, forward, backward and SGD with momentum, or the
forward pass alone. Contestants: PyTorch eager, in a CUDA graph, and compiled in a CUDA graph; ours, made by
cuda_ops.convert, eager and in a CUDA graph; on the CPU, which has no graphs, the eager ones alone. Parity and layers
are `race`'s to tell.

A row is a process of its own. Many are alive at a time, one a core, and share the compiler's cache: what needs no GPU
(imports, weights, compilation) they do side by side. A GPU is taken by one process at a time, with a lock on a file,
also for what looks like preparation, since cuDNN and Triton choose by timing. A process takes it once for eager steps
and once, when it has compiled, for the graphs, all three in turns, block by block; half of the processes compile first,
so that neither the GPU nor the cores wait for the other.

Results are written anew whenever a row has something new, and stay when the run is interrupted or out of time. A row
that the run did not come to keeps what an earlier run measured, with the commit that it was measured at.

Where ours is slower than the compiled graph, or hardly faster, both are traced, and their kernels shown.

Writes <out>/<device>/models.csv, models.json and models.md.
"""

import contextlib
import csv
import fcntl
import gc
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

import cuda_ops
from cuda_ops._errors import UserError
from cuda_ops._files import write_file, write_files

MODELS = (
    "resnet50",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "densenet121",
    "convnext_tiny",
    "vgg11_bn",
    "vit_b_16",
)
PRECISIONS = {"cuda": ("bf16", "tf32", "fp32"), "cpu": ("fp32", "bf16")}
MODES = ("training", "inference")
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
COLD = {"PyTorch": (EAGER, GRAPH), "compiled": (COMPILED,), "ours": (OURS_EAGER, OURS)}
AIMS = {"compiled graph / ours": 1.0, "graph / ours": 1.3, "eager / ours eager": 1.0}

ROUNDS, LEAST_ROUNDS = 9, 3
BLOCK_SECONDS = 0.04  # of steps that are timed together, at least
TIMED_SECONDS = {"eager": 0.6, "graphs": 1.5}  # all contestants together, once they have LEAST_ROUNDS
TRACED_BELOW, TRACED_KERNELS = 1.05, 12  # of compiled graph / ours, and how many kernels a row keeps
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


# --- a row's process ------------------------------------------------------------------------------------------------


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
            self.used += time.perf_counter() - self.since


def work(job: Job):
    """Measures a row, and writes it down after each part."""
    from cuda_ops.race import FORMATS, PRECISIONS, _set_precision
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
    if FORMATS[device.type] == "channels_last":
        subject = subject.in_channels_last()
    row.sizes = subject.note
    autocast = torch.bfloat16 if PRECISIONS[job.precision] == torch.bfloat16 else None
    conditions = Conditions(device, autocast, ROUNDS, 1, job.mode == "training")
    _set_precision(job.precision)
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
    ratio = row.ratio("compiled graph / ours")
    if ratio is not None and ratio < TRACED_BELOW and not job.quick:
        for name in (COMPILED, OURS):
            row.kernels[name] = traced(ready[name], batch, device)


def traced(step, batch, device) -> list[list[str]]:
    """The kernels that take most of a step."""
    from types import SimpleNamespace

    from gpt2_step import by_kernel, timeline

    try:
        return by_kernel(timeline(SimpleNamespace(step=step, batch=batch, device=device)))[:TRACED_KERNELS]
    except RuntimeError:  # a tracer that cannot start is no reason to lose the row
        return []


# --- all of them ----------------------------------------------------------------------------------------------------


@dataclass
class Running:
    job: Job
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


def start(job: Job, environment: dict[str, str], folder: Path) -> Running:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), **environment}
    paths = os.pathsep.join(filter(None, (str(cuda_ops._library.FOLDER.parent), os.environ.get("PYTHONPATH"))))
    log = folder / f"{'-'.join(job.key)}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(asdict(job))],
            env={**os.environ, **environment, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it can be ended with its compilers
        )
    return Running(job, process, log)


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


def row_of(job: Job) -> Row | None:
    try:
        return Row(**json.loads(Path(job.row).read_text()))
    except FileNotFoundError:
        return None


def how_it_ended(one: Running) -> str:
    status = one.process.returncode
    if status == -signal.SIGALRM:
        return f"stood still: it had the GPU for {HOLD_SECONDS} s"
    lines = one.log.read_text(errors="replace").strip().splitlines()
    what = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return what + (f": {lines[-1]}" if lines else "")


class Run:
    """Rows as they come, and the files that show them."""

    def __init__(self, facts: dict[str, str], jobs: list[Job], folder: Path):
        self.facts, self.folder = facts, folder
        self.rows = {job.key: Row(*job.key) for job in jobs}
        self.kept = [row for row in earlier(folder) if row.milliseconds]

    def take(self, row: Row) -> bool:
        """Whether anything is new."""
        row.commit, row.date = self.facts["commit"], self.facts["date"]
        new = self.rows[row.key] != row
        self.rows[row.key] = row
        return new

    def merged(self) -> list[Row]:
        """This run's, and an earlier one's where this has none."""
        found = {row.key: row for row in self.kept} | {k: r for k, r in self.rows.items() if r.milliseconds}
        for key, row in self.rows.items():
            found.setdefault(key, row)
        order = {model: i for i, model in enumerate(MODELS)}
        precisions = [*PRECISIONS["cuda"]]
        return sorted(
            found.values(),
            key=lambda r: (
                MODES.index(r.mode),
                precisions.index(r.precision),
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
            "models.md": markdown(rows, self.facts),
        }
        paths = {self.folder / name: text.encode() for name, text in contents.items()}
        write_files(paths)
        return list(paths)


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


def markdown(rows: list[Row], facts: dict[str, str]) -> str:
    from mnist_report import table

    parts = ["# Whole models, PyTorch's against ours", " ".join(__doc__.split("\n\n")[1].split())]
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
    for mode in MODES:
        for precision in PRECISIONS["cuda"]:
            chosen = [row for row in rows if (row.mode, row.precision) == (mode, precision)]
            if chosen:
                parts += [f"## {mode}, {precision}, {chosen[0].sizes or 'not measured'}", table(*as_table(chosen))]
    for row in rows:
        for name, kernels in row.kernels.items():
            if kernels:
                header = ["kernel", "grid", "times", "µs a step", "µs each", "%"]
                parts += [f"## Kernels of {', '.join(row.key)}: {name}", table(header, kernels)]
    problems = [(row, name, why) for row in rows for name, why in row.problems.items()]
    if problems:
        parts += ["## What has no times, and why"]
        parts.append("\n".join(f"- {', '.join(row.key)}, {name}: {why}" for row, name, why in problems))
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


def planned(device: torch.device, precisions, batch, compiled: bool, quick: bool, folder: Path) -> list[Job]:
    """In the order in which they begin: what an interrupted run is to have comes first."""
    models = MODELS[:1] if quick else MODELS
    common = {"batch": batch, "compiled": compiled, "quick": quick, "parent": os.getpid()}
    jobs = []
    for precision in precisions:
        for mode in MODES:
            for model in models:
                row = str(folder / f"{model.replace('/', '_')}-{precision}-{mode}.json")
                first = len(jobs) // 2 % 2 == 1  # by pairs: with two GPUs on both of them
                jobs.append(Job(model, precision, mode, device="", lock="", row=row, compiles_first=first, **common))
    return jobs


def announce(row: Row):
    times = ", ".join(f"{name} {row.median(name):.2f}" for name in NAMES if row.median(name))
    ratios = ", ".join(f"{name} {row.ratio(name):.2f}" for name in RATIOS if row.ratio(name))
    problems = "".join(f"; {name}: {why}" for name, why in row.problems.items())
    print(f"{' '.join(row.key)}: {times} ms; {ratios}{problems}", flush=True)


def measure_all(run: Run, jobs: list[Job], device: torch.device, until: float, processes: int, folder: Path):
    """Starts a process for each job, as many at a time, and takes up what they write."""
    places = devices_of(device)
    for i in range(len(places)):
        (folder / f"device{i}.lock").touch()
    waiting, running, place_of = list(jobs), [], {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                load = [sum(place_of[one.job.key] == i for one in running) for i in range(len(places))]
                place = load.index(min(load))
                name, environment = places[place]
                job = replace(waiting.pop(0), device=name, lock=str(folder / f"device{place}.lock"))
                place_of[job.key] = place
                running.append(start(job, environment, folder))
            ended = [one for one in running if one.process.poll() is not None]
            new = collect(run, running)
            stop(ended)  # compilers that it has left
            for one in ended:
                running.remove(one)
                row = run.rows[one.job.key]
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
    found = [run.take(row) for one in running if (row := row_of(one.job)) is not None]
    return any(found)


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
        jobs = planned(device, chosen, batches[0] if batches else None, with_compile, quick, folder)
        processes = process_count(device)
        facts |= {"processes": str(processes), "compiler's cache": "empty at the beginning, shared by the rows"}
        facts |= {"GPUs": str(len(devices_of(device)))} if device.type == "cuda" else {}
        found = Run(facts, jobs, out / harness.slug(facts["device"]))
        try:
            measure_all(found, jobs, device, begin + seconds, processes, folder)
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


if __name__ == "__main__":
    work(Job(**json.loads(sys.argv[1])))
