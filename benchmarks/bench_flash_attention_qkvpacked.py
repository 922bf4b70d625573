"""flash_attention_qkvpacked of a projection's result, beside PyTorch's attention of its three parts, whose gradients
are copied into one. GPT-2 124M's layer, and the CPU's model of characters."""

import torch
from harness import Bench, Case, Implementation

import cuda_ops

ours = cuda_ops.functional.flash_attention_qkvpacked
native = torch.nn.functional.scaled_dot_product_attention


def of_parts(qkv, causal):
    query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
    return native(query, key, value, is_causal=causal).transpose(1, 2)


def case(batch, length, heads, head_dim, devices=("cpu", "cuda")):
    def make(make):
        return make(batch, length, 3, heads, head_dim), True

    elements = batch * length * heads * head_dim
    products = 2 * elements * length  # half of them are masked
    return Case(
        f"{batch}×{length}×3×{heads}×{head_dim} causal",
        make,
        elements=(4 * elements, 8 * elements),
        flops=(products, 2.5 * products),
        devices=devices,
    )


BENCH = Bench(
    op="flash_attention_qkvpacked",
    ours=Implementation("ours", lambda qkv, causal: ours(qkv, causal=causal)),
    native=[Implementation("eager", of_parts)],
    cases=[
        case(12, 64, 4, 32, ("cpu",)),
        case(2, 512, 6, 64),
        case(32, 1024, 12, 64, ("cuda",)),
        case(64, 256, 6, 64, ("cuda",)),
    ],
)
