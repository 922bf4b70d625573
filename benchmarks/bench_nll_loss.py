"""nll_loss by class indices, mean. Forward takes one element of a row; backward writes all, nearly all of them 0."""

import torch
from harness import Bench, Case, Implementation


def case(rows, classes):
    return Case(
        f"{rows}x{classes}",
        lambda make: (make(rows, classes), make.integers(rows, high=classes)),
        elements=(rows, rows * classes),
        bytes=(8 * rows, 8 * rows),
    )


BENCH = Bench(
    op="nll_loss",
    native=[Implementation("eager", torch.nn.functional.nll_loss)],
    cases=[case(*sizes) for sizes in [(64, 10), (1024, 10), (8192, 4096), (8192, 50304)]],
)
