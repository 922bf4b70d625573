"""relu6: input cut off at 0 and 6, out of place and in place."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from ._activation import activation_operators, inplace_operator

relu6_forward, relu6_backward = activation_operators("relu6")
relu6_inplace = inplace_operator("relu6", relu6_forward, saves_input=False)
ReLU6Function = autograd_function("relu6_forward", "ReLU6Function")


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    r"""Rectified linear unit with an upper bound, :math:`\min(\max(x, 0), 6)`, elementwise. NaN stays; where the output
    is 0 or 6, the gradient is 0.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        inplace: write the result into `input`, and return it.

    Returns:
        A tensor like `input`, with its strides where they are dense; `input` itself if `inplace`. It is what
        is saved for the gradient.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: `input` is not floating point; or `inplace`, and `input` is a leaf that requires grad or has
            elements that share memory.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.relu6(torch.tensor([8.0, -3.0]))
        tensor([6., 0.])
    """
    return relu6_inplace(input) if inplace else relu6_forward(input)


class ReLU6(torch.nn.ReLU6):
    """torch.nn.ReLU6 by :func:`cuda_ops.functional.relu6`: same arguments, repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return relu6(input, self.inplace)
