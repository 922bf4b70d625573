"""square: the template op. See CONTRIBUTING.md for how to copy it into an op of your own."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator


@register_fake("cuda_ops::square_forward")
def _(input):
    return torch.empty_like(input)


@register_fake("cuda_ops::square_backward")
def _(grad_output, input):
    return torch.empty_like(input)


square_forward = operator("square_forward")
SquareFunction = autograd_function("square_forward", "SquareFunction")


def square(input: Tensor) -> Tensor:
    r"""Elementwise square, :math:`\text{output}_i = \text{input}_i^2`.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.

    Returns:
        A tensor like `input`, with its strides where they are dense.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: `input` is not floating point.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.square(torch.tensor([1.0, -3.0]))
        tensor([1., 9.])
    """
    return square_forward(input)
