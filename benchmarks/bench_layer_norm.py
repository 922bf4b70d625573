"""layer_norm over the last dimension. Forward reads and writes once; backward reads input and grad_output and writes
grad_input, and the parameters' gradients of all rows come of the same pass."""

import torch
from harness import MATRIX_SHAPES, Bench, Case, Implementation, compiled_on_cuda

SHAPES = [(64, 768), *MATRIX_SHAPES, (32768, 768), (32768, 64), (8192, 1023), (256, 262_144)]


def case(rows, cols):
    def make_arguments(make):
        return make(rows, cols), (cols,), make(cols), make(cols)

    return Case(f"{rows}x{cols}", make_arguments, elements=(2 * rows * cols + 2 * cols, 3 * rows * cols + 3 * cols))


BENCH = Bench(
    op="layer_norm",
    native=[Implementation("eager", torch.nn.functional.layer_norm)],
    cases=[case(*shape) for shape in SHAPES],
    beside=compiled_on_cuda(torch.nn.functional.layer_norm),
)
