"""hardtanh: input cut off at two bounds, out of place and in place."""

import torch
from torch import Tensor

from .._arguments import number
from .._autograd import autograd_function
from ._activation import activation_operators, inplace_operator

hardtanh_forward, hardtanh_backward = activation_operators("hardtanh")
hardtanh_inplace = inplace_operator("hardtanh", hardtanh_forward, saves_input=False)
HardtanhFunction = autograd_function("hardtanh_forward", "HardtanhFunction")


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    r"""Cuts off what is below `min_val` or above `max_val`, elementwise. NaN stays; where the output is a bound, the
    gradient is 0.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        min_val: the lower bound.
        max_val: the upper bound.
        inplace: write the result into `input`, and return it.

    Returns:
        A tensor like `input`, with its strides where they are dense; `input` itself if `inplace`. It is what
        is saved for the gradient.

    Raises:
        TypeError: `input` is no tensor, or a bound is no number.
        RuntimeError: `input` is not floating point; or `inplace`, and `input` is a leaf that requires grad or has
            elements that share memory.
        ValueError: `min_val` is greater than `max_val`.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.hardtanh(torch.tensor([0.5, -3.0]))
        tensor([ 0.5000, -1.0000])
    """
    min_val, max_val = number("hardtanh", "min_val", min_val), number("hardtanh", "max_val", max_val)
    if min_val > max_val:
        raise ValueError(f"hardtanh: expected min_val to be at most max_val, got {min_val} and {max_val}")
    return hardtanh_inplace(input, min_val, max_val) if inplace else hardtanh_forward(input, min_val, max_val)


class Hardtanh(torch.nn.Hardtanh):
    """torch.nn.Hardtanh by :func:`cuda_ops.functional.hardtanh`: same arguments, repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return hardtanh(input, self.min_val, self.max_val, self.inplace)
