"""Squeeze-and-excitation's products in EfficientNet-B0 and MobileNetV3: parameters in float32, as a model has them."""

import torch
from harness import Bench, Case, Implementation, compiled_on_cuda

SIZES = [(64, 32, 8), (64, 240, 10), (64, 480, 20), (64, 1152, 48), (64, 960, 240)]


def case(sizes):
    images, channels, squeezed = sizes

    def make_arguments(make):
        weights = make(squeezed, channels, 1, 1), make(squeezed), make(channels, squeezed, 1, 1), make(channels)
        return make(images, channels, 1, 1), *weights, "silu"

    count = 2 * images * channels + 2 * channels * squeezed
    return Case("x".join(map(str, sizes)), make_arguments, elements=(count, 2 * count))


def chain(input, weight1, bias1, weight2, bias2, activation):
    hidden = torch.nn.functional.silu(torch.nn.functional.conv2d(input, weight1, bias1))
    return torch.nn.functional.conv2d(hidden, weight2, bias2)


BENCH = Bench(
    op="excitation",
    native=[Implementation("eager", chain)],
    cases=[case(sizes) for sizes in SIZES],
    beside=compiled_on_cuda(chain),
)
