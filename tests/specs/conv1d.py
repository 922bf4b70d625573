import torch
from support.opspec import Bad, OpSpec, bad

import cuda_ops

from .conv2d import convolution


def samples(make):
    # One element each; no bias.
    yield convolution(make, (1, 1, 1), (1, 1, 1), bias=False)
    # wav2vec's first layers: one channel, a stride of half the kernel; then channels one off the tiles.
    yield convolution(make, (2, 1, 163), (33, 1, 10), stride=5)
    yield convolution(make, (2, 31, 30), (65, 31, 3), stride=2)
    # Its positions: groups and an even kernel, with padding on both sides.
    yield convolution(make, (2, 12, 19), (12, 3, 8), groups=4, padding=4)
    # Depthwise; more output channels than input channels.
    yield convolution(make, (2, 35, 20), (70, 1, 3), groups=35, padding=1, stride=2)
    # A matrix product, of 129 channels.
    yield convolution(make, (2, 129, 9), (5, 129, 1), bias=False)
    # Strides: equal to and greater than the kernel, the last elements unused; dilation.
    yield convolution(make, (2, 3, 12), (4, 3, 3), stride=(3,))
    yield convolution(make, (2, 3, 10), (4, 3, 2), stride=4, padding=1)
    yield convolution(make, (2, 2, 33), (3, 2, 3), dilation=4, stride=3, padding=(5,))
    # Padding as a word, also where the sum is odd; more of it than kernel.
    yield convolution(make, (2, 3, 7), (2, 3, 4), padding="same", dilation=3)
    yield convolution(make, (2, 3, 7), (2, 3, 3), padding="valid", stride=2)
    yield convolution(make, (2, 3, 4), (2, 3, 2), padding=3, stride=2)
    # The kernel as long as the input; no batch; longer than a block of the CPU's.
    yield convolution(make, (3, 4, 6), (7, 4, 6))
    yield convolution(make, (3, 7), (4, 3, 3), padding=1)
    yield convolution(make, (1, 2, 1025), (3, 2, 3), padding=1)


def small_samples(make):
    yield convolution(make, (2, 2, 4), (2, 2, 2), padding=1, stride=2)
    yield convolution(make, (2, 2, 5), (4, 1, 3), groups=2, dilation=2, bias=False)
    yield convolution(make, (2, 4), (2, 2, 2), padding="same")


def empty_samples(make):
    yield convolution(make, (0, 2, 5), (3, 2, 3))
    yield convolution(make, (0, 4, 5), (6, 2, 3), groups=2, bias=False, stride=2)
    # As in PyTorch, no input channels give no output channels.
    yield convolution(make, (2, 0, 5), (3, 0, 3))
    yield convolution(make, (2, 0, 5), (3, 0, 3), bias=False)
    # No elements, but padding that makes some.
    yield convolution(make, (0, 2, 0), (3, 2, 3), padding=2)


def op_samples(make):
    ops = torch.ops.cuda_ops
    signal, weight = make(2, 4, 9), make(6, 2, 3)
    channels_last = signal.transpose(1, 2).contiguous().transpose(1, 2)
    parameters = (2,), (1, 2), (2,), 2
    output = ops.conv1d_forward(signal, weight, make(6), *parameters)
    for x in (signal, channels_last, signal[:, :, :1].expand(2, 4, 9)):
        yield ops.conv1d_forward, (x, weight, make(6), *parameters)
    yield ops.conv1d_forward, (signal, make(6, 3, 2).transpose(1, 2), None, *parameters)
    for last in (False, True):
        yield ops.conv1d_backward_input, (output, weight, signal.shape, last, *parameters)
        yield ops.conv1d_backward_weight, (output, signal, weight.shape, last, *parameters)
    yield ops.conv2d_backward_bias, (output,)


def call(input=(2, 2, 5), weight=(4, 2, 3), bias=None, dtype=torch.float32, **arguments):
    """A call with the given shapes, all else being right."""

    def run(device):
        tensors = [torch.ones(shape, device=device, dtype=dtype) for shape in (input, weight)]
        bias_tensor = None if bias is None else torch.ones(bias, device=device)
        return cuda_ops.functional.conv1d(*tensors, bias_tensor, **arguments)

    return run


PLAIN = (1,), (0, 0), (1,), 1
backward_input = torch.ops.cuda_ops.conv1d_backward_input
backward_weight = torch.ops.cuda_ops.conv1d_backward_weight
SPEC = OpSpec(
    name="conv1d",
    function=cuda_ops.functional.conv1d,
    reference=torch.nn.functional.conv1d,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        Bad(
            "integers", call(dtype=torch.int64), RuntimeError, "conv1d: expected input to be floating point, got int64"
        ),
        Bad(
            "dimensions of input",
            call(input=(5,)),
            RuntimeError,
            r"conv1d: expected input to have 3 dimensions, or 2 without a batch, got shape \[5\]",
        ),
        Bad(
            "dimensions of weight",
            call(weight=(4, 2, 3, 1)),
            RuntimeError,
            r"conv1d: expected weight to have 3 dimensions, got shape \[4, 2, 3, 1\]",
        ),
        Bad(
            "dimensions of weight with padding='same'",
            call(weight=(4, 2), padding="same"),
            RuntimeError,
            r"conv1d: expected weight to have 3 dimensions, got shape \[4, 2\]",
        ),
        Bad(
            "channels",
            call(input=(2, 3, 5)),
            RuntimeError,
            r"conv1d: expected input to have 2 channels in dimension 1, .* got shape \[2, 3, 5\]",
        ),
        Bad(
            "output channels of groups",
            call(input=(2, 6, 5), groups=3),
            RuntimeError,
            r"conv1d: expected weight to have a positive multiple of groups=3 output channels .* got shape \[4, 2, 3\]",
        ),
        Bad(
            "no output channels",
            call(weight=(0, 2, 3)),
            RuntimeError,
            "conv1d: expected weight to have a positive multiple of groups=1 output channels",
        ),
        Bad("groups", call(groups=0), RuntimeError, "conv1d: expected groups to be positive, got 0"),
        Bad("stride", call(stride=(0,)), RuntimeError, r"conv1d: expected stride to be positive, got \[0\]"),
        Bad("dilation", call(dilation=-1), RuntimeError, r"conv1d: expected dilation to be positive, got \[-1\]"),
        Bad("padding", call(padding=-1), RuntimeError, "conv1d: expected padding to be zero or more, got .*-1"),
        Bad("two strides", call(stride=(1, 1)), RuntimeError, r"conv1d: expected stride and dilation to have 1 value "),
        Bad(
            "two paddings",
            call(padding=(1, 1)),
            RuntimeError,
            r"conv1d: expected padding to be an int or one in a sequence, got \(1, 1\)",
        ),
        Bad("fraction", call(stride=1.5), TypeError, "conv1d: expected stride to be an int, got 1.5"),
        Bad(
            "unknown word",
            call(padding="full"),
            RuntimeError,
            "conv1d: expected padding to be 'same', 'valid', an int or one in a sequence, got 'full'",
        ),
        Bad(
            "'same' with a stride",
            call(padding="same", stride=2),
            RuntimeError,
            r"conv1d: expected stride to be 1 with padding='same', got 2",
        ),
        Bad(
            "kernel greater than input",
            call(input=(2, 2, 4), dilation=2),
            RuntimeError,
            "conv1d: expected the kernel to be no greater than the padded input, 4, got 5",
        ),
        Bad(
            "empty kernel",
            call(weight=(4, 2, 0)),
            RuntimeError,
            "conv1d: expected weight to have a kernel that is not empty",
        ),
        Bad(
            "no elements",
            call(input=(2, 2, 0), padding=2),
            RuntimeError,
            "conv1d: expected input to have no empty dimension but batch or channels",
        ),
        Bad(
            "size of bias",
            call(bias=(3,)),
            RuntimeError,
            r"conv1d: expected bias to have shape \[4\], one value for each output channel of weight, got \[3\]",
        ),
        Bad(
            "dtype of bias",
            call(bias=(4,), dtype=torch.float64),
            RuntimeError,
            "conv1d: expected bias to have the dtype of input, float64, got float32",
        ),
        Bad(
            "beyond the limit",
            call(dilation=2**30),
            RuntimeError,
            "conv1d: expected lengths, padding and dilation to be below 1073741824, got 1073741824",
        ),
        bad(
            "dtype of weight",
            lambda ones: cuda_ops.functional.conv1d(ones(1, 1, 3), ones(1, 1, 3, dtype=torch.float64)),
            "conv1d: expected weight to have the dtype of input, float32, got float64",
        ),
        bad(
            "grad_output of another shape, for input",
            lambda ones: backward_input(ones(2, 4, 4), ones(4, 2, 3), (2, 2, 5), False, *PLAIN),
            r"conv1d_backward_input: expected grad_output to have the shape of output, \[2, 4, 3\], got \[2, 4, 4\]",
        ),
        bad(
            "grad_output of another shape, for weight",
            lambda ones: backward_weight(ones(2, 4, 4), ones(2, 2, 5), (4, 2, 3), False, *PLAIN),
            r"conv1d_backward_weight: expected grad_output to have the shape of output, \[2, 4, 3\], got \[2, 4, 4\]",
        ),
    ],
)
