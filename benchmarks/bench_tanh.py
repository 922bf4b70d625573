import torch
from harness import MATRIX_SHAPES, MNIST_SHAPES, Bench, Implementation, elementwise_cases

BENCH = Bench(
    op="tanh",
    native=[Implementation("eager", torch.tanh)],
    cases=elementwise_cases([*MNIST_SHAPES, *MATRIX_SHAPES], streams=(2, 3)),
)
