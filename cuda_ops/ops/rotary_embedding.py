"""rotary_embedding: queries or keys turned by the angles of their positions."""

import torch
from torch import Tensor

from .._arguments import check_dtype, expect
from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator


def _empty(input, dtype):
    """Laid out as input is: rows within heads, or heads within rows."""
    batch, heads, length, features = input.shape
    if input.stride(1) < input.stride(2):
        return input.new_empty((batch, length, heads, features), dtype=dtype).transpose(1, 2)
    return input.new_empty(input.shape, dtype=dtype)


def _check(op, name, input, cos, sin):
    expect(input.dim() == 4, op, f"{name} to have 4 dimensions, got shape {{}}", list(input.shape))
    message = f"{name} to have an even last dimension, of pairs, got shape {{}}"
    expect(input.shape[3] % 2 == 0, op, message, list(input.shape))
    batch, _, length, features = input.shape
    fits = cos.dim() == 3 and cos.shape[0] in (1, batch) and tuple(cos.shape[1:]) == (length, features)
    message = f"cos to have shape [{{}} or 1, {{}}, {{}}], the batch, length and features of {name}, got {{}}"
    expect(fits, op, message, batch, length, features, list(cos.shape))
    expect(sin.shape == cos.shape, op, "sin to have the shape of cos, {}, got {}", list(cos.shape), list(sin.shape))


@register_fake("cuda_ops::rotary_embedding_forward")
def _(input, cos, sin, dtype):
    _check("rotary_embedding", "input", input, cos, sin)
    return _empty(input, dtype or torch.promote_types(input.dtype, cos.dtype))


@register_fake("cuda_ops::rotary_embedding_backward")
def _(grad_output, cos, sin, dtype):
    _check("rotary_embedding_backward", "grad_output", grad_output, cos, sin)
    return _empty(grad_output, dtype)


rotary_embedding_forward = operator("rotary_embedding_forward")
RotaryEmbeddingFunction = autograd_function("rotary_embedding_forward", "RotaryEmbeddingFunction")


def rotary_embedding(input: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    r"""Rotary position embedding of queries or keys (Su et al., RoFormer, 2021), in one pass: with :math:`h` for half
    of the features, the pair of elements :math:`e` and :math:`e + h` of each head is turned by its position's angle,

    .. math::
        \text{output}_e = \text{input}_e \cos_e - \text{input}_{e + h} \sin_e, \qquad
        \text{output}_{e + h} = \text{input}_{e + h} \cos_{e + h} + \text{input}_e \sin_{e + h},

    as ``input * cos + rotate_half(input) * sin`` of transformers' Llama does.

    Args:
        input: (N, heads, L, E), with an even E, any strides; float32, float64, float16 or bfloat16.
        cos, sin: (N, L, E), or (1, L, E) for all of the batch; in the dtype of `input`, or float32 beside float16 or
            bfloat16. They have no gradient.
        dtype: of the output; None: that to which the three promote.

    Returns:
        A tensor of the shape of `input`, dense, with heads and rows in the order in which they lie in `input`.

    Raises:
        TypeError: `input`, `cos` or `sin` is no tensor, `dtype` no dtype.
        RuntimeError: `input` is not floating point, shapes or devices do not fit, or `cos` or `sin` requires grad.

    Sums are made in float32 (float64 for float64) and rounded once, to `dtype`. Differentiable any number of times.

    Example:
        >>> x = torch.tensor([1.0, 2.0]).view(1, 1, 1, 2)
        >>> cos, sin = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
        >>> cuda_ops.functional.rotary_embedding(x, cos, sin).flatten()
        tensor([-2.,  1.])
    """
    if dtype is not None:
        check_dtype("rotary_embedding", dtype)
    return rotary_embedding_forward(input, cos, sin, dtype)
