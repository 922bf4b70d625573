"""Queries and keys of a Llama's attention, as its linear layers lay them out, heads within rows."""

import torch
from harness import Bench, Case, Implementation, compiled_on_cuda


def composed(input, cos, sin):
    first, second = input.chunk(2, -1)
    return input * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def case(batch, heads, length, features):
    def make_arguments(make):
        tables = make(1, length, features).detach(), make(1, length, features).detach()
        return make(batch, length, heads, features).transpose(1, 2), *tables

    count = 2 * batch * heads * length * features
    return Case(f"{batch}x{heads}x{length}x{features}", make_arguments, elements=(count, count))


BENCH = Bench(
    op="rotary_embedding",
    native=[Implementation("eager", composed)],
    cases=[case(16, 12, 512, 64), case(16, 4, 512, 64), case(4, 32, 2048, 128)],
    beside=compiled_on_cuda(composed),
)
