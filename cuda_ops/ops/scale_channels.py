"""scale_channels: a factor for each channel of each image, as a squeeze-and-excitation block ends."""

import math

import torch
from torch import Tensor

from .._arguments import check_tensors, expect
from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._operators import operator
from .layer_scale_add import _is_dense

OP = "scale_channels"
GATES = ("sigmoid", "hardsigmoid")

require_ops("scale_channels_gradients", "scale_channels_tangent")


def _empty(op, input, scale, activation):
    """Like the output: with the strides of input where channels are innermost, else contiguous."""
    if activation not in (None, *GATES):
        raise ValueError(f"{op}: expected activation to be 'sigmoid', 'hardsigmoid' or None, got {activation!r}")
    fits = input.dim() >= 2 and scale.dim() in {2, input.dim()}
    message = f"scale to have one element for each channel of each image of input, {list(input.shape)}, got shape {{}}"
    expect(fits, op, message, list(scale.shape))
    for size, wanted in zip(scale.shape, (*input.shape[:2], *[1] * (scale.dim() - 2)), strict=True):
        expect(size == wanted, op, message, list(scale.shape))
    images, channels = input.shape[:2]
    outermost = images == 1 or (images > 0 and input.stride(0) == input.numel() // images)
    keeps = channels > 1 and input.stride(1) == 1 and outermost and input.numel() > 0 and _is_dense(input)
    strides = input.stride() if keeps or (input.numel() == 0 or input.is_contiguous()) else None
    if strides is None:
        strides = [math.prod(max(size, 1) for size in input.shape[d + 1 :]) for d in range(input.dim())]
    return torch.empty_strided(input.shape, strides, dtype=input.dtype, device=input.device)


@register_fake("cuda_ops::scale_channels_forward")
def _(input, scale, activation):
    return _empty(OP, input, scale, activation)


@register_fake("cuda_ops::scale_channels_backward")
def _(grad_output, input, scale, activation, wanted):
    like = _empty(f"{OP}_backward", input, scale, activation)
    grad_input = like if wanted[0] else input.new_empty(0)
    grad_scale = torch.empty_like(scale, memory_format=torch.contiguous_format) if wanted[1] else scale.new_empty(0)
    return grad_input, grad_scale


scale_channels_forward = operator("scale_channels_forward")
ScaleChannelsFunction = autograd_function("scale_channels_forward", "ScaleChannelsFunction")


def scale_channels(input: Tensor, scale: Tensor, activation: str | None = None) -> Tensor:
    r"""A factor for each channel of each image: :math:`\text{output}_{n c \cdot} = \text{input}_{n c \cdot} \,
    f(\text{scale}_{n c})`, the excitation that ends a squeeze-and-excitation block, with the gate's activation
    :math:`f` in it. One pass, and one backward for both gradients.

    Args:
        input: (N, C, \*), any strides; float32, float64, float16 or bfloat16.
        scale: (N, C), or with a dimension of size 1 for each other of `input`; of its dtype.
        activation: ``"sigmoid"``, ``"hardsigmoid"``, or None for the scale itself.

    Returns:
        A tensor of the shape of `input`: with its strides where channels are innermost (channels_last), else
        contiguous. The product is rounded once.

    Raises:
        TypeError: `input` or `scale` is no tensor.
        ValueError: `activation` is none of these.
        RuntimeError: `input` is not floating point, or `scale` is of another dtype, device or shape.

    Autocast casts neither. Differentiable any number of times; beyond the first time by a composition of PyTorch's
    operations. The gradient of `scale` repeats bit by bit.

    Source: Hu, Shen and Sun, "Squeeze-and-Excitation Networks", 2018.

    Example:
        >>> image = torch.arange(4.0).view(1, 2, 1, 2)
        >>> cuda_ops.functional.scale_channels(image, torch.tensor([[2.0, 10.0]]))
        tensor([[[[ 0.,  2.]],
        <BLANKLINE>
                 [[20., 30.]]]])
    """
    if not (isinstance(input, Tensor) and isinstance(scale, Tensor)):
        check_tensors(OP, input=input, scale=scale)
    return scale_channels_forward(input, scale, activation)
