"""norm: of vectors along any dimensions."""

import torch
from torch import Tensor

from .._arguments import number
from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator
from ._reduction import check_type, dims_of, reduced


@register_fake("cuda_ops::norm_forward")
def _(input, p, dim, keepdim, dtype):
    return reduced("norm", input, dim, keepdim, dtype)


norm_forward = operator("norm_forward")
NormFunction = autograd_function("norm_forward", "NormFunction")


def norm(
    input: Tensor,
    p: float | str | None = "fro",
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""The norm of the elements along `dim`, which are taken for one vector: :math:`(\sum |x|^p)^{1/p}`; for infinite p
    the largest or smallest :math:`|x|`, and for 0 how many are not 0.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        p: any number; "fro" and None are 2. (The nuclear norm of matrices is not supported.)
        dim: a dimension or several; None, and no dimensions, are all of them.
        keepdim: whether the result keeps the dimensions that are reduced, of one element each.
        dtype: that of the result, floating point; `input` is taken in it.

    Sums are in float32 for float16 and bfloat16, else in the dtype, by parts that are added in a fixed order.

    Returns:
        A contiguous tensor; 0 where there are no elements.

    Raises:
        TypeError: `input` is no tensor, `dim` no ints, `p` no number, or `dtype` no dtype.
        IndexError: `input` has no dimension `dim`.

        NotImplementedError: `dtype` is not floating point, or p is "nuc".

    Under CUDA's autocast it computes in float32. Differentiable any number of times; the gradient of a norm of zeros is
    0, and equal elements share that of an infinite p.

    Example:
        >>> cuda_ops.functional.norm(torch.tensor([[3.0, 4.0], [0.0, -2.0]]), dim=1)
        tensor([5., 2.])
    """
    if p == "nuc":
        raise NotImplementedError('norm: expected p to be a number, got "nuc"')
    p = 2.0 if p is None or p == "fro" else number("norm", "p", p)
    check_type("norm", dtype)
    return norm_forward(input, p, dims_of("norm", dim), keepdim, dtype)
