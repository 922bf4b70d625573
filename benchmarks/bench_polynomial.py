"""x² + x + 1. PyTorch has no such op: as one writes it, and in the fewest calls."""

import torch
from harness import MATRIX_SHAPES, MNIST_SHAPES, Bench, Implementation, elementwise_cases

BENCH = Bench(
    op="polynomial",
    native=[
        Implementation("as written", lambda x: x * x + x + 1),
        Implementation("addcmul", lambda x: torch.addcmul(x + 1, x, x)),
    ],
    cases=elementwise_cases([*MNIST_SHAPES, *MATRIX_SHAPES], streams=(2, 3)),
)
