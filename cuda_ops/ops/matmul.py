"""matmul: the product of two tensors, with torch.matmul's shapes."""

import math

import torch
from torch import Tensor

from .._arguments import check_tensors, expect
from .._autocast import autocast_to_lower
from .._autograd_old import Function
from .._fakes import register_fake
from .._library import ops


@register_fake("cuda_ops::matmul_forward")
def _(input, other):
    expect(input.dim() in (2, 3), "matmul", "input to have 2 to 3 dimensions, got shape {}", tuple(input.shape))
    fits = other.dim() == input.dim()
    expect(fits, "matmul", "other to have {} dimensions, got shape {}", input.dim(), tuple(other.shape))
    message = "other to have as many rows as input has columns, {}, got input of shape {} and other of shape {}"
    fits = input.shape[-1] == other.shape[-2]
    expect(fits, "matmul", message, input.shape[-1], list(input.shape), list(other.shape))
    return input.new_empty((*input.shape[:-1], other.shape[-1]))


class MatmulFunction(Function):
    """Two matrices, or a batch of pairs. The gradients are products again, so that it differentiates any number of
    times; transposed views are taken as they are stored."""

    @staticmethod
    def forward(ctx, input, other):
        ctx.save_for_backward(
            input if ctx.needs_input_grad[1] else None,
            other if ctx.needs_input_grad[0] else None,
        )
        return ops.matmul_forward(input, other)

    @staticmethod
    def backward(ctx, grad_output):
        input, other = ctx.saved_tensors
        grad_input = grad_other = None
        if ctx.needs_input_grad[0]:
            grad_input = MatmulFunction.apply(grad_output, other.transpose(-2, -1))
        if ctx.needs_input_grad[1]:
            grad_other = MatmulFunction.apply(input.transpose(-2, -1), grad_output)
        return grad_input, grad_other


def matmul(input: Tensor, other: Tensor) -> Tensor:
    r"""Matrix product. Like :func:`torch.matmul`.

    Args:
        input: any strides; float32 or float64, on CUDA float16 and bfloat16 too.
        other: dtype and device of `input`. Of two vectors the result is their dot product; a vector on the left is a
            row, one on the right a column, whose dimension of 1 the result has not; dimensions before the last two are
            batches, and broadcast.

    Returns:
        A contiguous tensor.

    Raises:
        TypeError: `input` or `other` is no tensor.
        RuntimeError: `input` is not floating point or a scalar, or shapes, dtypes or devices do not fit each other.
        NotImplementedError: `input` is float16 or bfloat16 on the CPU, or the environment's ``CUDA_OPS_GEMM_PATH``
            names a kernel that cannot do the product.

    Products are summed in float32 (float64 for float64). float32 operands are rounded to TF32 where
    ``torch.backends.cuda.matmul.allow_tf32`` or ``torch.set_float32_matmul_precision`` allows it. Under autocast the
    tensors are cast as PyTorch casts them. Differentiable any number of times.

    On CUDA the kernel is chosen by shape, dtype and device; ``CUDA_OPS_GEMM_PATH=<name>`` in the environment forces
    a path: ``simt``, ``mma``, ``sm90``, ``sm90_skinny``, ``direct``, or a rung that is for lessons alone, such as
    ``naive``.

    Example:
        >>> a, b = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([3.0, 4.0])
        >>> cuda_ops.functional.matmul(a, b)
        tensor([11.,  4.])
    """
    check_tensors("matmul", input=input, other=other)
    input, other = autocast_to_lower("matmul", input, other)
    if input.dim() == 2 and other.dim() == 2:
        return MatmulFunction.apply(input, other)
    return matmul_of_any(input, other)


def matmul_of_any(input, other):
    for name, tensor in (("input", input), ("other", other)):
        if tensor.dim() == 0:
            raise RuntimeError(f"matmul: expected {name} to have at least 1 dimension, got a scalar")
    if input.shape[-1] != other.shape[max(other.dim() - 2, 0)]:
        raise RuntimeError(
            f"matmul: expected other to have as many rows as input has columns, {input.shape[-1]}, got input of shape "
            f"{list(input.shape)} and other of shape {list(other.shape)}"
        )
    a = input.unsqueeze(0) if input.dim() == 1 else input
    b = other.unsqueeze(1) if other.dim() == 1 else other
    rows, columns = a.shape[-2], b.shape[-1]
    if b.dim() == 2:  # all rows of all matrices of a are those of one
        batch = a.shape[:-2]
        product = MatmulFunction.apply(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b)
    else:
        batch = broadcast_batch(input, other, a.shape[:-2], b.shape[:-2])
        # A matrix that all products share is not copied: its stride is 0.
        a, b = (t.expand(*batch, *t.shape[-2:]).reshape(math.prod(batch), *t.shape[-2:]) for t in (a, b))
        product = MatmulFunction.apply(a, b)
    shape = [*batch]
    shape += [rows] if input.dim() > 1 else []
    shape += [columns] if other.dim() > 1 else []
    return product.reshape(shape)


def broadcast_batch(input, other, left, right):
    try:
        return torch.broadcast_shapes(left, right)
    except RuntimeError:
        raise RuntimeError(
            "matmul: expected the dimensions before the last two to broadcast, got input of shape "
            f"{list(input.shape)} and other of shape {list(other.shape)}"
        ) from None
