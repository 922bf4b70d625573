"""What the reductions share: dimensions, and fake kernels."""

import torch

from .._arguments import as_integer, check_dtype, expect
from .._fakes import register_fake


def dims_of(op: str, dim, argument: str = "dim") -> list[int]:
    """`dim` as the ops take it: None and no dimensions are all of them."""
    if dim is None:
        return []
    if type(dim) is int:
        return [dim]
    values = dim if isinstance(dim, (tuple, list)) else (dim,)
    try:
        return [as_integer(value) for value in values]
    except TypeError:
        raise TypeError(f"{op}: expected {argument} to be an int or a tuple of ints, got {dim!r}") from None


def check_type(op: str, dtype):
    if dtype is not None:
        check_dtype(op, dtype)


def reduced(op, input, dims, keepdim, dtype=None):
    """For fake kernels: an empty result."""
    rank, bound = input.dim(), max(input.dim(), 1)
    message = "dim to be in [{}, {}] for an input of shape {}, got {}"
    gone = set()
    for dim in dims:
        shape = list(input.shape)
        expect(-bound <= dim < bound, op, message, -bound, bound - 1, shape, dim, check=torch._check_index)
        expect(dim % bound not in gone, op, "dim to name each dimension once, got {}", list(dims))
        gone.add(dim % bound)
    if not dims:
        gone = set(range(rank))
    shape = []
    for d, size in enumerate(input.shape):
        if d not in gone:
            shape.append(size)
        elif keepdim:
            shape.append(1)
    return input.new_empty(shape, dtype=dtype)


@register_fake("cuda_ops::reduction_backward_cpu")
def _(grad_output, input, output, kind, parameter, dim, keepdim):
    return torch.empty_like(input)
