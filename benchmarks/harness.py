"""Times our ops against PyTorch's own, so that nobody can doubt the result.

- Both sides run in the same process on the same inputs, one sample of each in turn (ours, PyTorch, ours, ...), and what
  is shown are medians, with the 10th and 90th percentile beside them in the CSV.
- Before anything is timed, outputs and gradients of the two are compared; a result that is NaN is no result.
- Inputs are random, and calls go round over so many sets of them that together they exceed three times the largest
  cache ("cold"). Where that would take too many sets, the row says "hot".
- Two clocks on CUDA. `kernel`: a CUDA graph of many calls, replayed between two events; that is the GPU's time, and
  what remains when a training step is captured into a graph. `wall`: eager calls by the host's clock, with the cost
  of Python and of launching. On the CPU there is only `wall`.
- PyTorch is shown in its strongest simple variant: where a case knows several (layouts, fused), all are timed and
  written down, and the ratio is against the fastest.
- TF32 is off on both sides; allowed on both in rows of the dtype "tf32", which is float32 with TF32. cuDNN may try its
  algorithms and keep the fastest (cudnn.benchmark).
- What is timed beside the two sides, rungs of a ladder and other tools ("peers"), has on CUDA the kernel's clock alone;
  a call of it that takes milliseconds is sampled SLOW_SAMPLES times, alone, on CUDA between two events, and no more.
  A peer whose package is missing, whose first call fails or whose result is wrong is left out, and that is said; a rung
  that fails ends the run.
- % of ceiling: the least time in which the bytes and floating-point operations that the op cannot do without could be
  moved and done, by a copy and a torch.mm timed in the same run, as a fraction of the time taken.

A bench_<op>.py declares one `BENCH = Bench(...)`; `python -m cuda_ops bench` runs them.
"""

import contextlib
import csv
import ctypes
import datetime
import functools
import gc
import importlib
import io
import itertools
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

import cuda_ops
from cuda_ops import _library
from cuda_ops._files import write_file
from cuda_ops._table import print_table

HERE = Path(__file__).resolve().parent
COLUMNS = ["op", "case", "dtype", "direction", "clock", "implementation", "median_us", "p10_us", "p90_us", "samples"]
COLUMNS += ["cache", "gb_per_s", "tflop_per_s", "percent_of_ceiling"]
MAX_SETS = 64
OURS, PEER = "ours", "peer "
BESIDE = ("rung ", PEER)
SLOW_SAMPLES = 3
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "tf32": torch.float32,
}
# Largest relative norm between the two results, by dtype; with sums in another order.
AGREE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


class BenchError(ValueError):
    """Its message says in one line what is wrong and what to do."""


# --- what a bench_<op>.py declares ----------------------------------------------------------------------------------


class Make:
    """Makes random tensors of the dtype and on the device of a run; floats require grad unless told otherwise."""

    def __init__(self, device, dtype, seed=0):
        self.device, self.dtype = torch.device(device), dtype
        self.generator = torch.Generator(device=self.device).manual_seed(seed)

    def __call__(self, *shape, requires_grad=True) -> Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
        return values.requires_grad_(requires_grad)

    def integers(self, *shape, high) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator, device=self.device)


@dataclass
class Implementation:
    name: str
    function: Callable
    prepare: Callable = lambda *args: args
    """Turns a case's arguments into this implementation's (another layout, an optimizer), before the clock starts."""


@dataclass
class Case:
    name: str
    make: Callable[[Make], tuple]
    elements: tuple[int, int] = (0, 0)
    """Elements of the dtype that have to be read and written at the least, forward and backward."""
    flops: tuple[float, float] = (0, 0)
    bytes: tuple[int, int] = (0, 0)
    """Bytes beside those elements, such as indices."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Where it is worth waiting for."""


@dataclass
class Bench:
    op: str
    cases: list[Case]
    """The first one is what --quick runs."""
    native: list[Implementation]
    ours: Implementation | list[Implementation] | None = None
    """Default: cuda_ops.functional.<op>. Several, as PyTorch's are, where a layout is the caller's to choose: their
    names begin with "ours"."""
    backward: bool = True
    random: bool = False
    """Whether the op draws random numbers or works in place, so that results are not compared."""
    beside: Callable[[torch.device, torch.dtype, "Case"], list[Implementation]] | None = None
    """What else is timed with a case, and is neither ours nor PyTorch's: rungs of a ladder, peers. Names begin with
    one of BESIDE."""
    report: Callable[[list[dict], Path], None] | None = None
    """Is given all rows and the path of the CSV when it is written: for a table or a plot of its own."""

    def implementations(self) -> list[Implementation]:
        ours = self.ours
        if ours is None:
            if not hasattr(cuda_ops.functional, self.op):
                raise BenchError(f"cuda_ops.functional has no {self.op} in this build")
            ours = Implementation("ours", getattr(cuda_ops.functional, self.op))
        return [*(ours if isinstance(ours, list) else [ours]), *self.native]


def elementwise_cases(
    shapes: Iterable[tuple], streams: tuple[int, int], inputs: int = 1, extra: tuple = ()
) -> list[Case]:
    """Cases of an op of `inputs` tensors of one shape, which moves so many such tensors forward and backward."""
    return [
        Case(
            "x".join(map(str, shape)),
            lambda make, shape=shape: (*(make(*shape) for _ in range(inputs)), *extra),
            elements=(streams[0] * math.prod(shape), streams[1] * math.prod(shape)),
        )
        for shape in shapes
    ]


# Outputs of the two convolutions of the MNIST CNN, by batch size.
MNIST_SHAPES = [(64, 32, 28, 28), (64, 64, 14, 14), (1024, 32, 28, 28), (1024, 64, 14, 14)]
MATRIX_SHAPES = [(8192, 768), (8192, 4096), (8192, 16384)]


# --- timing ---------------------------------------------------------------------------------------------------------


@dataclass
class Summary:
    median: float
    p10: float
    p90: float
    samples: int


def summarize(seconds: list[float]) -> Summary:
    """Median, 10th and 90th percentile, in the unit of the samples."""
    if len(seconds) == 1:
        return Summary(seconds[0], seconds[0], seconds[0], 1)
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return Summary(statistics.median(seconds), deciles[0], deciles[8], len(seconds))


def interleaved(samplers: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """`rounds` samples of each, one of each in turn, so that a drift of the machine meets all of them alike."""
    samples = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sample in samplers.items():
            samples[name].append(sample())
    return samples


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_sampler(calls: list[Callable], device, least_seconds: float) -> Callable[[], float]:
    """A function that times eager calls by the host's clock, going round over `calls`; seconds for one."""
    outputs = [call() for call in calls]  # kept, so that an output is not written where the last one still is in cache
    position = 0

    def run(count):
        nonlocal position
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            outputs[position] = calls[position]()
            position = (position + 1) % len(calls)
        synchronize(device)
        return (time.perf_counter() - start) / count

    count = max(1, math.ceil(least_seconds / run(len(calls))))
    return lambda: run(count)


def graph_sampler(calls: list[Callable], device, stream, least_seconds: float) -> Callable[[], float]:
    """As wall_sampler, by CUDA events around replays of a graph of all calls."""
    # A graph of some calls at least: events around a single short one would time the gap between them.
    synchronize(device)
    start = time.perf_counter()
    calls[0]()
    synchronize(device)
    wanted = 20 if time.perf_counter() - start < 1e-3 else 1
    calls = calls * math.ceil(wanted / len(calls)) if len(calls) < wanted else calls
    graph = torch.cuda.CUDAGraph()
    outputs = []
    with torch.cuda.graph(graph, stream=stream):
        outputs.extend(call() for call in calls)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def run(replays):
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / (replays * len(calls))

    run(2)
    replays = max(1, math.ceil(least_seconds / (run(2) * len(calls))))
    return lambda _outputs=outputs: run(replays)  # the outputs live as long as the graph that writes them


def single_sampler(calls: list[Callable], device) -> Callable[[], float]:
    """For calls that take milliseconds: one a sample, the next in turn, without a warm-up or a graph."""
    turn = itertools.cycle(calls)

    def wall():
        call = next(turn)
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def kernel():
        call, start, end = next(turn), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # some 100 µs, so that the call is in the queue before the first event is reached
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    return kernel if device.type == "cuda" else wall


# --- calls ----------------------------------------------------------------------------------------------------------


def cache_bytes(device) -> int:
    """The last cache before memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(s[:-1]) * units[s[-1]] for s in sizes if s[-1:] in units), default=32 << 20)


def memory_budget(device) -> int:
    """Bytes that the sets of inputs of one side may take, if nothing else is asked for."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 16
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16


def sets_needed(bytes_per_call: int, cache: int, budget: int, bytes_held: int = 0) -> tuple[int, str]:
    """How many sets of inputs to go round over, and whether that makes calls "cold". A set holds `bytes_held`, which is
    more than a call moves where it reads a part of them."""
    wanted = max(1, math.ceil(3 * cache / max(1, bytes_per_call)))
    allowed = max(1, min(MAX_SETS, budget // max(1, bytes_per_call, bytes_held)))
    return min(wanted, allowed), "cold" if wanted <= allowed else "hot"


def tensors_of(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors_of(item)]
    return []


def forward_call(implementation, arguments):
    return functools.partial(implementation.function, *arguments)


def backward_call(implementation, arguments):
    """A call of backward alone, again and again over one graph. It has to be made on the stream that it will run on."""
    outputs = [o for o in tensors_of(implementation.function(*arguments)) if o.requires_grad]
    inputs = [t for t in tensors_of(arguments) if t.requires_grad]
    grad_outputs = [torch.randn_like(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=True)


def copy_arguments(arguments):
    """Tensors of the same values, so that no side finds its inputs in the cache where the other has left them."""
    if isinstance(arguments, Tensor):
        return arguments.detach().clone().requires_grad_(arguments.requires_grad)
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(map(copy_arguments, arguments))
    return arguments


def require_agreement(what, results: dict[str, object], dtype):
    """Every implementation's tensors against the first one's; BenchError if they differ or are not finite."""
    (first, expected), *others = results.items()
    for name, actual in others:
        for a, e in zip(tensors_of(actual), tensors_of(expected), strict=True):
            distance = (a.double() - e.double()).norm() / e.double().norm().clamp_min(1e-30)
            if not distance <= AGREE[dtype]:  # and so a NaN is refused
                raise BenchError(
                    f"{what}: {first} and {name} differ by {distance:.2g}, so that no time is worth telling"
                )


def require_agreement_of_gradients(what, implementations, arguments, dtype):
    """As require_agreement, for the gradients of the same grad_outputs."""
    results, grad_outputs = {}, None
    for implementation in implementations:
        copies = implementation.prepare(*copy_arguments(arguments))
        outputs = [o for o in tensors_of(implementation.function(*copies)) if o.requires_grad]
        grad_outputs = grad_outputs or [torch.randn_like(o) for o in outputs]
        inputs = [t for t in tensors_of(copies) if t.requires_grad]
        results[implementation.name] = torch.autograd.grad(outputs, inputs, grad_outputs)
    require_agreement(what, results, dtype)


def check_results(what, calls: dict[str, list[Callable]], dtype, left_out: set):
    """The first call of each, against the first of all; peers come last. A peer that raises or differs is taken out of
    `calls` and put into `left_out`, and that is said in one line: its package may be of a version that fails here."""
    (first, some), *others = sorted(calls.items(), key=lambda item: item[0].startswith(PEER))
    expected = some[0]()
    for name, some in others:
        try:
            require_agreement(what, {first: expected, name: some[0]()}, dtype)  # which waits for the GPU
        except Exception as error:
            if not name.startswith(PEER):
                raise
            message = " ".join(str(error).split())[:300]
            print(f"{what}: {name} is left out from here on: {type(error).__name__}: {message}", flush=True)
            left_out.add(name)
            del calls[name]


# --- one run --------------------------------------------------------------------------------------------------------


@dataclass
class Settings:
    device: torch.device
    dtypes: list[str]
    """Names among DTYPES."""
    quick: bool = False
    """Only the first case of each bench, and small ceilings."""
    rounds: int = 31
    least_seconds: float = 0.004
    """How long a sample takes at the least; as many calls as fill it."""
    budget: int | None = None
    """Bytes for the sets of inputs of one side; None: memory_budget."""
    case_seconds: float = 30
    """About how long one case may take; there are fewer samples (but 3) where they would take longer."""
    op_seconds: float | None = None
    """About how long all cases of an op may take together, with all that comes before their samples."""
    left_out: dict[str, set[str]] = field(default_factory=dict)
    """By dtype, the peers that failed in this run."""


QUICK = {"quick": True, "rounds": 5, "least_seconds": 0.0005, "budget": 256 << 20}


@dataclass
class Ceiling:
    bytes_per_second: float
    flops_per_second: float

    def percent(self, seconds, bytes_moved, flops):
        return 100 * max(bytes_moved / self.bytes_per_second, flops / self.flops_per_second) / seconds


@contextlib.contextmanager
def tf32(allowed: bool):
    """PyTorch's switches for TF32, set for a while; and cuDNN's search among its algorithms, switched on."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    try:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = allowed, allowed, True
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


@functools.lru_cache
def measure_ceiling(device, name, quick) -> Ceiling:
    """Of the dtype of that name, with PyTorch's switches for TF32 as they are."""
    dtype = DTYPES[name]
    make = Make(device, dtype)
    big = device.type == "cuda" and not quick
    source = make((1 << 30 if big else 1 << 26) // dtype.itemsize, requires_grad=False)
    target = torch.empty_like(source)
    size = 4096 if big else 1024
    a, b = make(size, size, requires_grad=False), make(size, size, requires_grad=False)
    samplers = {
        "copy": wall_sampler([lambda: target.copy_(source)], device, 0.02),
        "mm": wall_sampler([lambda: torch.mm(a, b)], device, 0.02),
    }
    best = {name: min(samples) for name, samples in interleaved(samplers, 3 if quick else 9).items()}
    return Ceiling(2 * source.nbytes / best["copy"], 2 * size**3 / best["mm"])


def is_slow(seconds, sets, least_seconds) -> bool:
    """Whether a call fills a sample, or one for each set of inputs does and a call alone can be timed well."""
    return seconds > least_seconds or (seconds > 5e-4 and seconds * sets > least_seconds)


def samplers_of(what, calls: dict[str, list[Callable]], settings: Settings) -> tuple[dict, set]:
    """({(clock, implementation): sampler}, those among them that are slow)."""
    device, least = settings.device, settings.least_seconds
    samplers, slow = {}, set()
    for name, some in calls.items():
        beside = name.startswith(BESIDE)
        if beside and is_slow((single := single_sampler(some, device))(), len(some), least):
            key = ("kernel" if device.type == "cuda" else "wall", name)
            samplers[key] = single
            slow.add(key)
            continue
        if device.type != "cuda" or not beside:
            samplers["wall", name] = wall_sampler(some, device, least)
        if device.type != "cuda":
            continue
        try:
            samplers["kernel", name] = graph_sampler(some, device, torch.cuda.current_stream(), least)
        except Exception as error:
            if not (isinstance(error, RuntimeError) or name.startswith(PEER)):
                raise
            print(f"{what}: {name} cannot be captured into a CUDA graph: {str(error).splitlines()[0]}")
    return samplers, slow


def take_samples(samplers: dict, slow: set, settings: Settings, seconds: float) -> dict[object, list[float]]:
    """Of all of them in turn, for about so many seconds; but SLOW_SAMPLES of the slow ones, and as many of all at the
    least."""
    cost = dict.fromkeys(samplers, 0.0)
    samples = {key: [] for key in samplers}
    for key, sample in samplers.items():
        start = time.perf_counter()
        samples[key] += [sample()]
        cost[key] = time.perf_counter() - start
    least = min(SLOW_SAMPLES, settings.rounds)
    others = {key: sample for key, sample in samplers.items() if key not in slow}
    seconds -= least * sum(cost[key] for key in slow)
    wanted = int(seconds / sum(cost[key] for key in others)) if others else 0
    rounds = min(settings.rounds, max(least, wanted))
    for some, count in ((samplers, least - 1), (others, rounds - least)):
        for key, found in interleaved(some, count).items():
            samples[key] += found
    return samples


def time_case(bench: Bench, case: Case, dtype_name: str, direction: str, settings: Settings) -> list[dict]:
    """Rows of the CSV for one case: an implementation and a clock each."""
    start = time.perf_counter()
    dtype, device, implementations = DTYPES[dtype_name], settings.device, bench.implementations()
    left_out = settings.left_out.setdefault(dtype_name, set())
    if bench.beside:
        implementations += [i for i in bench.beside(device, dtype, case) if i.name not in left_out]
    index = ["forward", "backward"].index(direction)
    bytes_moved = case.elements[index] * dtype.itemsize + case.bytes[index]
    make = Make(device, dtype)
    held = sum(t.nbytes for t in tensors_of(case.make(make)))
    count, cache = sets_needed(bytes_moved, cache_bytes(device), settings.budget or memory_budget(device), held)
    make_call = [forward_call, backward_call][index]
    calls = {i.name: [] for i in implementations}
    for _ in range(count):
        arguments = case.make(make)
        for implementation in implementations:
            # Rungs and peers share one copy: with one for each of them the largest products fill a small GPU.
            copy = arguments if implementation.name.startswith(BESIDE) else copy_arguments(arguments)
            calls[implementation.name].append(make_call(implementation, implementation.prepare(*copy)))
    what = f"{bench.op} {case.name} {dtype_name} {direction}"
    if not bench.random:
        if direction == "forward":
            check_results(what, calls, dtype, left_out)
        else:
            require_agreement_of_gradients(what, implementations, arguments, dtype)
    samplers, slow = samplers_of(what, calls, settings)
    ceiling = measure_ceiling(device, dtype_name, settings.quick)
    flops = case.flops[index]
    rows = []
    left = settings.case_seconds - (time.perf_counter() - start)
    for (clock, name), seconds in take_samples(samplers, slow, settings, left).items():
        summary = summarize(seconds)
        values = [bench.op, case.name, dtype_name, direction, clock, name]
        values += [f"{1e6 * s:.3f}" for s in (summary.median, summary.p10, summary.p90)] + [summary.samples, cache]
        values += [f"{bytes_moved / summary.median / 1e9:.1f}", f"{flops / summary.median / 1e12:.3f}"]
        values += [f"{ceiling.percent(summary.median, bytes_moved, flops):.1f}"]
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def run_bench(bench: Bench, settings: Settings, keep: Callable[[list[dict]], None] = lambda rows: None) -> list[dict]:
    """All rows; keep(rows so far) is called after each case."""
    rows = []
    cases = [case for case in bench.cases if settings.device.type in case.devices]
    cases = cases[:1] if settings.quick else cases
    directions = ["forward", "backward"] if bench.backward else ["forward"]
    runs = list(itertools.product(cases, settings.dtypes, directions))
    start = time.perf_counter()
    for done, (case, dtype, direction) in enumerate(runs):
        share = settings.case_seconds
        if settings.op_seconds is not None:
            left = settings.op_seconds - (time.perf_counter() - start)
            share = min(share, left / (len(runs) - done))
        with tf32(dtype == "tf32"):
            rows += time_case(bench, case, dtype, direction, replace(settings, case_seconds=share))
        keep(rows)
        gc.collect()  # graphs hold memory until their cycles are found
        if settings.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


# --- results --------------------------------------------------------------------------------------------------------


def command_output(*command) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, cwd=HERE).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def device_name(device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    return f"CPU {model.group(1) if model else platform.machine()}"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def environment(settings: Settings) -> dict[str, str]:
    """What a reader needs to judge or repeat the run."""
    changed = " with changes" if command_output("git", "status", "--porcelain", "-uno") else ""
    found = {
        "device": device_name(settings.device),
        "torch": torch.__version__,
        "cuda_ops": cuda_ops.__version__,
        "commit": (command_output("git", "rev-parse", "--short", "HEAD") or "unknown") + changed,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "tf32": "allowed on both sides in rows of dtype tf32, off in the others",
    }
    if settings.device.type == "cuda":
        query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
        found["cuda"], found["cudnn"] = torch.version.cuda, str(torch.backends.cudnn.version())
        index = settings.device.index or 0
        found[query] = command_output("nvidia-smi", f"--id={index}", f"--query-gpu={query}", "--format=csv,noheader")
        found["built for"] = _library.build_info()["architectures"]
    else:
        found["threads"] = str(torch.get_num_threads())
        found["load average"] = f"{os.getloadavg()[0]:.1f}"
    return found


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees on the CPU, for all that is timed in it; returns whether the C
    library can (glibc). Else large blocks go back to the system, depending on what ran before, and a step that asks for
    36 MB anew takes 9000 page faults."""
    trim_threshold, mmap_max = -1, -4  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_MAX
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and mallopt(mmap_max, 0) == 1 and mallopt(trim_threshold, 2**31 - 1) == 1


def write_csv(path: Path, rows: list[dict], facts: dict[str, str]):
    """The facts as lines with a # in front (pandas: comment="#"), then a row for each measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    text.writelines(f"# {name}: {value}\n" for name, value in facts.items())
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue().encode())


def read_csv(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def comparison(rows: list[dict]) -> list[list[str]]:
    """The fastest of ours beside the fastest of PyTorch's variants, a line for each measurement; the last column is the
    ratio."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[c] for c in COLUMNS[:5]), {})[row["implementation"]] = row
    lines = []
    for key, by_name in groups.items():
        mine, theirs = {}, {}
        for name, row in by_name.items():
            if not name.startswith(BESIDE):
                (mine if name.startswith(OURS) else theirs)[name] = row
        if not mine or not theirs:
            continue
        ours = min(mine.values(), key=lambda row: float(row["median_us"]))
        name, best = min(theirs.items(), key=lambda item: float(item[1]["median_us"]))
        ratio = float(best["median_us"]) / float(ours["median_us"])
        rate = ours["gb_per_s"] if float(ours["tflop_per_s"]) == 0 else f"{ours['tflop_per_s']} TF"
        lines.append(
            [
                *key,
                ours["cache"],
                ours["median_us"],
                best["median_us"],
                name,
                rate,
                ours["percent_of_ceiling"],
                f"{ratio:.2f}",
            ]
        )
    return lines


def print_comparison(rows: list[dict]):
    lines = comparison(rows)
    columns = [*COLUMNS[:5], "cache", "ours µs", "PyTorch µs", "variant", "GB/s", "% ceiling", "PyTorch / ours"]
    styles = ["green" if float(line[-1]) >= 1 else "red" for line in lines]
    print_table("ours against PyTorch (above 1: ours is faster)", columns, lines, styles)
    print(f"{sum(float(line[-1]) >= 1 for line in lines)} of {len(lines)} measurements are wins.")


# --- the command ----------------------------------------------------------------------------------------------------


def all_ops() -> list[str]:
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def load_bench(op: str) -> Bench:
    if op not in all_ops():
        from cuda_ops.bench import RACES

        known = f"{', '.join(all_ops())}; and the races {' and '.join(RACES)}"
        raise BenchError(f"there is no benchmarks/bench_{op}.py; there are: {known}")
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    return importlib.import_module(f"bench_{op}").BENCH


def run(ops: list[str], settings: Settings, out: Path) -> list[dict]:
    """Runs the benches, writes <out>/<device>/<op>.csv, prints the comparison, and returns all rows. Until an op is
    done its rows are in <op>.partial.csv, so that a run that is cut loses neither them nor an earlier run's."""
    benches = [load_bench(op) for op in (all_ops() if not ops or "all" in ops else dict.fromkeys(ops))]
    facts = environment(settings)
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    folder = out / slug(facts["device"])
    rows = []
    for bench in benches:
        if bench.ours is None and not hasattr(cuda_ops.functional, bench.op) and bench.op not in ops:
            print(f"{bench.op}: left out, cuda_ops.functional has no such op")
            continue
        partial = folder / f"{bench.op}.partial.csv"
        with contextlib.ExitStack() as stack:
            if settings.device.type == "cuda":
                stack.enter_context(torch.cuda.device(settings.device))
                # A graph is captured on a stream that is not the default one, and backward runs where its forward ran.
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
            try:
                found = run_bench(bench, settings, functools.partial(write_csv, partial, facts=facts))
            except BaseException:  # Ctrl-C too
                if partial.exists():
                    print(f"{bench.op}: unfinished; what was measured is in {partial}", flush=True)
                raise
        # The facts are asked for again, so that the clocks are those of a GPU at work.
        write_csv(folder / f"{bench.op}.csv", found, environment(settings))
        partial.unlink(missing_ok=True)
        if bench.report:
            bench.report(found, folder / f"{bench.op}.csv")
        print(f"{bench.op}: {len(found)} measurements in {folder / f'{bench.op}.csv'}", flush=True)
        rows += found
    print_comparison(rows)
    return rows
