"""layer_norm: normalisation of the last dimensions by their mean and deviation."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from .._fakes import register_fake
from .._modules import parameter
from .._operators import operator
from ._norm import check_shapes, empty_rstd, shape_of


@register_fake("cuda_ops::layer_norm_forward")
def _(input, normalized_shape, weight, bias, eps):
    rows = check_shapes("layer_norm", input, normalized_shape, weight=weight, bias=bias)
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    return output, input.new_empty(rows, dtype=torch.float64), empty_rstd(input, rows)


@register_fake("cuda_ops::layer_norm_backward")
def _(grad_output, grad_sum, input, normalized_shape, weight, mean, rstd, eps, bias_dtype, wanted):
    dtype = weight.dtype if weight is not None else input.dtype if bias_dtype is None else bias_dtype
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format) if wanted[0] else input.new_empty(0),
        input.new_empty(normalized_shape if wanted[1] else 0, dtype=dtype),
        input.new_empty(normalized_shape if wanted[2] else 0, dtype=dtype),
    )


@register_fake("cuda_ops::layer_norm_backward_with_sums")
def _(grad_output, grad_sum, input, normalized_shape, weight, mean, rstd, bias_dtype, with_weight, with_bias):
    dtype = weight.dtype if weight is not None else input.dtype if bias_dtype is None else bias_dtype
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format),
        input.new_empty(normalized_shape if with_weight else 0, dtype=dtype),
        input.new_empty(normalized_shape if with_bias else 0, dtype=dtype),
        input.new_empty(normalized_shape, dtype=dtype),
    )


@register_fake("cuda_ops::layer_norm_backward_mask")
def _(grad_output, grad_sum, input, normalized_shape, weight, mean, rstd, mask, p, bias_dtype, with_weight, with_bias):
    dtype = weight.dtype if weight is not None else input.dtype if bias_dtype is None else bias_dtype
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format),
        torch.empty_like(input, memory_format=torch.contiguous_format),
        input.new_empty(normalized_shape if with_weight else 0, dtype=dtype),
        input.new_empty(normalized_shape if with_bias else 0, dtype=dtype),
    )


layer_norm_forward = operator("layer_norm_forward")
LayerNormFunction = autograd_function("layer_norm_forward", "LayerNormFunction")


def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    r"""Layer normalisation over the last dimensions,
    :math:`\text{output} = (\text{input} - \mu) / \sqrt{\sigma^2 + \text{eps}} \cdot \text{weight} + \text{bias}`, with
    the mean and the biased variance of each row, which is what lies along these dimensions.

    Args:
        input: (\*, `normalized_shape`), any strides; float32, float64, float16 or bfloat16.
        normalized_shape: the sizes of the last dimensions, those to be normalised over.
        weight, bias: of that shape, or None for 1 and 0; of the dtype of `input`, or float32 beside a float16 or
            bfloat16 `input`.
        eps: added to the variance.

    Mean and variance are computed without loss where the mean is far larger than the deviation.

    Returns:
        A contiguous tensor of the shape and dtype of `input`.

    Raises:
        TypeError: a tensor is none, `normalized_shape` is no tuple or list of ints, or `eps` no number.
        RuntimeError: `input` is not floating point, or does not end in `normalized_shape`; a parameter has the wrong
            shape, dtype or device.

    Under CUDA's autocast it computes in float32. Differentiable any number of times; beyond the first time by a
    composition of PyTorch's operations.

    Example:
        >>> cuda_ops.functional.layer_norm(torch.tensor([1.0, 3.0]), (2,))
        tensor([-1.0000,  1.0000])
    """
    return layer_norm_forward(input, shape_of("layer_norm", normalized_shape), weight, bias, eps)[0]


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm by :func:`cuda_ops.functional.layer_norm`: same arguments, repr and state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        return layer_norm(input, self.normalized_shape, weight, bias, self.eps)
