"""cumsum: running sums along a dimension."""

import torch
from torch import Tensor

from .._arguments import expect
from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator
from ._reduction import check_type


@register_fake("cuda_ops::cumsum_forward")
def _(input, dim, dtype, reverse):
    bound, shape = max(input.dim(), 1), list(input.shape)
    message = "dim to be in [{}, {}] for an input of shape {}, got {}"
    expect(-bound <= dim < bound, "cumsum", message, -bound, bound - 1, shape, dim, check=torch._check_index)
    return torch.empty_like(input, dtype=dtype)


cumsum_forward = operator("cumsum_forward")
CumsumFunction = autograd_function("cumsum_forward", "CumsumFunction")


def cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    r"""Running sums along a dimension, as :func:`torch.cumsum`:
    :math:`\text{output}_c = \text{input}_0 + \dots + \text{input}_c`.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        dim: the dimension; it may count from the end.
        dtype: that of the result, floating point; `input` is cast to it first.

    On CUDA it is one pass over `input`, with sums in float32 for float16, bfloat16 and float32. Chunks of long rows
    are combined in one order, whichever is done first: results repeat bit by bit.

    Returns:
        A tensor like `input`, with its strides where they are dense.

    Raises:
        TypeError: `input` is no tensor, `dim` no int, or `dtype` no dtype.
        IndexError: `input` has no dimension `dim`.
        RuntimeError: `input` is not floating point and no `dtype` is given.
        NotImplementedError: `dtype` is not floating point.

    Under CUDA's autocast it computes in float32. Differentiable any number of times.

    Source: the chunks' look-back is that of Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled
    Look-back", 2016, with an order of its own (csrc/include/cuda_ops/cumsum.h).

    Example:
        >>> cuda_ops.functional.cumsum(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), 1)
        tensor([[ 1.,  3.,  6.],
                [ 4.,  9., 15.]])
    """
    check_type("cumsum", dtype)
    return cumsum_forward(input, dim, dtype, False)
