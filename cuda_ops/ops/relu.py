"""relu: max(input, 0), out of place and in place."""

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator


@register_fake("cuda_ops::relu_forward")
def _(input):
    return torch.empty_like(input)


@register_fake("cuda_ops::relu_inplace")
def _(input):
    return None


@register_fake("cuda_ops::relu_backward")
def _(grad_output, output):
    return torch.empty_like(output)


relu_forward, relu_inplace = operator("relu_forward"), operator("relu_inplace")
relu_backward = operator("relu_backward")
ReLUFunction = autograd_function("relu_forward", "ReLUFunction")


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    r"""Rectified linear unit, :math:`\text{output}_i = \max(\text{input}_i, 0)`, elementwise.

    NaN stays NaN. The gradient is 0 wherever the output is 0, and passes where it is NaN, as in PyTorch.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        inplace: write the result into `input`, and return it.

    Returns:
        A tensor like `input`, with its strides where they are dense; `input` itself if `inplace`.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: `input` is not floating point; or `inplace`, and `input` is a leaf that requires grad or has
            elements that share memory.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.relu(torch.tensor([1.0, -3.0]))
        tensor([1., 0.])
    """
    if not inplace:
        return relu_forward(input)
    if is_dynamo_compiling():
        # torch.compile does not trace autograd through an op that writes into its input. The graph that it makes has no
        # writes anyway but those into arguments, so that this costs nothing there.
        return input.copy_(relu_forward(input))
    relu_inplace(input)
    return input


class ReLU(torch.nn.ReLU):
    """torch.nn.ReLU by :func:`cuda_ops.functional.relu`: same arguments, repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return relu(input, inplace=self.inplace)
