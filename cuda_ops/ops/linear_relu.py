"""linear_relu: relu(input @ weight.T + bias), over any leading shape, in one kernel."""

import torch
from torch import Tensor

from .._arguments import expect
from .._autograd import autograd_function
from .._fakes import register_fake
from .._modules import parameter
from .._operators import operator


@register_fake("cuda_ops::linear_relu_forward")
def _(input, weight, bias):
    expect(weight.dim() == 2, "linear_relu", "weight to have 2 dimensions, got shape {}", tuple(weight.shape))
    expect(input.dim() >= 1, "linear_relu", "input to have at least 1 dimension, got a scalar")
    message = (
        "the last dimension of input to be the in_features of weight, {} (weight has shape {}), got input of shape {}"
    )
    fits = input.shape[-1] == weight.shape[1]
    expect(fits, "linear_relu", message, weight.shape[1], list(weight.shape), list(input.shape))
    if bias is not None:
        fits = bias.dim() == 1 and bias.shape[0] == weight.shape[0]
        message = "bias to have shape [{}], the out_features of weight, got {}"
        expect(fits, "linear_relu", message, weight.shape[0], list(bias.shape))
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


@register_fake("cuda_ops::linear_relu_backward")
def _(grad_output, output, input, weight, with_input, with_weight, with_bias):
    return (
        input.new_empty(input.shape if with_input else (0,)),
        weight.new_empty(weight.shape if with_weight else (0,)),
        weight.new_empty((weight.shape[0] if with_bias else 0,)),
    )


linear_relu_forward = operator("linear_relu_forward")
LinearReLUFunction = autograd_function("linear_relu_forward", "LinearReLUFunction")


def linear_relu(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Affine map of the last dimension with ReLU, :math:`y = \max(x W^T + b, 0)`: like
    ``torch.nn.functional.relu(torch.nn.functional.linear(input, weight, bias))`` in one kernel.

    Args:
        input: (..., in_features), any strides; float32, float64, float16 or bfloat16.
        weight: (out_features, in_features); dtype and device of `input`, or float32 beside an `input` in half
            precision (it is converted where the kernel loads it).
        bias: (out_features), like `weight`.

    Returns:
        A contiguous tensor (..., out_features) in the dtype of `input`; gradients of the parameters are in theirs.

    Raises:
        TypeError: `input`, `weight` or `bias` is no tensor.
        RuntimeError: `input` is not floating point, or shapes, dtypes or devices do not fit each other.

    Products are summed in float32 (float64 for float64). On CUDA, float32 operands, and for few rows what the
    gradient of `bias` sums, are rounded to TF32 where ``torch.backends.cuda.matmul.allow_tf32`` or
    ``torch.set_float32_matmul_precision`` allows it. Under autocast `input` alone is cast, and the weight where
    it is loaded. Differentiable any number of times; from the second derivative on by other kernels.

    Example:
        >>> input, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, -1.0]])
        >>> cuda_ops.functional.linear_relu(input, weight, torch.tensor([0.5, 0.0]))
        tensor([[11.5000,  0.0000]])
    """
    return linear_relu_forward(input, weight, bias)


class LinearReLU(torch.nn.Linear):
    """:class:`torch.nn.Linear` and :class:`torch.nn.ReLU` in one, through :func:`cuda_ops.functional.linear_relu`.

    Example:
        >>> cuda_ops.nn.LinearReLU(3, 4)(torch.ones(2, 3)).shape
        torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear_relu(input, parameter(self, "weight"), parameter(self, "bias"))
