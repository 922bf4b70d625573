"""conv1d with bias: wav2vec 2.0's feature layers and its position layer, a TCN's dilated layer, a mixer of channels and
a depthwise layer; both sides also with channels next to each other, as in a transposed (N, L, C)."""

import torch
from harness import Bench, Case, Implementation

import cuda_ops


def case(batch, inputs, outputs, length, kernel, stride=1, groups=1, dilation=1, padding=None):
    span = (kernel - 1) * dilation + 1
    padding = span // 2 if padding is None else padding
    depth, out = inputs // groups * kernel, (length + 2 * padding - span) // stride + 1
    x, y, w = batch * inputs * length, batch * outputs * out, outputs * depth
    parts = [f"{groups} groups"] * (groups > 1) + [f"stride {stride}"] * (stride > 1)
    parts += [f"dilation {dilation}"] * (dilation > 1)
    return Case(
        ", ".join([f"{batch}x{inputs}x{length} to {outputs}, {kernel}", *parts]),
        lambda make: (
            make(batch, inputs, length),
            make(outputs, inputs // groups, kernel),
            make(outputs),
            stride,
            padding,
            dilation,
            groups,
        ),
        elements=(x + w + y, 2 * x + 2 * w + y),
        flops=(2 * y * depth, 4 * y * depth),
    )


def channels_last(input, *others):
    return (input.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(), *others)


CASES = [
    case(8, 1, 512, 16000, 10, stride=5, padding=0),
    case(8, 512, 512, 3199, 3, stride=2, padding=0),
    case(8, 768, 768, 99, 128, groups=16, padding=64),
    case(32, 64, 64, 1024, 3, dilation=8),
    case(32, 256, 256, 1024, 1),
    case(32, 256, 256, 1024, 7, groups=256),
]
BENCH = Bench(
    op="conv1d",
    ours=[
        Implementation("ours", cuda_ops.functional.conv1d),
        Implementation("ours channels_last", cuda_ops.functional.conv1d, channels_last),
    ],
    native=[
        Implementation("eager", torch.nn.functional.conv1d),
        Implementation("channels_last", torch.nn.functional.conv1d, channels_last),
    ],
    cases=CASES,
)
