"""attention: exact attention without the matrix of scores in memory."""

import math

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .._arguments import check_tensors, check_tensors_or_none, expect, flag, integer, number
from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._operators import composite, operator

require_ops("attention_gradients", "attention_packed_gradients")


def _empty(like, batch, heads, rows, elements):
    """Laid out as `like` is: heads within rows or rows within heads."""
    if like.stride(1) < like.stride(2):
        return like.new_empty(batch, rows, heads, elements).transpose(1, 2)
    return like.new_empty(batch, heads, rows, elements)


def _check_shapes(op, query, key, value, mask):
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        expect(tensor.dim() == 4, op, f"{name} to have 4 dimensions, got shape {{}}", list(tensor.shape))
    message = "value to have the heads and the length of key, got shapes {} and {}"
    expect(value.shape[1:3] == key.shape[1:3], op, message, list(value.shape), list(key.shape))
    message = "key to have the last dimension of query, {}, got {}"
    expect(key.shape[3] == query.shape[3], op, message, query.shape[3], key.shape[3])
    if mask is not None:
        wanted = [*query.shape[:3], key.shape[2]]
        pairs = zip(reversed(mask.shape), reversed(wanted), strict=False)
        fits = mask.dim() <= 4 and all(m == 1 or m == size for m, size in pairs)
        expect(fits, op, "mask to be of a shape that broadcasts to {}, got {}", wanted, list(mask.shape))


@register_fake("cuda_ops::attention_forward")
def _(
    query, key, value, mask, alibi_slopes, scale, diagonal, window_left, window_right, softcap, dropout, call=None
):  # fmt: skip
    _check_shapes("attention", query, key, value, mask)
    batch, heads, queries, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (
        _empty(query, batch, heads, queries, value.shape[3]),
        query.new_empty(batch, heads, queries, dtype=dtype),
        query.new_empty(2 if dropout > 0.0 else 0, dtype=torch.int64),
    )


@register_fake("cuda_ops::attention_backward")
def _(
    grad_output, grad_logsumexp, query, key, value, mask, alibi_slopes, output, logsumexp, state, scale, diagonal,
    window_left, window_right, softcap, dropout, with_scores,
):  # fmt: skip
    _check_shapes("attention_backward", query, key, value, mask)
    scores = (*query.shape[:3], key.shape[2]) if with_scores else (0,)
    grads = [_empty(tensor, *tensor.shape) for tensor in (query, key, value)]
    return (*grads, query.new_empty(scores))


@register_fake("cuda_ops::attention_dropout_factors")
def _(state, sizes, dropout, dtype):
    return state.new_empty(sizes, dtype=dtype)


def _check_packed(op, qkv):
    fits = qkv.dim() == 5 and qkv.shape[2] == 3
    expect(fits, op, "qkv to have shape [batch, length, 3, heads, head_dim], got {}", list(qkv.shape))


@register_fake("cuda_ops::attention_packed_forward")
def _(qkv, alibi_slopes, scale, window_left, window_right, softcap, dropout, call=None):
    _check_packed("attention_packed", qkv)
    batch, length, _, heads, head_dim = qkv.shape
    query = qkv.select(2, 0).transpose(1, 2)
    dtype = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    return (
        _empty(query, batch, heads, length, head_dim).transpose(1, 2),
        qkv.new_empty(batch, heads, length, dtype=dtype),
        qkv.new_empty(2 if dropout > 0.0 else 0, dtype=torch.int64),
    )


@register_fake("cuda_ops::attention_packed_backward")
def _(
    grad_output, grad_logsumexp, qkv, alibi_slopes, output, logsumexp, state, scale, window_left, window_right, softcap,
    dropout,
):  # fmt: skip
    _check_packed("attention_packed_backward", qkv)
    return qkv.new_empty(qkv.shape)


@register_fake("cuda_ops::attention_packed_bias")
def _(grad_qkv, grad_next_bias, next_weight):
    return grad_next_bias.new_empty(3 * next_weight.shape[1])


attention_forward = operator("attention_forward")
attention_packed_forward = operator("attention_packed_forward")
AttentionFunction = autograd_function("attention_forward", "AttentionFunction")


class _Composed:
    """Attention of PyTorch's operations, which store the scores: for what is differentiated further, and forward. In at
    least float32."""

    def __init__(self, query, key, value, mask, alibi_slopes, state, scale, options, dropout):
        diagonal, window_left, window_right, softcap = options
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.key_heads = key.shape[1]
        self.group = query.shape[1] // self.key_heads if self.key_heads else 1
        self.query, self.scale = query.to(self.dtype), scale
        self.key, self.value = self.of_queries(key), self.of_queries(value)
        scores = scale * (self.query @ self.key.mT)
        self.cap = None
        if softcap > 0.0:
            tanh = torch.tanh(scores / softcap)
            scores, self.cap = softcap * tanh, 1 - tanh * tanh
        queries, keys = scores.shape[-2:]
        i = torch.arange(queries, device=query.device)[:, None] + diagonal
        j = torch.arange(keys, device=query.device)
        if alibi_slopes is not None:
            slopes = alibi_slopes.to(torch.float32).to(self.dtype)
            scores = scores - slopes[..., None, None] * (i - j).abs().to(self.dtype)
        unseen = torch.zeros(queries, keys, dtype=torch.bool, device=query.device)
        if window_left >= 0:
            unseen = unseen | (j < i - window_left)
        if window_right >= 0:
            unseen = unseen | (j > i + window_right)
        if mask is not None:
            if mask.dtype == torch.bool:
                unseen = unseen | ~mask
            else:
                scores = scores + mask.to(self.dtype)
        scores = scores.masked_fill(unseen, -math.inf)
        # Of scores less their maximum: a logsumexp of 1e4 is rounded by 1e-3, by which the weights would be wrong.
        hidden = (scores == -math.inf).all(-1, keepdim=True)
        self.weights = torch.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)
        self.factors = None
        if dropout > 0.0:
            sizes, factors = list(scores.shape), torch.ops.cuda_ops.attention_dropout_factors
            self.factors = factors(state, sizes, dropout, self.dtype)

    def of_queries(self, tensor):
        """One of the keys' as one a head of the queries."""
        tensor = tensor.to(self.dtype)
        return tensor if self.group == 1 else tensor.repeat_interleave(self.group, 1)

    def dropped(self, tensor):
        return tensor if self.factors is None else tensor * self.factors

    def sum_of_group(self, tensor):
        return tensor if self.group == 1 else tensor.unflatten(1, (self.key_heads, self.group)).sum(2)


@composite("attention_gradients_composed")
def _(
    grad_output, grad_logsumexp, query, key, value, mask, alibi_slopes, state, scale, diagonal, window_left,
    window_right, softcap, dropout, wanted,
):  # fmt: skip
    """Those of the gradients that are wanted, by the formulas of attention.h."""
    options = diagonal, window_left, window_right, softcap
    c = _Composed(query, key, value, mask, alibi_slopes, state, scale, options, dropout)
    if grad_output is None:
        g = torch.zeros(*query.shape[:3], value.shape[3], dtype=c.dtype, device=query.device)
    else:
        g = grad_output.to(c.dtype)
    products = c.dropped(g @ c.value.mT)
    delta = (c.weights * products).sum(-1)
    if grad_logsumexp is not None:
        delta = delta - grad_logsumexp
    scores = c.weights * (products - delta.unsqueeze(-1))
    grads = []
    capped = c.scale * (scores if c.cap is None else scores * c.cap)
    if wanted[0]:
        grads.append((capped @ c.key).to(query.dtype))
    if wanted[1]:
        grads.append(c.sum_of_group(capped.mT @ c.query).to(key.dtype))
    if wanted[2]:
        grads.append(c.sum_of_group(c.dropped(c.weights).mT @ g).to(value.dtype))
    if wanted[3]:
        grads.append(scores.sum_to_size(mask.shape).to(mask.dtype))
    return grads


@composite("attention_tangents")
def _(
    tangent_query, tangent_key, tangent_value, tangent_mask, query, key, value, mask, alibi_slopes, state, scale,
    diagonal, window_left, window_right, softcap, dropout,
):  # fmt: skip
    """What output and logsumexp change by."""
    options = diagonal, window_left, window_right, softcap
    c = _Composed(query, key, value, mask, alibi_slopes, state, scale, options, dropout)
    tangent = torch.zeros_like(c.weights)
    if tangent_query is not None:
        tangent = tangent + c.scale * (tangent_query.to(c.dtype) @ c.key.mT)
    if tangent_key is not None:
        tangent = tangent + c.scale * (c.query @ c.of_queries(tangent_key).mT)
    if c.cap is not None:
        tangent = tangent * c.cap
    if tangent_mask is not None:
        tangent = tangent + tangent_mask.to(c.dtype)
    logsumexp = (c.weights * tangent).sum(-1)
    output = c.dropped(c.weights * (tangent - logsumexp.unsqueeze(-1))) @ c.value
    if tangent_value is not None:
        output = output + c.dropped(c.weights) @ c.of_queries(tangent_value)
    return output.to(query.dtype), logsumexp


def _heads(tensor):
    """(batch, length, heads, head_dim) as (batch, heads, length, head_dim), and the other way round."""
    return None if tensor is None else tensor.transpose(1, 2)


@composite("attention_packed_gradients_composed")
def _(
    grad_output, grad_logsumexp, qkv, alibi_slopes, state, scale, window_left, window_right, softcap, dropout,
):  # fmt: skip
    grads = torch.ops.cuda_ops.attention_gradients_composed(
        _heads(grad_output), grad_logsumexp, *map(_heads, qkv.unbind(2)), None, alibi_slopes, state, scale, 0,
        window_left, window_right, softcap, dropout, [True, True, True, False],
    )  # fmt: skip
    return torch.stack([_heads(grad) for grad in grads], 2)


@composite("attention_packed_tangents")
def _(tangent_qkv, qkv, alibi_slopes, state, scale, window_left, window_right, softcap, dropout):
    output, logsumexp = torch.ops.cuda_ops.attention_tangents(
        *map(_heads, tangent_qkv.unbind(2)), None, *map(_heads, qkv.unbind(2)), None, alibi_slopes, state, scale, 0,
        window_left, window_right, softcap, dropout,
    )  # fmt: skip
    return _heads(output), logsumexp


def _call_of(query, dropout_p):
    """What tells two calls that draw random numbers apart in a compiled graph (see dropout)."""
    return torch.empty(0, device=query.device) if dropout_p > 0.0 and is_compiling() else None


def _probability(op, dropout_p):
    if not 0.0 <= number(op, "dropout_p", dropout_p) <= 1.0:
        raise ValueError(f"{op}: expected dropout_p to be between 0 and 1, got {dropout_p}")
    return float(dropout_p)


def _scale(op, scale, head_dim):
    if scale is not None:
        return number(op, "scale", scale)
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention, :math:`\text{softmax}(\text{scale} \, Q K^T + \text{mask}) \, V`, as
    :func:`torch.nn.functional.scaled_dot_product_attention`; exact, and without the scores in memory.

    Args:
        query: (..., heads, queries, head_dim); float32, float64, float16 or bfloat16. Any strides, as
            those of a part of a packed projection: where the last one is 1, nothing is copied.
        key: (..., heads, keys, head_dim).
        value: (..., heads, keys, value_dim). All three are of the same dtype; leading dimensions broadcast.
        attn_mask: of a shape that broadcasts to (..., heads, queries, keys), which costs no memory: bool, where True
            takes part; or of the dtype of `query` or float32, and then it is added to the scores.
        dropout_p: the probability that a weight is dropped, from 0 to 1, rounded to a multiple of :math:`2^{-16}`.
            There is no `training`: pass 0.0 then. The numbers are of PyTorch's generator, as those of
            :func:`cuda_ops.functional.dropout`.
        is_causal: query i sees keys 0 to i alone; not together with `attn_mask`.
        scale: what the products are multiplied by; None: :math:`1 / \sqrt{\text{head\_dim}}`.
        enable_gqa: whether heads of key and value may serve several of query; their number divides query's.

    Returns:
        (..., heads, queries, value_dim), laid out as `query` is. A query that sees no key has output and gradients 0.
        As in PyTorch the lowest number of a dtype, where a mask adds it, hides a key beside others; of a row that has
        it throughout, all scores are equal, and the output is the mean of the values.

    Raises:
        TypeError: an argument of another type.
        ValueError: dropout_p is not between 0 and 1.
        RuntimeError: shapes, dtypes or devices that do not fit, or `attn_mask` together with `is_causal`.

    Under autocast it computes in the lower precision. The gradients, also that of an additive mask, recompute the
    scores; the gradient of the mask takes memory for all of them, and so do derivatives beyond the first, and forward
    mode, which are composed of PyTorch's operations. Results repeat bit by bit.

    Online softmax and tiles are those of FlashAttention (Dao et al., arXiv 2205.14135 and 2307.08691).

    Example:
        >>> x = torch.eye(2).reshape(1, 1, 2, 2)
        >>> cuda_ops.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        tensor([[[[1.0000, 0.0000],
                  [0.3302, 0.6698]]]])
    """
    op = "scaled_dot_product_attention"
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor:
        check_tensors(op, query=query, key=key, value=value)
    if attn_mask is not None:
        check_tensors_or_none(op, attn_mask=attn_mask)
        if is_causal:
            raise RuntimeError(f"{op}: expected attn_mask to be None with is_causal, got a Tensor")
    p = _probability(op, dropout_p)
    right = 0 if flag(op, "is_causal", is_causal) else -1
    enable_gqa = flag(op, "enable_gqa", enable_gqa)
    shape = None
    alike = query.dim() == 4 and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    if not alike and not (enable_gqa and _is_grouped(query, key, value)):
        query, key, value, attn_mask, shape = _in_four_dimensions(op, query, key, value, attn_mask, enable_gqa)
    factor = _scale(op, scale, query.shape[-1])
    call = _call_of(query, p)
    output = attention_forward(query, key, value, attn_mask, None, factor, 0, -1, right, 0.0, p, call)[0]
    return output if shape is None else output.reshape(shape)


def _is_grouped(query, key, value):
    """Whether heads of key and value serve several of query, as the kernels take them."""
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[1] == value.shape[1] > 0
        and query.shape[1] % key.shape[1] == 0
    )


def _in_four_dimensions(op, query, key, value, mask, enable_gqa):
    """The tensors as (batch, heads, rows, elements), and the shape of the result."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2 or (enable_gqa and tensor.dim() < 3):
            least = 3 if enable_gqa else 2
            raise RuntimeError(f"{op}: expected {name} to have {least} dimensions at least, got {list(tensor.shape)}")
    tensors = [query, key, value]
    try:
        if enable_gqa:
            heads = [tensor.shape[-3] for tensor in tensors]
            if heads[1] == 0 or heads[2] == 0 or heads[0] % heads[1] or heads[0] % heads[2]:
                message = "expected the heads of key and value to divide those of query"
                raise RuntimeError(f"{op}: {message}, {heads[0]}, got {heads[1]} and {heads[2]}")
            if heads[1] != heads[2]:
                tensors[1:] = [t.repeat_interleave(heads[0] // t.shape[-3], -3) for t in tensors[1:]]
            lead = torch.broadcast_shapes(*[t.shape[:-3] for t in tensors])
            tensors = [t.expand(*lead, *t.shape[-3:]) for t in tensors]
        else:
            lead = torch.broadcast_shapes(*[t.shape[:-2] for t in tensors])
            tensors = [t.expand(*lead, *t.shape[-2:]) for t in tensors]
    except RuntimeError as error:
        if str(error).startswith(op):
            raise
        shapes = " and ".join(str(list(t.shape)) for t in tensors)
        message = "expected the leading dimensions of query, key and value to broadcast"
        raise RuntimeError(f"{op}: {message}, got shapes {shapes}") from None
    query, key, value = tensors
    shape = (*query.shape[:-1], value.shape[-1])
    if mask is not None and mask.dim() > 2 and query.dim() != 4:
        wanted = (*query.shape[:-1], key.shape[-2])
        try:
            mask = mask.expand(wanted)
        except RuntimeError:
            message = f"expected attn_mask to be of a shape that broadcasts to {list(wanted)}"
            raise RuntimeError(f"{op}: {message}, got {list(mask.shape)}") from None
        mask = _four(mask)
    return _four(query), _four(key), _four(value), mask, shape


def _four(tensor):
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    return tensor if tensor.dim() == 4 else tensor.flatten(0, -4)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    r"""Attention with the options of the flash-attention library, and the layout of
    :func:`torch.nn.functional.scaled_dot_product_attention`:
    :math:`\text{softmax}(\text{cap}(\text{scale} \, Q K^T) - \text{slope} \, |i + d - j|) \, V` with
    :math:`\text{cap}(x) = \text{softcap} \tanh(x / \text{softcap})`.

    Args:
        query: (batch, heads, queries, head_dim); float32, float64, float16 or bfloat16; any strides.
        key: (batch, key_heads, keys, head_dim), where key_heads divides heads.
        value: (batch, key_heads, keys, value_dim).
        causal: query i sees no key beyond i + d.
        scale: None: :math:`1 / \sqrt{\text{head\_dim}}`.
        window: (left, right): query i sees keys i + d - left to i + d + right alone; -1: no bound.
        softcap: 0: none (Gemma 2, arXiv 2408.00118).
        alibi_slopes: (heads) or (batch, heads), constants (ALiBi, arXiv 2108.12409).
        return_logsumexp: whether to return the logarithm of each row's sum of exponentials too, of which the gradient
            is taken as well.
        bottom_right: d is 0, or with this keys - queries, so that the last query is at the last key.
        dropout_p: as in :func:`cuda_ops.functional.scaled_dot_product_attention`.
        sinks: (heads), floating point: logits that join the softmax of each row of their head, and have no value
            (attention sinks, arXiv 2309.17453, as parameters). They have a gradient, and are a part of logsumexp.

    Returns:
        (batch, heads, queries, value_dim), laid out as `query` is; with `return_logsumexp` and (batch, heads, queries),
        float64 for float64, else float32. A query that sees no key has output 0 and logsumexp -inf.

    Raises:
        TypeError: an argument of another type.
        ValueError: dropout_p is not between 0 and 1.
        RuntimeError: shapes, dtypes or devices that do not fit; a window below -1; a negative softcap.

    Derivatives beyond the first, and forward mode, are composed of PyTorch's operations, which store the scores.

    Example:
        >>> x = torch.zeros(1, 1, 3, 4)
        >>> cuda_ops.functional.flash_attention(x, x, x, window=(1, 0), return_logsumexp=True)[1]
        tensor([[[0.0000, 0.6931, 0.6931]]])
    """
    op = "flash_attention"
    check_tensors(op, query=query, key=key, value=value)
    alibi_slopes, factor, left, right, cap = _options(op, query, causal, scale, window, softcap, alibi_slopes)
    p = _probability(op, dropout_p)
    diagonal = 0
    if flag(op, "bottom_right", bottom_right) and query.dim() == key.dim() == 4:
        diagonal = key.shape[2] - query.shape[2]
    call = _call_of(query, p)
    output, logsumexp, _ = attention_forward(
        query, key, value, None, alibi_slopes, factor, diagonal, left, right, cap, p, call
    )
    return _results(op, output, logsumexp, sinks, return_logsumexp)


def _options(op, like, causal, scale, window, softcap, alibi_slopes):
    """What the functions of the flash-attention library are told alike, checked, as the ops are told it: slopes, scale,
    the window's two sides and softcap. like: a tensor of rows of head_dim elements."""
    left, right = _window(op, window, causal)
    slopes = _slopes(op, alibi_slopes, like)
    factor = _scale(op, scale, like.shape[-1] if like.dim() else 0)
    return slopes, factor, left, right, number(op, "softcap", softcap)


def _results(op, output, logsumexp, sinks, return_logsumexp, heads_within_rows=False):
    """What they return."""
    if sinks is not None:
        output, logsumexp = _with_sinks(op, output, logsumexp, sinks, heads_within_rows)
    return (output, logsumexp) if flag(op, "return_logsumexp", return_logsumexp) else output


def _with_sinks(op, output, logsumexp, sinks, heads_within_rows):
    """Output, which becomes sigmoid(logsumexp - sink) of what it was, and logsumexp with a logit a head that joins each
    row's denominator. heads_within_rows: those of output; logsumexp has rows within heads."""
    check_tensors(op, sinks=sinks)
    heads = logsumexp.shape[-2]
    if sinks.device != output.device:
        raise RuntimeError(
            f"{op}: expected sinks to be on the device of query, {output.device}, got a tensor on {sinks.device}"
        )
    if not (sinks.is_floating_point() and sinks.shape == (heads,)):
        raise RuntimeError(
            f"{op}: expected sinks to be floating point of shape [{heads}], got {sinks.dtype} of shape "
            f"{list(sinks.shape)}"
        )
    sinks = sinks.to(logsumexp.dtype).unsqueeze(-1)
    share = torch.sigmoid(logsumexp - sinks)
    if heads_within_rows:
        share = share.transpose(-1, -2)
    # Of -inf the second derivative of logaddexp is NaN.
    hidden = logsumexp == -math.inf
    joined = torch.where(hidden, sinks, torch.logaddexp(logsumexp.masked_fill(hidden, 0.0), sinks))
    return (output * share.unsqueeze(-1)).to(output.dtype), joined


def _window(op, window, causal):
    """How many keys a query sees before and behind its own; -1: all."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{op}: expected window to be two ints, got {window!r}")
    left, right = (integer(op, "window", size) for size in window)
    if flag(op, "causal", causal):
        right = min(right, 0) if right >= 0 else 0
    return left, right


def _slopes(op, alibi_slopes, like):
    check_tensors_or_none(op, alibi_slopes=alibi_slopes)
    if alibi_slopes is not None and torch.is_autocast_enabled(like.device.type):
        return alibi_slopes.double()  # which autocast leaves as it is
    return alibi_slopes


def flash_attention_qkvpacked(
    qkv: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_logsumexp: bool = False,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention of a sequence to itself, whose queries, keys and values lie in one tensor, as one linear layer makes
    them. :func:`flash_attention` of its three parts, and its gradient is one such tensor too, where the gradients of
    three views would be copied into one.

    Args:
        qkv: (batch, length, 3, heads, head_dim); float32, float64, float16 or bfloat16; any strides.
        causal, scale, window, softcap, alibi_slopes, return_logsumexp, dropout_p: as of :func:`flash_attention`.

    Returns:
        (batch, length, heads, head_dim); with `return_logsumexp` and (batch, heads, length), float64 for float64, else
        float32.

    Raises:
        TypeError: an argument of another type.
        ValueError: dropout_p is not between 0 and 1.
        RuntimeError: shapes, dtypes or devices that do not fit; a window below -1; a negative softcap.

    Example:
        >>> projected = torch.zeros(1, 3, 24)
        >>> qkv = projected.unflatten(2, (3, 2, 4))
        >>> cuda_ops.functional.flash_attention_qkvpacked(qkv, causal=True).shape
        torch.Size([1, 3, 2, 4])
    """
    op = "flash_attention_qkvpacked"
    check_tensors(op, qkv=qkv)
    alibi_slopes, factor, left, right, cap = _options(op, qkv, causal, scale, window, softcap, alibi_slopes)
    p = _probability(op, dropout_p)
    call = _call_of(qkv, p)
    output, logsumexp, _ = attention_packed_forward(qkv, alibi_slopes, factor, left, right, cap, p, call)
    return _results(op, output, logsumexp, None, return_logsumexp)
