"""Layer normalisation in Triton, forward and backward: programs that walk over rows with the gradients of weight and
bias in registers, and one more kernel that adds what they leave."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_ops.ladder import layer_norm as ladder

ACROSS = 32  # columns of a program of the last kernel


@triton.jit
def forward_kernel(
    input_pointer,
    weight_pointer,
    bias_pointer,
    output_pointer,
    mean_pointer,
    rstd_pointer,
    columns,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(input_pointer + row * columns + at, mask=inside, other=0.0)
    mean = tl.sum(x, 0) / columns
    centred = tl.where(inside, x - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 0) / columns + eps)
    weight = tl.load(weight_pointer + at, mask=inside)
    bias = tl.load(bias_pointer + at, mask=inside)
    tl.store(output_pointer + row * columns + at, centred * rstd * weight + bias, mask=inside)
    tl.store(mean_pointer + row, mean)
    tl.store(rstd_pointer + row, rstd)


@triton.jit
def backward_kernel(
    input_pointer,
    weight_pointer,
    grad_output_pointer,
    mean_pointer,
    rstd_pointer,
    grad_input_pointer,
    sums_pointer,
    rows,
    columns,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    weight = tl.load(weight_pointer + at, mask=inside, other=0.0)
    grad_weight = tl.zeros((BLOCK,), tl.float32)
    grad_bias = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        x = tl.load(input_pointer + row * columns + at, mask=inside, other=0.0)
        g = tl.load(grad_output_pointer + row * columns + at, mask=inside, other=0.0)
        mean, rstd = tl.load(mean_pointer + row), tl.load(rstd_pointer + row)
        xhat, h = (x - mean) * rstd, g * weight
        grad_input = rstd * (h - tl.sum(h, 0) / columns - xhat * (tl.sum(h * xhat, 0) / columns))
        tl.store(grad_input_pointer + row * columns + at, grad_input, mask=inside)
        grad_weight += g * xhat
        grad_bias += g
    tl.store(sums_pointer + program * 2 * columns + at, grad_weight, mask=inside)
    tl.store(sums_pointer + (program * 2 + 1) * columns + at, grad_bias, mask=inside)


@triton.jit
def add_kernel(sums_pointer, output_pointer, programs, columns, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    at = tl.program_id(0) * ACROSS + tl.arange(0, ACROSS)
    total = tl.zeros((DOWN, ACROSS), tl.float32)
    for first in range(0, programs, DOWN):
        row = first + tl.arange(0, DOWN)
        inside = (row[:, None] < programs) & (at[None, :] < columns)
        total += tl.load(sums_pointer + row[:, None].to(tl.int64) * columns + at[None, :], mask=inside, other=0.0)
    tl.store(output_pointer + at, tl.sum(total, 0), mask=at < columns)


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, grad_output: Tensor):
    """Of the rows of contiguous float32 matrices on CUDA: output, grad_input, grad_weight, grad_bias."""
    rows, columns = input.shape
    output, grad_input = torch.empty_like(input), torch.empty_like(input)
    mean, rstd = input.new_empty(rows), input.new_empty(rows)
    block = triton.next_power_of_2(columns)
    warps = min(max(block // 512, 1), 16)
    forward_kernel[(rows,)](input, weight, bias, output, mean, rstd, columns, ladder.EPS, block, num_warps=warps)
    multiprocessors = torch.cuda.get_device_properties(input.device).multi_processor_count
    programs = min(rows, multiprocessors * max(1, 32 // warps))
    sums, gradients = input.new_empty(programs, 2 * columns), input.new_empty(2 * columns)
    backward_kernel[(programs,)](
        input, weight, grad_output, mean, rstd, grad_input, sums, rows, columns, block, num_warps=warps
    )
    add_kernel[(triton.cdiv(2 * columns, ACROSS),)](sums, gradients, programs, 2 * columns, 32, ACROSS)
    return output, grad_input, gradients[:columns], gradients[columns:]
