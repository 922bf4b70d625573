"""softmax along the rows of a matrix, rung by rung.

    >>> import torch
    >>> from cuda_ops.ladder import softmax
    >>> softmax.LADDER.rungs["simulated two passes"](torch.tensor([[0.0, 0.0]]))
    tensor([[0.5000, 0.5000]])

The kernels are in csrc/cuda/softmax/ladder/; `python -m cuda_ops bench ladder softmax` measures them, and
notebooks/softmax.ipynb walks them.
"""

import numpy as np
import torch
from torch import Tensor

from .. import functional
from . import simulator
from ._ladder import Case, Ladder, Simulated

# --- kernels for the simulator ---------------------------------------------------------------------------------------
# Written as the .cu files of the same names are; `t` is the thread.

LEAST = np.finfo(np.float32).min


def three_passes_kernel(t, output, input, rows, columns):
    """csrc/cuda/softmax/ladder/01_three_passes.cu: a thread goes over its row three times."""
    row = t.blockIdx.x * t.blockDim.x + t.threadIdx.x
    if row >= rows:
        return
    maximum, total = LEAST, np.float32(0)
    for c in range(columns):
        maximum = max(maximum, input[row * columns + c])
    for c in range(columns):
        total += np.exp(input[row * columns + c] - maximum)
    for c in range(columns):
        output[row * columns + c] = np.exp(input[row * columns + c] - maximum) / total


def merged(a, b):
    """Of two parts of a row, (largest element, sum of exponentials) each: that of both."""
    maximum = max(a[0], b[0])
    return maximum, a[1] * np.exp(a[0] - maximum) + b[1] * np.exp(b[0] - maximum)


def two_passes_kernel(t, output, input, rows, columns):
    """csrc/cuda/softmax/ladder/02_two_passes.cu: the largest element and the sum at one go."""
    row = t.blockIdx.x * t.blockDim.x + t.threadIdx.x
    if row >= rows:
        return
    state = LEAST, np.float32(0)
    for c in range(columns):
        state = merged(state, (input[row * columns + c], np.float32(1)))
    for c in range(columns):
        output[row * columns + c] = np.exp(input[row * columns + c] - state[0]) / state[1]


def warp_a_row_kernel(t, output, input, rows, columns):
    """csrc/cuda/softmax/ladder/03_warp_a_row.cu: the lanes of a warp share a row, and merge what each has found."""
    lane = t.threadIdx.x % 32
    row = (t.blockIdx.x * t.blockDim.x + t.threadIdx.x) // 32
    if row >= rows:
        return
    state = LEAST, np.float32(0)
    for c in range(lane, columns, 32):
        state = merged(state, (input[row * columns + c], np.float32(1)))
    for apart in (16, 8, 4, 2, 1):
        other = yield t.shfl_xor(state, apart)
        state = merged(state, other)
    for c in range(lane, columns, 32):
        output[row * columns + c] = np.exp(input[row * columns + c] - state[0]) / state[1]


def registers_kernel(t, output, input, rows, columns):
    """csrc/cuda/softmax/ladder/04_registers.cu: a lane keeps what it has read."""
    lane = t.threadIdx.x % 32
    row = (t.blockIdx.x * t.blockDim.x + t.threadIdx.x) // 32
    if row >= rows:
        return
    x = [input[row * columns + c] for c in range(lane, columns, 32)]
    maximum, total = max([LEAST, *x]), np.float32(0)
    for apart in (16, 8, 4, 2, 1):
        other = yield t.shfl_xor(maximum, apart)
        maximum = max(maximum, other)
    x = [np.exp(element - maximum) for element in x]
    total = sum(x, total)
    for apart in (16, 8, 4, 2, 1):
        total += yield t.shfl_xor(total, apart)
    for c, element in zip(range(lane, columns, 32), x, strict=True):
        output[row * columns + c] = element / total


def launch(kernel, input: np.ndarray, threads: int = 64) -> tuple[np.ndarray, simulator.Report]:
    rows, columns = input.shape
    output = np.full(input.shape, np.nan, np.float32)
    of_block = threads // 32 if kernel in (warp_a_row_kernel, registers_kernel) else threads
    blocks = -(-rows // of_block)
    report = simulator.launch(kernel, blocks, threads, output, np.ascontiguousarray(input), rows, columns)
    return output, report


# --- models ----------------------------------------------------------------------------------------------------------


def online() -> None:
    """The online sum, element by element: whenever a larger element turns up, what is there is scaled down to it. In
    the end it is the sum that a second pass would have found."""
    x = np.array([1.0, 3.0, 2.0, 5.0, 5.0, 4.0])
    maximum, total = -np.inf, 0.0
    for element in x:
        larger = max(maximum, element)
        total = total * np.exp(maximum - larger) + np.exp(element - larger)
        maximum = larger
        print(f"after {element:.0f}: largest {maximum:.0f}, sum of exp(x - {maximum:.0f}) = {total:.4f}")
    print(f"in two passes: {np.exp(x - x.max()).sum():.4f}")


def what_each_rung_asks_for() -> None:
    """For an element of a row that fits: how often it is read and written, how many exponentials are made, and how many
    cache lines of 128 bytes a warp's load touches."""
    print("rung  reads  writes  exponentials  lines of a load of a warp")
    for rung, reads, exponentials, lines in ((1, 3, 2, 32), (2, 2, 3, 32), (3, 2, 3, 1), (4, 1, 1, 1), (5, 1, 1, 4)):
        print(f"{rung:4d}  {reads:5d}  {1:6d}  {exponentials:12d}  {lines:2d}, of {4 if rung < 5 else 16} bytes a lane")


# --- the ladder ------------------------------------------------------------------------------------------------------


def matrix(rows: int, columns: int) -> Case:
    return Case(f"{rows}x{columns}", lambda make: (3 * make.normal(rows, columns),), elements=2 * rows * columns)


def misaligned(rows: int, columns: int) -> Case:
    """The same, from an address that is no multiple of 16 bytes."""
    return Case(
        f"{rows}x{columns} misaligned",
        lambda make: (make.normal(rows * columns + 1)[1:].view(rows, columns),),
        elements=2 * rows * columns,
    )


def bound(input: Tensor) -> Tensor:
    """x - max is rounded once, and its error is the exponential's, relatively; the sum's is that of additions in any
    order, of positive numbers, each off by half an ulp of the sum so far, with errors that cancel but for the root of
    their number; and for a part of it, since a long row's terms, added one by one (rungs 1 and 2), are all so small
    beside the sum that they are rounded alike."""
    x = input.double()
    output = torch.softmax(x, 1)
    distance = x.amax(1, keepdim=True) - x if x.numel() else x
    eps, columns = torch.finfo(input.dtype).eps, input.shape[1]
    return eps * (8 + 4 * columns**0.5 + columns / 64 + 2 * distance) * output + torch.finfo(input.dtype).tiny


LADDER = Ladder(
    name="softmax",
    formula=r"\text{output}_{rc} = e^{x_{rc} - \max_c x_{rc}} \Big/ \sum_c e^{x_{rc} - \max_c x_{rc}}",
    introduction="""A row has to be known whole, twice, before its first element can be written: its largest element,
and then the sum of exponentials. What a kernel does in the meantime with the row decides: reads it again, or keeps it.
And who shares a row decides how long a row can be kept: a warp, a block, a cluster of blocks.""",
    kernels=["three passes", "two passes", "warp a row", "registers", "block a row", "cluster a row"],
    dtypes=(torch.float32,),
    arguments=lambda input: ([torch.empty_like(input)], [input], []),
    reference=lambda input: torch.softmax(input.double(), 1),
    bound=bound,
    tests=[
        *(matrix(*sizes) for sizes in [(1, 1), (3, 33), (35, 37)]),
        *(matrix(*sizes) for sizes in [(0, 5), (5, 0), (1000, 1), (300, 10), (129, 128), (77, 250), (65, 1024)]),
        *(matrix(*sizes) for sizes in [(7, 1025), (5, 4096), (3, 8193), (2, 16384), (3, 16385), (2, 50257)]),
        *(matrix(*sizes) for sizes in [(3, 50260), (2, 131072), (1, 131073)]),
        misaligned(9, 4096),
        misaligned(3, 40000),
    ],
    cases=[matrix(35, 37), matrix(65536, 256), matrix(8192, 4096), matrix(2048, 50257), matrix(16, 131072)],
    shown="8192x4096",
    native={"torch.softmax": lambda input: torch.softmax(input, 1)},
    ours=lambda input: functional.softmax(input, 1),
    simulated={
        1: Simulated(three_passes_kernel, launch),
        2: Simulated(two_passes_kernel, launch),
        3: Simulated(warp_a_row_kernel, launch),
        4: Simulated(registers_kernel, launch),
    },
    largest={1: 1 << 27, 2: 1 << 27},
    models=(online, what_each_rung_asks_for),
)
