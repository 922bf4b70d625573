"""mean of all elements, along rows, along columns, and of the images of a batch by channel."""

import torch
from harness import Bench, Implementation, reduction_cases

BENCH = Bench(
    op="mean",
    native=[Implementation("eager", torch.mean)],
    cases=reduction_cases(),
)
