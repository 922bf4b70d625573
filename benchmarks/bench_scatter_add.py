"""scatter_add of elements: into many places and into few, along both dimensions of a matrix; and of whole rows."""

import math

import torch
from harness import Bench, Case, Implementation

import cuda_ops


def case(shape, dim, source, rows=False):
    """Forward reads input, source and its indices, and writes the output; backward reads indices and writes what source
    is."""

    def make(make):
        index = make.integers(*([source[0], 1] if rows else source), high=shape[dim])
        return make(*shape), dim, index, make(*source)

    count = math.prod(source)
    indices = 8 * (source[0] if rows else count)
    name = f"{'x'.join(map(str, source))} into {'x'.join(map(str, shape))} along {dim}"
    return Case(
        f"{name}{', rows' if rows else ''}",
        make,
        elements=(count + 2 * math.prod(shape), 2 * count),
        bytes=(indices, indices),
    )


def expanded(input, dim, index, src):
    return input, dim, index.expand(src.shape), src


CASES = [
    case((1 << 20,), 0, (1 << 22,)),
    case((1 << 24,), 0, (1 << 24,)),
    case((4096, 4096), 0, (4096, 4096)),
    case((4096, 4096), 1, (4096, 4096)),
    case((1 << 17, 64), 0, (1 << 20, 64), rows=True),
]


def deterministic(*arguments):
    torch.use_deterministic_algorithms(True)
    try:
        return torch.scatter_add(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)


BENCH = Bench(
    op="scatter_add",
    native=[
        Implementation("eager", torch.scatter_add, expanded),
        Implementation("eager, deterministic", deterministic, expanded),
    ],
    ours=Implementation("ours", cuda_ops.functional.scatter_add, expanded),
    cases=CASES,
)
