"""conv1d: convolution in one dimension, as in torch.nn.functional.conv1d."""

import torch
from torch import Tensor

from .._arguments import check_tensors, single
from .._autograd import autograd_function
from .._fakes import register_fake
from .._modules import parameter
from .._operators import operator
from .conv2d import check_bias, check_sizes, empty_image, is_channels_last, output_size, padding_by_word


def is_channels_last_1d(tensor):
    """Whether an (N, C, L) tensor is a view of a dense (N, L, C) one."""
    return is_channels_last(tensor.unsqueeze(2))


def empty_rows(size, like, channels_last):
    batch, channels, length = size
    return empty_image((batch, channels, 1, length), like, channels_last).squeeze(2)


@register_fake("cuda_ops::conv1d_forward")
def _(input, weight, bias, stride, padding, dilation, groups):
    check_sizes(input.shape, weight.shape, stride, padding, dilation, groups, "conv1d")
    check_bias(bias, weight.shape[0], "conv1d")
    channels_last = is_channels_last_1d(input) or is_channels_last_1d(weight)
    return empty_rows(output_size(input.shape, weight.shape, stride, padding, dilation), input, channels_last)


@register_fake("cuda_ops::conv1d_backward_input")
def _(grad_output, weight, input_size, channels_last, stride, padding, dilation, groups):
    return empty_rows(input_size, grad_output, channels_last)


@register_fake("cuda_ops::conv1d_backward_weight")
def _(grad_output, input, weight_size, channels_last, stride, padding, dilation, groups):
    return empty_rows(weight_size, grad_output, channels_last)


conv1d_forward = operator("conv1d_forward")
Conv1dFunction = autograd_function("conv1d_forward", "Conv1dFunction")


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    r"""Convolution (cross-correlation, as everywhere in PyTorch) along one axis of a signal of several channels,

    .. math::
        \text{output}_{n,o,x} = \text{bias}_o + \sum_{c,s} \text{weight}_{o,c,s} \,
        \text{input}_{n,\,gC+c,\;x\,\text{stride} - \text{padding} + s\,\text{dilation}}

    with zeros outside of the input, :math:`C` channels in a group, and :math:`g` the group of output channel :math:`o`.
    It is :func:`conv2d` of images of one row.

    Args:
        input: (N, C_in, L), or (C_in, L) without a batch; any strides; float32, float64, float16 or
            bfloat16 (summed in float32).
        weight: (C_out, C_in / groups, kernel).
        bias: (C_out), or None.
        stride: an integer, as it is or in a tuple.
        padding: zeros on both sides, as `stride`; or 'valid' for none; or 'same' for the output to have the length of
            the input, which takes a stride of 1 (with an even dilated kernel the end gets one more).
        dilation: distance of the kernel's elements, as `stride`.
        groups: into how many separate convolutions the channels are cut.

    Returns:
        (N, C_out, L_out), or without N; L_out = (L + paddings - dilation * (kernel - 1) - 1) // stride + 1. Its
        channels lie next to each other if those of `input` or of `weight` do, as in a transposed (N, L, C), else it is
        contiguous. A gradient is laid out as what it is the gradient of. N = 0 gives an empty output, and as in PyTorch
        so does C_in = 0.

    Raises:
        RuntimeError: a tensor is not floating point, its dtype, device or shape does not go with the others, the
            padded input is shorter than the dilated kernel, stride, dilation or groups are not positive, padding is
            negative, an unknown word or 'same' with a stride.
        TypeError: stride, padding, dilation or groups are no integers, or a tensor is none.
        NotImplementedError: the environment's
            ``CUDA_OPS_CONV2D_PATH`` names a kernel that cannot do this convolution.

    Kernels, dtypes and autocast are :func:`conv2d`'s. Deterministic. Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.conv1d(torch.tensor([[[1.0, 2.0, 4.0]]]), torch.tensor([[[-1.0, 1.0]]]))
        tensor([[[1., 2.]]])
    """
    if type(padding) is not int:
        padding = _padding_of(padding, input, weight, stride, dilation)
    if isinstance(input, Tensor) and input.dim() == 2:
        return conv1d_forward(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    return conv1d_forward(input, weight, bias, stride, padding, dilation, groups)


def _padding_of(padding, input, weight, stride, dilation):
    """Left and right."""
    if not isinstance(padding, str):
        length = single("conv1d", "padding", padding)
        return length, length
    check_tensors("conv1d", input=input, weight=weight)
    stride, dilation = single("conv1d", "stride", stride), single("conv1d", "dilation", dilation)
    return padding_by_word(padding, weight, (stride,), (dilation,), "conv1d", "an int or one in a sequence")


class Conv1d(torch.nn.Conv1d):
    """torch.nn.Conv1d with this convolution: the same arguments, repr and state_dict. padding_mode 'reflect',
    'replicate' and 'circular' pad by torch.nn.functional.pad first."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias, padding = parameter(self, "weight"), parameter(self, "bias"), self.padding
        if self.padding_mode != "zeros":
            input = torch.nn.functional.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        return conv1d(input, weight, bias, self.stride, padding, self.dilation, self.groups)
