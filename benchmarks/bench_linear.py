"""linear with bias: the two layers of the MNIST CNN, square matrices, and the shape of lecture 5."""

import torch
from harness import Bench, Case, Implementation


def case(rows, inputs, outputs):
    x, w, y = rows * inputs, outputs * inputs, rows * outputs
    return Case(
        f"{rows}x{inputs} to {outputs}",
        lambda make: (make(rows, inputs), make(outputs, inputs), make(outputs)),
        elements=(x + w + y, 2 * x + 2 * w + y),
        flops=(2 * rows * inputs * outputs, 4 * rows * inputs * outputs),
    )


SIZES = [(64, 3136, 128), (64, 128, 10), (1024, 3136, 128), (1024, 128, 10)]
SIZES += [(1024, 1024, 1024), (4096, 4096, 4096), (5120, 256, 5120)]
BENCH = Bench(
    op="linear",
    native=[Implementation("eager", torch.nn.functional.linear)],
    cases=[case(*sizes) for sizes in SIZES],
)
