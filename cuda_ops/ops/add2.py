"""add2: the sum of two tensors. examples/add2 builds its kernels in two more ways: JIT and CMake."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator


@register_fake("cuda_ops::add2_forward")
def _(input, other):
    if input.shape != other.shape:
        try:
            input, _ = torch.broadcast_tensors(input, other)
        except RuntimeError:
            raise RuntimeError(
                "add2: expected other to have a shape that broadcasts with that of input, "
                f"{list(input.shape)}, got {list(other.shape)}"
            ) from None
    return torch.empty_like(input)


add2_forward = operator("add2_forward")
Add2Function = autograd_function("add2_forward", "Add2Function")


def add2(input: Tensor, other: Tensor) -> Tensor:
    r"""Sum of two tensors, :math:`\text{output}_i = \text{input}_i + \text{other}_i`.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        other: the dtype and device of `input`; a shape that broadcasts with it as in `torch.add`.

    Returns:
        A tensor of the broadcast shape, with the strides of `input` where they are dense.

    Raises:
        TypeError: `input` or `other` is no tensor.
        RuntimeError: `input` is not floating point, or dtype, device or shape of `other` do not fit it (PyTorch's own
            add would promote the dtype).

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.add2(torch.tensor([1.0, -3.0]), torch.tensor([10.0, 20.0]))
        tensor([11., 17.])
    """
    return add2_forward(input, other)
