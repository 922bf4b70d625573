"""add_layer_norm: layer_norm of a residual sum, in one pass."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .._arguments import flag, number
from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._operators import operator
from ._norm import check_shapes, empty_rstd, shape_of

require_ops("add_layer_norm_gradients", "add_layer_norm_tangents")


@register_fake("cuda_ops::add_layer_norm_forward")
def _(input, residual, normalized_shape, weight, bias, eps, p, call=None):
    rows = check_shapes("add_layer_norm", input, normalized_shape, weight=weight, bias=bias)
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    mean = input.new_empty(rows, dtype=torch.float64)
    state = input.new_empty(2 if p > 0.0 else 0, dtype=torch.int64)
    return output, torch.empty_like(output), mean, empty_rstd(input, rows), state


@register_fake("cuda_ops::add_layer_norm_forward_mask")
def _(input, residual, normalized_shape, weight, bias, eps, p):
    rows = check_shapes("add_layer_norm", input, normalized_shape, weight=weight, bias=bias)
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    mean = input.new_empty(rows, dtype=torch.float64)
    state, mask = input.new_empty(2, dtype=torch.int64), input.new_empty(input.numel() // 8, dtype=torch.uint8)
    return output, torch.empty_like(output), mean, empty_rstd(input, rows), state, mask


add_layer_norm_forward = operator("add_layer_norm_forward")
AddLayerNormFunction = autograd_function("add_layer_norm_forward", "AddLayerNormFunction")


def drop_probability(op: str, p: float, training: bool) -> float:
    if not 0.0 <= (p if type(p) is float else number(op, "p", p)) <= 1.0:
        raise ValueError(f"{op}: expected p to be between 0 and 1, got {p}")
    return float(p) if flag(op, "training", training) else 0.0


def call_of(input, p):
    """What tells two calls that draw random numbers apart in a compiled graph (see dropout)."""
    return torch.empty(0, device=input.device) if p > 0.0 and is_compiling() else None


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    p: float = 0.0,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    r"""The norm of a residual sum, and the sum itself: :math:`\text{sum} = \text{residual} + \text{dropout}
    (\text{input})`, :math:`\text{output} = \text{layer\_norm}(\text{sum})`; in one kernel on CUDA, and backward in one
    that adds the gradient of the sum.

    Args:
        input: (\*, `normalized_shape`), any strides; float32, float64, float16 or bfloat16.
        residual: of the shape and dtype of `input`.
        normalized_shape, weight, bias, eps: as those of :func:`cuda_ops.functional.layer_norm`.
        p: probability of an element of `input` to be dropped, from 0 to 1; as :func:`cuda_ops.functional.dropout`,
            which draws the same numbers after the same seed.
        training: if False, nothing is dropped.

    Returns:
        (output, sum): contiguous, of the shape and dtype of `input`. The sum is rounded to it before it is normalised.

    Raises:
        TypeError: a tensor is none, `normalized_shape` is no tuple or list of ints, or `eps` or `p` no number.
        ValueError: p is not between 0 and 1.
        RuntimeError: `input` is not floating point, or does not end in `normalized_shape`; another tensor has the wrong
            shape, dtype or device.

    Under autocast it computes in float32. Differentiable any number of times.

    Example:
        >>> x, residual = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0])
        >>> cuda_ops.functional.add_layer_norm(x, residual, (2,))
        (tensor([-1.0000,  1.0000]), tensor([1., 3.]))
    """
    op = "add_layer_norm"
    p, shape = drop_probability(op, p, training), shape_of(op, normalized_shape)
    call = call_of(input, p)
    return add_layer_norm_forward(input, residual, shape, weight, bias, eps, p, call)[:2]
