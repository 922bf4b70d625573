"""tanh: the hyperbolic tangent."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from ._activation import activation_operators

tanh_forward, tanh_backward = activation_operators("tanh")
TanhFunction = autograd_function("tanh_forward", "TanhFunction")


def tanh(input: Tensor) -> Tensor:
    r"""Hyperbolic tangent, elementwise.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.

    Returns:
        A tensor like `input`, with its strides where they are dense. It is what is saved for the gradient.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: `input` is not floating point.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.tanh(torch.tensor([0.5, -3.0]))
        tensor([ 0.4621, -0.9951])
    """
    return tanh_forward(input)


class Tanh(torch.nn.Tanh):
    """torch.nn.Tanh by :func:`cuda_ops.functional.tanh`: same repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return tanh(input)
