"""amin: the smallest of the elements along any dimensions."""

from torch import Tensor

from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator
from ._reduction import dims_of, reduced


@register_fake("cuda_ops::amin_forward")
def _(input, dim, keepdim):
    return reduced("amin", input, dim, keepdim)


amin_forward = operator("amin_forward")
AminFunction = autograd_function("amin_forward", "AminFunction")


def amin(input: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    r"""The smallest of the elements along `dim`; NaN if one of them is.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        dim: a dimension or several; None, and no dimensions, are all of them.
        keepdim: whether the result keeps the dimensions that are reduced, of one element each.

    Returns:
        A contiguous tensor.

    Raises:
        TypeError: `input` is no tensor, `dim` no ints.
        IndexError: `input` has no dimension `dim`, or no elements along it.
        RuntimeError: `input` is not floating point, or a dimension is named twice.

    Differentiable any number of times; equal elements share the gradient.

    Example:
        >>> cuda_ops.functional.amin(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 1)
        tensor([1., 3.])
    """
    return amin_forward(input, dims_of("amin", dim), keepdim)
