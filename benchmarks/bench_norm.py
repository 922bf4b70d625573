"""norm of all elements, along rows, along columns, and of the images of a batch by channel."""

import torch
from harness import Bench, Implementation, reduction_cases

import cuda_ops


def norm(input, dim=None):
    return torch.linalg.vector_norm(input, 2, dim)


BENCH = Bench(
    op="norm",
    ours=Implementation("ours", lambda x, dim: cuda_ops.functional.norm(x, 2.0, dim)),
    native=[Implementation("eager", norm)],
    cases=reduction_cases(),
)
