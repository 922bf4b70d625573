"""conv_transpose2d with bias: a DCGAN's generator, a U-Net's upsampling, and one by four; in both layouts."""

import torch
from harness import Bench, Case, Implementation

import cuda_ops


def case(batch, inputs, outputs, size, kernel, stride, padding):
    rows = (size - 1) * stride - 2 * padding + kernel
    x, y, w = batch * inputs * size**2, batch * outputs * rows**2, inputs * outputs * kernel**2
    flops = 2 * x * outputs * kernel**2
    return Case(
        f"{batch}x{inputs}x{size}x{size} to {outputs}, {kernel}x{kernel}, stride {stride}",
        lambda make: (
            make(batch, inputs, size, size),
            make(inputs, outputs, kernel, kernel),
            make(outputs),
            stride,
            padding,
        ),
        elements=(x + w + y, 2 * x + 2 * w + y),
        flops=(flops, 2 * flops),
    )


def channels_last(input, weight, *others):
    relaid = [t.detach().contiguous(memory_format=torch.channels_last).requires_grad_() for t in (input, weight)]
    return (*relaid, *others)


SIZES = [(64, 512, 256, 8, 4, 2, 1), (64, 256, 128, 16, 4, 2, 1), (64, 128, 64, 32, 4, 2, 1), (64, 64, 3, 32, 4, 2, 1)]
SIZES += [(8, 1024, 512, 28, 2, 2, 0), (8, 128, 64, 224, 2, 2, 0), (16, 64, 32, 32, 8, 4, 2)]
BENCH = Bench(
    op="conv_transpose2d",
    ours=[
        Implementation("ours", cuda_ops.functional.conv_transpose2d),
        Implementation("ours channels_last", cuda_ops.functional.conv_transpose2d, channels_last),
    ],
    native=[
        Implementation("eager", torch.nn.functional.conv_transpose2d),
        Implementation("channels_last", torch.nn.functional.conv_transpose2d, channels_last),
    ],
    cases=[case(*sizes) for sizes in SIZES],
)
