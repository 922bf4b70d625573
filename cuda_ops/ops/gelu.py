"""gelu: the Gaussian error linear unit, exact and by its approximation with tanh."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from ._activation import activation_operators

gelu_forward, gelu_backward = activation_operators("gelu")
GELUFunction = autograd_function("gelu_forward", "GELUFunction")


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    r"""Gaussian error linear unit, elementwise.

    It is :math:`x \, \Phi(x)`, :math:`\Phi` being the normal distribution's function; with ``approximate="tanh"``
    :math:`x / 2 \, (1 + \tanh(\sqrt{2 / \pi} \, (x + 0.044715 \, x^3)))`. Far below 0 it keeps its digits, where a sum
    of 1 and erf or tanh cancels.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        approximate: ``"none"`` or ``"tanh"``.

    Returns:
        A tensor like `input`, with its strides where they are dense.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: `input` is not floating point, or `approximate` is neither of the two.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.gelu(torch.tensor([1.0, -10.0]))
        tensor([ 8.4134e-01, -7.6199e-23])
    """
    return gelu_forward(input, approximate)


class GELU(torch.nn.GELU):
    """torch.nn.GELU by :func:`cuda_ops.functional.gelu`: same arguments, repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, self.approximate)
