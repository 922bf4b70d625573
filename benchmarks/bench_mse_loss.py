"""mse_loss, a number of all elements: forward reads two arrays, backward too, and writes one."""

import math

import torch
from harness import Bench, Case, Implementation

import cuda_ops


def case(*shape):
    count = math.prod(shape)
    return Case(
        "x".join(map(str, shape)),
        lambda make: (make(*shape), make(*shape, requires_grad=False).sigmoid()),
        elements=(2 * count, 3 * count),
    )


BENCH = Bench(
    op="mse_loss",
    ours=Implementation("ours", lambda x, t: cuda_ops.functional.mse_loss(x, t)),
    native=[Implementation("eager", lambda x, t: torch.nn.functional.mse_loss(x, t))],
    cases=[case(8192, 4096), case(8192, 768), case(64, 1000)],
)
