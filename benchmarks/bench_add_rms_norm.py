"""The norm of a residual sum, which is returned too: two reads and two writes forward; backward reads the sum and both
gradients and writes one, which is the gradient of input and of residual alike."""

import torch
from harness import MATRIX_SHAPES, Bench, Case, Implementation, compiled_on_cuda

SHAPES = [(64, 768), *MATRIX_SHAPES, (32768, 768)]


def case(rows, cols):
    def make_arguments(make):
        return make(rows, cols), make(rows, cols), (cols,), make(cols)

    return Case(f"{rows}x{cols}", make_arguments, elements=(4 * rows * cols + cols, 4 * rows * cols + 2 * cols))


def chain(input, residual, shape, weight):
    sum = input + residual
    return torch.nn.functional.rms_norm(sum, shape, weight), sum


BENCH = Bench(
    op="add_rms_norm",
    native=[Implementation("eager", chain)],
    cases=[case(*shape) for shape in SHAPES],
    beside=compiled_on_cuda(chain),
)
