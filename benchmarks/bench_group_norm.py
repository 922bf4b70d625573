"""group_norm in networks' shapes, of contiguous images. Forward reads input and writes output once where a group fits
into registers; backward reads input and grad_output twice, for the sums and for the result."""

import torch
from harness import Bench, Case, Implementation, compiled_on_cuda

# Stable Diffusion's U-Net and decoder, a ResNet with 32 groups, detection heads, one group (its largest).
SHAPES = [
    (2, 320, 64, 64, 32),
    (2, 1280, 16, 16, 32),
    (1, 128, 512, 512, 32),
    (64, 64, 56, 56, 32),
    (64, 256, 56, 56, 32),
    (64, 2048, 7, 7, 32),
    (16, 256, 100, 152, 32),
    (32, 96, 56, 56, 1),
]


def case(images, channels, height, width, groups):
    count = images * channels * height * width

    def make_arguments(make):
        return make(images, channels, height, width), groups, make(channels), make(channels)

    name = f"{images}x{channels}x{height}x{width} in {groups}"
    return Case(name, make_arguments, elements=(2 * count + 2 * channels, 3 * count + 3 * channels))


BENCH = Bench(
    op="group_norm",
    native=[Implementation("eager", torch.nn.functional.group_norm)],
    cases=[case(*shape) for shape in SHAPES],
    beside=compiled_on_cuda(torch.nn.functional.group_norm),
)
