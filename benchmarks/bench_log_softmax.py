"""log_softmax over rows."""

import torch
from harness import MATRIX_SHAPES, Bench, Implementation, elementwise_cases

BENCH = Bench(
    op="log_softmax",
    native=[Implementation("eager", torch.nn.functional.log_softmax)],
    cases=elementwise_cases([(64, 10), (1024, 10), *MATRIX_SHAPES], streams=(2, 3), extra=(1,)),
)
