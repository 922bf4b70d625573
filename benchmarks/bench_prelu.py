"""prelu with a weight for each channel: planes, channels innermost, and one weight for all."""

import math

import torch
from harness import Bench, Case, Implementation


def case(shape, channels):
    count = math.prod(shape)
    return Case(
        f"{'x'.join(map(str, shape))}, {channels} weights",
        lambda make: (make(*shape), make(channels)),
        elements=(2 * count, 3 * count),
    )


BENCH = Bench(
    op="prelu",
    native=[Implementation("eager", torch.nn.functional.prelu)],
    cases=[
        case((64, 64, 112, 112), 64),
        case((64, 256, 56, 56), 256),
        case((256, 512, 7, 7), 512),
        case((8192, 4096), 4096),
        case((8192, 4096), 1),
    ],
)
