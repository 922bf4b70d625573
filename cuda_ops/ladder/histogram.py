"""How often each of 256 numbers is there, rung by rung.

    >>> import torch
    >>> from cuda_ops.ladder import histogram
    >>> counts = histogram.LADDER.rungs["simulated per lane"](torch.tensor([3, 7, 3], dtype=torch.int32))
    >>> counts[[3, 7]]
    tensor([2, 1], dtype=torch.int32)

The kernels are in csrc/cuda/histogram/ladder/; `python -m cuda_ops bench ladder histogram` measures them, and
notebooks/histogram.ipynb walks them.
"""

import numpy as np
import torch
from torch import Tensor

from . import simulator
from ._ladder import Case, Ladder, Simulated

BINS = 256

# --- kernels for the simulator ---------------------------------------------------------------------------------------
# Written as the .cu files of the same names are, with fewer threads; `t` is the thread, a bare `yield` is
# __syncthreads(). Every block has its own counters, which it adds to those in memory at its end.


def global_atomics_kernel(t, counts, input, count):
    """csrc/cuda/histogram/ladder/01_global_atomics.cu."""
    for i in range(t.blockIdx.x * t.blockDim.x + t.threadIdx.x, count, t.gridDim.x * t.blockDim.x):
        if 0 <= input[i] < BINS:
            t.atomic_add(counts, int(input[i]), 1)


def shared_atomics_kernel(t, counts, input, count):
    """csrc/cuda/histogram/ladder/02_shared_atomics.cu."""
    mine = t.shared("mine", BINS, np.int32)
    for b in range(t.threadIdx.x, BINS, t.blockDim.x):
        mine[b] = 0
    yield
    for i in range(t.blockIdx.x * t.blockDim.x + t.threadIdx.x, count, t.gridDim.x * t.blockDim.x):
        if 0 <= input[i] < BINS:
            t.atomic_add(mine, int(input[i]), 1)
    yield
    for b in range(t.threadIdx.x, BINS, t.blockDim.x):
        t.atomic_add(counts, b, mine[b])


def match_kernel(t, counts, input, count):
    """csrc/cuda/histogram/ladder/05_match.cu: the lowest of the lanes with one number counts for all of them. Here all
    lanes come to the match, those beyond the input with a number that is no bin."""
    mine = t.shared("mine", BINS, np.int32)
    for b in range(t.threadIdx.x, BINS, t.blockDim.x):
        mine[b] = 0
    yield
    for first in range(t.blockIdx.x * t.blockDim.x, count, t.gridDim.x * t.blockDim.x):
        i = first + t.threadIdx.x
        number = int(input[i]) if i < count else BINS
        same = yield t.match_any(number)
        lower = (1 << t.threadIdx.x % 32) - 1
        if same & lower == 0 and 0 <= number < BINS:
            t.atomic_add(mine, number, same.bit_count())
    yield
    for b in range(t.threadIdx.x, BINS, t.blockDim.x):
        t.atomic_add(counts, b, mine[b])


def per_lane_kernel(t, counts, input, count):
    """csrc/cuda/histogram/ladder/06_per_lane.cu: counter b of lane l is word 32 * b + l."""
    of_lanes = t.shared("of_lanes", BINS * 32, np.int32)
    for word in range(t.threadIdx.x, BINS * 32, t.blockDim.x):
        of_lanes[word] = 0
    yield
    lane = t.threadIdx.x % 32
    for i in range(t.blockIdx.x * t.blockDim.x + t.threadIdx.x, count, t.gridDim.x * t.blockDim.x):
        if 0 <= input[i] < BINS:
            t.atomic_add(of_lanes, 32 * int(input[i]) + lane, 1)
    yield
    for b in range(t.threadIdx.x, BINS, t.blockDim.x):
        t.atomic_add(counts, b, sum(of_lanes[32 * b + (k + lane) % 32] for k in range(32)))


def launch(kernel, input: np.ndarray) -> tuple[np.ndarray, simulator.Report]:
    counts = np.zeros(BINS, np.int32)
    return counts, simulator.launch(kernel, 2, 64, counts, np.ascontiguousarray(input), input.size)


BOTH = (torch.uint8, torch.int32)

# --- models ----------------------------------------------------------------------------------------------------------


def where_lanes_meet() -> None:
    """How many passes shared memory takes for the 32 additions of a warp: additions to one bank come one after the
    other, but those to one counter are one (ATOMS.POPC.INC). With one set of counters, and with one for each lane
    (rung 6)."""
    rng = np.random.default_rng(0)
    inputs = {
        "uniform": rng.integers(0, BINS, (1000, 32)),
        "normal": np.clip(rng.normal(128, 12, (1000, 32)), 0, BINS - 1).astype(int),
        "all alike": np.full((1000, 32), 7),
    }

    def passes(words):
        return np.mean([np.bincount(np.unique(warp) % 32, minlength=32).max() for warp in words])

    for name, bins in inputs.items():
        shared, per_lane = passes(bins), passes(bins * 32 + np.arange(32))
        print(f"{name:>9}: {shared:4.1f} passes with shared counters, {per_lane:4.1f} with one set for each lane")


# --- the ladder ------------------------------------------------------------------------------------------------------


def reference(input: Tensor) -> Tensor:
    numbers = input.long()
    return torch.bincount(numbers[(numbers >= 0) & (numbers < BINS)].flatten(), minlength=BINS).int()


def histc(input: Tensor) -> Tensor:
    """By torch.histc, which counts in the dtype of its input, and on the CPU takes floats alone. Unlike bincount it
    does not wait for the device, and so can be part of a CUDA graph."""
    return torch.histc(input.to(torch.int32 if input.is_cuda else torch.float32), BINS, 0, BINS - 1)


def uniform(size: int) -> Case:
    return Case(f"{size} uniform", lambda make: (make.integers(size, high=BINS),), elements=size, bytes=4 * BINS)


def alike(size: int) -> Case:
    return Case(f"{size} alike", lambda make: (make.integers(size, high=1) + 7,), elements=size, bytes=4 * BINS)


def misaligned(size: int) -> Case:
    return Case(f"{size} misaligned", lambda make: (make.integers(size + 1, high=BINS)[1:],), elements=size)


def outside(size: int) -> Case:
    """Of int32 two numbers in three are no bins."""
    return Case(
        f"{size} outside",
        lambda make: ((make.integers(size, high=3 * BINS).int() - BINS).to(make.dtype),),
        elements=size,
    )


LADDER = Ladder(
    name="histogram",
    formula=r"\text{output}_b = |\{i : \text{input}_i = b\}|, \quad b = 0 \dots 255",
    introduction="""Every element is read once, and one of 256 counters grows. Which one depends on
the element, so that threads meet, in counters and in banks, and how often they do depends on the data. Two of the rungs
are widely recommended and change nothing, or worse: what a kernel waits for has to be known before it is mended.""",
    kernels=["global atomics", "shared atomics", "per warp", "vectors", "match", "per lane"],
    dtypes=BOTH,
    arguments=lambda input: ([input.new_empty(BINS, dtype=torch.int32)], [input], []),
    reference=reference,
    bound=None,
    tests=[
        *map(uniform, (1, 31, 1000)),
        *map(uniform, (0, 4095, 4097, 70001, 1000003)),
        alike(100003),
        misaligned(70001),
        outside(50021),
    ],
    cases=[
        uniform(1000),
        uniform((1 << 20) + 1),
        uniform((1 << 26) - 3),
        uniform(1 << 28),
        alike(1 << 28),
    ],
    shown=f"{1 << 28} uniform",
    native={"torch.bincount": lambda input: torch.bincount(input, minlength=BINS), "torch.histc": histc},
    simulated={
        1: Simulated(global_atomics_kernel, launch, BOTH),
        2: Simulated(shared_atomics_kernel, launch, BOTH),
        5: Simulated(match_kernel, launch, BOTH),
        6: Simulated(per_lane_kernel, launch, BOTH),
    },
    largest={1: 1 << 21},
    compiled=False,
    models=(where_lanes_meet,),
)
