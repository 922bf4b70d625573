"""flash_attention_varlen: 16384 tokens of sequences of several lengths, packed, beside PyTorch's attention of one
after the other."""

import itertools

import torch
from harness import Bench, Case, Implementation

import cuda_ops

ours = cuda_ops.functional.flash_attention_varlen
native = torch.nn.functional.scaled_dot_product_attention


def one_by_one(qkv, starts, lengths):
    ends = itertools.accumulate(lengths)
    pieces = [qkv[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    found = []
    for piece in pieces:
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in piece.unbind(1))
        found.append(native(query, key, value, is_causal=True).squeeze(0).transpose(0, 1))
    return torch.cat(found)


def packed(qkv, starts, lengths):
    return ours(*qkv.unbind(1), starts, starts, max(lengths), max(lengths), causal=True)


def case(lengths, heads, head_dim, devices=("cuda",)):
    def make(make):
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=make.device)
        return make(sum(lengths), 3, heads, head_dim), starts, lengths

    elements = sum(lengths) * heads * head_dim
    products = sum(2 * length * length for length in lengths) * heads * head_dim
    name = f"{len(lengths)} of {min(lengths)} to {max(lengths)}, {heads} heads of {head_dim}, causal"
    return Case(name, make, elements=(4 * elements, 8 * elements), flops=(products, 2.5 * products), devices=devices)


def mixed(count, total):
    """`count` lengths from 1 to 2 count - 1 parts of the mean."""
    return [total * (2 * i + 1) // count**2 for i in range(count)]


BENCH = Bench(
    op="flash_attention_varlen",
    ours=Implementation("ours", packed),
    native=[Implementation("eager", one_by_one)],
    cases=[
        case([40, 1, 200, 15], 4, 64, devices=("cpu", "cuda")),
        *[case(mixed(count, 16384), 2048 // head_dim, head_dim) for head_dim in (64, 128) for count in (64, 16, 4)],
    ],
)
