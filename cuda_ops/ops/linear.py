"""linear: output = input @ weight.T + bias, over any leading shape."""

import torch
from torch import Tensor

from .._arguments import check_tensors_or_none, expect
from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._operators import operator

require_ops("linear_rounded_gradients", "linear_rounded_tangent")


@register_fake("cuda_ops::linear_forward")
def _(input, weight, bias):
    expect(weight.dim() == 2, "linear", "weight to have 2 dimensions, got shape {}", tuple(weight.shape))
    expect(input.dim() >= 1, "linear", "input to have at least 1 dimension, got a scalar")
    message = (
        "the last dimension of input to be the in_features of weight, {} (weight has shape {}), got input of shape {}"
    )
    fits = input.shape[-1] == weight.shape[1]
    expect(fits, "linear", message, weight.shape[1], list(weight.shape), list(input.shape))
    if bias is not None:
        fits = bias.dim() == 0 or (bias.dim() == 1 and bias.shape[0] in (1, weight.shape[0]))
        message = "bias to have shape [{}], the out_features of weight, got {}"
        expect(fits, "linear", message, weight.shape[0], list(bias.shape))
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


@register_fake("cuda_ops::linear_untransposed_forward")
def _(input, weight, bias):
    op = "linear_untransposed"
    expect(weight.dim() == 2, op, "weight to have 2 dimensions, got shape {}", tuple(weight.shape))
    expect(input.dim() >= 1, op, "input to have at least 1 dimension, got a scalar")
    message = "the last dimension of input to be the in_features of weight, {}, got input of shape {}"
    expect(input.shape[-1] == weight.shape[0], op, message, weight.shape[0], list(input.shape))
    return input.new_empty((*input.shape[:-1], weight.shape[1]))


@register_fake("cuda_ops::linear_rounded_forward")
def _(input, weight, bias, untransposed):
    expect(weight.dim() == 2, "linear", "weight to have 2 dimensions, got shape {}", tuple(weight.shape))
    features, outputs = weight.shape if untransposed else reversed(weight.shape)
    message = "the last dimension of input to be the in_features of weight, {}, got input of shape {}"
    expect(input.shape[-1] == features, "linear", message, features, list(input.shape))
    return input.new_empty((*input.shape[:-1], outputs)), weight.new_empty(weight.shape, dtype=input.dtype)


@register_fake("cuda_ops::linear_backward_input")
def _(grad_output, weight):
    return grad_output.new_empty((*grad_output.shape[:-1], weight.shape[1]))


@register_fake("cuda_ops::linear_backward_weight")
def _(grad_output, input):
    return grad_output.new_empty((grad_output.shape[-1], input.shape[-1]))


@register_fake("cuda_ops::linear_backward_float32_weight")
def _(grad_output, input):
    dtype = torch.float32 if grad_output.dtype in (torch.float16, torch.bfloat16) else grad_output.dtype
    return grad_output.new_empty((grad_output.shape[-1], input.shape[-1]), dtype=dtype)


@register_fake("cuda_ops::linear_backward_bias")
def _(grad_output):
    return grad_output.new_empty((grad_output.shape[-1],))


@register_fake("cuda_ops::linear_backward_float32_bias")
def _(grad_output):
    dtype = torch.float32 if grad_output.dtype in (torch.float16, torch.bfloat16) else grad_output.dtype
    return grad_output.new_empty((grad_output.shape[-1],), dtype=dtype)


linear_forward = operator("linear_forward")
linear_rounded_forward = operator("linear_rounded_forward")
linear_untransposed_forward = operator("linear_untransposed_forward")
linear_backward_input = operator("linear_backward_input")
linear_backward_weight = operator("linear_backward_weight")
linear_backward_bias = operator("linear_backward_bias")
LinearFunction = autograd_function("linear_forward", "LinearFunction")


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Affine map of the last dimension, :math:`y = x W^T + b`. Like :func:`torch.nn.functional.linear`.

    Args:
        input: (..., in_features), any strides; float32, float64, float16 or bfloat16.
        weight: (out_features, in_features), or (in_features) for one output feature without a dimension of its own;
            dtype and device of `input`.
        bias: (out_features), or one number for all of them; a scalar if `weight` has one dimension. dtype and device of
            `input`.

    Returns:
        A contiguous tensor (..., out_features); (...) if `weight` has one dimension.

    Raises:
        TypeError: `input`, `weight` or `bias` is no tensor.
        RuntimeError: `input` is not floating point, or shapes, dtypes or devices do not fit each other.
        NotImplementedError: the environment's ``CUDA_OPS_GEMM_PATH``
            names a kernel that cannot do one of the products.

    Products are summed in float32 (float64 for float64). On CUDA, float32 operands of all but small products are
    rounded to TF32 where ``torch.backends.cuda.matmul.allow_tf32`` or ``torch.set_float32_matmul_precision`` allows
    it, else multiplied with float32's accuracy. Kernels are those of :func:`matmul`, with the bias added as results are
    stored; ``CUDA_OPS_GEMM_PATH`` forces one. Under autocast the tensors are cast as PyTorch casts them.
    Differentiable any number of times.

    Example:
        >>> input, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, -1.0]])
        >>> cuda_ops.functional.linear(input, weight, torch.tensor([0.5, 0.0]))
        tensor([[11.5000, -2.0000]])
    """
    if isinstance(weight, Tensor) and weight.dim() == 1:
        return linear_of_vector(input, weight, bias)
    return linear_forward(input, weight, bias)


def linear_of_vector(input, weight, bias):
    """One output feature without a dimension of its own."""
    check_tensors_or_none("linear", bias=bias)
    if bias is not None:
        if bias.dim() != 0:
            raise RuntimeError(
                "linear: expected bias to be a scalar where weight has 1 dimension, "
                f"got a bias of shape {list(bias.shape)}"
            )
        bias = bias.unsqueeze(0)
    return linear_forward(input, weight.unsqueeze(0), bias).squeeze(-1)


class Linear(torch.nn.Linear):
    """Like :class:`torch.nn.Linear`, through :func:`cuda_ops.functional.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
