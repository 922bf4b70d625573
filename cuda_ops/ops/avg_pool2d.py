"""avg_pool2d: the mean of each window."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator
from ._pool2d import empty_pooled, is_none

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


avg_pool2d_forward = operator("avg_pool2d_forward")
AvgPool2dFunction = autograd_function("avg_pool2d_forward", "AvgPool2dFunction")


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
        input: (N, C, H, W) or (C, H, W), any strides; only N may be 0. float32, float64, float16 or
            bfloat16 (summed in float32).
        kernel_size: height and width of the window, or one int for both.
        stride: distance between windows, a pair or one int; kernel_size if it is None.
        padding: zeros on each side, a pair or one int; at most half of kernel_size.
        ceil_mode: whether a last window that runs past the padding's end counts; it does if it starts before the
            input's end.
        count_include_pad: whether the divisor counts the padding that a window covers. What lies past the padding is
            never counted.
        divisor_override: the divisor, instead of the count.

    Returns:
        The means, with input's memory format.

    Raises:
        TypeError: a pair is not of ints, a flag is no bool, `divisor_override` is no int, or `input` is no tensor.
        RuntimeError: a pair is not one int or two, or out of range; `divisor_override` is 0; `input` is not
            floating point, not of 3 or 4 dimensions, empty but for N, or too small for one window.

    Differentiable any number of times. Results repeat bit by bit.

    Example:
        >>> cuda_ops.functional.avg_pool2d(torch.arange(16.0).view(1, 4, 4), 2)
        tensor([[[ 2.5000,  4.5000],
                 [10.5000, 12.5000]]])
    """
    if is_none(stride):
        stride = kernel_size
    return avg_pool2d_forward(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


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
