"""layer_scale_add: the end of a residual block, with LayerScale and stochastic depth, in one pass."""

import math

import torch
from torch import Tensor

from .._arguments import expect
from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._operators import operator

require_ops("layer_scale_add_gradients", "layer_scale_add_tangents")


def _scaled_dim(op, input, weight):
    """The dimension of `input` that weight has elements for; None without a weight."""
    if weight is None:
        return None
    found, fits = None, 0 < input.dim() >= weight.dim()
    for i in range(1, weight.dim() + 1 if fits else 1):
        if weight.shape[-i] != 1:
            fits = fits and found is None and weight.shape[-i] == input.shape[-i]
            found = input.dim() - i
    message = "weight to have one size above 1, that of a dimension of input, {}, with which it broadcasts, got {}"
    expect(fits, op, message, list(input.shape), list(weight.shape))
    return input.dim() - 1 if found is None else found


def _is_dense(input):
    """Whether its elements lie side by side, in some order of dimensions."""
    expected = 1
    sizes = [(stride, size) for stride, size in zip(input.stride(), input.shape, strict=True) if size != 1]
    for stride, size in sorted(sizes):
        if stride != expected:
            return False
        expected *= size
    return True


def _strides(input, weight, dim, row_scale):
    """Those of the sum: of `input` where its channels are innermost, or there are none; else contiguous ones."""
    images = input.shape[0] if input.dim() else 1
    outermost = images == 1 or (images > 0 and input.stride(0) == input.numel() // images)
    keeps = _is_dense(input)
    if weight is None:
        keeps = keeps and (row_scale is None or outermost)
    else:
        keeps = keeps and dim > 0 and outermost and weight.numel() > 1 and input.stride(dim) == 1
    if keeps:
        return input.stride()
    return [math.prod(max(size, 1) for size in input.shape[d + 1 :]) for d in range(input.dim())]


@register_fake("cuda_ops::layer_scale_add_forward")
def _(input, residual, weight, row_scale, copy_dtype):
    op = "layer_scale_add"
    message = "residual to have the shape of input, {}, got {}"
    expect(input.dim() == residual.dim(), op, message, list(input.shape), list(residual.shape))
    for size, wanted in zip(residual.shape, input.shape, strict=True):
        expect(size == wanted, op, message, list(input.shape), list(residual.shape))
    dim = _scaled_dim(op, input, weight)
    if row_scale is not None:
        fits = input.dim() > 0 and dim != 0
        message = "input to have rows in front of the dimension that weight scales, got shape {}"
        expect(fits, op, message, list(input.shape))
        message = f"row_scale to have one element for each row of input, [{input.shape[0]}], got {{}}"
        expect(row_scale.dim() == 1 and row_scale.shape[0] == input.shape[0], op, message, list(row_scale.shape))
    dtype = torch.promote_types(input.dtype, residual.dtype)
    if weight is not None:
        dtype = torch.promote_types(dtype, weight.dtype)
    strides = _strides(input, weight, dim, row_scale)
    sum = torch.empty_strided(input.shape, strides, dtype=dtype, device=input.device)
    copy = torch.empty_strided(input.shape, strides, dtype=copy_dtype, device=input.device) if copy_dtype else None
    return sum, sum.new_empty(0) if copy is None else copy


@register_fake("cuda_ops::layer_scale_add_backward")
def _(grad_sum, grad_copy, input, weight, row_scale, input_dtype, residual_dtype, sum_dtype, wanted):
    op = "layer_scale_add_backward"
    grad = grad_copy if grad_sum is None else grad_sum
    expect(grad is not None, op, "grad_sum or grad_copy to be a Tensor, got None")
    leading = input if wanted[2] else grad
    strides = _strides(leading, weight, _scaled_dim(op, grad, weight), row_scale)

    def like(is_wanted, dtype):
        if not is_wanted:
            return grad.new_empty(0, dtype=dtype)
        return torch.empty_strided(grad.shape, strides, dtype=dtype, device=grad.device)

    none = grad.new_empty(0, dtype=sum_dtype if weight is None else weight.dtype)
    grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if wanted[2] else none
    return like(wanted[0], input_dtype), like(wanted[1], residual_dtype), grad_weight


layer_scale_add_forward = operator("layer_scale_add_forward")
LayerScaleAddFunction = autograd_function("layer_scale_add_forward", "LayerScaleAddFunction")


def layer_scale_add(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, row_scale: Tensor | None = None
) -> Tensor:
    r"""The end of a residual block: :math:`\text{residual} + \text{weight} \cdot \text{row\_scale} \cdot
    \text{input}`, with the branch's output as `input`, a factor for each channel (LayerScale: Touvron et al., Going
    deeper with Image Transformers, 2021), and one for each row of the batch, such as stochastic depth's. One pass, and
    one backward with the gradient of `weight`.

    Args:
        input: (N, \*), any strides; float32, float64, float16 or bfloat16.
        residual: of the shape of `input`; it may be float32 beside a float16 or bfloat16 `input`, or otherwise.
        weight: broadcasts to `input`, with one size above 1: (C, 1, 1) beside (N, C, H, W), (C) beside (N, L, C). None
            stands for 1.
        row_scale: (N), or None for 1. It has no gradient.

    Returns:
        A tensor of the shape of `input`, in the dtype to which those of input, residual and weight promote; with the
        strides of `input` where its channels are innermost, else contiguous. The sum is rounded once.

    Raises:
        TypeError: `input` or `residual` is no tensor.
        RuntimeError: `input` is not floating point; shapes or devices that do not fit, or a `row_scale` that requires
            a gradient.

    Autocast casts none of them. Differentiable any number of times; beyond the first time by a composition of PyTorch's
    operations. Fastest with channels innermost (channels_last).

    Example:
        >>> x, residual = torch.ones(2, 3), torch.zeros(2, 3)
        >>> cuda_ops.functional.layer_scale_add(x, residual, torch.arange(3.0), torch.tensor([0.0, 2.0]))
        tensor([[0., 0., 0.],
                [0., 2., 4.]])
    """
    return layer_scale_add_forward(input, residual, weight, row_scale, None)[0]
