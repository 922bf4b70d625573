"""multi_head_attention_forward: attention of several heads between its projections, of the ops that there are."""

import math

import torch
from torch import Tensor

from .._arguments import check_tensors, check_tensors_or_none, flag, integer
from .attention import _probability, _scale, scaled_dot_product_attention
from .concat import concat
from .dropout import dropout
from .linear import linear
from .masked_softmax import masked_softmax
from .matmul import matmul
from .mean import mean

OP = "multi_head_attention_forward"


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    r"""Attention of several heads with its projections, as
    :func:`torch.nn.functional.multi_head_attention_forward`: the function of :class:`cuda_ops.nn.MultiheadAttention`.

    Args:
        query: (L, N, E), or (L, E) without a batch; float32, float64, float16 or bfloat16.
        key: (S, N, E), or (S, E). Where query, key and value are one tensor, their projections are one product.
        value: (S, N, E), or (S, E).
        embed_dim_to_check: E.
        num_heads: H, which divides E.
        in_proj_weight: (3 E, E), the projections of query, key and value one below the other.
        in_proj_bias: (3 E).
        bias_k, bias_v: (1, 1, E), a key and a value more for every sequence; both or neither.
        add_zero_attn: whether there is one more key and value of zeros.
        dropout_p: the probability that a weight of the attention is dropped, if `training`.
        out_proj_weight, out_proj_bias: (E, E) and (E).
        key_padding_mask: (N, S), or (S) without a batch: bool, where True is a key that takes no part; or added to the
            scores of the key.
        need_weights: whether to return the weights too, for which they are stored; without them they never are.
        attn_mask: (L, S), or (N H, L, S): bool, where True takes no part; or added to the scores. Masks that are added
            are of the dtype of `query` or float32, have gradients, and may be combined with boolean ones.
        use_separate_proj_weight: whether the projections have weights of their own, which keys and values of another
            width need: `q_proj_weight` (E, E), `k_proj_weight` (E, width of key), `v_proj_weight` (E, width of value).
        static_k, static_v: (N H, S, E / H), what attention takes in place of the projections of key and value.
        average_attn_weights: whether the weights returned are the mean over the heads.
        is_causal: a promise that `attn_mask`, which has to be there, is the causal one. It is not read then, unless
            weights are returned or there is a `key_padding_mask`.

    Returns:
        (L, N, E), or (L, E), contiguous; and the weights, dropout included, (N, L, S) or (N, H, L, S), without N if
        there is no batch, or None. A query that sees no key takes nothing from the values, in either case, and its
        weights are 0 (PyTorch's are NaN if they are returned).

    Raises:
        TypeError: an argument of another type.
        ValueError: dropout_p is not between 0 and 1.
        AssertionError: shapes that do not fit, a mask of integers, or a weight or bias that is missing.
        RuntimeError: shapes, dtypes or devices that do not fit, or is_causal without attn_mask.
        NotImplementedError: nested tensors.

    Products, softmax and attention are those of :func:`linear`, :func:`scaled_dot_product_attention`, :func:`matmul`
    and :func:`masked_softmax`, and so are autocast and derivatives. It is the attention of Vaswani et al., arXiv
    1706.03762.

    Example:
        >>> x, one = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.eye(2)
        >>> output, weights = cuda_ops.functional.multi_head_attention_forward(
        ...     x, x, x, 2, 1, one.repeat(3, 1), None, None, None, False, 0.0, one, None
        ... )
        >>> weights
        tensor([[0.6698, 0.3302],
                [0.3302, 0.6698]])
    """
    if flag(OP, "use_separate_proj_weight", use_separate_proj_weight):
        weights = {"q_proj_weight": q_proj_weight, "k_proj_weight": k_proj_weight, "v_proj_weight": v_proj_weight}
    else:
        weights = {"in_proj_weight": in_proj_weight}
    # fmt: off
    return _multi_head(
        query, key, value, embed_dim_to_check, num_heads, weights, in_proj_bias, bias_k, bias_v, add_zero_attn,
        dropout_p, out_proj_weight, out_proj_bias, training, key_padding_mask, need_weights, attn_mask, static_k,
        static_v, average_attn_weights, is_causal, False,
    )
    # fmt: on


# fmt: off
def _multi_head(
    query, key, value, embed_dim, heads, weights, in_proj_bias, bias_k, bias_v, add_zero_attn, dropout_p,
    out_proj_weight, out_proj_bias, training, key_padding_mask, need_weights, attn_mask, static_k, static_v,
    average_attn_weights, is_causal, batch_first,
):
    # fmt: on
    """With `batch_first` a batch is the first dimension of query, key, value and output."""
    check_tensors(OP, query=query, key=key, value=value, out_proj_weight=out_proj_weight)
    check_tensors_or_none(
        OP, key_padding_mask=key_padding_mask, attn_mask=attn_mask, in_proj_bias=in_proj_bias, bias_k=bias_k,
        bias_v=bias_v, static_k=static_k, static_v=static_v, **weights,
    )  # fmt: skip
    others = (key_padding_mask, attn_mask, in_proj_bias, bias_k, bias_v, static_k, static_v, *weights.values())
    device = query.device
    for tensor in (key, value, out_proj_weight, out_proj_bias, *others):
        if isinstance(tensor, Tensor) and tensor.device != device:
            raise RuntimeError(f"{OP}: expected tensors to be on the device of query, {device}, got {tensor.device}")
    p = _probability(OP, dropout_p) if flag(OP, "training", training) else 0.0
    need_weights, is_causal = flag(OP, "need_weights", need_weights), flag(OP, "is_causal", is_causal)
    head_dim = _check_widths(query, key, value, embed_dim, integer(OP, "num_heads", heads), len(weights) == 3)
    _check_present(weights, bias_k, bias_v, static_k, static_v)
    batched = query.dim() == 3
    batch_dim = 0 if batch_first else 1
    batch = query.shape[batch_dim] if batched else 1
    if batched and key.shape[batch_dim] != batch:
        raise RuntimeError(f"{OP}: expected key to have the batch of query, {batch}, got {key.shape[batch_dim]}")
    if is_causal and attn_mask is None:
        raise RuntimeError(
            f"{OP}: expected attn_mask to be the causal mask with is_causal, got None "
            "(torch.nn.Transformer.generate_square_subsequent_mask makes one)"
        )

    def of_heads(tensor):
        """(batch, heads, rows, head_dim), a view."""
        tensor = tensor.view(*tensor.shape[:-1], heads, head_dim)
        if not batched:
            return tensor.transpose(0, 1).unsqueeze(0)
        return tensor.transpose(1, 2) if batch_first else tensor.permute(1, 2, 0, 3)

    q, k, v = (of_heads(tensor) for tensor in _projected(query, key, value, weights, in_proj_bias))
    if static_k is not None:
        k = _static("static_k", static_k, batch, heads, head_dim)
    if static_v is not None:
        v = _static("static_v", static_v, batch, heads, head_dim)
    queries, keys = q.shape[2], k.shape[2]
    more = []
    if bias_k is not None:
        more.append([b.view(1, heads, 1, head_dim).expand(batch, -1, -1, -1) for b in (bias_k, bias_v)])
    if flag(OP, "add_zero_attn", add_zero_attn):
        more.append([tensor.new_zeros(batch, heads, 1, head_dim) for tensor in (k, v)])
    if more:
        k, v = (concat([tensor, *others], 2) for tensor, others in zip((k, v), zip(*more, strict=True), strict=True))

    shape = batch, heads, queries, keys
    padding = None if key_padding_mask is None else _padding_mask(key_padding_mask, shape, batched)
    if is_causal and padding is None and not need_weights:
        attn_mask = None
    else:
        is_causal = False
    mask = _merged(None if attn_mask is None else _attention_mask(attn_mask, shape), padding)
    if mask is not None:
        mask = _taking_part(mask, len(more), query, q)

    if need_weights:
        scale = _scale(OP, None, head_dim)
        if q.dtype == torch.float16:  # whose range ends below what products may be before they are scaled
            q, scale = q * scale, 1.0
        scores = matmul(q, k.mT)
        if mask is not None and mask.dtype != torch.bool and not torch.is_autocast_enabled(query.device.type):
            mask = mask.to(scores.dtype)
        attention_weights = dropout(masked_softmax(scores, mask, scale), p)
        output = matmul(attention_weights, v)
    else:
        attention_weights = None
        output = scaled_dot_product_attention(q, k, v, mask, p, is_causal)
    if not batched:
        output = output.squeeze(0).transpose(0, 1)
    else:
        output = output.transpose(1, 2) if batch_first else output.permute(2, 0, 1, 3)
    output = linear(output.reshape(*output.shape[:-2], embed_dim), out_proj_weight, out_proj_bias)
    if attention_weights is None:
        return output, None
    if flag(OP, "average_attn_weights", average_attn_weights):
        attention_weights = mean(attention_weights, 1)
    return output, attention_weights if batched else attention_weights.squeeze(0)


def _check_widths(query, key, value, embed_dim, heads, separate):
    """The elements of a head."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.is_nested:
            raise NotImplementedError(f"{OP}: expected {name} to be a dense tensor, got a nested tensor")
    dim = query.dim()
    if dim not in (2, 3):
        raise AssertionError(f"{OP}: expected query to have 2 or 3 dimensions, got shape {list(query.shape)}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != dim:
            shape = list(tensor.shape)
            raise AssertionError(f"{OP}: expected {name} to have the {dim} dimensions of query, got shape {shape}")
    if query.shape[-1] != embed_dim:
        message = f"expected query to have embed_dim, {embed_dim}, as its last dimension"
        raise AssertionError(f"{OP}: {message}, got shape {list(query.shape)}")
    if heads <= 0 or embed_dim % heads:
        raise AssertionError(f"{OP}: expected num_heads to divide embed_dim, {embed_dim}, got {heads}")
    alike = key.shape[:-1] == value.shape[:-1] if separate else key.shape == value.shape
    if not alike:
        which = "shape of key but for its last dimension" if separate else "shape of key"
        shapes = f"{list(key.shape)} and {list(value.shape)}"
        raise AssertionError(f"{OP}: expected value to have the {which}, got shapes {shapes}")
    return embed_dim // heads


def _check_present(weights, bias_k, bias_v, static_k, static_v):
    for name, weight in weights.items():
        if weight is None:
            separate = name != "in_proj_weight"
            message = f"expected {name} to be a Tensor with use_separate_proj_weight={separate}, got None"
            raise AssertionError(f"{OP}: {message}")
    if (bias_k is None) != (bias_v is None):
        present, missing = ("bias_v", "bias_k") if bias_k is None else ("bias_k", "bias_v")
        raise AssertionError(f"{OP}: expected {missing} to be a Tensor with {present}, got None")
    if bias_k is not None:
        for name, static in (("static_k", static_k), ("static_v", static_v)):
            if static is not None:
                raise AssertionError(f"{OP}: expected {name} to be None with bias_k and bias_v, got a Tensor")


def _projected(query, key, value, weights, bias):
    """As few products as there are different tensors."""
    if len(weights) == 3:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        for name, weight in weights.items():
            if weight.dim() != 2 or weight.shape[0] != query.shape[-1]:
                message = f"expected {name} to have shape [{query.shape[-1]}, any]"
                raise AssertionError(f"{OP}: {message}, got {list(weight.shape)}")
        inputs = zip((query, key, value), weights.values(), biases, strict=True)
        return [linear(*arguments) for arguments in inputs]
    weight, width = weights["in_proj_weight"], query.shape[-1]
    if weight.dim() != 2 or weight.shape[0] != 3 * width:
        message = f"expected in_proj_weight to have shape {[3 * width, width]}"
        raise RuntimeError(f"{OP}: {message}, got {list(weight.shape)}")
    if key is not value:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return [linear(*arguments) for arguments in zip((query, key, value), weight.chunk(3), biases, strict=True)]
    if query is key:
        return linear(query, weight, bias).chunk(3, -1)
    of_query, of_key = weight.split([width, 2 * width])
    biases = (None, None) if bias is None else bias.split([width, 2 * width])
    return linear(query, of_query, biases[0]), *linear(key, of_key, biases[1]).chunk(2, -1)


def _static(name, tensor, batch, heads, head_dim):
    if tensor.dim() != 3 or tensor.shape[0] != batch * heads or tensor.shape[2] != head_dim:
        message = f"expected {name} to have shape [{batch * heads}, any, {head_dim}]"
        raise AssertionError(f"{OP}: {message}, got {list(tensor.shape)}")
    return tensor.unflatten(0, (batch, heads))


def _check_kind(name, mask):
    if mask.dtype != torch.bool and not mask.is_floating_point():
        kind = str(mask.dtype).removeprefix("torch.")
        raise AssertionError(f"{OP}: expected {name} to be bool or floating point, got {kind}")


def _attention_mask(mask, shape):
    """In four dimensions that broadcast to `shape`, of scores."""
    _check_kind("attn_mask", mask)
    batch, heads, queries, keys = shape
    if mask.dim() not in (2, 3):
        raise AssertionError(f"{OP}: expected attn_mask to have 2 or 3 dimensions, got shape {list(mask.shape)}")
    wanted = [queries, keys] if mask.dim() == 2 else [batch * heads, queries, keys]
    if list(mask.shape) != wanted:
        raise RuntimeError(f"{OP}: expected attn_mask to have shape {wanted}, got {list(mask.shape)}")
    return mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (batch, heads))


def _padding_mask(mask, shape, batched):
    _check_kind("key_padding_mask", mask)
    wanted = [shape[0], shape[3]] if batched else [shape[3]]
    if list(mask.shape) != wanted:
        raise AssertionError(f"{OP}: expected key_padding_mask to have shape {wanted}, got {list(mask.shape)}")
    return mask[:, None, None] if batched else mask


def _merged(first, second):
    """What both masks let through, as boolean as they are: True hides."""
    if first is None or second is None:
        return second if first is None else first
    booleans = first.dtype == torch.bool, second.dtype == torch.bool
    if all(booleans):
        return first | second
    if booleans[0]:
        return torch.where(first, -math.inf, second)
    if booleans[1]:
        return torch.where(second, -math.inf, first)
    return first + second


def _taking_part(mask, more, query, q):
    """The mask as attention takes it, with the keys that were added, which nothing hides."""
    if more:
        mask = torch.nn.functional.pad(mask, (0, more))
    if mask.dtype == torch.bool:
        return ~mask
    if mask.dtype not in (torch.float32, query.dtype, q.dtype):
        names = [str(dtype).removeprefix("torch.") for dtype in (query.dtype, mask.dtype)]
        message = "expected masks to be bool, float32 or of the dtype of query, {}, got {}".format(*names)
        raise RuntimeError(f"{OP}: {message}")
    return mask


class MultiheadAttention(torch.nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention`, computed as by :func:`cuda_ops.functional.multi_head_attention_forward`:
    in evaluation as in training, and without the weights in memory where `need_weights` is False.

    Inputs are (L, N, E), with `batch_first` (N, L, E), or (L, E) without a batch; and so is the output, which is
    contiguous.

    Example:
        >>> attention = cuda_ops.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.rand(3, 5, 8)
        >>> output, weights = attention(x, x, x)
        >>> output.shape, weights.shape
        (torch.Size([3, 5, 8]), torch.Size([3, 5, 5]))
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if self._qkv_same_embed_dim:
            weights = {"in_proj_weight": self.in_proj_weight}
        else:
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            weights = {name: getattr(self, name) for name in names}
        # fmt: off
        return _multi_head(
            query, key, value, self.embed_dim, self.num_heads, weights, self.in_proj_bias, self.bias_k, self.bias_v,
            self.add_zero_attn, self.dropout, self.out_proj.weight, self.out_proj.bias, self.training,
            key_padding_mask, need_weights, attn_mask, None, None, average_attn_weights, is_causal, self.batch_first,
        )
        # fmt: on
