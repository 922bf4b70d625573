"""sum: of the elements along any dimensions."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator
from ._reduction import check_type, dims_of, reduced


@register_fake("cuda_ops::sum_forward")
def _(input, dim, keepdim, dtype):
    return reduced("sum", input, dim, keepdim, dtype)


sum_forward = operator("sum_forward")
SumFunction = autograd_function("sum_forward", "SumFunction")


def sum(
    input: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    r"""The sum of the elements along `dim`.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        dim: a dimension or several; None, and no dimensions, are all of them.
        keepdim: whether the result keeps the dimensions that are reduced, of one element each.
        dtype: that of the result, floating point; `input` is taken in it.

    Sums are in float32 for float16 and bfloat16, else in the dtype, by parts that are added in a fixed order.

    Returns:
        A contiguous tensor; 0 where there are no elements.

    Raises:
        TypeError: `input` is no tensor, `dim` no ints, or `dtype` no dtype.
        IndexError: `input` has no dimension `dim`.
        RuntimeError: `input` is not floating point and no `dtype` is given, or a dimension is named twice.
        NotImplementedError: `dtype` is not floating point.

    Under CUDA's autocast it computes in float32. Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 1)
        tensor([3., 7.])
    """
    check_type("sum", dtype)
    return sum_forward(input, dims_of("sum", dim), keepdim, dtype)
