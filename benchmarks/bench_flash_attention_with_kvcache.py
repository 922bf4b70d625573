"""flash_attention_with_kvcache: one new query a sequence, as a model generates text, beside PyTorch's attention to a
cache that is full. Bound by the bytes of keys and values."""

import torch
from harness import Bench, Case, Implementation

import cuda_ops

ours = cuda_ops.functional.flash_attention_with_kvcache
native = torch.nn.functional.scaled_dot_product_attention


def eager(query, key_cache, value_cache):
    parts = [t.transpose(1, 2) for t in (query, key_cache, value_cache)]
    grouped = query.shape[2] != key_cache.shape[2]
    return native(*parts, enable_gqa=grouped).transpose(1, 2)


def case(batch, heads, key_heads, keys, head_dim, queries=1, devices=("cuda",)):
    def make(make):
        query = make(batch, queries, heads, head_dim, requires_grad=False)
        return query, *[make(batch, keys, key_heads, head_dim, requires_grad=False) for _ in range(2)]

    cache, rows = 2 * batch * keys * key_heads * head_dim, 2 * batch * queries * heads * head_dim
    products = 4 * batch * queries * heads * keys * head_dim
    name = f"{batch}×{queries} of {keys}, {heads}:{key_heads} heads of {head_dim}"
    return Case(name, make, elements=(cache + rows, 0), flops=(products, 0), devices=devices)


BENCH = Bench(
    op="flash_attention_with_kvcache",
    ours=Implementation("ours", ours),
    native=[Implementation("eager", eager)],
    cases=[
        case(2, 8, 2, 1024, 64, devices=("cpu", "cuda")),
        *[case(1, 32, key_heads, keys, 128) for key_heads in (32, 8) for keys in (1024, 16384, 131072)],
        *[case(batch, 32, 8, 8192, head_dim) for batch in (8, 64) for head_dim in (64, 128)],
        case(8, 32, 8, 8192, 128, queries=8),
    ],
    backward=False,
)
