"""argmin of all elements, along rows and along columns."""

import torch
from harness import Bench, Implementation, reduction_cases

BENCH = Bench(
    op="argmin",
    native=[Implementation("eager", torch.argmin)],
    cases=reduction_cases(several=False),
    backward=False,
)
