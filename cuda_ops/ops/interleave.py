"""interleave: two tensors by turns along a dimension, such as ShuffleNet's channels."""

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .._arguments import check_tensors, expect, integer
from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._operators import operator

OP = "interleave"

require_ops("interleave_tangent")


def _dim(op, tensor, dim):
    rank, shape = tensor.dim(), list(tensor.shape)
    expect(rank > 0, op, "input to have dimensions, got one that has none")
    message = "dim to be in [{}, {}] for a tensor of shape {}, got {}"
    expect(-rank <= dim < rank, op, message, -rank, rank - 1, shape, dim, check=torch._check_index)
    return dim % rank


def _format(*tensors):
    formats = {suggest_memory_format(tensor) for tensor in tensors}
    return torch.channels_last if formats == {torch.channels_last} else torch.contiguous_format


@register_fake("cuda_ops::interleave_forward")
def _(input, other, dim):
    fits = input.dim() == other.dim()
    for size, wanted in zip(other.shape, input.shape, strict=False):
        fits = fits and size == wanted
    expect(fits, OP, "other to have the shape of input, {}, got {}", list(input.shape), list(other.shape))
    dim, shape = _dim(OP, input, dim), list(input.shape)
    shape[dim] = 2 * shape[dim]
    return torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=_format(input, other))


@register_fake("cuda_ops::interleave_backward")
def _(grad, dim):
    op = "interleave_backward"
    dim, shape = _dim(op, grad, dim), list(grad.shape)
    expect(shape[dim] % 2 == 0, op, "grad to have an even size along dim, got {}", list(grad.shape))
    shape[dim] = shape[dim] // 2
    memory_format = _format(grad)
    return tuple(
        torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=memory_format) for _ in range(2)
    )


interleave_forward = operator("interleave_forward")
InterleaveFunction = autograd_function("interleave_forward", "InterleaveFunction")


def interleave(input: Tensor, other: Tensor, dim: int = 1) -> Tensor:
    r"""The slices of two tensors along `dim` by turns: those of `input` have even indices, those of `other` odd ones.
    With ``dim=1`` it is ``channel_shuffle(torch.cat((input, other), 1), 2)``, the end of ShuffleNetV2's blocks, in one
    copy.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        other: of its shape and dtype.
        dim: the dimension; it may count from the end.

    Returns:
        A new tensor, twice as large along `dim`: contiguous, or channels_last where both are. Of images in
        channels_last, inputs that are slices of channels of larger images are read where they are.

    Raises:
        TypeError: an argument is not of its type.
        IndexError: `input` has no such dimension.
        RuntimeError: `input` is not floating point; dtypes, devices or shapes do not fit.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.interleave(torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0]), 0)
        tensor([ 1., -1.,  2., -2.])
    """
    if not (isinstance(input, Tensor) and isinstance(other, Tensor)):
        check_tensors(OP, input=input, other=other)
    return interleave_forward(input, other, integer(OP, "dim", dim))
