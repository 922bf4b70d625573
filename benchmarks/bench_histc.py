"""histc of values that are all over the bins and of equal ones; a hundred bins, and more than a block holds."""

import math

import torch
from harness import Bench, Case, Implementation


def case(shape, bins, equal=False):
    def make(make):
        values = make(*shape, requires_grad=False)
        return (values.fill_(0.5) if equal else values), bins, -4, 4

    name = f"{'x'.join(map(str, shape))} into {bins}{', equal' if equal else ''}"
    return Case(name, make, elements=(math.prod(shape) + bins, 0))


BENCH = Bench(
    op="histc",
    native=[Implementation("eager", torch.histc)],
    cases=[
        case((8192, 4096), 100),
        case((8192, 4096), 100, equal=True),
        case((8192, 4096), 2048),
        case((8192, 4096), 1 << 20),
        case((1024, 1024), 256),
    ],
    backward=False,
)
