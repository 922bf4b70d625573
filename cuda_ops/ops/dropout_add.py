"""dropout_add: dropout of a block's output, and the residual sum, in one pass."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .._arguments import check_tensors, expect, flag, number
from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator
from .dropout import empty_state


@register_fake("cuda_ops::dropout_add_forward")
def _(input, residual, p, call=None):
    message = "residual to have the shape of input, {}, got {}"
    expect(input.dim() == residual.dim(), "dropout_add", message, list(input.shape), list(residual.shape))
    for size, wanted in zip(residual.shape, input.shape, strict=True):
        expect(size == wanted, "dropout_add", message, list(input.shape), list(residual.shape))
    return torch.empty_like(input), empty_state(input)


dropout_add_forward = operator("dropout_add_forward")
DropoutAddFunction = autograd_function("dropout_add_forward", "DropoutAddFunction")


def dropout_add(input: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    r"""The residual sum behind dropout, :math:`\text{residual} + \text{dropout}(\text{input})`: one pass, and one
    backward for `input`; the gradient of `residual` is that of the output.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        residual: of the shape and dtype of `input`.
        p: probability of an element of `input` to be dropped, from 0 to 1; as :func:`cuda_ops.functional.dropout`,
            which draws the same numbers after the same seed.
        training: if False, nothing is dropped.

    Returns:
        A tensor like `input`, with its strides where they are dense. The sum is rounded once.

    Raises:
        TypeError: `input` or `residual` is no tensor, `p` no number or `training` no bool.
        ValueError: p is not between 0 and 1.
        RuntimeError: `input` is not floating point; a mismatch of shapes, dtypes or devices.

    Differentiable any number of times, with the mask of forward.

    Example:
        >>> cuda_ops.functional.dropout_add(torch.ones(3), torch.arange(3.0), p=0.5, training=False)
        tensor([1., 2., 3.])
    """
    if not 0.0 <= (p if type(p) is float else number("dropout_add", "p", p)) <= 1.0:
        raise ValueError(f"dropout_add: expected p to be between 0 and 1, got {p}")
    if not flag("dropout_add", "training", training):
        p = 0.0
    # What tells two calls apart in a compiled graph (see dropout).
    call = None
    if is_compiling():
        check_tensors("dropout_add", input=input)
        call = torch.empty(0, device=input.device)
    return dropout_add_forward(input, residual, p, call)[0]
