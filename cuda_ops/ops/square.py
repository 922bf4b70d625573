"""square: the template op. See CONTRIBUTING.md for how to copy it into an op of your own."""

import torch
from torch import Tensor

from .._arguments import check_tensors
from .._autograd import Function
from .._fakes import register_fake
from .._library import ops


@register_fake("cuda_ops::square_forward")
def _(input):
    return torch.empty_like(input)


@register_fake("cuda_ops::square_backward")
def _(grad_output, input):
    return torch.empty_like(input)


class SquareFunction(Function):
    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return ops.square_forward(input)

    @staticmethod
    def backward(ctx, grad_output):
        (input,) = ctx.saved_tensors
        return SquareBackwardFunction.apply(grad_output, input)


class SquareBackwardFunction(Function):
    """grad_input = 2 * input * grad_output, itself differentiable: it is linear in each of its arguments, so that
    its own gradients are the same product with another factor in place."""

    @staticmethod
    def forward(ctx, grad_output, input):
        ctx.save_for_backward(grad_output, input)
        return ops.square_backward(grad_output, input)

    @staticmethod
    def backward(ctx, grad_grad_input):
        grad_output, input = ctx.saved_tensors
        grad_grad_output = SquareBackwardFunction.apply(grad_grad_input, input) if ctx.needs_input_grad[0] else None
        grad_input = SquareBackwardFunction.apply(grad_grad_input, grad_output) if ctx.needs_input_grad[1] else None
        return grad_grad_output, grad_input


def square(input: Tensor) -> Tensor:
    r"""Elementwise square, :math:`\text{output}_i = \text{input}_i^2`.

    Args:
        input: any shape, any strides; float32 or float64, on CUDA float16 and bfloat16 too.

    Returns:
        A tensor like `input`, with its strides where they are dense.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: `input` is not floating point.
        NotImplementedError: `input` is float16 or bfloat16 on the CPU.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.square(torch.tensor([1.0, -3.0]))
        tensor([1., 9.])
    """
    check_tensors("square", input=input)
    return SquareFunction.apply(input)
