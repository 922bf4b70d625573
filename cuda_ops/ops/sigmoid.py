"""sigmoid: 1 / (1 + exp(-input))."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from ._activation import activation_operators

sigmoid_forward, sigmoid_backward = activation_operators("sigmoid")
SigmoidFunction = autograd_function("sigmoid_forward", "SigmoidFunction")


def sigmoid(input: Tensor) -> Tensor:
    r"""Logistic function, :math:`1 / (1 + e^{-x})`, elementwise.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.

    Returns:
        A tensor like `input`, with its strides where they are dense. It is what is saved for the gradient.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: `input` is not floating point.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.sigmoid(torch.tensor([0.0, -3.0]))
        tensor([0.5000, 0.0474])
    """
    return sigmoid_forward(input)


class Sigmoid(torch.nn.Sigmoid):
    """torch.nn.Sigmoid by :func:`cuda_ops.functional.sigmoid`: same repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return sigmoid(input)
