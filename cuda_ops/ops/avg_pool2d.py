"""avg_pool2d: the mean of each window."""

import torch
from torch import Tensor

from .._arguments import check_tensors, flag, integer, pair
from .._autograd_old import Function
from .._fakes import register_fake
from .._library import ops
from ._pool2d import empty_pooled, pair_or_kernel

NO_DILATION = (1, 1)


@register_fake("cuda_ops::avg_pool2d_forward")
def _(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    return empty_pooled("avg_pool2d", input, kernel_size, stride, padding, NO_DILATION, ceil_mode)


@register_fake("cuda_ops::avg_pool2d_backward")
def _(
    grad_output,
    input_size,
    kernel_size,
    stride,
    padding,
    ceil_mode,
    count_include_pad,
    divisor_override,
    channels_last,
):
    return torch.empty(
        (*grad_output.shape[:-2], *input_size),
        dtype=grad_output.dtype,
        device=grad_output.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )


class AvgPool2dFunction(Function):
    @staticmethod
    def forward(ctx, input, *window):
        output = ops.avg_pool2d_forward(input, *window)
        # The output has one of the two formats exactly, and both only where no one can tell them apart.
        channels_last = (
            output.dim() == 4 and output.is_contiguous(memory_format=torch.channels_last) and not output.is_contiguous()
        )
        ctx.window = window
        ctx.input = (input.shape[-2:], *window, channels_last)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        grad_input = AvgPool2dBackwardFunction.apply(grad_output, ctx.window, *ctx.input)
        return grad_input, *(None for _ in ctx.window)


class AvgPool2dBackwardFunction(Function):
    """grad_input is linear in grad_output, and transposed twice it is the pooling again."""

    @staticmethod
    def forward(ctx, grad_output, window, *rest):
        ctx.window = window
        ctx.rest = 1 + len(rest)
        return ops.avg_pool2d_backward(grad_output, *rest)

    @staticmethod
    def backward(ctx, grad_grad_input):
        return AvgPool2dFunction.apply(grad_grad_input, *ctx.window), *(None for _ in range(ctx.rest))


def avg_pool2d(
    input: Tensor,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    r"""Mean of each window of a plane, as :func:`torch.nn.functional.avg_pool2d`.

    .. math::
        \text{output}_{n,c,i,j} = \frac{1}{\text{divisor}_{i,j}} \sum_{k<k_H,\, l<k_W}
            \text{input}_{n,c,\; i s_H - p_H + k,\; j s_W - p_W + l}

    Args:
        input: (N, C, H, W) or (C, H, W), any strides; only N may be 0. float32 or float64, on CUDA float16 and
            bfloat16 too (summed in float32).
        kernel_size: height and width of the window, or one int for both.
        stride: distance between windows, a pair or one int; kernel_size if it is None.
        padding: zeros on each side, a pair or one int; at most half of kernel_size.
        ceil_mode: whether a last window that runs past the padding's end counts; it does if it starts before the
            input's end.
        count_include_pad: whether the divisor counts the padding that a window covers. What lies past the padding is
            never counted.
        divisor_override: the divisor, in the place of the count.

    Returns:
        The means, with input's memory format.

    Raises:
        TypeError: a pair is not of ints, a flag is no bool, `divisor_override` is no int, or `input` is no tensor.
        RuntimeError: a pair is not one int or two, or out of range; `divisor_override` is 0; `input` is not
            floating point, not of 3 or 4 dimensions, empty but for N, or too small for one window.
        NotImplementedError: `input` is float16 or bfloat16 on the CPU.

    Differentiable any number of times. Results repeat bit by bit.

    Example:
        >>> cuda_ops.functional.avg_pool2d(torch.arange(16.0).view(1, 4, 4), 2)
        tensor([[[ 2.5000,  4.5000],
                 [10.5000, 12.5000]]])
    """
    check_tensors("avg_pool2d", input=input)
    kernel_size = pair("avg_pool2d", "kernel_size", kernel_size)
    return AvgPool2dFunction.apply(
        input,
        kernel_size,
        pair_or_kernel("avg_pool2d", "stride", stride, kernel_size),
        pair("avg_pool2d", "padding", padding),
        flag("avg_pool2d", "ceil_mode", ceil_mode),
        flag("avg_pool2d", "count_include_pad", count_include_pad),
        None if divisor_override is None else integer("avg_pool2d", "divisor_override", divisor_override),
    )


class AvgPool2d(torch.nn.AvgPool2d):
    """:class:`torch.nn.AvgPool2d`, computed by :func:`cuda_ops.functional.avg_pool2d`."""

    def forward(self, input):
        return avg_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )
