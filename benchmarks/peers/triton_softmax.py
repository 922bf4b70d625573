"""softmax of rows in Triton: a program has a row in its registers; longer ones online, in two passes."""

import triton
import triton.language as tl
from torch import Tensor

MOST = 65536  # elements of a row that a program holds


@triton.jit
def row_kernel(input_pointer, output_pointer, columns, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, BLOCK)
    x = tl.load(input_pointer + offset + at, mask=at < columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(output_pointer + offset + at, e / tl.sum(e, 0), mask=at < columns)


@triton.jit
def long_row_kernel(input_pointer, output_pointer, columns, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * columns
    maximum = tl.full((BLOCK,), -3.4e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(input_pointer + offset + at, mask=at < columns, other=-float("inf"))
        larger = tl.maximum(maximum, x)
        total = total * tl.exp(maximum - larger) + tl.exp(x - larger)
        maximum = larger
    largest = tl.max(maximum, 0)
    factor = 1 / tl.sum(total * tl.exp(maximum - largest), 0)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(input_pointer + offset + at, mask=at < columns)
        tl.store(output_pointer + offset + at, tl.exp(x - largest) * factor, mask=at < columns)


def softmax(input: Tensor) -> Tensor:
    """Of the rows of a contiguous float32 matrix on CUDA."""
    rows, columns = input.shape
    output = input.new_empty(rows, columns)
    if columns > MOST:
        long_row_kernel[(rows,)](input, output, columns, 4096, num_warps=16)
    else:
        block = triton.next_power_of_2(columns)
        row_kernel[(rows,)](input, output, columns, block, num_warps=min(max(block // 512, 1), 32))
    return output
