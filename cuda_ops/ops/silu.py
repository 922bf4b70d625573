"""silu: input * sigmoid(input), out of place and in place."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from ._activation import activation_operators, inplace_operator

silu_forward, silu_backward = activation_operators("silu")
silu_inplace = inplace_operator("silu", silu_forward)
SiLUFunction = autograd_function("silu_forward", "SiLUFunction")


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    r"""Sigmoid linear unit (swish), :math:`x / (1 + e^{-x})`, elementwise.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        inplace: write the result into `input`, and return it; a gradient needs a copy of what was there, as in PyTorch.

    Returns:
        A tensor like `input`, with its strides where they are dense; `input` itself if `inplace`.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: `input` is not floating point; or `inplace`, and `input` is a leaf that requires grad or has
            elements that share memory.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.silu(torch.tensor([1.0, -3.0]))
        tensor([ 0.7311, -0.1423])
    """
    return silu_inplace(input) if inplace else silu_forward(input)


class SiLU(torch.nn.SiLU):
    """torch.nn.SiLU by :func:`cuda_ops.functional.silu`: same arguments, repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return silu(input, inplace=self.inplace)
