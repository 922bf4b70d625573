"""Samplers by the host's clock and by CUDA graphs, their summaries, the device's ceilings, and its caches."""

import contextlib
import ctypes
import functools
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .spec import DTYPES, Make

MAX_SETS = 64


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
    """`rounds` samples of each, interleaved, so that a drift of the machine affects all of them alike."""
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
    # A graph of a millisecond at least: events around a single short call would time the gap between them. No longer,
    # since a graph holds the outputs of all its calls.
    synchronize(device)
    start = time.perf_counter()
    calls[0]()
    synchronize(device)
    wanted = min(20, math.ceil(1e-3 / (time.perf_counter() - start)))
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
    """For calls that take milliseconds: one a sample, the next time the next call, without a warm-up or a graph."""
    cycle = itertools.cycle(calls)

    def wall():
        call = next(cycle)
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def kernel():
        call, start, end = next(cycle), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # some 100 µs, so that the call is in the queue before the first event is reached
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    return kernel if device.type == "cuda" else wall


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
    """Of the dtype of that name, with PyTorch's switches for TF32 as they are; of integers a copy's alone."""
    dtype = DTYPES[name]
    make = Make(device, dtype)
    big = device.type == "cuda" and not quick
    source = make((1 << 30 if big else 1 << 26) // dtype.itemsize, requires_grad=False)
    target = torch.empty_like(source)
    samplers = {"copy": wall_sampler([lambda: target.copy_(source)], device, 0.02)}
    size = 4096 if big else 1024
    if dtype.is_floating_point:
        a, b = make(size, size, requires_grad=False), make(size, size, requires_grad=False)
        samplers["mm"] = wall_sampler([lambda: torch.mm(a, b)], device, 0.02)
    best = {name: min(samples) for name, samples in interleaved(samplers, 3 if quick else 9).items()}
    return Ceiling(2 * source.nbytes / best["copy"], 2 * size**3 / best["mm"] if "mm" in best else math.inf)


def is_slow(seconds, sets, least_seconds) -> bool:
    """Whether a call fills a sample, or one for each set of inputs does and a call alone can be timed well."""
    return seconds > least_seconds or (seconds > 5e-4 and seconds * sets > least_seconds)


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees on the CPU, for all that is timed in it; returns whether the C
    library can (glibc). Else large blocks go back to the system, depending on what ran before, and a step that asks for
    36 MB anew takes 9000 page faults."""
    trim_threshold, mmap_max = -1, -4  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_MAX
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and mallopt(mmap_max, 0) == 1 and mallopt(trim_threshold, 2**31 - 1) == 1
