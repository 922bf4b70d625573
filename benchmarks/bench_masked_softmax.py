"""masked_softmax over attention's scores, [batch, heads, queries, keys], causal, beside PyTorch's three ops."""

import math

import torch
from harness import Bench, Case, Implementation, compiled_on_cuda

import cuda_ops


def composed(input):
    queries, keys = input.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=input.device).triu(1)
    return torch.softmax((input * 0.125).masked_fill(hidden, -math.inf), -1)


def case(*shape):
    count = math.prod(shape)
    return Case("×".join(map(str, shape)), lambda make: (make(*shape),), elements=(2 * count, 3 * count))


BENCH = Bench(
    op="masked_softmax",
    ours=Implementation("ours", lambda x: cuda_ops.functional.masked_softmax(x, None, 0.125, True)),
    native=[Implementation("eager", composed)],
    cases=[case(4, 12, 256, 256), case(4, 12, 1024, 1024), case(1, 16, 4096, 4096)],
    beside=compiled_on_cuda(composed),
)
