"""concat: tensors one behind the other along a dimension. Its other name, as PyTorch has it, is cat."""

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .._arguments import expect, integer
from .._fakes import register_fake


def passed_over(tensor) -> bool:
    return tensor.dim() == 1 and tensor.shape[0] == 0


@register_fake("cuda_ops::concat_forward")
def _(tensors, dim):
    op = "concat"
    expect(len(tensors) > 0, op, "tensors to have elements, got none")
    pattern = next((tensor for tensor in tensors if not passed_over(tensor)), tensors[0])
    rank, shape = pattern.dim(), list(pattern.shape)
    expect(rank > 0, op, "tensors to have dimensions, got one that has none")
    if passed_over(pattern):  # as all are: any dimension will do
        dim = 0
    message = "dim to be in [{}, {}] for tensors of shape {}, got {}"
    expect(-rank <= dim < rank, op, message, -rank, rank - 1, shape, dim, check=torch._check_index)
    dim %= rank
    memory_format, total = suggest_memory_format(pattern), 0
    for i, tensor in enumerate(tensors):
        expect(tensor.dtype == pattern.dtype, op, "tensors[{}] to have one dtype, got {}", i, tensor.dtype)
        if passed_over(tensor) and rank != 1:
            continue
        expect(
            tensor.dim() == rank, op, "tensors[{}] to have the shape {} but along dim, got {}", i, shape, tensor.shape
        )
        for d in range(rank):
            message = "tensors[{}] to have the shape {} but along dim, got {}"
            expect(d == dim or tensor.shape[d] == shape[d], op, message, i, shape, tensor.shape)
        if suggest_memory_format(tensor) != memory_format:
            memory_format = torch.contiguous_format
        total = total + tensor.shape[dim]
    shape[dim] = total
    return torch.empty(shape, dtype=pattern.dtype, device=pattern.device, memory_format=memory_format)


# torch.ops parses the list; the parser of other ops' calls (_operators.py) knows none.
concat_forward = torch.ops.cuda_ops.concat_forward.default


def concat(tensors, dim: int = 0, *, out=None) -> Tensor:
    r"""The tensors one behind the other along `dim`, as :func:`torch.cat`. On CUDA one launch copies up to 64 of them.

    Args:
        tensors: a tuple or list of tensors of one dtype (float32, float64, float16 or bfloat16) and one
            device, any strides; of one shape but along `dim`. Those of shape (0,) are passed over.
        dim: the dimension; it may count from the end.
        out: not supported.

    Returns:
        A new tensor, contiguous, or channels_last where all are.

    Raises:
        TypeError: `tensors` is no sequence of tensors, or `dim` no int.
        IndexError: the tensors have no dimension `dim`.
        RuntimeError: there are no tensors, they are not floating point, or dtypes, devices or shapes do not fit.
        NotImplementedError: `out` is given.

    Differentiable any number of times; gradients are views of the incoming one.

    Example:
        >>> cuda_ops.functional.concat((torch.tensor([1.0, 2.0]), torch.tensor([3.0])))
        tensor([1., 2., 3.])
    """
    if out is not None:
        raise NotImplementedError("concat: out is not supported")
    if not isinstance(tensors, (tuple, list)) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError(f"concat: expected tensors to be a tuple or list of Tensors, got {type(tensors).__name__}")
    if not tensors:  # by which the dispatcher could not choose a kernel
        raise RuntimeError("concat: expected tensors to have elements, got none")
    return concat_forward(list(tensors), integer("concat", "dim", dim))


cat = concat
