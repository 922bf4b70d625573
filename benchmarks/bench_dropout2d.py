"""dropout2d with p = 0.5: a number for each channel, by which all its elements are multiplied. dropout1d, dropout3d and
stochastic_depth differ in how many elements a number stands for."""

import torch
from harness import MNIST_SHAPES, Bench, Implementation, elementwise_cases

BENCH = Bench(
    op="dropout2d",
    native=[Implementation("eager", torch.nn.functional.dropout2d)],
    cases=elementwise_cases([*MNIST_SHAPES, (64, 256, 56, 56)], streams=(2, 2)),
    random=True,
)
