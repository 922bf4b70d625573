"""cumsum along one long row, long and short rows, and columns."""

import math

import torch
from harness import Bench, Case, Implementation

CASES = [
    ((8192, 4096), 1),
    ((8192, 4096), 0),
    ((1 << 20,), 0),
    ((1 << 24,), 0),
    ((1 << 28,), 0),
    ((32768, 768), 1),
    ((32768, 768), 0),
    ((8192, 16384), 1),
    ((262144, 100), 1),
    ((64, 4096, 256), 1),
    ((1 << 22, 8), 0),
]


def case(shape, dim):
    count = math.prod(shape)
    return Case(
        f"{'x'.join(map(str, shape))} along {dim}",
        lambda make: (make(*shape), dim),
        elements=(2 * count, 2 * count),
        devices=("cpu", "cuda") if count <= 1 << 25 else ("cuda",),
    )


BENCH = Bench(
    op="cumsum",
    native=[Implementation("eager", torch.cumsum)],
    cases=[case(*c) for c in CASES],
)
