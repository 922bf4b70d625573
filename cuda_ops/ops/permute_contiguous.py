"""permute_contiguous: a tensor with its dimensions in another order, contiguous."""

import torch
from torch import Tensor

from .._arguments import expect
from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator
from ._reduction import dims_of


@register_fake("cuda_ops::permute_contiguous_forward")
def _(input, dims):
    op, rank, seen = "permute_contiguous", input.dim(), set()
    expect(len(dims) == rank, op, "dims to name the {} dimensions of input, got {}", rank, list(dims))
    message = "dims to be in [{}, {}] for an input of shape {}, got {}"
    for dim in dims:
        shape = list(input.shape)
        expect(-rank <= dim < rank, op, message, -rank, rank - 1, shape, dim, check=torch._check_index)
        expect(dim % rank not in seen, op, "dims to name each dimension once, got {}", list(dims))
        seen.add(dim % rank)
    return input.new_empty([input.shape[dim] for dim in dims])


permute_contiguous_forward = operator("permute_contiguous_forward")
PermuteContiguousFunction = autograd_function("permute_contiguous_forward", "PermuteContiguousFunction")


def permute_contiguous(input: Tensor, dims: tuple[int, ...]) -> Tensor:
    r"""`input.permute(dims).contiguous()`: the dimensions in another order, copied. Matrices are transposed in tiles
    through shared memory.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        dims: all dimensions of `input`, in the order that the result has them.

    Returns:
        A contiguous tensor, a new one also where the order is that of `input`.

    Raises:
        TypeError: `input` is no tensor, or `dims` no ints.
        IndexError: `input` has no such dimension.
        RuntimeError: `input` is not floating point, or `dims` does not name each dimension once.

    Differentiable any number of times; the gradient is a view of the incoming one.

    Example:
        >>> cuda_ops.functional.permute_contiguous(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (1, 0))
        tensor([[1., 3.],
                [2., 4.]])
    """
    return permute_contiguous_forward(input, dims_of("permute_contiguous", dims, "dims"))
