"""2x2 maxima of the MNIST CNN. Backward has to know which: PyTorch keeps 8 bytes for each, one byte would do."""

import math

import torch
from harness import MNIST_SHAPES, Bench, Case, Implementation


def case(shape):
    count = math.prod(shape)
    return Case(
        "x".join(map(str, shape)),
        lambda make: (make(*shape), 2),
        elements=(count + count // 4, count // 4 + count),
        bytes=(count // 4, count // 4),
    )


BENCH = Bench(
    op="max_pool2d",
    native=[Implementation("eager", torch.nn.functional.max_pool2d)],
    cases=[case(shape) for shape in MNIST_SHAPES],
)
