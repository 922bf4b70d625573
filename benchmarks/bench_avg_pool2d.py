"""2x2 means of tensors as in the MNIST CNN."""

import math

import torch
from harness import MNIST_SHAPES, Bench, Case, Implementation


def case(shape):
    count = math.prod(shape)
    return Case(
        "x".join(map(str, shape)),
        lambda make: (make(*shape), 2),
        elements=(count + count // 4, count // 4 + count),
    )


BENCH = Bench(
    op="avg_pool2d",
    native=[Implementation("eager", torch.nn.functional.avg_pool2d)],
    cases=[case(shape) for shape in MNIST_SHAPES],
)
