"""Random numbers into a tensor, uniform and normal: one write of it."""

import math

import torch
from harness import MATRIX_SHAPES, Bench, Case, Implementation

import cuda_ops


def fill(init):
    def run(tensor, name):
        return getattr(init, name)(tensor)

    return run


def case(shape, name):
    return Case(
        f"{name} {'x'.join(map(str, shape))}",
        lambda make: (make(*shape, requires_grad=False), name),
        elements=(math.prod(shape), 0),
    )


BENCH = Bench(
    op="random_fill",
    native=[Implementation("eager", fill(torch.nn.init))],
    ours=Implementation("ours", fill(cuda_ops.nn.init)),
    cases=[case(shape, name) for name in ("uniform_", "normal_") for shape in [(64, 3, 3, 64), *MATRIX_SHAPES]],
    backward=False,
    random=True,
)
