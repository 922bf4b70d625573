import torch
from support.opspec import Bad, OpSpec, Sample, bad

import cuda_ops


def transposed(make, input, weight, *, bias=True, **arguments):
    channels = weight[1] * arguments.get("groups", 1)
    tensors = (make(*input), make(*weight), *([make(channels)] if bias else []))
    return Sample(tensors, arguments, f"{input} {weight} {arguments}")


def samples(make):
    # One element each; no bias.
    yield transposed(make, (1, 1, 1, 1), (1, 1, 1, 1), bias=False)
    # A DCGAN's generator: from a vector, and doubling the plane; channels one off the tiles.
    yield transposed(make, (3, 33, 1, 1), (33, 31, 4, 4), bias=False)
    yield transposed(make, (2, 31, 7, 5), (31, 17, 4, 4), stride=2, padding=1)
    yield transposed(make, (2, 16, 6, 6), (16, 3, 4, 4), stride=2, padding=1)
    # A U-Net's: as much stride as kernel.
    yield transposed(make, (2, 6, 5, 7), (6, 3, 2, 2), stride=2)
    # Strides greater than the kernel: rows and columns of bias alone between; and at the end, by output_padding.
    yield transposed(make, (2, 3, 4, 3), (3, 4, 2, 1), stride=(3, 4), output_padding=(2, 3))
    yield transposed(make, (2, 3, 5, 4), (3, 4, 3, 3), stride=2, padding=1, output_padding=1)
    # Dilation; output_padding of a stride and more, which dilation allows, within the padding and beyond it.
    yield transposed(make, (2, 2, 5, 6), (2, 3, 3, 2), dilation=(2, 3), padding=(1, 2), stride=(2, 1))
    yield transposed(make, (2, 2, 4, 4), (2, 3, 3, 2), dilation=(3, 4), output_padding=(2, 1), padding=(3, 0))
    yield transposed(make, (2, 2, 3, 3), (2, 3, 2, 2), dilation=5, output_padding=4, stride=(2, 3))
    # Groups, depthwise and with more output channels than input channels.
    yield transposed(make, (2, 6, 5, 4), (6, 2, 3, 3), groups=3, padding=1)
    yield transposed(make, (2, 35, 4, 4), (35, 1, 4, 4), groups=35, padding=1, stride=2, bias=False)
    # More padding than kernel; a matrix product of 129 channels; no batch.
    yield transposed(make, (2, 3, 6, 5), (3, 2, 2, 2), padding=(2, 1))
    yield transposed(make, (1, 129, 3, 4), (129, 5, 1, 1))
    yield transposed(make, (3, 4, 5), (3, 4, 3, 3), stride=2, output_padding=(1, 0))
    # Several blocks of rows on the CPU.
    yield transposed(make, (1, 2, 40, 17), (2, 3, 3, 3), stride=2, padding=1)


def small_samples(make):
    yield transposed(make, (2, 2, 3, 2), (2, 2, 2, 2), padding=1, stride=(2, 1), output_padding=(1, 0))
    yield transposed(make, (2, 2, 2, 3), (2, 1, 2, 2), groups=2, dilation=(2, 1), bias=False)
    yield transposed(make, (2, 2, 2), (2, 2, 2, 2), dilation=2, output_padding=1)


def empty_samples(make):
    yield transposed(make, (0, 2, 4, 3), (2, 3, 3, 3))
    yield transposed(make, (0, 4, 4, 3), (4, 2, 3, 3), groups=2, bias=False, stride=2, output_padding=1)


def op_samples(make):
    ops = torch.ops.cuda_ops
    image, weight = make(2, 4, 3, 4), make(4, 3, 3, 2)
    parameters = (2, 3), (1, 0, 0, 1), (1, 2), (1, 2), 2
    for x in (image, image.to(memory_format=torch.channels_last), image[:, :, :1].expand(2, 4, 3, 4)):
        yield ops.conv_transpose2d_forward, (x, weight, make(6), *parameters)
    last = weight.to(memory_format=torch.channels_last)
    yield ops.conv_transpose2d_forward, (image, last, None, *parameters)


def call(input=(2, 4, 5, 5), weight=(4, 2, 3, 3), bias=None, dtype=torch.float32, **arguments):
    """A call with the given shapes, all else being right."""

    def run(device):
        tensors = [torch.ones(shape, device=device, dtype=dtype) for shape in (input, weight)]
        bias_tensor = None if bias is None else torch.ones(bias, device=device)
        return cuda_ops.functional.conv_transpose2d(*tensors, bias_tensor, **arguments)

    return run


OP = "conv_transpose2d"
SPEC = OpSpec(
    name=OP,
    function=cuda_ops.functional.conv_transpose2d,
    reference=torch.nn.functional.conv_transpose2d,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        Bad("integers", call(dtype=torch.int64), RuntimeError, f"{OP}: expected input to be floating point, got int64"),
        Bad(
            "dimensions of input",
            call(input=(5, 5)),
            RuntimeError,
            rf"{OP}: expected input to have 4 dimensions, or 3 without a batch, got shape \[5, 5\]",
        ),
        Bad(
            "dimensions of weight",
            call(weight=(4, 2, 3)),
            RuntimeError,
            rf"{OP}: expected weight to have 4 dimensions, got shape \[4, 2, 3\]",
        ),
        Bad(
            "channels",
            call(input=(2, 2, 5, 5)),
            RuntimeError,
            rf"{OP}: expected input to have 4 channels in dimension 1, .* got shape \[2, 2, 5, 5\]",
        ),
        Bad(
            "channels of groups",
            call(groups=3),
            RuntimeError,
            rf"{OP}: expected weight to have a positive multiple of groups=3 input channels .* got shape \[4, 2, 3",
        ),
        Bad(
            "no input channels",
            call(input=(2, 0, 5, 5), weight=(0, 2, 3, 3)),
            RuntimeError,
            f"{OP}: expected weight to have a positive multiple of groups=1 input channels",
        ),
        Bad(
            "no output channels",
            call(weight=(4, 0, 3, 3)),
            RuntimeError,
            f"{OP}: expected weight to have output channels and a kernel",
        ),
        Bad(
            "empty kernel",
            call(weight=(4, 2, 0, 3)),
            RuntimeError,
            f"{OP}: expected weight to have output channels and a kernel",
        ),
        Bad("groups", call(groups=0), RuntimeError, f"{OP}: expected groups to be positive, got 0"),
        Bad("stride", call(stride=(1, 0)), RuntimeError, rf"{OP}: expected stride to be positive, got \[1, 0\]"),
        Bad("dilation", call(dilation=-1), RuntimeError, rf"{OP}: expected dilation to be positive, got \[-1, -1\]"),
        Bad("padding", call(padding=-1), RuntimeError, f"{OP}: expected padding to be zero or more, got .*-1"),
        Bad(
            "output_padding",
            call(output_padding=-1),
            RuntimeError,
            rf"{OP}: expected output_padding to be zero or more, got \(-1, -1\)",
        ),
        Bad(
            "output_padding of a stride",
            call(stride=2, output_padding=(1, 2)),
            RuntimeError,
            f"{OP}: expected output_padding to be smaller than stride or dilation, ",
        ),
        Bad(
            "output_padding of a stride, of the op",
            lambda device: torch.ops.cuda_ops.conv_transpose2d_forward(
                torch.ones(1, 1, 2, 2, device=device),
                torch.ones(1, 1, 2, 2, device=device),
                None,
                (2, 2),
                (0, 0, 0, 0),
                (1, 2),
                (3, 3),
                1,
            ),
            RuntimeError,
            rf"{OP}: expected output_padding to be zero or more and less than stride, \[2, 2\], got \[1, 2\]",
        ),
        Bad(
            "padding that leaves nothing",
            call(input=(2, 4, 1, 5), padding=2),
            RuntimeError,
            rf"{OP}: expected padding to leave something of the output, got an output of \[2, 2, -1, 3\]",
        ),
        Bad(
            "three strides",
            call(stride=(1, 1, 1)),
            RuntimeError,
            rf"{OP}: expected stride to be an int or two of them, got \(1, 1, 1\)",
        ),
        Bad("fraction", call(stride=1.5), TypeError, f"{OP}: expected stride to be an int or two of them, got 1.5"),
        Bad("word", call(padding="same"), TypeError, f"{OP}: expected padding to be an int or two of them, got 'same'"),
        Bad(
            "empty rows",
            call(input=(2, 4, 0, 5)),
            RuntimeError,
            f"{OP}: expected input to have no empty dimension but the batch",
        ),
        Bad(
            "size of bias",
            call(bias=(2,), groups=2),
            RuntimeError,
            rf"{OP}: expected bias to have shape \[4\], one value for each output channel of weight, got \[2\]",
        ),
        Bad(
            "dtype of bias",
            call(bias=(2,), dtype=torch.float64),
            RuntimeError,
            f"{OP}: expected bias to have the dtype of input, float64, got float32",
        ),
        Bad(
            "beyond the limit",
            call(dilation=2**30),
            RuntimeError,
            f"{OP}: expected heights, widths, padding and dilation to be below 1073741824, got 1073741824",
        ),
        bad(
            "dtype of weight",
            lambda ones: cuda_ops.functional.conv_transpose2d(ones(1, 1, 3, 3), ones(1, 1, 3, 3, dtype=torch.float64)),
            f"{OP}: expected weight to have the dtype of input, float32, got float64",
        ),
    ],
)
