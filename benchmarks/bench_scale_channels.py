"""Squeeze-and-excitation's multiplication in EfficientNet-B0 and MobileNetV3, channels innermost: a read and a write
forward; backward reads gradient and image, and writes the image's gradient."""

import math

import torch
from harness import Bench, Case, Implementation, compiled_on_cuda

SHAPES = [(64, 32, 112, 112), (64, 144, 56, 56), (64, 240, 28, 28), (64, 480, 14, 14), (64, 1152, 7, 7)]


def case(shape):
    def make_arguments(make):
        n, c, h, w = shape
        return make(n, h, w, c).movedim(-1, 1), make(n, c, 1, 1), "sigmoid"

    count = math.prod(shape)
    return Case("x".join(map(str, shape)), make_arguments, elements=(2 * count, 3 * count))


def chain(input, scale, activation):
    return torch.sigmoid(scale) * input


BENCH = Bench(
    op="scale_channels",
    native=[Implementation("eager", chain)],
    cases=[case(shape) for shape in SHAPES],
    beside=compiled_on_cuda(chain),
)
