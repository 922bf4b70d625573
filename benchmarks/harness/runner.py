"""Runs benches: makes inputs and calls, compares results, takes interleaved samples, writes rows."""

import contextlib
import functools
import gc
import importlib
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

import cuda_ops

from .results import COLUMNS, competition, environment, noise, print_comparison, slug, write_csv
from .spec import BESIDE, DTYPES, PEER, Bench, BenchError, Case, Make
from .timing import (
    cache_bytes,
    graph_sampler,
    interleaved,
    is_slow,
    measure_ceiling,
    memory_budget,
    sets_needed,
    single_sampler,
    summarize,
    tf32,
    wall_sampler,
)

BENCHMARKS = Path(__file__).resolve().parents[1]
SLOW_SAMPLES = 3
# Largest relative norm between the two results, by dtype; with sums in another order. Of integers none.
AGREE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


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


def require_agreement(what, results: dict[str, object], dtype, bends=1.0):
    """Every implementation's tensors against the first one's; BenchError if they differ or are not finite."""
    (first, expected), *others = results.items()
    for name, actual in others:
        for a, e in zip(tensors_of(actual), tensors_of(expected), strict=True):
            distance = (a.double() - e.double()).norm() / e.double().norm().clamp_min(1e-30)
            if not distance <= bends * AGREE.get(dtype, 0.0):  # and so a NaN is refused
                raise BenchError(
                    f"{what}: {first} and {name} differ by {distance:.2g}, so that no time is worth telling"
                )


def require_agreement_of_gradients(what, implementations, arguments, dtype, bends=1.0):
    """As require_agreement, for the gradients of the same grad_outputs."""
    results, grad_outputs = {}, None
    for implementation in implementations:
        copies = implementation.prepare(*copy_arguments(arguments))
        outputs = [o for o in tensors_of(implementation.function(*copies)) if o.requires_grad]
        grad_outputs = grad_outputs or [torch.randn_like(o) for o in outputs]
        inputs = [t for t in tensors_of(copies) if t.requires_grad]
        results[implementation.name] = torch.autograd.grad(outputs, inputs, grad_outputs)
    require_agreement(what, results, dtype, bends)


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


def samplers_of(what, calls: dict[str, list[Callable]], settings: Settings) -> tuple[dict, set]:
    """({(clock, implementation): sampler}, those among them that are slow)."""
    device, least = settings.device, settings.least_seconds
    samplers, slow = {}, set()
    for name, some in calls.items():
        beside = name.startswith(BESIDE)
        single = single_sampler(some, device) if beside else None
        # Asked twice: a call that had to wait for something else once is not slow.
        if single and all(is_slow(single(), len(some), least) for _ in range(2)):
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
    """Interleaved samples of all, for so many seconds; SLOW_SAMPLES of the slow ones, and of all at least as many."""
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
            require_agreement_of_gradients(what, implementations, arguments, dtype, bench.bends)
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


def all_ops() -> list[str]:
    return sorted(path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py"))


def load_bench(op: str) -> Bench:
    if op.startswith("ladder_"):
        if str(BENCHMARKS) not in sys.path:
            sys.path.insert(0, str(BENCHMARKS))
        return importlib.import_module("ladders").bench_of(op.removeprefix("ladder_"))
    if op not in all_ops():
        from cuda_ops.bench import RACES

        known = f"{', '.join(all_ops())}; and the races {' and '.join(RACES)}"
        raise BenchError(f"there is no benchmarks/bench_{op}.py; there are: {known}")
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module(f"bench_{op}").BENCH


def facts_of(settings: Settings) -> dict[str, str]:
    quick = {"quick": f"yes, {settings.rounds} samples of the first case alone"} if settings.quick else {}
    return environment(settings.device) | quick


def run(ops: list[str], settings: Settings, out: Path) -> list[dict]:
    """Runs the benches, writes <out>/<device>/<op>.csv, prints the comparison, and returns all rows. Until an op is
    done its rows are in <op>.partial.csv, so that a run that is cut loses neither them nor an earlier run's."""
    benches = [load_bench(op) for op in (all_ops() if not ops or "all" in ops else dict.fromkeys(ops))]
    facts = facts_of(settings)
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
        write_csv(folder / f"{bench.op}.csv", found, facts_of(settings))
        partial.unlink(missing_ok=True)
        if bench.report:
            bench.report(found, folder / f"{bench.op}.csv")
        print(f"{bench.op}: {len(found)} measurements in {folder / f'{bench.op}.csv'}", flush=True)
        rows += found
    print_comparison(rows)
    if settings.quick and rows:
        print(noise(rows))
    if said := competition(settings.device):
        print(said)
    return rows
