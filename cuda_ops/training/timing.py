"""Milliseconds of each phase of a training step, and the memory that it takes."""

import itertools
import time

import torch

PHASES = ("batch load", "forward", "backward", "update", "zero_grad")
WHOLE_STEP = "whole step"


class PhaseTimer:
    """Times the phases of each step.

    On CUDA an event is recorded on the stream between the phases, and read after a synchronisation once a block of
    steps: the device is never made to wait inside a step, and what is measured is the device's own clock, pauses in
    which it waits for the host included. On the CPU, where every op is done when it returns, it is the host's clock.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.steps: list[list[float]] = []
        """Milliseconds: a list for each step, one number for each phase."""
        self._pending: list[list] = []

    def begin(self):
        """A step begins."""
        self._pending.append([self._mark()])

    def lap(self):
        """The next of PHASES ends."""
        self._pending[-1].append(self._mark())

    def collect(self):
        """Ends a block of steps: reads its marks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for marks in self._pending:
            self.steps.append([self._milliseconds(begin, end) for begin, end in itertools.pairwise(marks)])
        self._pending.clear()

    def _mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _milliseconds(self, begin, end) -> float:
        return begin.elapsed_time(end) if self.device.type == "cuda" else (end - begin) * 1e3


def summarize(steps: list[list[float]], warmup: int) -> dict[str, dict[str, float]]:
    """{phase: {mean, p10, median, p90}} in milliseconds over the steps after the first `warmup`, the whole step last;
    empty if there is none."""
    if len(steps) <= warmup:
        return {}
    times = torch.tensor(steps[warmup:], dtype=torch.float64)
    times = torch.cat([times, times.sum(1, keepdim=True)], 1)
    quantiles = times.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), dim=0)
    return {
        phase: {
            "mean": times[:, i].mean().item(),
            "p10": quantiles[0, i].item(),
            "median": quantiles[1, i].item(),
            "p90": quantiles[2, i].item(),
        }
        for i, phase in enumerate((*PHASES, WHOLE_STEP))
    }


def summarize_blocks(milliseconds: list[float]) -> dict[str, float]:
    """{mean, p10, median, p90} of the times of blocks of steps; empty if there is none."""
    if not milliseconds:
        return {}
    times = torch.tensor(milliseconds, dtype=torch.float64)
    p10, median, p90 = times.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return {"mean": times.mean().item(), "p10": p10, "median": median, "p90": p90}


class MemoryMeter:
    """Peak GPU memory of one backend, while others live beside it: what its model and optimizer hold, and the most
    that its steps took on top. PyTorch's allocator counts nothing on the CPU; there it stays None."""

    def __init__(self, device: torch.device):
        self.device = device
        self.resident = 0
        self.growth = None

    def __enter__(self):
        """A block of steps of this backend begins."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *exception):
        if self.device.type == "cuda":
            growth = torch.cuda.max_memory_allocated(self.device) - self._before
            self.growth = max(self.growth or 0, growth)

    @property
    def peak(self) -> int | None:
        """Bytes."""
        return None if self.growth is None else self.resident + self.growth


def product_flops(device: torch.device, dtype: torch.dtype, repeats: int = 5) -> float:
    """Floating-point operations a second of torch.mm, the best of some: what a share of the peak is a share of."""
    size = 4096 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timer = PhaseTimer(device)
    for _ in range(repeats + 2):
        timer.begin()
        torch.mm(a, b)
        timer.lap()
    timer.collect()
    return 2e3 * size**3 / min(steps[0] for steps in timer.steps[2:])
