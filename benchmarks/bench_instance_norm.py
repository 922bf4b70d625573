"""instance_norm: as group_norm, of one channel a group."""

import torch
from harness import Bench, Case, Implementation, compiled_on_cuda

SHAPES = [(8, 64, 256, 256), (8, 128, 128, 128), (64, 64, 56, 56), (64, 2048, 7, 7), (1, 32, 1024, 1024)]


def case(images, channels, height, width):
    count = images * channels * height * width

    def make_arguments(make):
        return make(images, channels, height, width), None, None, make(channels), make(channels)

    name = f"{images}x{channels}x{height}x{width}"
    return Case(name, make_arguments, elements=(2 * count + 2 * channels, 3 * count + 3 * channels))


BENCH = Bench(
    op="instance_norm",
    native=[Implementation("eager", torch.nn.functional.instance_norm)],
    cases=[case(*shape) for shape in SHAPES],
    beside=compiled_on_cuda(torch.nn.functional.instance_norm),
)
