"""What is special to polynomial: a constant, the default, and derivatives of any order."""

import pytest
import torch

import cuda_ops


def test_the_default_is_x_squared_plus_x_plus_1(device):
    x = torch.linspace(-3, 3, 101, dtype=torch.float64, device=device)
    torch.testing.assert_close(cuda_ops.functional.polynomial(x), x**2 + x + 1)


def test_a_constant_has_gradient_zero(device):
    x = torch.tensor([1.0, float("nan")], device=device, requires_grad=True)
    output = cuda_ops.functional.polynomial(x, (5,))
    assert output.tolist() == [5.0, 5.0]
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_derivatives_of_any_order(device, order):
    """The fifth derivative of a polynomial of degree 4 is 0."""
    coefficients = (1.0, -2.0, 0.5, 3.0, 0.25)
    x = torch.linspace(-2, 2, 33, dtype=torch.float64, device=device, requires_grad=True)
    value, expected = cuda_ops.functional.polynomial(x, coefficients), coefficients
    for _ in range(order):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        expected = [k * c for k, c in enumerate(expected)][1:]
    torch.testing.assert_close(value, sum((c * x**k for k, c in enumerate(expected)), torch.zeros_like(x)))
