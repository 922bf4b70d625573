"""scatter_add in place."""

import torch
from bench_scatter_add import CASES, expanded
from harness import Bench, Implementation

import cuda_ops


def detached(*arguments):
    return [value.detach() if isinstance(value, torch.Tensor) else value for value in expanded(*arguments)]


BENCH = Bench(
    op="scatter_add_",
    native=[Implementation("eager", torch.Tensor.scatter_add_, detached)],
    ours=Implementation("ours", cuda_ops.functional.scatter_add_, detached),
    cases=CASES,
    backward=False,
    random=True,
)
