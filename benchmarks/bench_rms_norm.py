"""rms_norm over the last dimension: as layer_norm, without a mean and without a bias."""

import torch
from harness import MATRIX_SHAPES, Bench, Case, Implementation, compiled_on_cuda

SHAPES = [(64, 768), *MATRIX_SHAPES, (32768, 768), (32768, 64), (8192, 1023), (256, 262_144)]


def case(rows, cols):
    def make_arguments(make):
        return make(rows, cols), (cols,), make(cols)

    return Case(f"{rows}x{cols}", make_arguments, elements=(2 * rows * cols + cols, 3 * rows * cols + 2 * cols))


BENCH = Bench(
    op="rms_norm",
    native=[Implementation("eager", torch.nn.functional.rms_norm)],
    cases=[case(*shape) for shape in SHAPES],
    beside=compiled_on_cuda(torch.nn.functional.rms_norm),
)
