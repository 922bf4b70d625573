"""conv_transpose2d: transposed convolution in two dimensions, as in torch.nn.functional.conv_transpose2d."""

import torch
from torch import Tensor

from .._arguments import pair
from .._autograd import autograd_function
from .._fakes import register_fake
from .._modules import parameter
from .._operators import operator
from ._conv_transpose import conv_transpose, transposed_size
from .conv2d import empty_image, is_channels_last


@register_fake("cuda_ops::conv_transpose2d_forward")
def _(input, weight, bias, stride, padding, output_padding, dilation, groups):
    size = transposed_size("conv_transpose2d", input, weight, bias, stride, padding, output_padding, dilation, groups)
    return empty_image(size, input, is_channels_last(input) or is_channels_last(weight))


conv_transpose2d_forward = operator("conv_transpose2d_forward")
ConvTranspose2dFunction = autograd_function("conv_transpose2d_forward", "ConvTranspose2dFunction")


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
) -> Tensor:
    r"""Transposed convolution over an image of several channels: the gradient of :func:`conv2d` for its input, as a
    layer. Each pixel of the input adds its multiple of the kernel to the output, `stride` apart:

    .. math::
        \text{output}_{n,\,gC+c,\;y\,\text{stride} - \text{padding} + r\,\text{dilation},\;x\ldots} \mathrel{+}=
        \sum_o \text{weight}_{o,c,r,s} \, \text{input}_{n,o,y,x},

    where the output starts as bias, :math:`C` is the number of output channels of a group, and :math:`g` the group of
    input channel :math:`o`.

    Args:
        input: (N, C_in, H, W), or (C_in, H, W) without a batch; any strides; float32, float64, float16 or
            bfloat16 (summed in float32).
        weight: (C_in, C_out / groups, kernel height, kernel width).
        bias: (C_out), or None.
        stride: one integer, or one for each of height and width.
        padding: how many rows and columns the output lacks on each side, as `stride`.
        output_padding: how many more it has at the bottom and the right, as `stride`; less than stride or dilation.
        groups: into how many separate convolutions the channels are cut.
        dilation: distance of the kernel's elements, as `stride`.

    Returns:
        (N, C_out, H_out, W_out), or without N; H_out = (H - 1) * stride - 2 * padding + dilation * (kernel - 1) +
        output_padding + 1. Rows and columns that no element of the kernel reaches are bias alone. It is channels_last
        if the strides of `input` or of `weight` are those of channels_last, else contiguous. N = 0 gives an empty
        output.

    Raises:
        RuntimeError: a tensor is not floating point, its dtype, device or shape does not go with the others, there are
            no channels or no rows, stride, dilation or groups are not positive, padding or output_padding is negative,
            the latter is too large, or the former leaves nothing.
        TypeError: stride, padding, output_padding, dilation or groups are no integers, or a tensor is none.
        NotImplementedError: the environment's
            ``CUDA_OPS_CONV2D_PATH`` names a kernel that cannot do this convolution.

    Under autocast the tensors are cast to its dtype. The kernels are those of :func:`conv2d`'s gradients: fastest
    in channels_last, with channels of a group in multiples of 8. Deterministic. Differentiable any number of times.

    Example:
        >>> image = torch.tensor([[[[1.0, 2.0]]]])
        >>> cuda_ops.functional.conv_transpose2d(image, torch.ones(1, 1, 2, 2), torch.tensor([0.5]), stride=2)
        tensor([[[[1.5000, 1.5000, 2.5000, 2.5000],
                  [1.5000, 1.5000, 2.5000, 2.5000]]]])
    """
    op = "conv_transpose2d"
    return conv_transpose(
        op,
        conv_transpose2d_forward,
        input,
        weight,
        bias,
        pair(op, "stride", stride),
        pair(op, "padding", padding),
        pair(op, "output_padding", output_padding),
        groups,
        pair(op, "dilation", dilation),
    )


class ConvTranspose2d(torch.nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d with this convolution: the same arguments, repr and state_dict, and output_size in a
    call."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        stride, padding, dilation = self.stride, self.padding, self.dilation
        output_padding = self.output_padding
        if output_size is not None:
            output_padding = self._output_padding(input, output_size, stride, padding, self.kernel_size, 2, dilation)
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        return conv_transpose2d(input, weight, bias, stride, padding, output_padding, self.groups, dilation)
