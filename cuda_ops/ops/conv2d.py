"""conv2d: convolution in two dimensions, as in torch.nn.functional.conv2d."""

import torch
from torch import Tensor

from .._arguments import check_tensors, expect, pair
from .._autograd import autograd_function
from .._fakes import register_fake
from .._modules import parameter
from .._operators import operator


def is_channels_last(tensor):
    """Whether the strides of a 4-d tensor are those of channels_last: Tensor::suggest_memory_format of C++, which
    Python does not have."""
    stride, size = tensor.stride(), tensor.shape
    if stride[1] == 0:
        return False
    smallest = 0
    for dim in (1, 3, 2, 0):
        if size[dim] == 0 or stride[dim] < smallest:
            return False
        # N x 1 x 1 x 1 is in both formats; it counts as contiguous.
        if dim == 0 and smallest == stride[1]:
            return False
        smallest = stride[dim] * size[dim]
    return True


def empty_image(size, like, channels_last):
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=memory_format)


def check_sizes(input, weight, stride, padding, dilation, groups, op="conv2d"):
    """The checks of csrc/torch/conv2d.cpp, for fake kernels; of as many axes as there are strides."""
    shape, axes = tuple(weight), len(stride)
    without = "input to have {} dimensions, or {} without a batch, got shape {}"
    expect(len(input) == axes + 2, op, without, axes + 2, axes + 1, tuple(input))
    expect(len(weight) == axes + 2, op, "weight to have {} dimensions, got shape {}", axes + 2, shape)
    check_parameters(stride, padding, dilation, groups, op)
    multiple = "weight to have a positive multiple of groups={} output channels in dimension 0, got shape {}"
    expect(weight[0] >= groups, op, multiple, groups, shape)
    expect(weight[0] % groups == 0, op, multiple, groups, shape)
    channels = "input to have {} channels in dimension 1, for weight of shape {} and groups={}, got shape {}"
    expect(input[1] == weight[1] * groups, op, channels, weight[1] * groups, shape, groups, tuple(input))
    for axis in range(axes):
        padded = input[2 + axis] + padding[2 * axis] + padding[2 * axis + 1]
        kernel = (weight[2 + axis] - 1) * dilation[axis] + 1
        expect(weight[2 + axis] > 0, op, "weight to have a kernel that is not empty, got shape {}", shape)
        expect(kernel <= padded, op, "the kernel to be no greater than the padded input, {}, got {}", padded, kernel)


def check_parameters(stride, padding, dilation, groups, op):
    for name, values in (("stride", stride), ("dilation", dilation), ("groups", (groups,))):
        for value in values:
            expect(value > 0, op, "{} to be positive, got {}", name, values)
    for value in padding:
        expect(value >= 0, op, "padding to be zero or more, got {}", padding)


def output_size(input, weight, stride, padding, dilation):
    """The shape of a convolution's output, of as many axes as there are strides."""
    lengths = [
        (input[2 + i] + padding[2 * i] + padding[2 * i + 1] - dilation[i] * (weight[2 + i] - 1) - 1) // stride[i] + 1
        for i in range(len(stride))
    ]
    # As in PyTorch: without input channels there are no output channels.
    return (input[0], 0 if input[1] == 0 else weight[0], *lengths)


def check_bias(bias, channels, op):
    if bias is not None:
        fits = bias.dim() == 1 and bias.shape[0] == channels
        expect(fits, op, "bias to have shape [{}], got {}", channels, tuple(bias.shape))


@register_fake("cuda_ops::conv2d_forward")
def _(input, weight, bias, stride, padding, dilation, groups):
    check_sizes(input.shape, weight.shape, stride, padding, dilation, groups)
    check_bias(bias, weight.shape[0], "conv2d")
    channels_last = is_channels_last(input) or is_channels_last(weight)
    return empty_image(output_size(input.shape, weight.shape, stride, padding, dilation), input, channels_last)


@register_fake("cuda_ops::conv2d_backward_input")
def _(grad_output, weight, input_size, channels_last, stride, padding, dilation, groups):
    return empty_image(input_size, grad_output, channels_last)


@register_fake("cuda_ops::conv2d_backward_weight")
def _(grad_output, input, weight_size, channels_last, stride, padding, dilation, groups):
    return empty_image(weight_size, grad_output, channels_last)


@register_fake("cuda_ops::conv2d_backward_bias")
def _(grad_output, size=None):
    op, dimensions = "conv2d_backward_bias", grad_output.dim()
    expect(dimensions in (3, 4), op, "grad_output to have 3 to 4 dimensions, got {}", dimensions)
    channels = grad_output.shape[1]
    if size is None:
        return grad_output.new_empty((channels,))
    fits = len(size) == 1 and (size[0] == channels or (channels == 0 and size[0] >= 0))
    expect(fits, op, "size to be [{}], got {}", channels, list(size))
    return grad_output.new_empty(size)


conv2d_forward = operator("conv2d_forward")
conv2d_backward_input = operator("conv2d_backward_input")
conv2d_backward_weight = operator("conv2d_backward_weight")
conv2d_backward_bias = operator("conv2d_backward_bias")
Conv2dFunction = autograd_function("conv2d_forward", "Conv2dFunction")


def _four_paddings(padding, weight, stride, dilation, op="conv2d"):
    """Top, bottom, left, right for an int, a pair, 'same' or 'valid'."""
    if not isinstance(padding, str):
        height, width = pair(op, "padding", padding)
        return height, height, width, width
    return padding_by_word(padding, weight, stride, dilation, op, "an int or two of them")


def padding_by_word(padding, weight, stride, dilation, op, others) -> tuple[int, ...]:
    """Before and after each axis, for 'same' or 'valid'."""
    axes = len(stride)
    if padding not in ("same", "valid"):
        raise RuntimeError(f"{op}: expected padding to be 'same', 'valid', {others}, got {padding!r}")
    if padding == "valid" or weight.dim() != axes + 2:  # a weight of other dimensions is refused by the op
        return (0, 0) * axes
    if any(s != 1 for s in stride):
        got = stride if axes > 1 else stride[0]
        raise RuntimeError(f"{op}: expected stride to be 1 with padding='same', got {got}")
    # Where the two sides can't be equal, the end gets one more.
    sums = [dilation[i] * (weight.shape[2 + i] - 1) for i in range(axes)]
    return tuple(side for total in sums for side in (total // 2, total - total // 2))


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    r"""Convolution (cross-correlation, as everywhere in PyTorch) over an image of several channels,

    .. math::
        \text{output}_{n,o,y,x} = \text{bias}_o + \sum_{c,r,s} \text{weight}_{o,c,r,s} \,
        \text{input}_{n,\,gC+c,\;y\,\text{stride} - \text{padding} + r\,\text{dilation},\;x\ldots}

    with zeros outside of the input, :math:`C` channels in a group, and :math:`g` the group of output channel :math:`o`.

    Args:
        input: (N, C_in, H, W), or (C_in, H, W) without a batch; any strides; float32, float64, float16 or
            bfloat16 (summed in float32).
        weight: (C_out, C_in / groups, kernel height, kernel width).
        bias: (C_out), or None.
        stride: one integer, or one for each of height and width.
        padding: zeros on both sides, as `stride`; or 'valid' for none; or 'same' for the output to have the size of
            the input, which takes a stride of 1 (with an even dilated kernel the bottom and the right get one more).
        dilation: distance of the kernel's elements, as `stride`.
        groups: into how many separate convolutions the channels are cut.

    Returns:
        (N, C_out, H_out, W_out), or without N; H_out = (H + paddings - dilation * (kernel - 1) - 1) // stride + 1.
        It is channels_last if the strides of `input` or of `weight` are those of channels_last, else contiguous. A
        gradient has the format of what it is the gradient of. N = 0 gives an empty output, and as in PyTorch so does
        C_in = 0.

    Raises:
        RuntimeError: a tensor is not floating point, its dtype, device or shape does not go with the others, the
            padded input is smaller than the dilated kernel, stride, dilation or groups are not positive, padding is
            negative, an unknown word or 'same' with a stride.
        TypeError: stride, padding, dilation or groups are no integers, or a tensor is none.
        NotImplementedError: the environment's
            ``CUDA_OPS_CONV2D_PATH`` names a kernel that cannot do this convolution.

    Under autocast the tensors are cast to its dtype. From compute capability 8.0 on float16, bfloat16 and, where
    ``torch.backends.cudnn.allow_tf32`` allows it, float32 go through tensor cores, fastest in channels_last, where the
    channels of a group are multiples of 8 (float32: 4); others are copied with zeros behind them where that is faster
    than the sum as it stands. Which kernel is chosen by shape, and ``CUDA_OPS_CONV2D_PATH`` in the environment forces
    one. Deterministic. Differentiable any number of times.

    On CUDA, float32 with 3x3 kernels, stride 1 and one group may go through Winograd's algorithm, as in cuDNN: its
    rounding error is about twice that of the sum as it stands, and a NaN or an infinity makes NaN of the tiles of 4 x 4
    outputs that it meets. ``CUDA_OPS_CONV2D_WINOGRAD=0`` in the environment has the sum as it stands, ``2`` tiles of
    2 x 2, whose error is about the sum's.

    Example:
        >>> image = torch.tensor([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]])
        >>> cuda_ops.functional.conv2d(image, torch.ones(1, 1, 2, 2), bias=torch.tensor([0.5]))
        tensor([[[[12.5000, 16.5000]]]])
    """
    if type(padding) is not int:
        padding = _padding_of(padding, input, weight, stride, dilation)
    if isinstance(input, Tensor) and input.dim() == 3:
        return conv2d_forward(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    return conv2d_forward(input, weight, bias, stride, padding, dilation, groups)


def _padding_of(padding, input, weight, stride, dilation):
    """_four_paddings of arguments that are still to be checked."""
    # The common case first, in a function that small calls do feel.
    if type(padding) is tuple and len(padding) == 2 and type(padding[0]) is type(padding[1]) is int:
        height, width = padding
        return height, height, width, width
    check_tensors("conv2d", input=input, weight=weight)
    stride, dilation = pair("conv2d", "stride", stride), pair("conv2d", "dilation", dilation)
    return _four_paddings(padding, weight, stride, dilation)


class Conv2d(torch.nn.Conv2d):
    """torch.nn.Conv2d with this convolution: the same arguments, repr and state_dict. padding_mode 'reflect',
    'replicate' and 'circular' pad by torch.nn.functional.pad first."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias, padding = parameter(self, "weight"), parameter(self, "bias"), self.padding
        if self.padding_mode != "zeros":
            input = torch.nn.functional.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        return conv2d(input, weight, bias, self.stride, padding, self.dilation, self.groups)
