"""softplus: log(1 + exp(beta * input)) / beta."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from ._activation import activation_operators

softplus_forward, softplus_backward = activation_operators("softplus")
SoftplusFunction = autograd_function("softplus_forward", "SoftplusFunction")


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    r"""Softplus, elementwise: :math:`\log(1 + e^{\beta x}) / \beta`, and :math:`x` where :math:`\beta x` is above a
    threshold.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        beta: how sharply it bends at 0.
        threshold: of :math:`\beta x`.

    Returns:
        A tensor like `input`, with its strides where they are dense.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: `input` is not floating point.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.softplus(torch.tensor([1.0, -30.0]))
        tensor([1.3133e+00, 9.3576e-14])
    """
    return softplus_forward(input, beta, threshold)


class Softplus(torch.nn.Softplus):
    """torch.nn.Softplus by :func:`cuda_ops.functional.softplus`: same arguments, repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return softplus(input, self.beta, self.threshold)
