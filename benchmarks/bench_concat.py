"""concat of few and of many tensors, along the first dimension, the channels and the last."""

import math

import torch
from harness import Bench, Case, Implementation

import cuda_ops

CASES = [
    ([(1 << 24,), (1 << 24,)], 0),
    ([(64, 256, 56, 56), (64, 32, 56, 56)], 1),
    ([(8192, 4096), (8192, 4096)], 1),
    ([(8192, 768)] * 8, 0),
    ([(1 << 16,)] * 64, 0),
    ([(32768, 100), (32768, 28)], 1),
    ([(64, 100)] * 200, 0),
]


def case(shapes, dim):
    count = sum(map(math.prod, shapes))
    kinds = list(dict.fromkeys(shapes))
    names = " and ".join("x".join(map(str, shape)) for shape in kinds)
    return Case(
        f"{len(shapes)} of {names} along {dim}",
        lambda make: (dim, *(make(*shape) for shape in shapes)),
        elements=(2 * count, 0),
    )


BENCH = Bench(
    op="concat",
    ours=Implementation("ours", lambda dim, *tensors: cuda_ops.functional.concat(tensors, dim)),
    native=[Implementation("eager", lambda dim, *tensors: torch.cat(tensors, dim))],
    cases=[case(*c) for c in CASES],
    backward=False,
)
