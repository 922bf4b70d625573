"""polynomial: a polynomial with constant coefficients, elementwise."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._arguments import check_tensors
from .._autograd_old import Function
from .._fakes import register_fake
from .._library import ops


@register_fake("cuda_ops::polynomial_forward")
def _(input, coefficients):
    return torch.empty_like(input)


@register_fake("cuda_ops::polynomial_backward")
def _(grad_output, input, coefficients):
    return torch.empty_like(input)


def derivative(coefficients):
    """The coefficients of p' from those of p; a constant keeps one coefficient, 0."""
    return [power * coefficient for power, coefficient in enumerate(coefficients)][1:] or [0.0]


class PolynomialFunction(Function):
    @staticmethod
    def forward(ctx, input, coefficients):
        ctx.save_for_backward(input)
        ctx.coefficients = coefficients
        return ops.polynomial_forward(input, coefficients)

    @staticmethod
    def backward(ctx, grad_output):
        (input,) = ctx.saved_tensors
        return PolynomialBackwardFunction.apply(grad_output, input, ctx.coefficients), None


class PolynomialBackwardFunction(Function):
    """grad_input = grad_output * p'(input), itself differentiable: linear in grad_output, and in input once more the
    backward of a polynomial, p'."""

    @staticmethod
    def forward(ctx, grad_output, input, coefficients):
        ctx.save_for_backward(grad_output, input)
        ctx.coefficients = coefficients
        return ops.polynomial_backward(grad_output, input, coefficients)

    @staticmethod
    def backward(ctx, grad_grad_input):
        grad_output, input = ctx.saved_tensors
        grad_grad_output = grad_input = None
        if ctx.needs_input_grad[0]:
            grad_grad_output = PolynomialBackwardFunction.apply(grad_grad_input, input, ctx.coefficients)
        if ctx.needs_input_grad[1]:
            product = grad_grad_input * grad_output
            grad_input = PolynomialBackwardFunction.apply(product, input, derivative(ctx.coefficients))
        return grad_grad_output, grad_input, None


def polynomial(input: Tensor, coefficients: Sequence[float] = (1.0, 1.0, 1.0)) -> Tensor:
    r"""Elementwise polynomial, :math:`\text{output}_i = \sum_k \text{coefficients}_k \, \text{input}_i^k`.

    By default :math:`x^2 + x + 1`. It is computed by Horner's rule,
    :math:`(\dots(c_n x + c_{n-1}) x + \dots) x + c_0`.

    Args:
        input: any shape, any strides; float32 or float64, on CUDA float16 and bfloat16 too.
        coefficients: 1 to 64 numbers, that of the lowest power first. They are constants: no gradient reaches them.

    Returns:
        A tensor like `input`, with its strides where they are dense.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: `input` is not floating point; there are no coefficients, or more than 64.
        NotImplementedError: `input` is float16 or bfloat16 on the CPU; `coefficients` is, or contains, a tensor.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.polynomial(torch.tensor([1.0, -3.0]))
        tensor([3., 7.])
    """
    check_tensors("polynomial", input=input)
    if isinstance(coefficients, Tensor) or any(isinstance(c, Tensor) for c in coefficients):
        raise NotImplementedError(
            "polynomial: expected coefficients to be numbers, got a tensor (they are constants, without a gradient; "
            "`coefficients.tolist()` makes numbers of them)"
        )
    return PolynomialFunction.apply(input, [float(c) for c in coefficients])
