"""batch_norm in training. Nothing can be written before the statistics are known, so that the input is read twice,
and in backward input and grad_output are."""

import math

import torch
from harness import MNIST_SHAPES, Bench, Case, Implementation


def case(shape):
    channels, count = shape[1], math.prod(shape)

    def make_arguments(make):
        mean, var = make(channels, requires_grad=False), make(channels, requires_grad=False).square()
        return make(*shape), mean, var, make(channels), make(channels), True

    return Case("x".join(map(str, shape)), make_arguments, elements=(3 * count, 5 * count))


BENCH = Bench(
    op="batch_norm",
    native=[Implementation("eager", torch.nn.functional.batch_norm)],
    cases=[case(shape) for shape in [*MNIST_SHAPES, (64, 256, 14, 14), (64, 64, 56, 56)]],
)
