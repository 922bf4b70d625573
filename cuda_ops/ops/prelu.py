"""prelu: input, times a learned slope where it is negative."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._operators import operator

require_ops("prelu_double_backward", "prelu_tangent", "prelu_backward_tangent")


@register_fake("cuda_ops::prelu_forward")
def _(input, weight):
    return torch.empty_like(input)


@register_fake("cuda_ops::prelu_backward")
def _(grad_output, input, weight):
    return torch.empty_like(input), torch.empty_like(weight, memory_format=torch.contiguous_format)


prelu_forward = operator("prelu_forward")
PReLUFunction = autograd_function("prelu_forward", "PReLUFunction")


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    r"""Parametric rectified linear unit, elementwise: :math:`x` where :math:`x > 0`, else weight times :math:`x`; as
    :func:`torch.nn.functional.prelu`.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        weight: one element, for all, or as many as `input` has channels, which are its dimension 1; of its dtype, with
            no dimension or one.

    Returns:
        A tensor like `input`, with its strides where they are dense.

    Raises:
        TypeError: `input` or `weight` is no tensor.
        RuntimeError: `input` is not floating point, or `weight` is of another dtype, device or size.

    Under autocast it computes in the lower precision. Differentiable any number of times; both gradients come in one
    pass, and that of `weight` repeats bit by bit.

    Source: He, Zhang, Ren and Sun, "Delving Deep into Rectifiers", 2015.

    Example:
        >>> cuda_ops.functional.prelu(torch.tensor([1.0, -3.0]), torch.tensor([0.5]))
        tensor([ 1.0000, -1.5000])
    """
    return prelu_forward(input, weight)


class PReLU(torch.nn.PReLU):
    """torch.nn.PReLU by :func:`cuda_ops.functional.prelu`: same arguments, repr and state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return prelu(input, self.weight)
