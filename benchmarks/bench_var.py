"""var of all elements, along rows, along columns, and of the images of a batch by channel."""

import torch
from harness import Bench, Implementation, reduction_cases

BENCH = Bench(
    op="var",
    native=[Implementation("eager", torch.var)],
    cases=reduction_cases(),
)
