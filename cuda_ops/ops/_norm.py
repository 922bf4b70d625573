"""What layer_norm, rms_norm and group_norm share: their gradients' derivatives, composed of PyTorch's operations."""

import math

import torch

from .._arguments import expect, integer
from .._operators import composite


def shape_of(op, normalized_shape):
    """normalized_shape as the ops take it: a tuple or list of ints."""
    if type(normalized_shape) in (tuple, torch.Size, list):
        return normalized_shape
    if isinstance(normalized_shape, (tuple, list)):
        return [integer(op, "normalized_shape", size) for size in normalized_shape]
    raise TypeError(f"{op}: expected normalized_shape to be a tuple of ints, got {normalized_shape!r}")


def check_shapes(op, input, normalized_shape, **parameters):
    """For fake kernels; returns how many rows there are."""
    dims = len(normalized_shape)
    expect(dims > 0, op, "normalized_shape to have at least one dimension, got []")
    message = "input to end in the dimensions of normalized_shape, {}, got shape {}"
    shape = list(normalized_shape)
    fits = dims <= input.dim()
    for size, wanted in zip(input.shape[max(input.dim() - dims, 0) :], shape, strict=False):
        fits = fits and size == wanted
    expect(fits, op, message, shape, list(input.shape))
    for name, tensor in parameters.items():
        if tensor is not None:
            same = tensor.dim() == dims
            for size, wanted in zip(tensor.shape, shape, strict=False):
                same = same and size == wanted
            expect(same, op, f"{name} to have the shape normalized_shape, {{}}, got {{}}", shape, list(tensor.shape))
    return math.prod(input.shape[: input.dim() - dims])


def centered_twice(x, mean):
    """x less its mean, which is rounded: where x hardly varies that shifts all of it by much of what is left, and the
    second mean is this shift."""
    x = x - mean(x)
    return x - mean(x)


def empty_rstd(input, rows):
    return input.new_empty(rows, dtype=torch.float64 if input.dtype == torch.float64 else torch.float32)


class _Rows:
    r"""Arithmetic by row, in at least float32. With :math:`\hat x` the normalised input and :math:`r` its rstd, means
    over the row, the projection :math:`P(z) = z - \bar z - \hat x \, \overline{z \hat x}`, without :math:`\bar z` for
    rms_norm, is symmetric. mean and rstd are computed anew, so that further derivatives reach input through them too.
    """

    def __init__(self, input, normalized_shape, weight, eps, centered):
        self.zeros = torch.zeros_like(input, dtype=torch.promote_types(input.dtype, torch.float32))
        self.dtype, self.centered = self.zeros.dtype, centered
        self.count = input.dim() - len(normalized_shape)
        self.dims = list(range(self.count, input.dim()))
        self.gamma = self.values(weight, 1.0)
        x = input.to(self.dtype)
        x = centered_twice(x, self.mean) if centered else x
        self.rstd = (self.mean(x * x) + eps).rsqrt()
        self.normalised = x * self.rstd

    def whole(self, tensor):
        """A tensor of the shape of input; zeros for None."""
        return self.zeros if tensor is None else tensor.to(self.dtype)

    def values(self, tensor, default):
        """One value a column, which broadcasts; a number for None."""
        return default if tensor is None else tensor.to(self.dtype)

    def mean(self, tensor):
        return tensor.mean(self.dims, keepdim=True)

    def sum_rows(self, tensor):
        return tensor.sum(list(range(self.count))) if self.count else tensor

    def project(self, z):
        return (z - self.mean(z) if self.centered else z) - self.normalised * self.mean(z * self.normalised)


def gradients(c, v, v_weight, v_bias, grad_output, input, weight, wanted):
    r"""Those of the gradients of <v, grad_input> + <v_weight, grad_weight> + <v_bias, grad_bias> by grad_output, input
    and weight that are wanted, where v are the incoming ones. With :math:`h = \gamma g`, grad_input is
    :math:`r P(h)` and grad_weight the sum over rows of :math:`g \hat x`; the rest follows by
    :math:`\partial \langle u, \hat x \rangle / \partial x = r P(u)` and :math:`\partial r / \partial x = -r^2 \hat x /
    n`. `c`: the arithmetic of the norm, _Rows or another of its methods.
    """
    g, v = c.whole(grad_output), c.whole(v)
    v_weight, v_bias = c.values(v_weight, 0.0), c.values(v_bias, 0.0)
    h = c.gamma * g
    projected_v, projected_h = c.project(v), c.project(h)
    grads = []
    if wanted[0]:
        grad = c.gamma * c.rstd * projected_v + v_weight * c.normalised + v_bias
        grads.append(grad.to(grad_output.dtype))
    if wanted[1]:
        through_rstd = c.normalised * c.mean(v * projected_h)
        through_projection = c.mean(h * c.normalised) * projected_v + c.mean(v * c.normalised) * projected_h
        grad = c.rstd * (c.project(v_weight * g) - c.rstd * (through_rstd + through_projection))
        grads.append(grad.to(input.dtype))
    if wanted[2]:
        grads.append(c.sum_rows(c.rstd * g * projected_v).to(weight.dtype))
    return grads


def tangents(c, t_grad, t_sum, t_input, t_weight, grad_output, input, weight, dtype, wanted):
    r"""What grad_input, grad_weight and grad_bias change by where grad_output, grad_sum, input and weight change by
    t_...: as above, with :math:`\partial \hat x = r P(t)` and :math:`\partial r = -r^2 \, \overline{\hat x t}` for a
    change t of input."""
    g, t, t_g = c.whole(grad_output), c.whole(t_input), c.whole(t_grad)
    h, t_h = c.gamma * g, c.values(t_weight, 0.0) * g + c.gamma * t_g
    t_normalised = c.rstd * c.project(t)
    t_projected = -t_normalised * c.mean(h * c.normalised) - c.normalised * c.mean(h * t_normalised)
    t_rstd = -c.rstd * c.rstd * c.mean(c.normalised * t)
    t_grad_input = c.rstd * (c.project(t_h) + t_projected) + t_rstd * c.project(h) + c.whole(t_sum)
    t_grad_weight = c.sum_rows(t_g * c.normalised + g * t_normalised)
    dtype = weight.dtype if weight is not None else input.dtype if dtype is None else dtype
    results = t_grad_input.to(input.dtype), t_grad_weight.to(dtype), c.sum_rows(t_g).to(dtype)
    # (The last one is t_grad itself where there is one row of the same dtype; a result must be a tensor of its own.)
    return tuple(
        (result.clone() if want else result.new_zeros(0)) for result, want in zip(results, wanted, strict=False)
    )


@composite("layer_norm_backward_gradients")
def _(v, v_weight, v_bias, grad_output, input, normalized_shape, weight, eps, wanted):
    c = _Rows(input, normalized_shape, weight, eps, True)
    return gradients(c, v, v_weight, v_bias, grad_output, input, weight, wanted)


@composite("rms_norm_backward_gradients")
def _(v, v_weight, grad_output, input, normalized_shape, weight, eps, wanted):
    c = _Rows(input, normalized_shape, weight, eps, False)
    return gradients(c, v, v_weight, None, grad_output, input, weight, wanted)


@composite("layer_norm_backward_tangents")
def _(t_grad, t_sum, t_input, t_weight, grad_output, input, normalized_shape, weight, eps, bias_dtype, wanted):
    c = _Rows(input, normalized_shape, weight, eps, True)
    return tangents(c, t_grad, t_sum, t_input, t_weight, grad_output, input, weight, bias_dtype, wanted)


@composite("rms_norm_backward_tangents")
def _(t_grad, t_sum, t_input, t_weight, grad_output, input, normalized_shape, weight, eps, wanted):
    c = _Rows(input, normalized_shape, weight, eps, False)
    return tangents(c, t_grad, t_sum, t_input, t_weight, grad_output, input, weight, None, wanted)
