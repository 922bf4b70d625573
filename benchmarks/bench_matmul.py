"""matmul: matrices from small to large, lecture 5's shape both ways, a few rows, and a batch."""

import torch
from harness import Bench, Case, Implementation


def case(m, n, k, batch=()):
    count = batch[0] if batch else 1
    a, b, d = count * m * k, count * k * n, count * m * n
    return Case(
        "x".join(map(str, (*batch, m, n, k))),
        lambda make: (make(*batch, m, k), make(*batch, k, n)),
        elements=(a + b + d, 2 * a + 2 * b + d),
        flops=(2 * count * m * n * k, 4 * count * m * n * k),
    )


SIZES = [(64, 128, 3136), (64, 10, 128), (256, 256, 256), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096)]
SIZES += [(5120, 5120, 256), (5120, 256, 5120), (16, 4096, 4096)]
BENCH = Bench(
    op="matmul",
    native=[Implementation("eager", torch.matmul)],
    cases=[*(case(*sizes) for sizes in SIZES), case(128, 128, 64, batch=(256,))],
)
