"""linear_gelu: gelu(input @ weight.T + bias), over any leading shape, in one kernel, which for a gradient leaves
the preactivation too."""

import torch
from torch import Tensor

from .._arguments import expect
from .._autograd import autograd_function
from .._fakes import register_fake
from .._modules import parameter
from .._operators import composite, operator
from .linear import linear_forward


@register_fake("cuda_ops::linear_gelu_forward")
def _(input, weight, bias, approximate, with_preactivation):
    expect(weight.dim() == 2, "linear_gelu", "weight to have 2 dimensions, got shape {}", tuple(weight.shape))
    expect(input.dim() >= 1, "linear_gelu", "input to have at least 1 dimension, got a scalar")
    message = (
        "the last dimension of input to be the in_features of weight, {} (weight has shape {}), got input of shape {}"
    )
    fits = input.shape[-1] == weight.shape[1]
    expect(fits, "linear_gelu", message, weight.shape[1], list(weight.shape), list(input.shape))
    if bias is not None:
        fits = bias.dim() == 1 and bias.shape[0] == weight.shape[0]
        message = "bias to have shape [{}], the out_features of weight, got {}"
        expect(fits, "linear_gelu", message, weight.shape[0], list(bias.shape))
    output = input.new_empty((*input.shape[:-1], weight.shape[0]))
    return output, torch.empty_like(output) if with_preactivation else input.new_empty((0,))


@register_fake("cuda_ops::linear_gelu_backward")
def _(grad_output, preactivation, approximate, with_bias):
    grad_preactivation = preactivation.new_empty(preactivation.shape)
    return grad_preactivation, preactivation.new_empty((preactivation.shape[-1] if with_bias else 0,))


@register_fake("cuda_ops::gelu_linear_backward")
def _(grad_output, weight, preactivation, approximate, with_bias):
    grad_preactivation = preactivation.new_empty(preactivation.shape)
    dtype = torch.float32 if preactivation.dtype in (torch.float16, torch.bfloat16) else preactivation.dtype
    return grad_preactivation, preactivation.new_empty((preactivation.shape[-1] if with_bias else 0,), dtype=dtype)


with_preactivation_if_wanted = operator("linear_gelu")
linear_gelu_backward = operator("linear_gelu_backward")
gelu_backward_input = operator("gelu_backward_input")
LinearGELUFunction = autograd_function("linear_gelu_forward", "LinearGELUFunction")


# What is differentiated further or forward is composed of differentiable ops.


@composite("linear_gelu_tangents")
def _(input, weight, bias, preactivation, approximate):
    """The contribution of one argument's tangent to the tangents of output and preactivation."""
    tangent = linear_forward(input, weight, None) if bias is None else bias.expand_as(preactivation)
    return linear_gelu_backward(tangent, preactivation, approximate, False)[0], tangent


@composite("linear_gelu_backward_gradients")
def _(grad_grad_preactivation, grad_grad_bias, grad_output, preactivation, approximate, wanted):
    """Those of grad_output and preactivation that are wanted, of grad_output * gelu'(preactivation) and the sum of that
    over the rows."""
    total = grad_grad_preactivation
    if grad_grad_bias is not None and grad_grad_bias.numel():
        total = grad_grad_bias.expand_as(preactivation) if total is None else total + grad_grad_bias
    if total is None:
        total = torch.zeros_like(preactivation)
    grads = []
    if wanted[0]:
        grads.append(linear_gelu_backward(total, preactivation, approximate, False)[0])
    if wanted[1]:
        grads.append(gelu_backward_input(total, grad_output, preactivation, approximate))
    return grads


@composite("linear_gelu_backward_preactivation")
def _(tangent, grad_output, preactivation, approximate, with_bias):
    """What a tangent of preactivation gives to both gradients."""
    tangent = gelu_backward_input(tangent, grad_output, preactivation, approximate)
    return tangent, tangent.sum_to_size(tangent.shape[-1]) if with_bias else tangent.new_empty((0,))


def linear_gelu(input: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    r"""Affine map of the last dimension with GELU: like
    ``torch.nn.functional.gelu(torch.nn.functional.linear(input, weight, bias), approximate=approximate)``.

    With :math:`z = x W^T + b` it is :math:`z \, \Phi(z)`, :math:`\Phi` being the normal distribution's function; with
    ``approximate="tanh"`` :math:`z / 2 \, (1 + \tanh(\sqrt{2 / \pi} \, (z + 0.044715 \, z^3)))`.

    Args:
        input: (..., in_features), any strides; float32, float64, float16 or bfloat16.
        weight: (out_features, in_features); dtype and device of `input`.
        bias: (out_features), like `weight`.
        approximate: ``"none"`` or ``"tanh"``.

    Returns:
        A contiguous tensor (..., out_features).

    Raises:
        TypeError: `input`, `weight` or `bias` is no tensor.
        RuntimeError: `input` is not floating point, shapes, dtypes or devices do not fit each other, or `approximate`
            is neither of the two.
        NotImplementedError: the environment's ``CUDA_OPS_GEMM_PATH``
            names a kernel that cannot do one of the products.

    Bias and GELU are applied to the sums, in float32 (float64 for float64), as the product is stored; where a gradient
    is wanted, z is stored too, in the dtype of `input`, and GELU computed from it. The gradient of `bias` comes with
    the pass that makes that of z. TF32, autocast and ``CUDA_OPS_GEMM_PATH`` as in :func:`linear`. Differentiable any
    number of times.

    Example:
        >>> input, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, -1.0]])
        >>> cuda_ops.functional.linear_gelu(input, weight, torch.tensor([0.5, 1.0]))
        tensor([[11.5000, -0.1587]])
    """
    return with_preactivation_if_wanted(input, weight, bias, approximate)


class LinearGELU(torch.nn.Linear):
    """:class:`torch.nn.Linear` and :class:`torch.nn.GELU` in one, through :func:`cuda_ops.functional.linear_gelu`.

    Example:
        >>> cuda_ops.nn.LinearGELU(3, 4, approximate="tanh")(torch.ones(2, 3)).shape
        torch.Size([2, 4])
    """

    def __init__(self, in_features, out_features, bias=True, approximate="none", device=None, dtype=None):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.approximate = approximate

    def forward(self, input: Tensor) -> Tensor:
        return linear_gelu(input, parameter(self, "weight"), parameter(self, "bias"), self.approximate)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, approximate={self.approximate!r}"
