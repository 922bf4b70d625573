"""The end of ConvNeXt-tiny's blocks, channels innermost: two reads and a write forward; backward reads gradient and
branch, and writes the branch's gradient."""

import math

import torch
from harness import Bench, Case, Implementation, compiled_on_cuda

SHAPES = [(64, 96, 56, 56), (64, 192, 28, 28), (64, 384, 14, 14), (64, 768, 7, 7)]


def case(shape):
    def make_arguments(make):
        n, c, h, w = shape
        return make(n, h, w, c).movedim(-1, 1), make(n, h, w, c).movedim(-1, 1), make(c, 1, 1)

    count = math.prod(shape)
    return Case("x".join(map(str, shape)), make_arguments, elements=(3 * count, 3 * count))


def chain(input, residual, weight):
    return residual + weight * input


BENCH = Bench(
    op="layer_scale_add",
    native=[Implementation("eager", chain), Implementation("addcmul", lambda x, r, w: torch.addcmul(r, x, w))],
    cases=[case(shape) for shape in SHAPES],
    beside=compiled_on_cuda(chain),
)
