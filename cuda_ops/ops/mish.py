"""mish: input * tanh(softplus(input)), out of place and in place."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from ._activation import activation_operators, inplace_operator

mish_forward, mish_backward = activation_operators("mish")
mish_inplace = inplace_operator("mish", mish_forward)
MishFunction = autograd_function("mish_forward", "MishFunction")


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    r"""Mish, :math:`x \tanh(\log(1 + e^x))`, elementwise.

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
        >>> cuda_ops.functional.mish(torch.tensor([1.0, -3.0]))
        tensor([ 0.8651, -0.1456])
    """
    return mish_inplace(input) if inplace else mish_forward(input)


class Mish(torch.nn.Mish):
    """torch.nn.Mish by :func:`cuda_ops.functional.mish`: same arguments, repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return mish(input, self.inplace)
