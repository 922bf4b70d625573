import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

from . import flash_attention

attention = cuda_ops.functional.flash_attention_with_kvcache


def reference(
    query,
    key_cache,
    value_cache,
    key=None,
    value=None,
    *,
    cache_seqlens=None,
    block_table=None,
    alibi_slopes=None,
    **options,
):
    """A sequence after the other, by the formulas of flash_attention's docstring, without a change of the cache."""
    if not query.dim() == key_cache.dim() == 4:
        raise ValueError("other dimensions")
    if (key is None) != (value is None):
        raise ValueError("one of key and value")
    outputs = []
    for b in range(query.shape[0]):
        if block_table is None:
            keys, values = key_cache[b], value_cache[b]
        else:
            pages = block_table[b].clamp(0, max(key_cache.shape[0] - 1, 0)).long()
            keys, values = key_cache[pages].flatten(0, 1), value_cache[pages].flatten(0, 1)
        length = (
            keys.shape[0] if cache_seqlens is None else int(torch.as_tensor(cache_seqlens).expand(query.shape[0])[b])
        )
        if length < 0:
            raise IndexError("a negative length")
        keys, values = keys[:length], values[:length]
        if key is not None:
            keys, values = torch.cat([keys, key[b]]), torch.cat([values, value[b]])
        group = query.shape[2] // keys.shape[1] if keys.shape[1] else 1
        parts = [t.transpose(0, 1).unsqueeze(0) for t in (query[b], keys, values)]
        parts[1:] = [part.repeat_interleave(group, 1) for part in parts[1:]]
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b]
        if keys.shape[0] == 0:
            outputs.append(torch.zeros(*query.shape[1:3], values.shape[-1], dtype=query.dtype))
        else:
            found = flash_attention.reference(*parts, bottom_right=True, alibi_slopes=slopes, **options)
            outputs.append(found.squeeze(0).transpose(0, 1))
    return torch.stack(outputs) if outputs else query.new_zeros(*query.shape[:3], value_cache.shape[-1])


def sample(make, queries, lengths, capacity=70, heads=4, key_heads=2, dims=(16, 16), page=0, new=0, name="", **options):
    """page: rows of a page; 0: not paged. Nothing requires grad."""
    batch = len(lengths)

    def plain(*shape):
        return make(*shape, requires_grad=False)

    if page:
        columns = -(-capacity // page)
        # Pages in any order, one of which nobody has.
        table = torch.arange(batch * columns, device=make.device).flip(0).reshape(batch, columns).to(torch.int32)
        options["block_table"] = table
        caches = [plain(batch * columns + 1, page, key_heads, dim) for dim in dims]
    else:
        caches = [plain(batch, capacity, key_heads, dim) for dim in dims]
    fresh = [plain(batch, new, key_heads, dim) for dim in dims] if new else []
    options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=make.device)
    return Sample((plain(batch, queries, heads, dims[0]), *caches, *fresh), options, name or f"{queries} x {lengths}")


def samples(make):
    # No key, one, within a tile of keys, at its edge, and many, which are split.
    yield sample(make, 1, [0, 1, 33, 70])
    yield sample(make, 1, [600, 1030], capacity=1030, causal=True)
    # More rows than a tile of 16, 32 and 64 has; more queries than keys.
    for queries in (5, 9, 20, 40):
        yield sample(make, queries, [70, 3], causal=True, name=f"{queries} queries")
    for dims in ((8, 24), (20, 5), (64, 64), (128, 128), (256, 256)):
        yield sample(make, 2, [70, 40], dims=dims, scale=1.0 / dims[0], name=f"{dims} elements")
    for page in (1, 7, 16, 64):
        yield sample(make, 3, [70, 33], page=page, causal=True, name=f"pages of {page}")
    # New keys change the cache: tests/ops/test_attention_sequences.py.
    yield sample(make, 3, [60, 31], window=(9, 0), name="a window")
    yield sample(make, 3, [60, 31], softcap=2.0, scale=0.5, name="softcap")
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0], device=make.device)
    yield sample(make, 3, [60, 31], alibi_slopes=slopes, causal=True, name="alibi")
    yield sample(make, 3, [60, 31], alibi_slopes=torch.stack([slopes, 2 * slopes]), name="alibi of sequences")
    whole = sample(make, 2, [70, 70])
    yield Sample(whole.args, {}, name="the whole cache")
    yield Sample(whole.args, {"cache_seqlens": 31}, name="one length")


def small_samples(make):
    yield sample(make, 2, [3, 1], capacity=4, heads=2, key_heads=1, dims=(4, 4), causal=True)
    yield sample(make, 1, [3, 2], capacity=6, heads=2, key_heads=1, dims=(4, 4), page=2)


def empty_samples(make):
    yield sample(make, 0, [3, 1])
    yield sample(make, 1, [])
    yield sample(make, 1, [0, 0], capacity=0)


def op_samples(make):
    forward = torch.ops.cuda_ops.attention_cache_forward
    append = torch.ops.cuda_ops.attention_cache_append
    for page in (0, 8):
        case = sample(make, 3, [20, 31], capacity=40, dims=(8, 8), page=page, new=2)
        query, key_cache, value_cache, key, value = case.args
        lengths, table = case.kwargs["cache_seqlens"], case.kwargs.get("block_table")
        yield append, (key_cache, value_cache, key, value, lengths, table)
        yield forward, (query, key_cache, value_cache, lengths, table, None, 2, 0.5, -1, 0, 0.0)
    slopes = make(4, requires_grad=False)
    yield forward, (query, key_cache, value_cache, lengths, table, slopes, 0, 0.5, 7, 0, 2.0)


def call(ones, query=(2, 1, 4, 8), cache=(2, 9, 2, 8), new=(), seqlens=None, table=None, **kwargs):
    like = ones(*query)
    lengths = None if seqlens is None else torch.tensor(seqlens, dtype=torch.int32, device=like.device)
    pages = None if table is None else torch.tensor(table, dtype=torch.int32, device=like.device)
    caches = ones(*cache), ones(*cache)
    return attention(like, *caches, *[ones(*n) for n in new], cache_seqlens=lengths, block_table=pages, **kwargs)


SPEC = OpSpec(
    name="flash_attention_with_kvcache",
    stem="attention_cache",
    own_sizes=True,
    function=attention,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    # As of scaled_dot_product_attention.
    relative_norm={torch.float32: 2e-5, torch.float16: 1.5e-2, torch.bfloat16: 1.2e-1},
    nonfinite=False,
    bad=[
        bad(
            "three dimensions",
            lambda ones: call(ones, query=(2, 4, 8)),
            "attention_cache: expected query to have 4 dimensions",
        ),
        bad(
            "a cache of another batch",
            lambda ones: call(ones, cache=(3, 9, 2, 8)),
            "attention_cache: expected key_cache to have the batch of query, 2, got shape",
        ),
        bad(
            "other heads",
            lambda ones: call(ones, cache=(2, 9, 3, 8)),
            "attention_cache: expected the heads of key_cache to divide those of query, 4, got 3",
        ),
        bad(
            "a table of another batch",
            lambda ones: call(ones, table=[[0, 1]]),
            r"attention_cache: expected block_table to have shape \[2, pages of a sequence\], got \[1, 2\]",
        ),
        bad(
            "long rows",
            lambda ones: call(ones, query=(2, 1, 4, 264), cache=(2, 9, 2, 264)),
            "attention_cache: expected rows of up to 256 elements",
            NotImplementedError,
        ),
        bad(
            "new keys without lengths",
            lambda ones: call(ones, new=[(2, 1, 2, 8)] * 2),
            "flash_attention_with_kvcache: expected cache_seqlens to say where key and value go",
            ValueError,
        ),
        bad(
            "a key without its value",
            lambda ones: call(ones, new=[(2, 1, 2, 8)], seqlens=[1, 1]),
            "flash_attention_with_kvcache: expected key and value to be both Tensors or both None",
            ValueError,
        ),
        bad(
            "a query that requires grad",
            lambda ones: attention(ones(2, 1, 4, 8, requires_grad=True), ones(2, 9, 2, 8), ones(2, 9, 2, 8)),
            "attention_cache: not differentiable with respect to query",
        ),
    ],
)
