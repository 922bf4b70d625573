"""index_add: rows of one tensor added to the rows of another that indices name, out of place and in place."""

import torch
from torch import Tensor

from .._arguments import expect, integer, number
from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._operators import operator
from ._scatter import inplace_operator, wrapped_dim

require_ops("index_add_zeros")


@register_fake("cuda_ops::index_add_forward")
def _(input, dim, index, source, alpha):
    wrapped_dim("index_add", dim, input)
    return input.new_empty(input.shape)


@register_fake("cuda_ops::index_add_backward")
def _(grad_output, dim, index, alpha):
    op = "index_add_backward"
    dim = wrapped_dim(op, dim, grad_output)
    expect(index.dim() <= 1, op, "index to have 1 dimension, got shape {}", list(index.shape), check=torch._check_index)
    shape = list(grad_output.shape)
    if shape:
        shape[dim] = index.numel()
    return grad_output.new_empty(shape)


@register_fake("cuda_ops::index_add_inplace")
def _(input, dim, index, source, alpha):
    wrapped_dim("index_add_", dim, input)


index_add_forward = operator("index_add_forward")
index_add_inplace = inplace_operator("index_add", index_add_forward)
IndexAddFunction = autograd_function("index_add_forward", "IndexAddFunction")


def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    r"""`input`, to which the slices of `source` are added that `index` sends there, as :func:`torch.index_add`; along
    the first dimension :math:`\text{output}_r = \text{input}_r + \alpha \sum_{k : \text{index}_k = r} \text{source}_k`.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        dim: the dimension along which slices are named.
        index: [K], int64 or int32, in [0, R) where R is the size of `input` along `dim`.
        source: the shape of `input`, but K along `dim`; any strides.
        alpha: a factor of `source`.

    Returns:
        A contiguous tensor of the shape of `input`.

    Raises:
        IndexError: an index is not in [0, R), `input` has no dimension `dim`, or `index` more than one. On CUDA an
            index is told of late, as :func:`embedding` does; its slice is added nowhere.
        TypeError: an argument is of another type.
        RuntimeError: a mismatch of shapes, dtypes or devices.
        NotImplementedError: 2^31 slices or more.

    Deterministic: slices are added in their order, in float32 for the halves, and rounded once; but on CUDA slices of
    one or two elements only under :func:`torch.use_deterministic_algorithms`, as :func:`scatter_add` is. Differentiable
    any number of times by `input` and `source`.

    Example:
        >>> cuda_ops.functional.index_add(torch.zeros(3), 0, torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 4.0]))
        tensor([2., 0., 5.])
    """
    return index_add_forward(
        input, integer("index_add", "dim", dim), index, source, number("index_add", "alpha", alpha)
    )


def index_add_(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    r"""As :func:`index_add`, written into `input`, as :meth:`torch.Tensor.index_add_`. Slices that no index names are
    not touched.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        dim: the dimension along which slices are named.
        index: [K], int64 or int32, in [0, R) where R is the size of `input` along `dim`.
        source: the shape of `input`, but K along `dim`; any strides.
        alpha: a factor of `source`.

    Returns:
        `input`.

    Raises:
        RuntimeError: `input` is a leaf that requires grad, has elements that share memory, or shares it with the
            others; and what :func:`index_add` raises.

    Example:
        >>> x = torch.zeros(3)
        >>> cuda_ops.functional.index_add_(x, 0, torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 4.0]))
        tensor([2., 0., 5.])
    """
    return index_add_inplace(
        input, integer("index_add_", "dim", dim), index, source, number("index_add_", "alpha", alpha)
    )
