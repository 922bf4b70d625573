"""amax of all elements, along rows, along columns, and of the images of a batch by channel."""

import torch
from harness import Bench, Implementation, reduction_cases


def amax(input, dim=None):
    return torch.amax(input, () if dim is None else dim)


BENCH = Bench(
    op="amax",
    native=[Implementation("eager", amax)],
    cases=reduction_cases(),
)
