"""argmin: where the smallest of the elements is."""

import torch
from torch import Tensor

from .._arguments import integer
from .._fakes import register_fake
from .._operators import operator
from ._reduction import reduced


@register_fake("cuda_ops::argmin_forward")
def _(input, dim, keepdim):
    return reduced("argmin", input, [] if dim is None else [dim], keepdim, torch.int64)


argmin_forward = operator("argmin_forward")


def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    r"""The index of the smallest of the elements along `dim`, or among all elements in their order. Of equal ones the
    first; NaN counts as the smallest.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        dim: the dimension; None: all elements.
        keepdim: whether the result keeps the dimensions that are reduced, of one element each.

    Returns:
        A contiguous tensor of int64.

    Raises:
        TypeError: `input` is no tensor, `dim` no int.
        IndexError: `input` has no dimension `dim`, or no elements along it.
        RuntimeError: `input` is not floating point.

    Example:
        >>> cuda_ops.functional.argmin(torch.tensor([[1.0, 2.0], [4.0, 3.0]]), 1)
        tensor([0, 1])
    """
    return argmin_forward(input, dim if dim is None else integer("argmin", "dim", dim), keepdim)
