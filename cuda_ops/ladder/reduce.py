"""The sum of all elements, rung by rung.

    >>> import torch
    >>> from cuda_ops.ladder import reduce
    >>> reduce.LADDER.rungs["simulated shared tree"](torch.tensor([1.0, 2.0, 3.5]))
    tensor([6.5000])

The kernels are in csrc/cuda/reduce/ladder/; `python -m cuda_ops bench ladder reduce` measures them, and
notebooks/reduce.ipynb walks them.
"""

import numpy as np
import torch
from torch import Tensor

from .. import functional
from . import simulator
from ._ladder import Case, Ladder, Simulated

# --- kernels for the simulator ---------------------------------------------------------------------------------------
# Written as the .cu files of the same names are; `t` is the thread, a bare `yield` is __syncthreads().


def global_atomics_kernel(t, output, input, count):
    """csrc/cuda/reduce/ladder/01_global_atomics.cu: everyone adds to one number."""
    i = t.blockIdx.x * t.blockDim.x + t.threadIdx.x
    if i < count:
        t.atomic_add(output, 0, input[i])


def shared_tree_kernel(t, sums, input, count):
    """csrc/cuda/reduce/ladder/02_shared_tree.cu: half as many threads add at each level."""
    x = t.threadIdx.x
    i = t.blockIdx.x * t.blockDim.x + x
    tile = t.shared("tile", t.blockDim.x)
    tile[x] = input[i] if i < count else 0
    yield
    half = t.blockDim.x // 2
    while half > 0:
        if x < half:
            tile[x] += tile[x + half]
        yield
        half //= 2
    if x == 0:
        sums[t.blockIdx.x] = tile[0]


def unrolled_warp_kernel(t, sums, input, count):
    """csrc/cuda/reduce/ladder/03_unrolled_warp.cu: the last warp goes on alone."""
    x = t.threadIdx.x
    i = t.blockIdx.x * t.blockDim.x + x
    tile = t.shared("tile", t.blockDim.x)
    tile[x] = input[i] if i < count else 0
    yield
    half = t.blockDim.x // 2
    while half > 32:
        if x < half:
            tile[x] += tile[x + half]
        yield
        half //= 2
    if x >= 32:
        return
    total = tile[x] + tile[x + 32]
    for half in (16, 8, 4, 2, 1):
        tile[x] = total
        yield t.syncwarp()
        total += tile[x + half]
        yield t.syncwarp()
    if x == 0:
        sums[t.blockIdx.x] = total


def shuffles_kernel(t, sums, input, count):
    """csrc/cuda/reduce/ladder/04_shuffles.cu: lanes read each other's registers."""
    x, warps = t.threadIdx.x, t.blockDim.x // 32
    i = t.blockIdx.x * t.blockDim.x + x
    of_warps = t.shared("of_warps", warps)
    total = input[i] if i < count else np.float32(0)
    for half in (16, 8, 4, 2, 1):
        total += yield t.shfl_down(total, half)
    if x % 32 == 0:
        of_warps[x // 32] = total
    yield
    if x >= 32:
        return
    total = of_warps[x] if x < warps else np.float32(0)
    for half in (16, 8, 4, 2, 1):
        total += yield t.shfl_down(total, half)
    if x == 0:
        sums[t.blockIdx.x] = total


def with_atomics(kernel, input: np.ndarray, threads: int = 64) -> tuple[np.ndarray, simulator.Report]:
    output = np.zeros(1, np.float32)
    blocks = max(1, -(-input.size // threads))
    return output, simulator.launch(kernel, blocks, threads, output, np.ascontiguousarray(input), input.size)


def in_passes(kernel, input: np.ndarray, threads: int = 64) -> tuple[np.ndarray, simulator.Report]:
    """The kernel over the input, then over the blocks' sums, until one is left; the report is of the first pass."""
    report = None
    while report is None or input.size > 1:
        blocks = max(1, -(-input.size // threads))
        sums = np.full(blocks, np.nan, np.float32)
        found = simulator.launch(kernel, blocks, threads, sums, np.ascontiguousarray(input), input.size)
        input, report = sums, report or found
    return input, report


# --- the ladder ------------------------------------------------------------------------------------------------------


def sums_of(size: int) -> Case:
    # Not of mean 0: the sum would be small beside its terms, and every order of additions far off, relatively.
    return Case(f"{size}", lambda make: (make.normal(size) + 0.25,), elements=size)


def misaligned(size: int) -> Case:
    """The same, from an address that is no multiple of 16 bytes."""
    return Case(f"{size} misaligned", lambda make: (make.normal(size + 1)[1:],), elements=size)


def bound(input: Tensor) -> Tensor:
    """Of n - 1 additions in any order each may be off by half an ulp of a sum that is at most that of the magnitudes;
    errors of either sign cancel but for the root of their number, and a factor of 4 is for bad luck."""
    x = input.double()
    return 4 * (input.numel() + 1) ** 0.5 * torch.finfo(input.dtype).eps * x.abs().sum().reshape(1)


LADDER = Ladder(
    name="reduce",
    formula=r"\text{output} = \sum_i \text{input}_i",
    introduction="""A sum has one addition for each element that is read: memory bounds it, and a kernel is as good
as the share of a copy's speed that it reads with. What is in the way are the threads: they have to bring their numbers
together, and each way to do so costs something that memory would not.""",
    kernels=["global atomics", "shared tree", "unrolled warp", "shuffles", "vectors", "last block", "dependent launch"],
    dtypes=(torch.float32, torch.float64),
    arguments=lambda input: ([input.new_empty(1)], [input], []),
    reference=lambda input: input.double().sum().reshape(1),
    bound=bound,
    tests=[
        *map(sums_of, (1, 2, 63, 64, 65, 257, 1000)),
        *map(sums_of, (0, 4095, 4097, 65537, 1000003)),
        misaligned(70001),
    ],
    cases=[sums_of(1000), sums_of((1 << 20) + 1), sums_of(1 << 24), sums_of((1 << 26) - 3), sums_of(1 << 28)],
    shown=f"{1 << 28}",
    native={"torch.sum": lambda input: input.sum().reshape(1)},
    ours=lambda input: functional.sum(input).reshape(1),
    simulated={
        1: Simulated(global_atomics_kernel, with_atomics),
        2: Simulated(shared_tree_kernel, in_passes),
        3: Simulated(unrolled_warp_kernel, in_passes),
        4: Simulated(shuffles_kernel, in_passes),
    },
    largest={1: 1 << 21},
    unrepeatable=(1,),
)
