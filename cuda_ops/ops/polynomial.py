"""polynomial: a polynomial with constant coefficients, elementwise."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._arguments import numbers
from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator


@register_fake("cuda_ops::polynomial_forward")
def _(input, coefficients):
    return torch.empty_like(input)


@register_fake("cuda_ops::polynomial_backward")
def _(grad_output, input, coefficients):
    return torch.empty_like(input)


polynomial_forward = operator("polynomial_forward")
PolynomialFunction = autograd_function("polynomial_forward", "PolynomialFunction")


def polynomial(input: Tensor, coefficients: Sequence[float] = (1.0, 1.0, 1.0)) -> Tensor:
    r"""Elementwise polynomial, :math:`\text{output}_i = \sum_k \text{coefficients}_k \, \text{input}_i^k`.

    By default :math:`x^2 + x + 1`. It is computed by Horner's rule,
    :math:`(\dots(c_n x + c_{n-1}) x + \dots) x + c_0`.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        coefficients: 1 to 64 numbers, that of the lowest power first. They are constants: no gradient reaches them.

    Returns:
        A tensor like `input`, with its strides where they are dense.

    Raises:
        TypeError: `input` is no tensor, or `coefficients` no numbers.
        RuntimeError: `input` is not floating point; there are no coefficients, or more than 64.
        NotImplementedError: `coefficients` is, or contains, a tensor.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.polynomial(torch.tensor([1.0, -3.0]))
        tensor([3., 7.])
    """
    if type(coefficients) is not tuple:  # else the op looks at its elements
        coefficients = numbers("polynomial", "coefficients", coefficients)
    return polynomial_forward(input, coefficients)
