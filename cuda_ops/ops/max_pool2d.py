"""max_pool2d: the largest value of each window, and where it is."""

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .._arguments import check_tensors, flag, pair
from .._autograd_old import Function
from .._fakes import register_fake
from .._library import ops
from ._pool2d import empty_pooled, pair_or_kernel


@register_fake("cuda_ops::max_pool2d_forward")
def _(input, kernel_size, stride, padding, dilation, ceil_mode):
    window = (kernel_size, stride, padding, dilation, ceil_mode)
    return (
        empty_pooled("max_pool2d", input, *window),
        empty_pooled("max_pool2d", input, *window, dtype=torch.int64),
    )


@register_fake("cuda_ops::max_pool2d_backward")
def _(grad_output, indices, input_size, kernel_size, stride, padding, dilation, ceil_mode):
    shape = (*indices.shape[:-2], *input_size)
    return torch.empty(
        shape, dtype=grad_output.dtype, device=grad_output.device, memory_format=suggest_memory_format(indices)
    )


class MaxPool2dFunction(Function):
    @staticmethod
    def forward(ctx, input, *window):
        output, indices = ops.max_pool2d_forward(input, *window)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)  # no zeros for the gradient that indices does not have
        ctx.save_for_backward(indices)
        ctx.input_size = input.shape[-2:]
        ctx.window = window
        return output, indices

    @staticmethod
    def backward(ctx, grad_output, _):
        (indices,) = ctx.saved_tensors
        grad_input = None
        if grad_output is not None:
            grad_input = MaxPool2dBackwardFunction.apply(grad_output, indices, ctx.input_size, *ctx.window)
        return grad_input, *(None for _ in ctx.window)


class MaxPool2dBackwardFunction(Function):
    """grad_input: each element of grad_output at its index. Linear, and its own gradient is the way back: the element
    at each index."""

    @staticmethod
    def forward(ctx, grad_output, indices, input_size, *window):
        ctx.save_for_backward(indices)
        ctx.rest = 2 + len(window)
        return ops.max_pool2d_backward(grad_output, indices, input_size, *window)

    @staticmethod
    def backward(ctx, grad_grad_input):
        (indices,) = ctx.saved_tensors
        # The index of a window without any position in the input is -1.
        inside = (indices >= 0) & (indices < grad_grad_input.shape[-2] * grad_grad_input.shape[-1])
        places = torch.where(inside, indices, 0).flatten(-2)
        picked = grad_grad_input.flatten(-2).gather(-1, places).view(indices.shape)
        return torch.where(inside, picked, 0), *(None for _ in range(ctx.rest))


def max_pool2d(
    input: Tensor,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Largest value of each window of a plane, as :func:`torch.nn.functional.max_pool2d`.

    .. math::
        \text{output}_{n,c,i,j} = \max_{k<k_H,\, l<k_W}
            \text{input}_{n,c,\; i s_H - p_H + k d_H,\; j s_W - p_W + l d_W}

    NaN is larger than every number. Of several largest values the first gets the gradient, in the order of rows; of
    several NaNs the last.

    Args:
        input: (N, C, H, W) or (C, H, W), any strides; only N may be 0. float32 or float64, on CUDA float16 and
            bfloat16 too.
        kernel_size: height and width of the window, or one int for both.
        stride: distance between windows, a pair or one int; kernel_size if it is None.
        padding: positions of minus infinity on each side, a pair or one int; at most half of kernel_size.
        dilation: distance between the positions of one window, a pair or one int.
        ceil_mode: whether a last window that runs past the padding's end counts; it does if it starts before the
            input's end.
        return_indices: whether to return the indices too.

    Returns:
        The maxima, with input's memory format, or if `return_indices` the pair of them and of their places in the
        plane, :math:`h \cdot W + w` in int64. A window all of whose positions are padding, as dilation and ceil_mode
        together can make one, gives minus infinity and the place -1 (PyTorch: a place that is not the window's).

    Raises:
        TypeError: a pair is not of ints; `ceil_mode` is no bool; `input` is no tensor.
        RuntimeError: a pair is not one int or two, or out of range; `input` is not floating point, not of 3 or
            4 dimensions, empty but for N, or too small for one window.
        NotImplementedError: `input` is float16 or bfloat16 on the CPU.

    Differentiable any number of times. Results repeat bit by bit.

    Example:
        >>> cuda_ops.functional.max_pool2d(torch.arange(16.0).view(1, 4, 4), 2)
        tensor([[[ 5.,  7.],
                 [13., 15.]]])
    """
    check_tensors("max_pool2d", input=input)
    kernel_size = pair("max_pool2d", "kernel_size", kernel_size)
    output, indices = MaxPool2dFunction.apply(
        input,
        kernel_size,
        pair_or_kernel("max_pool2d", "stride", stride, kernel_size),
        pair("max_pool2d", "padding", padding),
        pair("max_pool2d", "dilation", dilation),
        flag("max_pool2d", "ceil_mode", ceil_mode),
    )
    return (output, indices) if return_indices else output


class MaxPool2d(torch.nn.MaxPool2d):
    """:class:`torch.nn.MaxPool2d`, computed by :func:`cuda_ops.functional.max_pool2d`."""

    def forward(self, input):
        return max_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            ceil_mode=self.ceil_mode,
            return_indices=self.return_indices,
        )
