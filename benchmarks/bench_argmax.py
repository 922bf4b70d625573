"""argmax of all elements, along rows and along columns."""

import torch
from harness import Bench, Implementation, reduction_cases

BENCH = Bench(
    op="argmax",
    native=[Implementation("eager", torch.argmax)],
    cases=reduction_cases(several=False),
    backward=False,
)
