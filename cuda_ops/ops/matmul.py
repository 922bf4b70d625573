"""matmul: the product of two tensors, with torch.matmul's shapes."""

from torch import Tensor

from .._arguments import expect
from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator


@register_fake("cuda_ops::matmul_forward")
def _(input, other):
    expect(input.dim() in (2, 3), "matmul", "input to have 2 to 3 dimensions, got shape {}", tuple(input.shape))
    fits = other.dim() == input.dim()
    expect(fits, "matmul", "other to have {} dimensions, got shape {}", input.dim(), tuple(other.shape))
    message = "other to have as many rows as input has columns, {}, got input of shape {} and other of shape {}"
    fits = input.shape[-1] == other.shape[-2]
    expect(fits, "matmul", message, input.shape[-1], list(input.shape), list(other.shape))
    return input.new_empty((*input.shape[:-1], other.shape[-1]))


matmul_of_any = operator("matmul")
MatmulFunction = autograd_function("matmul_forward", "MatmulFunction")


def matmul(input: Tensor, other: Tensor) -> Tensor:
    r"""Matrix product. Like :func:`torch.matmul`.

    Args:
        input: any strides; float32, float64, float16 or bfloat16.
        other: dtype and device of `input`. Of two vectors the result is their dot product; a vector on the left is a
            row, one on the right a column, whose dimension of 1 the result has not; dimensions before the last two are
            batches, and broadcast.

    Returns:
        A contiguous tensor.

    Raises:
        TypeError: `input` or `other` is no tensor.
        RuntimeError: `input` is not floating point or a scalar, or shapes, dtypes or devices do not fit each other.
        NotImplementedError: the environment's ``CUDA_OPS_GEMM_PATH``
            names a kernel that cannot do the product.

    Products are summed in float32 (float64 for float64). float32 operands are rounded to TF32 where
    ``torch.backends.cuda.matmul.allow_tf32`` or ``torch.set_float32_matmul_precision`` allows it. Under autocast the
    tensors are cast as PyTorch casts them. Differentiable any number of times.

    On CUDA the kernel is chosen by shape, dtype and device; ``CUDA_OPS_GEMM_PATH=<name>`` in the environment forces
    a path: ``simt``, ``mma``, ``sm90``, ``sm90_skinny``, ``direct``, ``padded``, ``narrow``, ``sm90_3xtf32``,
    ``sm90_unaligned``, or a rung of the ladder, such as ``naive``. On compute capability 9.0 large products of float32
    that may not be rounded to TF32 are made on the tensor cores of three products of TF32: the error is about
    that of float32's multiply-adds, and less of long sums, at most 2^-18 + k 2^-29 of the sum of the products'
    magnitudes (multiply-adds: k 2^-24). ``CUDA_OPS_3XTF32=0`` has multiply-adds.

    Example:
        >>> a, b = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([3.0, 4.0])
        >>> cuda_ops.functional.matmul(a, b)
        tensor([11.,  4.])
    """
    return matmul_of_any(input, other)
