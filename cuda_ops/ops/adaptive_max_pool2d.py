"""adaptive_max_pool2d: the largest values of as many windows as asked for, and where they are."""

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator
from ._adaptive_pool2d import empty_adaptive, empty_unpooled, output_plane


@register_fake("cuda_ops::adaptive_max_pool2d_forward")
def _(input, output_size):
    op = "adaptive_max_pool2d"
    return empty_adaptive(op, input, output_size), empty_adaptive(op, input, output_size, torch.int64)


@register_fake("cuda_ops::adaptive_max_pool2d_backward")
def _(grad_output, indices, input_size):
    return empty_unpooled(indices, input_size, grad_output.dtype, suggest_memory_format(indices))


adaptive_max_pool2d_forward = operator("adaptive_max_pool2d_forward")
AdaptiveMaxPool2dFunction = autograd_function("adaptive_max_pool2d_forward", "AdaptiveMaxPool2dFunction")


def adaptive_max_pool2d(input: Tensor, output_size, return_indices: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    r"""Largest values of windows over a plane, of which there are `output_size`, as
    :func:`torch.nn.functional.adaptive_max_pool2d`. Along an axis, window :math:`o` of :math:`O` over :math:`I`
    positions is :math:`\lfloor o I / O \rfloor \dots \lceil (o + 1) I / O \rceil - 1`.

    NaN is larger than every number. Of several largest values the first gets the gradient, in the order of rows; of
    several NaNs the last.

    Args:
        input: (N, C, H, W) or (C, H, W), any strides; only N may be 0. float32, float64, float16 or
            bfloat16.
        output_size: height and width of the output, or one int for both; None in its place is that of `input`. 0 gives
            an empty output.
        return_indices: whether to return the indices too.

    Returns:
        The maxima, with input's memory format, or if `return_indices` the pair of them and of their indices in the
        plane, :math:`h \cdot W + w` in int64.

    Raises:
        TypeError: `output_size` is not of ints and None, or `input` is no tensor.
        RuntimeError: `output_size` is not one int or two, or negative; `input` is not floating point, not of 3 or
            4 dimensions, or empty but for N.

    Differentiable any number of times. Results repeat bit by bit.

    Example:
        >>> cuda_ops.functional.adaptive_max_pool2d(torch.arange(12.0).view(1, 3, 4), (2, None))
        tensor([[[ 4.,  5.,  6.,  7.],
                 [ 8.,  9., 10., 11.]]])
    """
    output, indices = adaptive_max_pool2d_forward(input, output_plane("adaptive_max_pool2d", input, output_size))
    return (output, indices) if return_indices else output


class AdaptiveMaxPool2d(torch.nn.AdaptiveMaxPool2d):
    """:class:`torch.nn.AdaptiveMaxPool2d`, computed by :func:`cuda_ops.functional.adaptive_max_pool2d`."""

    def forward(self, input: Tensor):
        return adaptive_max_pool2d(input, self.output_size, self.return_indices)
