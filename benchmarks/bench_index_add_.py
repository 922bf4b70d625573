"""index_add in place."""

import torch
from bench_index_add import CASES
from harness import Bench, Implementation

import cuda_ops


def detached(*arguments):
    return [value.detach() if isinstance(value, torch.Tensor) else value for value in arguments]


BENCH = Bench(
    op="index_add_",
    native=[Implementation("eager", torch.Tensor.index_add_, detached)],
    ours=Implementation("ours", cuda_ops.functional.index_add_, detached),
    cases=CASES,
    backward=False,
    random=True,
)
