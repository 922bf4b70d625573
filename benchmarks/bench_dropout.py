"""dropout with p = 0.5. The mask can be drawn again in backward, so that it need not be moved."""

import torch
from harness import MATRIX_SHAPES, MNIST_SHAPES, Bench, Implementation, elementwise_cases

BENCH = Bench(
    op="dropout",
    native=[Implementation("eager", torch.nn.functional.dropout)],
    cases=elementwise_cases([*MNIST_SHAPES, *MATRIX_SHAPES], streams=(2, 2)),
    random=True,
)
