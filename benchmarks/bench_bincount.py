"""bincount of tokens and of letters, with and without weights. Both functions wait for the largest number, so that no
CUDA graph takes them; the registered op is given the size and does not."""

import torch
from harness import Bench, Case, Implementation

import cuda_ops


def case(count, high, weighted=False):
    def make(make):
        weights = make(count, requires_grad=False) if weighted else None
        return make.integers(count, high=high), weights, high

    return Case(
        f"{count} below {high}{', weights' if weighted else ''}",
        make,
        elements=(count if weighted else 0, 0),
        bytes=(8 * count + 8 * high, 0),
    )


BENCH = Bench(
    op="bincount",
    ours=[
        Implementation("ours", cuda_ops.functional.bincount),
        Implementation("ours, of a size", torch.ops.cuda_ops.bincount_forward),
    ],
    native=[Implementation("eager", torch.bincount)],
    cases=[
        case(1 << 24, 256),
        case(1 << 24, 50304),
        case(1 << 24, 1 << 22),
        case(1 << 24, 256, weighted=True),
        case(1 << 24, 50304, weighted=True),
    ],
    backward=False,
)
