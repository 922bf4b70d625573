"""logsumexp of rows, of classes and of a vocabulary, of columns side by side, and of a whole tensor."""

import math

import torch
from harness import Bench, Case, Implementation


def case(*shape, dim):
    count = math.prod(shape)
    dims = dim if isinstance(dim, tuple) else (dim,)
    columns = count // math.prod(shape[d] for d in dims)
    return Case(
        f"{'x'.join(map(str, shape))}, dim {dim}",
        lambda make: (make(*shape), dim),
        elements=(count + columns, 2 * count + 2 * columns),
    )


BENCH = Bench(
    op="logsumexp",
    native=[Implementation("eager", torch.logsumexp)],
    cases=[
        case(8192, 4096, dim=1),
        case(8192, 50304, dim=1),
        case(65536, 10, dim=1),
        case(4096, 8192, dim=0),
        case(8192, 4096, dim=(0, 1)),
    ],
)
