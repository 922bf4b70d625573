"""Attention in Triton, forward: a program for some queries of a head, which goes over the keys with an online softmax;
tl.dot for both products (float32 without TF32)."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def attention_kernel(
    query_pointer,
    key_pointer,
    value_pointer,
    output_pointer,
    queries,
    keys,
    scale,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The last queries first: causal ones have the most keys.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, column, at = tile * M + tl.arange(0, M), tl.arange(0, D), tl.arange(0, N)
    own = head * queries * D + row[:, None] * D + column[None, :]
    query = tl.load(query_pointer + own, mask=row[:, None] < queries, other=0.0)
    maximum = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    output = tl.zeros((M, D), tl.float32)
    end = tl.minimum(keys, (tile + 1) * M) if CAUSAL else keys
    key_pointer += head * keys * D
    value_pointer += head * keys * D
    for first in range(0, end, N):
        there = first + at < keys
        key = tl.load(key_pointer + (first + at)[None, :] * D + column[:, None], mask=there[None, :], other=0.0)
        scores = tl.dot(query, key, input_precision=PRECISION) * scale  # scale: times log2(e)
        seen = there[None, :]
        if CAUSAL:
            seen = seen & (first + at[None, :] <= row[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        largest = tl.maximum(maximum, tl.max(scores, 1))
        factor = tl.exp2(maximum - largest)
        weights = tl.exp2(scores - largest[:, None])
        total = total * factor + tl.sum(weights, 1)
        maximum = largest
        value = tl.load(value_pointer + (first + at)[:, None] * D + column[None, :], mask=there[:, None], other=0.0)
        output = tl.dot(weights.to(value.dtype), value, output * factor[:, None], input_precision=PRECISION)
    output = (output / total[:, None]).to(output_pointer.dtype.element_ty)
    tl.store(output_pointer + own, output, mask=row[:, None] < queries)


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Of contiguous tensors on CUDA, [batch][heads][length][head_dim]; at least one key."""
    batch, heads, queries, d = query.shape
    output = torch.empty_like(query)
    wide = query.dtype == torch.float32
    m, n = (64, 32) if wide else (128, 64 if causal else 128)
    grid = triton.cdiv(queries, m), batch * heads
    scale = 1 / (math.sqrt(d) * math.log(2))
    attention_kernel[grid](
        query,
        key,
        value,
        output,
        queries,
        key.shape[2],
        scale,
        d,
        m,
        n,
        causal,
        "ieee" if wide else "tf32",
        num_warps=8 if d == 128 or wide else 4,
        num_stages=2,
    )
    return output
