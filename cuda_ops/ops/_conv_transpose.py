"""What conv_transpose1d and conv_transpose2d share."""

import torch

from .._arguments import check_tensors, expect
from .conv2d import check_bias, check_parameters


def transposed_size(op, input, weight, bias, stride, padding, output_padding, dilation, groups):
    """The shape of the output, for fake kernels: with the checks of csrc/torch/conv_transpose.cpp."""
    axes, shape = len(stride), tuple(weight.shape)
    expected = "input to have {} dimensions, or {} without a batch, got shape {}"
    expect(input.dim() == axes + 2, op, expected, axes + 2, axes + 1, tuple(input.shape))
    expect(weight.dim() == axes + 2, op, "weight to have {} dimensions, got shape {}", axes + 2, shape)
    check_parameters(stride, padding, dilation, groups, op)
    multiple = "weight to have a positive multiple of groups={} input channels in dimension 0, got shape {}"
    expect(shape[0] >= groups, op, multiple, groups, shape)
    expect(shape[0] % groups == 0, op, multiple, groups, shape)
    expect(weight.numel() > 0, op, "weight to have output channels and a kernel, got shape {}", shape)
    channels = "input to have {} channels in dimension 1, for weight of shape {}, got shape {}"
    expect(input.shape[1] == shape[0], op, channels, shape[0], shape, tuple(input.shape))
    check_bias(bias, shape[1] * groups, op)
    size = [input.shape[0], shape[1] * groups]
    for axis in range(axes):
        length, extra = input.shape[2 + axis], output_padding[axis]
        expect(length > 0, op, "input to have no empty dimension but the batch, got shape {}", tuple(input.shape))
        expect(extra >= 0, op, "output_padding to be zero or more, got {}", output_padding)
        expect(extra < stride[axis], op, "output_padding to be less than stride, {}, got {}", stride, output_padding)
        span = (length - 1) * stride[axis] + (shape[2 + axis] - 1) * dilation[axis] + 1
        size.append(span - padding[2 * axis] - padding[2 * axis + 1] + extra)
        expect(size[-1] > 0, op, "padding to leave something of the output, got an output of {}", size)
    return size


def conv_transpose(op, forward, input, weight, bias, stride, padding, output_padding, groups, dilation):
    """`forward`, of a batch or without one. stride, padding, output_padding and dilation: a value for each axis."""
    check_tensors(op, input=input)
    for value, step, distance in zip(output_padding, stride, dilation, strict=True):
        if value < 0:
            raise RuntimeError(f"{op}: expected output_padding to be zero or more, got {output_padding}")
        if value >= step and value >= distance:
            raise RuntimeError(
                f"{op}: expected output_padding to be smaller than stride or dilation, {stride} and {dilation}, got "
                f"{output_padding}"
            )
    has_batch = input.dim() != len(stride) + 1
    input = input if has_batch else input.unsqueeze(0)
    if any(value >= step > 0 for value, step in zip(output_padding, stride, strict=True)):
        # A convolution of the output would have more rows than input: those that are missing are zeros.
        ends = [side for i in reversed(range(len(stride))) for side in (0, output_padding[i] // stride[i])]
        input = torch.nn.functional.pad(input, ends)
        output_padding = tuple([value % step for value, step in zip(output_padding, stride, strict=True)])
    sides = tuple([side for side in padding for _ in (0, 1)])
    output = forward(input, weight, bias, stride, sides, output_padding, dilation, groups)
    return output if has_batch else output.squeeze(0)
