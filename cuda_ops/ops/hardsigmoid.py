"""hardsigmoid: sigmoid's approximation of three lines, out of place and in place."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from ._activation import activation_operators, inplace_operator

hardsigmoid_forward, hardsigmoid_backward = activation_operators("hardsigmoid")
hardsigmoid_inplace = inplace_operator("hardsigmoid", hardsigmoid_forward)
HardsigmoidFunction = autograd_function("hardsigmoid_forward", "HardsigmoidFunction")


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    r"""Sigmoid's approximation by three lines, :math:`\min(\max(x + 3, 0), 6) / 6`, elementwise.

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
        >>> cuda_ops.functional.hardsigmoid(torch.tensor([1.5, -4.0]))
        tensor([0.7500, 0.0000])
    """
    return hardsigmoid_inplace(input) if inplace else hardsigmoid_forward(input)


class Hardsigmoid(torch.nn.Hardsigmoid):
    """torch.nn.Hardsigmoid by :func:`cuda_ops.functional.hardsigmoid`: same arguments, repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return hardsigmoid(input, self.inplace)
