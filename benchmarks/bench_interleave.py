"""The end of ShuffleNetV2's blocks, channels innermost: a read of both branches and a write."""

import math

import torch
from harness import Bench, Case, Implementation, compiled_on_cuda

SHAPES = [(64, 58, 28, 28), (64, 116, 14, 14), (64, 232, 7, 7)]


def case(shape):
    def make_arguments(make):
        n, c, h, w = shape
        return make(n, h, w, c).movedim(-1, 1), make(n, h, w, c).movedim(-1, 1)

    count = math.prod(shape)
    return Case("x".join(map(str, shape)), make_arguments, elements=(4 * count, 4 * count))


def chain(input, other):
    n, c, h, w = input.shape
    return torch.cat((input, other), 1).view(n, 2, c, h, w).transpose(1, 2).contiguous().view(n, 2 * c, h, w)


BENCH = Bench(
    op="interleave",
    native=[Implementation("eager", chain)],
    cases=[case(shape) for shape in SHAPES],
    beside=compiled_on_cuda(chain),
)
