"""var: the variance of the elements along any dimensions."""

from torch import Tensor

from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator
from ._reduction import dims_of, reduced


@register_fake("cuda_ops::var_forward")
def _(input, dim, correction, keepdim):
    return reduced("var", input, dim, keepdim)


var_forward = operator("var_forward")
VarFunction = autograd_function("var_forward", "VarFunction")


def var(
    input: Tensor, dim: int | tuple[int, ...] | None = None, *, correction: float = 1, keepdim: bool = False
) -> Tensor:
    r"""The variance, :math:`\sum (x - \bar x)^2 / \max(n - \text{correction}, 0)` over the n elements along
    `dim`.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        dim: a dimension or several; None, and no dimensions, are all of them.
        correction: 1 for an estimate from a sample, 0 for all there is.
        keepdim: whether the result keeps the dimensions that are reduced, of one element each.

    Squares are of differences from the mean (Chan, Golub and LeVeque, 1979), without loss where the mean is far larger
    than the deviation.

    Returns:
        A contiguous tensor; NaN where there are no elements.

    Raises:
        TypeError: `input` is no tensor, `dim` no ints, or `correction` no number.
        IndexError: `input` has no dimension `dim`.
        RuntimeError: `input` is not floating point, or a dimension is named twice.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.var(torch.tensor([[1.0, 3.0], [3.0, 5.0]]), 1)
        tensor([2., 2.])
    """
    return var_forward(input, dims_of("var", dim), correction, keepdim)
