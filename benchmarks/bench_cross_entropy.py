"""cross_entropy by class indices, mean: the MNIST CNN's, and those of language models."""

import torch
from harness import Bench, Case, Implementation


def case(rows, classes):
    return Case(
        f"{rows}x{classes}",
        lambda make: (make(rows, classes), make.integers(rows, high=classes)),
        elements=(rows * classes, 2 * rows * classes),
        bytes=(8 * rows, 8 * rows),
    )


BENCH = Bench(
    op="cross_entropy",
    native=[Implementation("eager", torch.nn.functional.cross_entropy)],
    cases=[case(*sizes) for sizes in [(64, 10), (1024, 10), (8192, 4096), (8192, 50304)]],
)
