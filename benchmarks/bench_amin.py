"""amin of all elements, along rows, along columns, and of the images of a batch by channel."""

import torch
from harness import Bench, Implementation, reduction_cases


def amin(input, dim=None):
    return torch.amin(input, () if dim is None else dim)


BENCH = Bench(
    op="amin",
    native=[Implementation("eager", amin)],
    cases=reduction_cases(),
)
