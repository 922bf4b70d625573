"""linear_gelu: the first layer of a transformer's MLP by width and rows, and two small layers."""

import torch
from harness import Bench, Case, Implementation


def case(rows, inputs, outputs):
    x, w, y = rows * inputs, outputs * inputs, rows * outputs
    return Case(
        f"{rows}x{inputs} to {outputs}",
        lambda make: (make(rows, inputs), make(outputs, inputs), make(outputs)),
        elements=(x + w + y, 2 * x + 2 * w + 3 * y),
        flops=(2 * rows * inputs * outputs, 4 * rows * inputs * outputs),
    )


def native(input, weight, bias):
    return torch.nn.functional.gelu(torch.nn.functional.linear(input, weight, bias))


SIZES = [(64, 256, 64), (16, 1024, 4096), (1024, 384, 1536), (4096, 768, 3072), (8192, 1024, 4096)]
BENCH = Bench(
    op="linear_gelu",
    native=[Implementation("eager", native)],
    cases=[case(*sizes) for sizes in SIZES],
)
