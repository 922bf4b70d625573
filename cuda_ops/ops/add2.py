"""add2: the sum of two tensors. examples/add2 builds its kernels in two more ways: JIT and CMake."""

import torch
from torch import Tensor

from .._arguments import check_tensors
from .._autograd_old import Function
from .._fakes import register_fake
from .._library import ops


@register_fake("cuda_ops::add2_forward")
def _(input, other):
    return torch.empty_like(input)


class Add2Function(Function):
    """The gradient of both addends is grad_output itself, so that backward needs no kernel, at any order."""

    @staticmethod
    def forward(ctx, input, other):
        return ops.add2_forward(input, other)

    @staticmethod
    def backward(ctx, grad_output):
        return tuple(grad_output if needed else None for needed in ctx.needs_input_grad)


def add2(input: Tensor, other: Tensor) -> Tensor:
    r"""Sum of two tensors, :math:`\text{output}_i = \text{input}_i + \text{other}_i`.

    Args:
        input: any shape, any strides; float32 or float64, on CUDA float16 and bfloat16 too.
        other: the dtype and device of `input`; a shape that broadcasts with it as in `torch.add`.

    Returns:
        A tensor of the broadcast shape, with the strides of `input` where they are dense.

    Raises:
        TypeError: `input` or `other` is no tensor.
        RuntimeError: `input` is not floating point, or dtype, device or shape of `other` do not fit it (PyTorch's own
            add would promote the dtype).
        NotImplementedError: `input` is float16 or bfloat16 on the CPU.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.add2(torch.tensor([1.0, -3.0]), torch.tensor([10.0, 20.0]))
        tensor([11., 17.])
    """
    check_tensors("add2", input=input, other=other)
    if input.shape != other.shape:
        # The views that broadcasting makes are autograd's, and so is the sum over their repeated elements in backward.
        input, other = torch.broadcast_tensors(input, other)
    return Add2Function.apply(input, other)
