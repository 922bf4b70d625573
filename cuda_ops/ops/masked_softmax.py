"""masked_softmax: the softmax of scores along the last dimension, of those that take part."""

import torch
from torch import Tensor

from .._arguments import expect
from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator


@register_fake("cuda_ops::masked_softmax_forward")
def _(input, mask, scale, is_causal):
    op, shape = "masked_softmax", list(input.shape)
    least = 2 if is_causal else 1
    reason = " with is_causal" if is_causal else ""
    expect(input.dim() >= least, op, "input to have {} dimensions at least{}, got shape {}", least, reason, shape)
    if mask is not None:
        message = "mask to be bool or of the dtype of input, {}, got {}"
        names = [str(dtype).removeprefix("torch.") for dtype in (input.dtype, mask.dtype)]
        expect(mask.dtype in (torch.bool, input.dtype), op, message, *names)
        message = "mask to be of a shape that broadcasts to that of input, {}, got {}"
        pairs = zip(reversed(mask.shape), reversed(input.shape), strict=False)
        fits = mask.dim() <= input.dim() and all(m == 1 or m == i for m, i in pairs)
        expect(fits, op, message, shape, list(mask.shape))
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@register_fake("cuda_ops::masked_softmax_backward")
def _(grad_output, output, scale):
    return torch.empty_like(output, memory_format=torch.contiguous_format)


masked_softmax_forward = operator("masked_softmax_forward")
MaskedSoftmaxFunction = autograd_function("masked_softmax_forward", "MaskedSoftmaxFunction")


def masked_softmax(input: Tensor, mask: Tensor | None = None, scale: float = 1.0, is_causal: bool = False) -> Tensor:
    r"""Softmax along the last dimension of the scores `input * scale`, of those that take part, as between the two
    products of attention (`mask` and `is_causal` mean what they do in
    :func:`torch.nn.functional.scaled_dot_product_attention`).

    Args:
        input: [..., queries, keys], any strides; float32, float64, float16 or bfloat16.
        mask: of a shape that broadcasts to that of `input`, which costs no memory: bool, where True takes part; or of
            the dtype of `input`, and then it is added to the scores.
        scale: what `input` is multiplied by.
        is_causal: query i sees keys 0 to i alone; with `mask`, of these those that it lets take part.

    Returns:
        A contiguous tensor with the shape of `input`. A row is 0 throughout where no score is above -inf, and NaN
        throughout where one that takes part is NaN or +inf.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: `input` is not floating point, or `mask` is of another dtype or shape than above.

    Under autocast it computes in float32. The gradients of what does not take part are 0, and those of a whole row
    where nothing does. An additive mask has a gradient too. Differentiable any number of times; from the second
    derivative on by PyTorch's own ops.

    Example:
        >>> cuda_ops.functional.masked_softmax(torch.zeros(2, 2), is_causal=True)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    return masked_softmax_forward(input, mask, scale, is_causal)
