"""conv2d with bias and padding that keeps the size, or halves it with a stride: those of the MNIST CNN, of usual
networks, and depthwise; both sides in both layouts."""

import torch
from harness import Bench, Case, Implementation

import cuda_ops


def case(batch, inputs, outputs, size, kernel, groups=1, stride=1):
    depth, rows = inputs // groups * kernel**2, (size + kernel // 2 * 2 - kernel) // stride + 1
    x, y, w = batch * inputs * size**2, batch * outputs * rows**2, outputs * depth
    cut = (f", {groups} groups" if groups > 1 else "") + (f", stride {stride}" if stride > 1 else "")
    return Case(
        f"{batch}x{inputs}x{size}x{size} to {outputs}, {kernel}x{kernel}{cut}",
        lambda make: (
            make(batch, inputs, size, size),
            make(outputs, inputs // groups, kernel, kernel),
            make(outputs),
            stride,
            kernel // 2,
            1,
            groups,
        ),
        elements=(x + w + y, 2 * x + 2 * w + y),
        flops=(2 * y * depth, 4 * y * depth),
    )


def channels_last(input, weight, *others):
    relaid = [t.detach().contiguous(memory_format=torch.channels_last).requires_grad_() for t in (input, weight)]
    return (*relaid, *others)


SIZES = [(64, 1, 32, 28, 3), (64, 32, 64, 14, 3), (1024, 1, 32, 28, 3), (1024, 32, 64, 14, 3), (64, 64, 64, 56, 3)]
SIZES += [(64, 256, 256, 14, 3), (64, 512, 512, 7, 3), (64, 256, 256, 14, 1), (64, 3, 64, 224, 7)]
SIZES += [(64, 128, 128, 56, 3, 128), (64, 256, 256, 14, 5, 256)]
SIZES += [(64, 3, 64, 224, 7, 1, 2), (64, 64, 128, 56, 3, 1, 2), (64, 128, 256, 28, 3, 1, 2)]
SIZES += [(64, 256, 512, 14, 3, 1, 2), (64, 64, 128, 56, 1, 1, 2), (64, 256, 512, 56, 1, 1, 2)]
BENCH = Bench(
    op="conv2d",
    ours=[
        Implementation("ours", cuda_ops.functional.conv2d),
        Implementation("ours channels_last", cuda_ops.functional.conv2d, channels_last),
    ],
    native=[
        Implementation("eager", torch.nn.functional.conv2d),
        Implementation("channels_last", torch.nn.functional.conv2d, channels_last),
    ],
    cases=[case(*sizes) for sizes in SIZES],
)
