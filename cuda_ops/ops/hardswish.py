"""hardswish: input * hardsigmoid(input), out of place and in place."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from ._activation import activation_operators, inplace_operator

hardswish_forward, hardswish_backward = activation_operators("hardswish")
hardswish_inplace = inplace_operator("hardswish", hardswish_forward)
HardswishFunction = autograd_function("hardswish_forward", "HardswishFunction")


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    r"""SiLU's approximation, :math:`x \min(\max(x + 3, 0), 6) / 6`, elementwise.

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
        >>> cuda_ops.functional.hardswish(torch.tensor([1.5, -1.0]))
        tensor([ 1.1250, -0.3333])
    """
    return hardswish_inplace(input) if inplace else hardswish_forward(input)


class Hardswish(torch.nn.Hardswish):
    """torch.nn.Hardswish by :func:`cuda_ops.functional.hardswish`: same arguments, repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return hardswish(input, self.inplace)
