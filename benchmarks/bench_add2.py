"""add2. Backward moves nothing: both gradients are grad_output itself."""

import torch
from harness import MATRIX_SHAPES, MNIST_SHAPES, Bench, Implementation, elementwise_cases

BENCH = Bench(
    op="add2",
    native=[Implementation("eager", torch.add)],
    cases=elementwise_cases([*MNIST_SHAPES, *MATRIX_SHAPES], streams=(3, 0), inputs=2),
    backward=False,
)
