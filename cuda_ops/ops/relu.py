"""relu: max(input, 0), out of place and in place."""

import torch
from torch import Tensor

from .._arguments import check_tensors
from .._autograd import Function
from .._fakes import register_fake
from .._library import ops


@register_fake("cuda_ops::relu_forward")
def _(input):
    return torch.empty_like(input)


@register_fake("cuda_ops::relu_inplace")
def _(input):
    return None


@register_fake("cuda_ops::relu_backward")
def _(grad_output, output):
    return torch.empty_like(output)


class ReLUFunction(Function):
    """Saves its output, which says all that backward asks, so that the input may be freed or written over."""

    @staticmethod
    def forward(ctx, input):
        output = ops.relu_forward(input)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        (output,) = ctx.saved_tensors
        return ReLUBackwardFunction.apply(grad_output, output)


class ReLUInplaceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        ops.relu_inplace(input)
        ctx.mark_dirty(input)
        ctx.save_for_backward(input)
        return input

    @staticmethod
    def backward(ctx, grad_output):
        (output,) = ctx.saved_tensors
        # Detached, since it is constant for the backward: in place on a view, the saved output would otherwise lead to
        # this very node on a second way, and a double backward would run it twice.
        return ReLUBackwardFunction.apply(grad_output, output.detach())


class ReLUBackwardFunction(Function):
    """grad_input = grad_output where output > 0, else 0: linear in grad_output with a factor that is constant
    wherever it has a derivative, so that its own gradient is the same function, and that of output is none."""

    @staticmethod
    def forward(ctx, grad_output, output):
        ctx.save_for_backward(output)
        return ops.relu_backward(grad_output, output)

    @staticmethod
    def backward(ctx, grad_grad_input):
        (output,) = ctx.saved_tensors
        return ReLUBackwardFunction.apply(grad_grad_input, output), None


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    r"""Rectified linear unit, :math:`\text{output}_i = \max(\text{input}_i, 0)`, elementwise.

    NaN stays NaN. The gradient is 0 wherever the output is 0, and passes where it is NaN, as in PyTorch.

    Args:
        input: any shape, any strides; float32 or float64, on CUDA float16 and bfloat16 too.
        inplace: write the result into `input`, and return it.

    Returns:
        A tensor like `input`, with its strides where they are dense; `input` itself if `inplace`.

    Raises:
        TypeError: `input` is no tensor.
        RuntimeError: `input` is not floating point; or `inplace`, and `input` is a leaf that requires grad or has
            elements that share memory.
        NotImplementedError: `input` is float16 or bfloat16 on the CPU.

    Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.relu(torch.tensor([1.0, -3.0]))
        tensor([1., 0.])
    """
    check_tensors("relu", input=input)
    if not inplace:
        return ReLUFunction.apply(input)
    if torch.compiler.is_compiling():
        # torch.compile does not trace a Function that writes into its input. The graph that it makes has no writes
        # anyway but those into arguments, so that this costs nothing there.
        return input.copy_(ReLUFunction.apply(input))
    if torch.is_grad_enabled():
        # autograd refuses these as well, but only after the Function has written over them.
        base = input._base if input._is_view() else input
        if base.is_leaf and base.requires_grad:
            raise RuntimeError("relu: a leaf Variable that requires grad is being used in an in-place operation")
    return ReLUInplaceFunction.apply(input)


class ReLU(torch.nn.ReLU):
    """torch.nn.ReLU by :func:`cuda_ops.functional.relu`: same arguments, repr and (empty) state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return relu(input, inplace=self.inplace)
