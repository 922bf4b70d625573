"""add_rms_norm: rms_norm of a residual sum, in one pass."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._operators import operator
from ._norm import check_shapes, empty_rstd, shape_of
from .add_layer_norm import call_of, drop_probability
from .rms_norm import eps_or_default

require_ops("add_rms_norm_gradients", "add_rms_norm_tangents")


@register_fake("cuda_ops::add_rms_norm_forward")
def _(input, residual, normalized_shape, weight, eps, p, call=None):
    rows = check_shapes("add_rms_norm", input, normalized_shape, weight=weight)
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    state = input.new_empty(2 if p > 0.0 else 0, dtype=torch.int64)
    return output, torch.empty_like(output), empty_rstd(input, rows), state


add_rms_norm_forward = operator("add_rms_norm_forward")
AddRMSNormFunction = autograd_function("add_rms_norm_forward", "AddRMSNormFunction")


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    p: float = 0.0,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    r"""The norm of a residual sum, and the sum itself: :math:`\text{sum} = \text{residual} + \text{dropout}
    (\text{input})`, :math:`\text{output} = \text{rms\_norm}(\text{sum})`; in one kernel on CUDA, and backward in one
    that adds the gradient of the sum.

    Args:
        input: (\*, `normalized_shape`), any strides; float32, float64, float16 or bfloat16.
        residual: of the shape and dtype of `input`.
        normalized_shape, weight, eps: as those of :func:`cuda_ops.functional.rms_norm`.
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

    Differentiable any number of times.

    Example:
        >>> x, residual = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 6.0])
        >>> cuda_ops.functional.add_rms_norm(x, residual, (2,))
        (tensor([0.2000, 1.4000]), tensor([1., 7.]))
    """
    op = "add_rms_norm"
    eps = eps_or_default(op, input, eps)
    p, shape = drop_probability(op, p, training), shape_of(op, normalized_shape)
    call = call_of(input, p)
    return add_rms_norm_forward(input, residual, shape, weight, eps, p, call)[:2]
