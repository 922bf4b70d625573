"""Layers of networks in evaluation: a convolution, batch_norm with running statistics and an activation, under
channels_last. Forward alone: gradients are those of the ops that it fuses."""

import torch
from harness import Bench, Case, Implementation

import cuda_ops

ACTIVATIONS = {
    "relu": lambda z: torch.nn.functional.relu(z, inplace=True),
    "silu": torch.nn.functional.silu,
    None: lambda z: z,
}


def by_layers(input, weight, bias, mean, var, bn_weight, bn_bias, activation, eps, stride, padding, dilation, groups):
    functional = torch.nn.functional
    x = functional.conv2d(input, weight, bias, stride, padding, dilation, groups)
    return ACTIVATIONS[activation](functional.batch_norm(x, mean, var, bn_weight, bn_bias, eps=eps))


def case(batch, inputs, outputs, size, kernel, groups, activation):
    def make_arguments(make):
        def plain(*shape):
            return make(*shape, requires_grad=False)

        images = [plain(batch, inputs, size, size), plain(outputs, inputs // groups, kernel, kernel)]
        images = [image.contiguous(memory_format=torch.channels_last) for image in images]
        statistics = plain(outputs), plain(outputs).square() + 0.1
        norm = plain(outputs), plain(outputs)
        return (*images, None, *statistics, *norm, activation, 1e-5, 1, kernel // 2, 1, groups)

    pixels, taps = batch * size**2, inputs // groups * kernel**2
    return Case(
        f"{batch}x{inputs}x{size}x{size} to {outputs}, {kernel}x{kernel}, {groups} groups, {activation}",
        make_arguments,
        elements=(pixels * (inputs + outputs) + outputs * taps, 0),
        flops=(2 * pixels * outputs * taps, 0),
    )


BENCH = Bench(
    op="conv_bn_act",
    ours=[Implementation("ours", cuda_ops.functional.conv_bn_act)],
    native=[Implementation("eager", by_layers)],
    cases=[
        case(64, 256, 64, 56, 1, 1, "relu"),
        case(64, 64, 64, 56, 3, 1, "relu"),
        case(64, 256, 256, 14, 3, 1, "relu"),
        case(64, 96, 24, 56, 1, 1, None),
        case(64, 144, 144, 56, 3, 144, "silu"),
        case(64, 240, 240, 28, 5, 240, "silu"),
    ],
    backward=False,
)
