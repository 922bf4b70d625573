"""layer_norm, rms_norm and both after an addition with an output in float16 or bfloat16, for conversion: what autocast
computes in float32 and a layer behind it lowers at once."""

import torch

from .._fakes import register_fake, require_ops
from .._operators import operator
from ._norm import check_shapes, empty_rstd

require_ops("layer_norm_rounded_gradients", "add_layer_norm_rounded_gradients")
require_ops("layer_norm_rounded_tangent", "add_layer_norm_rounded_tangents")
require_ops("rms_norm_rounded_gradients", "add_rms_norm_rounded_gradients")
require_ops("rms_norm_rounded_tangent", "add_rms_norm_rounded_tangents")


def _empty(input, dtype):
    return torch.empty(input.shape, dtype=dtype, device=input.device)


@register_fake("cuda_ops::layer_norm_rounded_forward")
def _(input, normalized_shape, weight, bias, eps, dtype):
    rows = check_shapes("layer_norm_rounded", input, normalized_shape, weight=weight, bias=bias)
    return _empty(input, dtype), input.new_empty(rows, dtype=torch.float64), empty_rstd(input, rows)


@register_fake("cuda_ops::add_layer_norm_rounded_forward")
def _(input, residual, normalized_shape, weight, bias, eps, dtype):
    rows = check_shapes("add_layer_norm_rounded", input, normalized_shape, weight=weight, bias=bias)
    sum = _empty(input, torch.promote_types(input.dtype, residual.dtype))
    return _empty(input, dtype), sum, input.new_empty(rows, dtype=torch.float64), empty_rstd(sum, rows)


@register_fake("cuda_ops::layer_norm_rounded_backward")
def _(grad_output, grad_sum, input, normalized_shape, weight, mean, rstd, bias_dtype, addend_dtype, wanted):
    dtype = weight.dtype if weight is not None else input.dtype if bias_dtype is None else bias_dtype
    with_addend = addend_dtype is not None and addend_dtype != input.dtype
    return (
        _empty(input, input.dtype) if wanted[0] else input.new_empty(0),
        _empty(input, addend_dtype) if with_addend else input.new_empty(0, dtype=addend_dtype or input.dtype),
        input.new_empty(normalized_shape if wanted[1] else 0, dtype=dtype),
        input.new_empty(normalized_shape if wanted[2] else 0, dtype=dtype),
    )


@register_fake("cuda_ops::rms_norm_rounded_forward")
def _(input, normalized_shape, weight, eps, dtype):
    rows = check_shapes("rms_norm_rounded", input, normalized_shape, weight=weight)
    return _empty(input, dtype), empty_rstd(input, rows)


@register_fake("cuda_ops::add_rms_norm_rounded_forward")
def _(input, residual, normalized_shape, weight, eps, dtype):
    rows = check_shapes("add_rms_norm_rounded", input, normalized_shape, weight=weight)
    sum = _empty(input, torch.promote_types(input.dtype, residual.dtype))
    return _empty(input, dtype), sum, empty_rstd(sum, rows)


@register_fake("cuda_ops::rms_norm_rounded_backward")
def _(grad_output, grad_sum, input, normalized_shape, weight, rstd, addend_dtype, wanted):
    with_addend = addend_dtype is not None and addend_dtype != input.dtype
    return (
        _empty(input, input.dtype) if wanted[0] else input.new_empty(0),
        _empty(input, addend_dtype) if with_addend else input.new_empty(0, dtype=addend_dtype or input.dtype),
        input.new_empty(normalized_shape if wanted[1] else 0, dtype=input.dtype if weight is None else weight.dtype),
    )


layer_norm_rounded_forward = operator("layer_norm_rounded_forward")
add_layer_norm_rounded_forward = operator("add_layer_norm_rounded_forward")
rms_norm_rounded_forward = operator("rms_norm_rounded_forward")
add_rms_norm_rounded_forward = operator("add_rms_norm_rounded_forward")
