"""elu: the exponential linear unit, out of place and in place."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from ._activation import activation_operators, inplace_operator

elu_forward, elu_backward = activation_operators("elu")
elu_inplace = inplace_operator("elu", elu_forward)
ELUFunction = autograd_function("elu_forward", "ELUFunction")


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    r"""Exponential linear unit, elementwise: :math:`x` where :math:`x > 0`, else :math:`\alpha \, (e^x - 1)`.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        alpha: the function is its negative far below 0.
        inplace: write the result into `input`, and return it. The gradient comes of the output then, which has
            few digits left of it far below 0, and `alpha` must not be negative, as in PyTorch.

    Returns:
        A tensor like `input`, with its strides where they are dense; `input` itself if `inplace`.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: `input` is not floating point; or `inplace`, and `input` is a leaf that requires grad or has
            elements that share memory.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.elu(torch.tensor([1.0, -3.0]))
        tensor([ 1.0000, -0.9502])
    """
    return elu_inplace(input, alpha) if inplace else elu_forward(input, alpha)


class ELU(torch.nn.ELU):
    """torch.nn.ELU by :func:`cuda_ops.functional.elu`: same arguments, repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return elu(input, self.alpha, self.inplace)
