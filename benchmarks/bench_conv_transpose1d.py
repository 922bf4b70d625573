"""conv_transpose1d with bias: the upsampling of a HiFi-GAN vocoder and of an audio U-Net."""

import torch
from harness import Bench, Case, Implementation

import cuda_ops


def case(batch, inputs, outputs, length, kernel, stride, padding):
    out = (length - 1) * stride - 2 * padding + kernel
    x, y, w = batch * inputs * length, batch * outputs * out, inputs * outputs * kernel
    flops = 2 * x * outputs * kernel
    return Case(
        f"{batch}x{inputs}x{length} to {outputs}, {kernel}, stride {stride}",
        lambda make: (make(batch, inputs, length), make(inputs, outputs, kernel), make(outputs), stride, padding),
        elements=(x + w + y, 2 * x + 2 * w + y),
        flops=(flops, 2 * flops),
    )


SIZES = [(16, 512, 256, 32, 16, 8, 4), (16, 256, 128, 256, 16, 8, 4), (16, 128, 64, 2048, 4, 2, 1)]
SIZES += [(8, 256, 128, 1024, 8, 4, 2)]
BENCH = Bench(
    op="conv_transpose1d",
    ours=[Implementation("ours", cuda_ops.functional.conv_transpose1d)],
    native=[Implementation("eager", torch.nn.functional.conv_transpose1d)],
    cases=[case(*sizes) for sizes in SIZES],
)
