"""attention_cache: attention of new queries to a cache of keys and values, which may be paged."""

import torch
from torch import Tensor

from .._arguments import check_tensors, check_tensors_or_none, expect, integer
from .._fakes import register_fake, require_ops
from .._operators import operator
from .attention import _options, _results

require_ops("attention_cache_forward")


@register_fake("cuda_ops::attention_cache_append")
def _(key_cache, value_cache, key, value, cache_seqlens, block_table):
    return None


@register_fake("cuda_ops::attention_cache_forward")
def _(
    query, key_cache, value_cache, cache_seqlens, block_table, alibi_slopes, new_keys, scale, window_left, window_right,
    softcap,
):  # fmt: skip
    op = "attention_cache"
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        expect(tensor.dim() == 4, op, f"{name} to have 4 dimensions, got shape {{}}", list(tensor.shape))
    batch, queries, heads, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = query.new_empty(batch, queries, heads, value_cache.shape[3])
    return output, query.new_empty(batch, heads, queries, dtype=dtype)


attention_cache_append = operator("attention_cache_append")
attention_cache_forward = operator("attention_cache_forward")


def flash_attention_with_kvcache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_logsumexp: bool = False,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention of new queries to the keys and values of a cache, as a language model generates text with; new keys
    and values are appended to the cache, in place, first. Each key is read once, by all queries of the heads that share
    it. The signature is that of the flash-attention library (Dao et al., arXiv 2307.08691), and so is the layout.

    Args:
        query: (batch, queries, heads, head_dim); float32, float64, float16 or bfloat16.
        key_cache: (batch, capacity, key_heads, head_dim), where key_heads divides heads; or, with `block_table`,
            (pages, page_size, key_heads, head_dim), pages of any size.
        value_cache: of the shape of `key_cache` but in its last dimension, value_dim.
        key: (batch, new keys, key_heads, head_dim), which goes into `key_cache` behind the first `cache_seqlens`.
        value: (batch, new keys, key_heads, value_dim).
        cache_seqlens: (batch), int32: how many keys of each sequence the cache has, not counting new ones; or one
            number for all. None: as many as there is room for, and then there are no new ones.
        block_table: (batch, pages of a sequence), int32: key j of sequence b is row j % page_size of page
            `block_table[b, j // page_size]`. Pages that no key needs may be any number.
        causal: a query sees no key beyond its own place, where the last query is at the last key.
        scale, softcap, alibi_slopes, sinks: as of :func:`flash_attention`.
        window: (left, right): a query sees so many keys before and behind its own place alone; -1: no bound.
        return_logsumexp: whether to return the logarithm of each row's sum of exponentials too.

    Returns:
        (batch, queries, heads, value_dim); with `return_logsumexp` and (batch, heads, queries), float64 for float64,
        else float32. A query that sees no key has output 0 and logsumexp -inf.

    Raises:
        TypeError: an argument of another type.
        ValueError: one of `key` and `value` without the other, or without `cache_seqlens`.
        IndexError: a length for which the cache has no room, or a page that it has not. On CUDA nothing waits for the
            kernel: it reads and writes nothing that is not there, and a later call raises (see
            :func:`cuda_ops.functional.embedding`).
        RuntimeError: shapes, dtypes or devices that do not fit, or an argument that requires grad: there is no
            gradient.
        NotImplementedError: rows of more than 256 elements.

    Example:
        >>> keys, values = torch.zeros(1, 8, 1, 2), torch.zeros(1, 8, 1, 2)
        >>> new = torch.tensor([1.0, 2.0]).reshape(1, 1, 1, 2)
        >>> cuda_ops.functional.flash_attention_with_kvcache(new, keys, values, new, new, cache_seqlens=3).flatten()
        tensor([0.9196, 1.8392])
        >>> values[0, 2:5, 0, 0]
        tensor([0., 1., 0.])
    """
    op = "flash_attention_with_kvcache"
    check_tensors(op, query=query, key_cache=key_cache, value_cache=value_cache)
    check_tensors_or_none(op, key=key, value=value, block_table=block_table)
    alibi_slopes, factor, left, right, cap = _options(op, query, causal, scale, window, softcap, alibi_slopes)
    if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        length = integer(op, "cache_seqlens", cache_seqlens)
        if not 0 <= length < 2**31:
            raise IndexError(f"{op}: expected cache_seqlens to be in [0, 2^31), got {length}")
        cache_seqlens = torch.full(query.shape[:1], length, dtype=torch.int32, device=query.device)
    if (key is None) != (value is None):
        raise ValueError(f"{op}: expected key and value to be both Tensors or both None")
    new_keys = 0
    if key is not None:
        if cache_seqlens is None:
            raise ValueError(f"{op}: expected cache_seqlens to say where key and value go, got None")
        attention_cache_append(key_cache, value_cache, key, value, cache_seqlens, block_table)
        new_keys = key.shape[1]
    output, logsumexp = attention_cache_forward(
        query, key_cache, value_cache, cache_seqlens, block_table, alibi_slopes, new_keys, factor, left, right, cap
    )
    return _results(op, output, logsumexp, sinks, return_logsumexp, heads_within_rows=True)
