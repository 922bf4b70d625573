"""conv_transpose1d: transposed convolution in one dimension, as in torch.nn.functional.conv_transpose1d."""

import torch
from torch import Tensor

from .._arguments import single
from .._autograd import autograd_function
from .._fakes import register_fake
from .._modules import parameter
from .._operators import operator
from ._conv_transpose import conv_transpose, transposed_size
from .conv1d import empty_rows, is_channels_last_1d


@register_fake("cuda_ops::conv_transpose1d_forward")
def _(input, weight, bias, stride, padding, output_padding, dilation, groups):
    size = transposed_size("conv_transpose1d", input, weight, bias, stride, padding, output_padding, dilation, groups)
    return empty_rows(size, input, is_channels_last_1d(input) or is_channels_last_1d(weight))


conv_transpose1d_forward = operator("conv_transpose1d_forward")
ConvTranspose1dFunction = autograd_function("conv_transpose1d_forward", "ConvTranspose1dFunction")


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
) -> Tensor:
    r"""Transposed convolution along one axis of a signal of several channels: the gradient of :func:`conv1d` for its
    input, as a layer. Each element of the input adds its multiple of the kernel to the output, `stride` apart:

    .. math::
        \text{output}_{n,\,gC+c,\;x\,\text{stride} - \text{padding} + s\,\text{dilation}} \mathrel{+}=
        \sum_o \text{weight}_{o,c,s} \, \text{input}_{n,o,x},

    where the output starts as bias, :math:`C` is the number of output channels of a group, and :math:`g` the group of
    input channel :math:`o`. It is :func:`conv_transpose2d` of images of one row.

    Args:
        input: (N, C_in, L), or (C_in, L) without a batch; any strides; float32, float64, float16 or
            bfloat16 (summed in float32).
        weight: (C_in, C_out / groups, kernel).
        bias: (C_out), or None.
        stride: an integer, as it is or in a tuple.
        padding: how many elements the output lacks on each side, as `stride`.
        output_padding: how many more it has at the end, as `stride`; less than stride or dilation.
        groups: into how many separate convolutions the channels are cut.
        dilation: distance of the kernel's elements, as `stride`.

    Returns:
        (N, C_out, L_out), or without N; L_out = (L - 1) * stride - 2 * padding + dilation * (kernel - 1) +
        output_padding + 1. What no element of the kernel reaches is bias alone. Its channels lie next to each other if
        those of `input` or of `weight` do, else it is contiguous. N = 0 gives an empty output.

    Raises:
        RuntimeError: a tensor is not floating point, its dtype, device or shape does not go with the others, there are
            no channels or no elements, stride, dilation or groups are not positive, padding or output_padding is
            negative, the latter is too large, or the former leaves nothing.
        TypeError: stride, padding, output_padding, dilation or groups are no integers, or a tensor is none.
        NotImplementedError: the environment's
            ``CUDA_OPS_CONV2D_PATH`` names a kernel that cannot do this convolution.

    Kernels, dtypes and autocast are those of :func:`conv_transpose2d`. Deterministic. Differentiable any number of
    times.

    Example:
        >>> cuda_ops.functional.conv_transpose1d(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[1.0, -1.0]]]))
        tensor([[[ 1.,  1., -2.]]])
    """
    op = "conv_transpose1d"
    return conv_transpose(
        op,
        conv_transpose1d_forward,
        input,
        weight,
        bias,
        (single(op, "stride", stride),),
        (single(op, "padding", padding),),
        (single(op, "output_padding", output_padding),),
        groups,
        (single(op, "dilation", dilation),),
    )


class ConvTranspose1d(torch.nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d with this convolution: the same arguments, repr and state_dict, and output_size in a
    call."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        stride, padding, dilation = self.stride, self.padding, self.dilation
        output_padding = self.output_padding
        if output_size is not None:
            output_padding = self._output_padding(input, output_size, stride, padding, self.kernel_size, 1, dilation)
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        return conv_transpose1d(input, weight, bias, stride, padding, output_padding, self.groups, dilation)
