import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

from . import flash_attention

attention = cuda_ops.functional.flash_attention_varlen


def reference(query, key, value, starts, key_starts, longest, longest_key, *, return_logsumexp=False, **options):
    """A sequence after the other, by the formulas of flash_attention's docstring; rows of no sequence are 0."""
    if query.dim() != 3 or key.dim() != 3 or starts.shape != key_starts.shape:
        raise ValueError("not packed")
    slopes = options.pop("alibi_slopes", None)
    starts, key_starts = starts.tolist(), key_starts.tolist()
    # What has no row still has a gradient of 0.
    output = torch.zeros(*query.shape[:2], value.shape[2], dtype=query.dtype) + 0 * (query.sum() + key.sum())
    output = output + 0 * value.sum()
    pieces, at = [], 0
    for b in range(len(starts) - 1):
        (first, last), (first_key, last_key) = starts[b : b + 2], key_starts[b : b + 2]
        last, last_key = min(last, first + longest), min(last_key, first_key + longest_key)
        parts = query[first:last], key[first_key:last_key], value[first_key:last_key]
        parts = [part.transpose(0, 1).unsqueeze(0) for part in parts]
        group = query.shape[1] // max(key.shape[1], 1)
        parts[1:] = [part.repeat_interleave(group, 1) for part in parts[1:]]
        of_b = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        if parts[1].shape[2] == 0:
            found = torch.zeros(last - first, *output.shape[1:], dtype=query.dtype)
        else:
            found = flash_attention.reference(*parts, alibi_slopes=of_b, **options).squeeze(0).transpose(0, 1)
        pieces += [output[at:first], found]
        at = last
    return torch.cat([*pieces, output[at:]])


def starts_of(make, lengths):
    return torch.tensor([0, *lengths], device=make.device).cumsum(0).to(torch.int32)


def sample(make, lengths, key_lengths=None, heads=2, key_heads=None, dims=(16, 16), name="", more=0, **options):
    """more: rows behind the last sequence."""
    key_lengths = lengths if key_lengths is None else key_lengths
    key_heads = heads if key_heads is None else key_heads
    tensors = (
        make(sum(lengths) + more, heads, dims[0]),
        make(sum(key_lengths) + more, key_heads, dims[0]),
        make(sum(key_lengths) + more, key_heads, dims[1]),
    )
    starts = starts_of(make, lengths), starts_of(make, key_lengths)
    longest = max(lengths, default=0), max(key_lengths, default=0)
    return Sample((*tensors, *starts, *longest), options, name or f"{lengths} x {key_lengths}, {options}")


# None, one, within a tile of 64, at its edge and beyond; no queries of keys, and no keys of queries.
LENGTHS, KEY_LENGTHS = [0, 3, 64, 2, 65, 5, 0, 130], [0, 70, 63, 2, 129, 0, 7, 40]


def samples(make):
    for options in (
        {},
        {"causal": True},
        {"causal": True, "bottom_right": True},
        {"window": (5, 3), "bottom_right": True},
        {"softcap": 2.0, "scale": 0.5},
    ):
        yield sample(make, LENGTHS, KEY_LENGTHS, **options)
    yield sample(make, LENGTHS, heads=4, key_heads=2, causal=True)
    yield sample(make, [40, 30], dims=(20, 12), more=3, name="rows behind the last sequence")
    slopes = torch.tensor([0.5, 0.25], device=make.device)
    yield sample(make, [40, 30], [30, 50], alibi_slopes=slopes, bottom_right=True, name="alibi")
    yield sample(make, [40, 30], alibi_slopes=torch.stack([slopes, 2 * slopes]), name="alibi of sequences")
    rest = sample(make, [9, 33]).args[3:]
    packed = make(42, 3, 2, 16)
    parts = [part.detach().requires_grad_(make.requires_grad) for part in packed.unbind(1)]
    yield Sample((*parts, *rest), {"causal": True}, name="packed projections")


def small_samples(make):
    yield sample(make, [2, 0, 3], [3, 1, 2], heads=2, key_heads=1, dims=(2, 2), causal=True, bottom_right=True)
    yield sample(make, [2, 3], heads=1, dims=(2, 3), more=1, softcap=1.5, window=(1, 1))


def empty_samples(make):
    yield sample(make, [], name="no sequence")
    yield sample(make, [0, 0])
    yield sample(make, [2, 3], heads=0)


def op_samples(make):
    forward = torch.ops.cuda_ops.attention_varlen_forward
    backward = torch.ops.cuda_ops.attention_varlen_backward
    query, key, value, *rest = sample(make, [2, 0, 3], [3, 1, 2], heads=4, key_heads=2, dims=(8, 8)).args
    options = 0.5, 3, 1, 0.0, True
    yield forward, (query, key, value, *rest[:2], None, *rest[2:], *options)
    slopes = make(4, requires_grad=False)
    yield forward, (query, key, value, *rest[:2], slopes, *rest[2:], 0.5, -1, 0, 2.0, False)
    tensors = [t.detach() for t in (query, key, value)]
    output, logsumexp = forward(*tensors, *rest[:2], None, *rest[2:], *options)
    saved = *tensors, *rest[:2], None, output, logsumexp, *rest[2:], *options
    yield backward, (torch.ones_like(output), torch.ones_like(logsumexp), *saved)


def call(
    ones, query=(5, 2, 4), key=(5, 2, 4), value=(5, 2, 4), starts=(0, 2, 5), dtype=torch.int32, longest=3, **kwargs
):
    like = ones(*query)
    starts = torch.tensor(starts, dtype=dtype, device=like.device)
    return attention(like, ones(*key), ones(*value), starts, starts, 3, longest, **kwargs)


SPEC = OpSpec(
    name="flash_attention_varlen",
    stem="attention_varlen",
    own_sizes=True,
    function=attention,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    cancels=True,
    # As of scaled_dot_product_attention.
    expanded_dim=-1,
    relative_norm={torch.float32: 2e-5, torch.float16: 1.5e-2, torch.bfloat16: 1.2e-1},
    nonfinite=False,
    bad=[
        bad(
            "four dimensions",
            lambda ones: call(ones, query=(1, 5, 2, 4)),
            r"attention_varlen: expected query to have 3 dimensions",
        ),
        bad(
            "other heads",
            lambda ones: call(ones, key=(5, 3, 4), value=(5, 3, 4)),
            "attention_varlen: expected the heads of key to divide those of query, 2, got 3",
        ),
        bad(
            "a negative length",
            lambda ones: call(ones, longest=-1),
            "attention_varlen: expected max_seqlen_q and max_seqlen_k to be 0 or more, got",
        ),
        bad(
            "starts of int64",
            lambda ones: call(ones, dtype=torch.int64),
            "attention_varlen: expected cu_seqlens_q to be int32, got int64",
        ),
        bad(
            "dropout",
            lambda ones: call(ones, dropout_p=0.5),
            "flash_attention_varlen: expected dropout_p to be 0, got 0.5",
            NotImplementedError,
        ),
        bad(
            "sinks of other heads",
            lambda ones: call(ones, sinks=ones(3)),
            r"flash_attention_varlen: expected sinks to be floating point of shape \[2\]",
        ),
    ],
)
