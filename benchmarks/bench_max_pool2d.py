"""2x2 maxima of the MNIST CNN. Backward has to know which: PyTorch keeps 8 bytes for each, one byte would do."""

import math

import torch
from harness import MNIST_SHAPES, Bench, Case, Implementation

import cuda_ops


def case(shape, window=(2, 2, 0)):
    count = math.prod(shape)
    kernel, stride, padding = window
    outputs = math.prod(shape[:2]) * math.prod((n + 2 * padding - kernel) // stride + 1 for n in shape[2:])
    name = "x".join(map(str, shape))
    return Case(
        name if window == (2, 2, 0) else f"{name}, {kernel}x{kernel}, stride {stride}, padding {padding}",
        lambda make: (make(*shape), *window),
        elements=(count + outputs, outputs + count),
        bytes=(outputs, outputs),
    )


def channels_last(input, *window):
    return input.detach().contiguous(memory_format=torch.channels_last).requires_grad_(input.requires_grad), *window


BENCH = Bench(
    op="max_pool2d",
    ours=[
        Implementation("ours", cuda_ops.functional.max_pool2d),
        Implementation("ours channels_last", cuda_ops.functional.max_pool2d, channels_last),
    ],
    native=[
        Implementation("eager", torch.nn.functional.max_pool2d),
        Implementation("eager channels_last", torch.nn.functional.max_pool2d, channels_last),
    ],
    # And the pool of ResNet's stem.
    cases=[*map(case, MNIST_SHAPES), case((64, 64, 112, 112), (3, 2, 1))],
)
