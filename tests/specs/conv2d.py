import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops


def convolution(make, input, weight, *, bias=True, name="", **arguments):
    tensors = (make(*input), make(*weight), *([make(weight[0])] if bias else []))
    return Sample(tensors, arguments, name or f"{input} {weight} {arguments}")


def samples(make):
    # One element each; no bias.
    yield convolution(make, (1, 1, 1, 1), (1, 1, 1, 1), bias=False)
    # The two layers of the MNIST CNN, with channels one off the tiles (32 and 64 rows; 8 rows on the CPU).
    yield convolution(make, (3, 1, 28, 28), (33, 1, 3, 3), padding=1)
    yield convolution(make, (2, 31, 14, 14), (65, 31, 3, 3), padding=1)
    # A depth of 129 and a number of pixels that fill no tile.
    yield convolution(make, (1, 43, 7, 9), (5, 43, 1, 3), bias=False)
    # Output channels past a tile of 128 columns (channels_last), few pixels.
    yield convolution(make, (2, 5, 3, 3), (130, 5, 2, 2))
    # Strides: less than, equal to and greater than the kernel, the last row and column unused.
    yield convolution(make, (2, 3, 12, 11), (4, 3, 3, 3), stride=2, padding=1)
    yield convolution(make, (2, 3, 9, 10), (4, 3, 3, 2), stride=(3, 2))
    yield convolution(make, (2, 3, 10, 9), (4, 3, 1, 2), stride=(4, 3), padding=(0, 1))
    # Dilation, also with a stride that it shares a factor with, or not.
    yield convolution(make, (2, 2, 12, 13), (3, 2, 3, 2), dilation=(2, 3), padding=2)
    yield convolution(make, (2, 2, 14, 15), (3, 2, 3, 3), dilation=(2, 4), stride=(4, 2), padding=(3, 1))
    yield convolution(make, (2, 2, 14, 15), (3, 2, 3, 3), dilation=(3, 2), stride=(2, 3))
    # Groups, depthwise and with more output channels than input channels.
    yield convolution(make, (2, 6, 8, 7), (9, 2, 3, 3), groups=3, padding=1)
    yield convolution(make, (2, 35, 6, 6), (70, 1, 3, 3), groups=35, padding=1, stride=2)
    # Few input channels and a large kernel; a group a channel, in whole runs of channels and of columns.
    yield convolution(make, (2, 3, 21, 18), (36, 3, 7, 7), padding=3)
    yield convolution(make, (2, 36, 9, 12), (36, 1, 5, 5), groups=36, padding=2)
    # Padding as a word: 'same' with an odd sum, where the end gets one more.
    yield convolution(make, (2, 3, 6, 7), (2, 3, 4, 2), padding="same", dilation=(1, 3))
    yield convolution(make, (2, 3, 6, 7), (2, 3, 3, 2), padding="valid", stride=(1, 2))
    # More padding than kernel, so that some outputs are bias alone; the kernel as large as the input.
    yield convolution(make, (2, 3, 4, 3), (2, 3, 2, 2), padding=(4, 3), stride=2)
    yield convolution(make, (3, 4, 5, 6), (7, 4, 5, 6))
    # No batch.
    yield convolution(make, (3, 7, 5), (4, 3, 3, 3), padding=1)
    # Several images of several blocks of rows on the CPU.
    yield convolution(make, (1, 2, 70, 33), (3, 2, 3, 3), padding=1)


def small_samples(make):
    yield convolution(make, (2, 2, 3, 4), (2, 2, 2, 2), padding=1, stride=(1, 2))
    yield convolution(make, (2, 2, 5, 3), (4, 1, 3, 2), groups=2, dilation=(2, 1), bias=False)
    yield convolution(make, (2, 4, 3), (2, 2, 2, 3), padding="same")


def empty_samples(make):
    yield convolution(make, (0, 2, 5, 4), (3, 2, 3, 3))
    yield convolution(make, (0, 4, 5, 4), (6, 2, 3, 3), groups=2, bias=False, stride=2)
    # As in PyTorch, no input channels give no output channels.
    yield convolution(make, (2, 0, 5, 4), (3, 0, 3, 3))
    yield convolution(make, (2, 0, 5, 4), (3, 0, 3, 3), bias=False)
    # No rows, but padding that makes some.
    yield convolution(make, (0, 2, 0, 4), (3, 2, 3, 3), padding=2)


def op_samples(make):
    ops = torch.ops.cuda_ops
    image, weight = make(2, 4, 6, 5), make(6, 2, 3, 2)
    channels_last = image.to(memory_format=torch.channels_last)
    parameters = (2, 1), (1, 2, 0, 1), (1, 2), 2
    output = ops.conv2d_forward(image, weight, make(6), *parameters)
    for x in (image, channels_last, image.transpose(2, 3).contiguous().transpose(2, 3)):
        yield ops.conv2d_forward, (x, weight, make(6), *parameters)
    yield ops.conv2d_forward, (image, weight.to(memory_format=torch.channels_last), None, *parameters)
    for last in (False, True):
        yield ops.conv2d_backward_input, (output, weight, image.shape, last, *parameters)
        yield ops.conv2d_backward_weight, (output, image, weight.shape, last, *parameters)
    yield ops.conv2d_backward_bias, (output,)
    yield ops.conv2d_backward_bias, (output.to(memory_format=torch.channels_last),)


def call(input=(2, 2, 5, 5), weight=(4, 2, 3, 3), bias=None, dtype=torch.float32, **arguments):
    """A call with the given shapes, all else being right."""

    def run(device):
        tensors = [torch.ones(shape, device=device, dtype=dtype) for shape in (input, weight)]
        bias_tensor = None if bias is None else torch.ones(bias, device=device)
        return cuda_ops.functional.conv2d(*tensors, bias_tensor, **arguments)

    return run


PLAIN = (1, 1), (0, 0, 0, 0), (1, 1), 1


def backward_input(device):
    ones = [torch.ones(shape, device=device) for shape in ((2, 4, 3, 4), (4, 2, 3, 3))]
    return torch.ops.cuda_ops.conv2d_backward_input(*ones, (2, 2, 5, 5), False, *PLAIN)


def backward_weight(device):
    ones = [torch.ones(shape, device=device) for shape in ((2, 4, 3, 4), (2, 2, 5, 5))]
    return torch.ops.cuda_ops.conv2d_backward_weight(*ones, (4, 2, 3, 3), False, *PLAIN)


SPEC = OpSpec(
    name="conv2d",
    function=cuda_ops.functional.conv2d,
    reference=torch.nn.functional.conv2d,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        Bad(
            "integers", call(dtype=torch.int64), RuntimeError, "conv2d: expected input to be floating point, got int64"
        ),
        Bad(
            "dimensions of input",
            call(input=(5, 5)),
            RuntimeError,
            r"conv2d: expected input to have 4 dimensions, or 3 without a batch, got shape \[5, 5\]",
        ),
        Bad(
            "dimensions of weight",
            call(weight=(4, 2, 3)),
            RuntimeError,
            r"conv2d: expected weight to have 4 dimensions, got shape \[4, 2, 3\]",
        ),
        Bad(
            "dimensions of weight with padding='same'",
            call(weight=(4, 2, 3), padding="same"),
            RuntimeError,
            r"conv2d: expected weight to have 4 dimensions, got shape \[4, 2, 3\]",
        ),
        Bad(
            "channels",
            call(input=(2, 3, 5, 5)),
            RuntimeError,
            r"conv2d: expected input to have 2 channels in dimension 1, .* got shape \[2, 3, 5, 5\]",
        ),
        Bad(
            "channels of groups",
            call(groups=2),
            RuntimeError,
            r"conv2d: expected input to have 4 channels .* groups=2, got shape \[2, 2, 5, 5\]",
        ),
        Bad(
            "output channels of groups",
            call(input=(2, 6, 5, 5), groups=3),
            RuntimeError,
            r"conv2d: expected weight to have a positive multiple of groups=3 output channels .* got shape \[4, 2",
        ),
        Bad(
            "no output channels",
            call(weight=(0, 2, 3, 3)),
            RuntimeError,
            "conv2d: expected weight to have a positive multiple of groups=1 output channels",
        ),
        Bad("groups", call(groups=0), RuntimeError, "conv2d: expected groups to be positive, got 0"),
        Bad("stride", call(stride=(1, 0)), RuntimeError, r"conv2d: expected stride to be positive, got \[1, 0\]"),
        Bad("dilation", call(dilation=-1), RuntimeError, r"conv2d: expected dilation to be positive, got \[-1, -1\]"),
        Bad("padding", call(padding=-1), RuntimeError, "conv2d: expected padding to be zero or more, got .*-1"),
        Bad(
            "three strides",
            call(stride=(1, 1, 1)),
            RuntimeError,
            r"conv2d: expected stride to be an int or two of them, got \(1, 1, 1\)",
        ),
        Bad("fraction", call(stride=1.5), TypeError, "conv2d: expected stride to be an int or two of them, got 1.5"),
        Bad(
            "unknown word",
            call(padding="full"),
            RuntimeError,
            "conv2d: expected padding to be 'same', 'valid', an int or two of them, got 'full'",
        ),
        Bad(
            "'same' with a stride",
            call(padding="same", stride=2),
            RuntimeError,
            r"conv2d: expected stride to be 1 with padding='same', got \(2, 2\)",
        ),
        Bad(
            "kernel greater than input",
            call(input=(2, 2, 2, 5), dilation=(2, 1)),
            RuntimeError,
            "conv2d: expected the kernel to be no greater than the padded input, 2 x 5, got 5 x 3",
        ),
        Bad(
            "empty kernel",
            call(weight=(4, 2, 0, 3)),
            RuntimeError,
            "conv2d: expected weight to have a kernel that is not empty",
        ),
        Bad(
            "empty rows",
            call(input=(2, 2, 0, 5), padding=2),
            RuntimeError,
            "conv2d: expected input to have no empty dimension but batch or channels",
        ),
        Bad(
            "size of bias",
            call(bias=(3,)),
            RuntimeError,
            r"conv2d: expected bias to have shape \[4\], one value for each output channel of weight, got \[3\]",
        ),
        Bad(
            "dimensions of bias", call(bias=(4, 1)), RuntimeError, r"conv2d: expected bias to have shape \[4\], .*4, 1"
        ),
        Bad(
            "dtype of bias",
            call(bias=(4,), dtype=torch.float64),
            RuntimeError,
            "conv2d: expected bias to have the dtype of input, float64, got float32",
        ),
        Bad(
            "dtype of weight",
            lambda device: cuda_ops.functional.conv2d(
                torch.ones(1, 1, 3, 3, device=device), torch.ones(1, 1, 3, 3, device=device, dtype=torch.float64)
            ),
            RuntimeError,
            "conv2d: expected weight to have the dtype of input, float32, got float64",
        ),
        Bad(
            "beyond the limit",
            call(dilation=2**30),
            RuntimeError,
            "conv2d: expected heights, widths, padding and dilation to be below 1073741824, got 1073741824",
        ),
        Bad(
            "grad_output of another shape, for input",
            backward_input,
            RuntimeError,
            r"conv2d_backward_input: expected grad_output to have the shape of output, \[2, 4, 3, 3\], got",
        ),
        Bad(
            "grad_output of another shape, for weight",
            backward_weight,
            RuntimeError,
            r"conv2d_backward_weight: expected grad_output to have the shape of output, \[2, 4, 3, 3\], got",
        ),
        Bad(
            "grad_output of another rank, for bias",
            lambda device: torch.ops.cuda_ops.conv2d_backward_bias(torch.ones(3, device=device)),
            RuntimeError,
            r"conv2d_backward_bias: expected grad_output to have 3 to 4 dimensions, got shape \[3\]",
        ),
    ],
)
