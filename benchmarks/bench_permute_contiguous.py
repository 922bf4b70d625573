"""permute_contiguous: matrices, batches of them, images from one format to the other, attention's heads."""

import math

import torch
from harness import Bench, Case, Implementation

CASES = [
    ((8192, 8192), (1, 0)),
    ((8192, 768), (1, 0)),
    ((4097, 8191), (1, 0)),
    ((64, 512, 512), (0, 2, 1)),
    ((64, 256, 56, 56), (0, 2, 3, 1)),
    ((64, 56, 56, 256), (0, 3, 1, 2)),
    ((256, 3, 224, 224), (0, 2, 3, 1)),
    ((32, 1024, 12, 64), (0, 2, 1, 3)),
]


def case(shape, dims):
    count = math.prod(shape)
    name = f"{'x'.join(map(str, shape))} as {''.join(map(str, dims))}"
    devices = ("cpu", "cuda") if count <= 1 << 25 else ("cuda",)
    return Case(name, lambda make: (make(*shape), dims), elements=(2 * count, 0), devices=devices)


BENCH = Bench(
    op="permute_contiguous",
    native=[Implementation("eager", lambda x, dims: torch.permute(x, dims).contiguous())],
    cases=[case(*c) for c in CASES],
    backward=False,
)
