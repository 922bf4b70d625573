"""max_pool2d: the largest value of each window, and where it is."""

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator
from ._pool2d import empty_pooled, is_none


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


max_pool2d_forward, max_pool2d_backward = operator("max_pool2d_forward"), operator("max_pool2d_backward")
MaxPool2dFunction = autograd_function("max_pool2d_forward", "MaxPool2dFunction")


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
        input: (N, C, H, W) or (C, H, W), any strides; only N may be 0. float32, float64, float16 or
            bfloat16.
        kernel_size: height and width of the window, or one int for both.
        stride: distance between windows, a pair or one int; kernel_size if it is None.
        padding: positions of minus infinity on each side, a pair or one int; at most half of kernel_size.
        dilation: distance between the positions of one window, a pair or one int.
        ceil_mode: whether a last window that runs past the padding's end counts; it does if it starts before the
            input's end.
        return_indices: whether to return the indices too.

    Returns:
        The maxima, with input's memory format, or if `return_indices` the pair of them and of their indices in the
        plane, :math:`h \cdot W + w` in int64. A window all of whose positions are padding, which dilation and ceil_mode
        together can make, gives minus infinity and the index -1 (PyTorch: an index outside of the window).

    Raises:
        TypeError: a pair is not of ints; `ceil_mode` is no bool; `input` is no tensor.
        RuntimeError: a pair is not one int or two, or out of range; `input` is not floating point, not of 3 or
            4 dimensions, empty but for N, or too small for one window.

    Differentiable any number of times. Results repeat bit by bit.

    Example:
        >>> cuda_ops.functional.max_pool2d(torch.arange(16.0).view(1, 4, 4), 2)
        tensor([[[ 5.,  7.],
                 [13., 15.]]])
    """
    if is_none(stride):
        stride = kernel_size
    output, indices = max_pool2d_forward(input, kernel_size, stride, padding, dilation, ceil_mode)
    return (output, indices) if return_indices else output


class MaxPool2d(torch.nn.MaxPool2d):
    """:class:`torch.nn.MaxPool2d`, computed by :func:`cuda_ops.functional.max_pool2d`."""

    def forward(self, input):
        return max_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.return_indices
        )
