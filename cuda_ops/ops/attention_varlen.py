"""attention_varlen: attention of sequences of any lengths, packed behind each other without padding."""

import math

import torch
from torch import Tensor

from .._arguments import check_tensors, expect, flag, integer, number
from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._operators import composite, operator
from .attention import _options, _results

require_ops("attention_varlen_gradients")


def _check_shapes(op, query, key, value):
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        expect(tensor.dim() == 3, op, f"{name} to have 3 dimensions, got shape {{}}", list(tensor.shape))
    message = "value to have the rows and the heads of key, got shapes {} and {}"
    expect(value.shape[:2] == key.shape[:2], op, message, list(value.shape), list(key.shape))
    message = "key to have the last dimension of query, {}, got {}"
    expect(key.shape[2] == query.shape[2], op, message, query.shape[2], key.shape[2])


@register_fake("cuda_ops::attention_varlen_forward")
def _(
    query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k, scale, window_left,
    window_right, softcap, bottom_right,
):  # fmt: skip
    _check_shapes("attention_varlen", query, key, value)
    rows, heads, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(rows, heads, value.shape[2]), query.new_empty(heads, rows, dtype=dtype)


@register_fake("cuda_ops::attention_varlen_backward")
def _(
    grad_output, grad_logsumexp, query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, output, logsumexp,
    max_seqlen_q, max_seqlen_k, scale, window_left, window_right, softcap, bottom_right,
):  # fmt: skip
    _check_shapes("attention_varlen_backward", query, key, value)
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


attention_varlen_forward = operator("attention_varlen_forward")
AttentionVarlenFunction = autograd_function("attention_varlen_forward", "AttentionVarlenFunction")


def _check_sequences(op, query, cu_seqlens_q, cu_seqlens_k, slopes):
    """What the kernels check, for what indexes by them: on a GPU an index out of range ends the process."""
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        expect(starts.device == query.device, op, "{} to be on the device of query, got {}", name, starts.device)
        expect(starts.dtype == torch.int32, op, "{} to be int32, got {}", name, starts.dtype)
        fits = starts.dim() == 1 and starts.shape[0] > 0
        expect(fits, op, "{} to have shape [sequences + 1], got {}", name, list(starts.shape))
    fits = cu_seqlens_k.shape[0] == cu_seqlens_q.shape[0]
    message = "cu_seqlens_k to have the shape of cu_seqlens_q, {}, got {}"
    expect(fits, op, message, list(cu_seqlens_q.shape), list(cu_seqlens_k.shape))
    if slopes is not None:
        expect(slopes.device == query.device, op, "alibi_slopes to be on the device of query, got {}", slopes.device)
        heads, sequences = query.shape[1], cu_seqlens_q.shape[0] - 1
        of_heads = slopes.dim() == 1 and slopes.shape[0] == heads
        of_batch = slopes.dim() == 2 and slopes.shape[0] == sequences and slopes.shape[1] == heads
        message = "alibi_slopes to have shape [{}] or [{}, {}], got {}"
        expect(of_heads or of_batch, op, message, heads, sequences, heads, list(slopes.shape))


def _positions(starts, rows, longest):
    """Of each row its sequence (the first where it is in none), its place there, and whether it is in one; and the
    lengths of the sequences."""
    starts = starts.long()
    row = torch.arange(rows, device=starts.device)
    sequence = torch.searchsorted(starts, row, right=True) - 1
    inside = (sequence >= 0) & (sequence < starts.shape[0] - 1)
    sequence = torch.where(inside, sequence, 0)
    place = row - starts[sequence]
    return sequence, place, inside & (place < longest), (starts[1:] - starts[:-1]).clamp(0, longest)


def _additive_mask(query, key, cu_seqlens_q, cu_seqlens_k, slopes, longest_query, longest_key, left, right, bottom):
    """(1 or heads, rows of query, rows of key): slopes times distances, -inf where a key is not seen."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    if cu_seqlens_q.shape[0] < 2:
        return torch.full((1, query.shape[0], key.shape[0]), -math.inf, dtype=dtype, device=query.device)
    sequence, i, inside, queries = _positions(cu_seqlens_q, query.shape[0], longest_query)
    key_sequence, j, key_inside, keys = _positions(cu_seqlens_k, key.shape[0], longest_key)
    i = (i + (keys - queries)[sequence] if bottom else i)[:, None]
    seen = (sequence[:, None] == key_sequence) & inside[:, None] & key_inside
    if left >= 0:
        seen = seen & (j >= i - left)
    if right >= 0:
        seen = seen & (j <= i + right)
    mask = torch.zeros(1, *seen.shape, dtype=dtype, device=query.device)
    if slopes is not None:
        slopes = slopes.to(torch.float32).to(dtype)
        of_rows = slopes[:, None] if slopes.dim() == 1 else slopes[sequence].mT
        mask = -of_rows[..., None] * (i - j).abs().to(dtype)
    return mask.masked_fill(~seen, -math.inf)


def _four(tensor):
    """(rows, heads, elements) as (1, heads, rows, elements)."""
    return None if tensor is None else tensor.transpose(0, 1).unsqueeze(0)


def _dense(query, key, value, mask, scale, softcap):
    """The arguments of the ops of dense tensors."""
    state = torch.empty(0, dtype=torch.int64, device=query.device)
    return _four(query), _four(key), _four(value), mask, None, state, scale, 0, -1, -1, softcap, 0.0


@composite("attention_varlen_gradients_composed")
def _(
    grad_output, grad_logsumexp, query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q,
    max_seqlen_k, scale, window_left, window_right, softcap, bottom_right,
):  # fmt: skip
    """Of all sequences at once, by a mask."""
    _check_shapes("attention_varlen_gradients", query, key, value)
    _check_sequences("attention_varlen_gradients", query, cu_seqlens_q, cu_seqlens_k, alibi_slopes)
    mask = _additive_mask(
        query, key, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k, window_left, window_right,
        bottom_right,
    )  # fmt: skip
    grad_logsumexp = None if grad_logsumexp is None else grad_logsumexp.unsqueeze(0)
    grads = torch.ops.cuda_ops.attention_gradients_composed(
        _four(grad_output), grad_logsumexp, *_dense(query, key, value, mask, scale, softcap), [True, True, True, False]
    )
    return tuple(grad.squeeze(0).transpose(0, 1) for grad in grads)


@composite("attention_varlen_tangents")
def _(
    tangent_query, tangent_key, tangent_value, query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes,
    max_seqlen_q, max_seqlen_k, scale, window_left, window_right, softcap, bottom_right,
):  # fmt: skip
    _check_shapes("attention_varlen_tangents", query, key, value)
    _check_sequences("attention_varlen_tangents", query, cu_seqlens_q, cu_seqlens_k, alibi_slopes)
    mask = _additive_mask(
        query, key, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k, window_left, window_right,
        bottom_right,
    )  # fmt: skip
    output, logsumexp = torch.ops.cuda_ops.attention_tangents(
        _four(tangent_query), _four(tangent_key), _four(tangent_value), None,
        *_dense(query, key, value, mask, scale, softcap),
    )  # fmt: skip
    return output.squeeze(0).transpose(0, 1), logsumexp.squeeze(0)


def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_logsumexp: bool = False,
    bottom_right: bool = False,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention of sequences of any lengths, which lie behind each other without padding: :func:`flash_attention` of
    rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of `query` with rows `cu_seqlens_k[b]` to `cu_seqlens_k[b + 1]` of
    `key` and `value`, for each sequence b. Nothing is copied, and the host never waits for the lengths.

    Args:
        query: (rows, heads, head_dim); float32, float64, float16 or bfloat16.
        key: (key rows, key_heads, head_dim), where key_heads divides heads.
        value: (key rows, key_heads, value_dim).
        cu_seqlens_q: (sequences + 1), int32, on the device of `query`: where the sequences begin, and where the last
            one ends. They do not decrease; a sequence may be empty. Numbers are clamped to the rows that exist.
        cu_seqlens_k: (sequences + 1), likewise of `key` and `value`.
        max_seqlen_q: no sequence is longer; rows of one that is beyond are taken for none.
        max_seqlen_k: likewise of `key`.
        causal, scale, window, softcap, alibi_slopes, sinks: as of :func:`flash_attention`; alibi_slopes are (heads) or
            (sequences, heads).
        return_logsumexp: whether to return (heads, rows) too, the logarithm of each row's sum of exponentials.
        bottom_right: a query's place is counted so that the last query of each sequence is at its last key.
        dropout_p: 0.0 alone.

    Returns:
        (rows, heads, value_dim); with `return_logsumexp` and (heads, rows), float64 for float64, else float32. A row
        that sees no key, or is of no sequence, has output 0 and logsumexp -inf.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: shapes, dtypes or devices that do not fit; a window below -1; a negative softcap.
        NotImplementedError: dropout_p is not 0.

    Derivatives beyond the first, and forward mode, are composed of PyTorch's operations, which store the scores of all
    rows with all keys.

    The layout is that of the flash-attention library (Dao et al., arXiv 2307.08691).

    Example:
        >>> starts = torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> x = torch.tensor([1.0, 3.0, 5.0]).reshape(3, 1, 1)
        >>> cuda_ops.functional.flash_attention_varlen(0 * x, 0 * x, x, starts, starts, 2, 2).flatten()
        tensor([2., 2., 5.])
    """
    op = "flash_attention_varlen"
    check_tensors(op, query=query, key=key, value=value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if number(op, "dropout_p", dropout_p) != 0.0:
        raise NotImplementedError(f"{op}: expected dropout_p to be 0, got {dropout_p}")
    alibi_slopes, factor, left, right, cap = _options(op, query, causal, scale, window, softcap, alibi_slopes)
    longest = integer(op, "max_seqlen_q", max_seqlen_q), integer(op, "max_seqlen_k", max_seqlen_k)
    bottom = flag(op, "bottom_right", bottom_right)
    output, logsumexp = attention_varlen_forward(
        query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, *longest, factor, left, right, cap, bottom
    )
    return _results(op, output, logsumexp, sinks, return_logsumexp, heads_within_rows=True)
