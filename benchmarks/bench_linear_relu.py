"""linear_relu: the hidden layer of the MNIST CNN by batch size, and two wider layers."""

import torch
from harness import Bench, Case, Implementation


def case(rows, inputs, outputs):
    x, w, y = rows * inputs, outputs * inputs, rows * outputs
    return Case(
        f"{rows}x{inputs} to {outputs}",
        lambda make: (make(rows, inputs), make(outputs, inputs), make(outputs)),
        elements=(x + w + y, 2 * x + 2 * w + 2 * y),
        flops=(2 * rows * inputs * outputs, 4 * rows * inputs * outputs),
    )


def native(input, weight, bias):
    return torch.nn.functional.relu(torch.nn.functional.linear(input, weight, bias))


SIZES = [(rows, 3136, 128) for rows in (64, 256, 1024, 4096, 16384)] + [(1024, 1024, 1024), (4096, 256, 5120)]
BENCH = Bench(
    op="linear_relu",
    native=[Implementation("eager", native)],
    cases=[case(*sizes) for sizes in SIZES],
)
