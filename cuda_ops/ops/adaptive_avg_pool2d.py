"""adaptive_avg_pool2d: the means of as many windows as asked for."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator
from ._adaptive_pool2d import empty_adaptive, empty_unpooled, output_plane


@register_fake("cuda_ops::adaptive_avg_pool2d_forward")
def _(input, output_size):
    return empty_adaptive("adaptive_avg_pool2d", input, output_size)


@register_fake("cuda_ops::adaptive_avg_pool2d_backward")
def _(grad_output, input_size, channels_last):
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return empty_unpooled(grad_output, input_size, grad_output.dtype, memory_format)


adaptive_avg_pool2d_forward = operator("adaptive_avg_pool2d_forward")
AdaptiveAvgPool2dFunction = autograd_function("adaptive_avg_pool2d_forward", "AdaptiveAvgPool2dFunction")


def adaptive_avg_pool2d(input: Tensor, output_size) -> Tensor:
    r"""Means of windows over a plane, of which there are `output_size`, as
    :func:`torch.nn.functional.adaptive_avg_pool2d`. Along an axis, window :math:`o` of :math:`O` over :math:`I`
    positions is :math:`\lfloor o I / O \rfloor \dots \lceil (o + 1) I / O \rceil - 1`.

    Args:
        input: (N, C, H, W) or (C, H, W), any strides; only N may be 0. float32, float64, float16 or
            bfloat16 (summed in float32).
        output_size: height and width of the output, or one int for both; None in its place is that of `input`. 0 gives
            an empty output.

    Returns:
        The means, with input's memory format.

    Raises:
        TypeError: `output_size` is not of ints and None, or `input` is no tensor.
        RuntimeError: `output_size` is not one int or two, or negative; `input` is not floating point, not of 3 or
            4 dimensions, or empty but for N.

    Differentiable any number of times. Results repeat bit by bit.

    Example:
        >>> cuda_ops.functional.adaptive_avg_pool2d(torch.arange(12.0).view(1, 3, 4), (2, None))
        tensor([[[2., 3., 4., 5.],
                 [6., 7., 8., 9.]]])
    """
    return adaptive_avg_pool2d_forward(input, output_plane("adaptive_avg_pool2d", input, output_size))


class AdaptiveAvgPool2d(torch.nn.AdaptiveAvgPool2d):
    """:class:`torch.nn.AdaptiveAvgPool2d`, computed by :func:`cuda_ops.functional.adaptive_avg_pool2d`."""

    def forward(self, input: Tensor) -> Tensor:
        return adaptive_avg_pool2d(input, self.output_size)
