"""leaky_relu: input, times a slope where it is negative; out of place and in place."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from ._activation import activation_operators, inplace_operator

leaky_relu_forward, leaky_relu_backward = activation_operators("leaky_relu")
leaky_relu_inplace = inplace_operator("leaky_relu", leaky_relu_forward)
LeakyReLUFunction = autograd_function("leaky_relu_forward", "LeakyReLUFunction")


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    r"""Leaky rectified linear unit, elementwise: :math:`x` where :math:`x > 0`, else ``negative_slope`` times that.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        negative_slope: the factor below 0.
        inplace: write the result into `input`, and return it. The gradient comes of the output then, and
            `negative_slope` must not be negative, as in PyTorch.

    Returns:
        A tensor like `input`, with its strides where they are dense; `input` itself if `inplace`.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: `input` is not floating point; or `inplace`, and `input` is a leaf that requires grad or has
            elements that share memory.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.leaky_relu(torch.tensor([1.0, -3.0]))
        tensor([ 1.0000, -0.0300])
    """
    return leaky_relu_inplace(input, negative_slope) if inplace else leaky_relu_forward(input, negative_slope)


class LeakyReLU(torch.nn.LeakyReLU):
    """torch.nn.LeakyReLU by :func:`cuda_ops.functional.leaky_relu`: same arguments, repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return leaky_relu(input, self.negative_slope, self.inplace)
