"""softmax over rows."""

import torch
from harness import MATRIX_SHAPES, Bench, Implementation, elementwise_cases

BENCH = Bench(
    op="softmax",
    native=[Implementation("eager", torch.nn.functional.softmax)],
    cases=elementwise_cases([(64, 10), (1024, 10), *MATRIX_SHAPES], streams=(2, 3), extra=(1,)),
)
