"""linear_cross_entropy: the last layer of the MNIST CNN by batch size, and a language model's."""

import torch
from harness import Bench, Case, Implementation


def case(rows, inputs, classes):
    x, w = rows * inputs, classes * inputs
    return Case(
        f"{rows}x{inputs} to {classes}",
        lambda make: (make(rows, inputs), make(classes, inputs), make.integers(rows, high=classes), make(classes)),
        elements=(x + w, 2 * x + 2 * w),
        flops=(2 * rows * inputs * classes, 4 * rows * inputs * classes),
        bytes=(8 * rows, 8 * rows),
    )


def native(input, weight, target, bias):
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(input, weight, bias), target)


SIZES = [(rows, 128, 10) for rows in (64, 256, 1024, 4096, 16384)] + [(1024, 768, 50257)]
BENCH = Bench(
    op="linear_cross_entropy",
    native=[Implementation("eager", native)],
    cases=[case(*sizes) for sizes in SIZES],
)
