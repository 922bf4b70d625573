import torch
from support.opspec import Bad, OpSpec, bad

import cuda_ops

from .conv_transpose2d import transposed


def samples(make):
    # One element each; no bias.
    yield transposed(make, (1, 1, 1), (1, 1, 1), bias=False)
    # A vocoder's: a kernel of two strides; channels one off the tiles.
    yield transposed(make, (2, 31, 9), (31, 17, 16), stride=8, padding=4)
    yield transposed(make, (2, 33, 12), (33, 5, 4), stride=2, padding=(1,))
    # Strides greater than the kernel: bias alone between, and by output_padding at the end.
    yield transposed(make, (2, 3, 5), (3, 4, 2), stride=4, output_padding=3)
    # Dilation; output_padding of a stride and more.
    yield transposed(make, (2, 2, 7), (2, 3, 3), dilation=3, padding=2, stride=2)
    yield transposed(make, (2, 2, 4), (2, 3, 2), dilation=5, output_padding=(4,), stride=2, padding=1)
    # Groups; more padding than kernel; no batch; longer than a block of the CPU's.
    yield transposed(make, (2, 6, 5), (6, 2, 3), groups=3, padding=1)
    yield transposed(make, (2, 3, 6), (3, 2, 2), padding=2)
    yield transposed(make, (3, 5), (3, 4, 3), stride=2, output_padding=1)
    yield transposed(make, (1, 2, 513), (2, 3, 3), stride=2)


def small_samples(make):
    yield transposed(make, (2, 2, 3), (2, 2, 2), padding=1, stride=2, output_padding=1)
    yield transposed(make, (2, 2, 3), (2, 1, 2), groups=2, dilation=2, bias=False)
    yield transposed(make, (2, 3), (2, 2, 2), dilation=2, output_padding=1)


def empty_samples(make):
    yield transposed(make, (0, 2, 4), (2, 3, 3))
    yield transposed(make, (0, 4, 4), (4, 2, 3), groups=2, bias=False, stride=2, output_padding=1)


def op_samples(make):
    forward = torch.ops.cuda_ops.conv_transpose1d_forward
    signal, weight = make(2, 4, 5), make(4, 3, 2)
    parameters = (3,), (1, 2), (2,), (2,), 2
    for x in (signal, signal.transpose(1, 2).contiguous().transpose(1, 2), signal[:, :, :1].expand(2, 4, 5)):
        yield forward, (x, weight, make(6), *parameters)
    yield forward, (signal, make(4, 2, 3).transpose(1, 2), None, *parameters)


def call(input=(2, 4, 5), weight=(4, 2, 3), bias=None, dtype=torch.float32, **arguments):
    """A call with the given shapes, all else being right."""

    def run(device):
        tensors = [torch.ones(shape, device=device, dtype=dtype) for shape in (input, weight)]
        bias_tensor = None if bias is None else torch.ones(bias, device=device)
        return cuda_ops.functional.conv_transpose1d(*tensors, bias_tensor, **arguments)

    return run


OP = "conv_transpose1d"
SPEC = OpSpec(
    name=OP,
    function=cuda_ops.functional.conv_transpose1d,
    reference=torch.nn.functional.conv_transpose1d,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        Bad("integers", call(dtype=torch.int64), RuntimeError, f"{OP}: expected input to be floating point, got int64"),
        Bad(
            "dimensions of input",
            call(input=(5,)),
            RuntimeError,
            rf"{OP}: expected input to have 3 dimensions, or 2 without a batch, got shape \[5\]",
        ),
        Bad(
            "dimensions of weight",
            call(weight=(4, 2)),
            RuntimeError,
            rf"{OP}: expected weight to have 3 dimensions, got shape \[4, 2\]",
        ),
        Bad(
            "channels",
            call(input=(2, 2, 5)),
            RuntimeError,
            rf"{OP}: expected input to have 4 channels in dimension 1, .* got shape \[2, 2, 5\]",
        ),
        Bad(
            "no output channels",
            call(weight=(4, 0, 3)),
            RuntimeError,
            f"{OP}: expected weight to have output channels and a kernel",
        ),
        Bad("groups", call(groups=0), RuntimeError, f"{OP}: expected groups to be positive, got 0"),
        Bad("stride", call(stride=0), RuntimeError, rf"{OP}: expected stride to be positive, got \[0\]"),
        Bad("padding", call(padding=-1), RuntimeError, f"{OP}: expected padding to be zero or more, got .*-1"),
        Bad(
            "output_padding",
            call(stride=2, output_padding=2),
            RuntimeError,
            f"{OP}: expected output_padding to be smaller than stride or dilation, ",
        ),
        Bad(
            "no elements",
            call(input=(2, 4, 0)),
            RuntimeError,
            f"{OP}: expected input to have no empty dimension but the batch",
        ),
        Bad(
            "padding that leaves nothing",
            call(input=(2, 4, 1), padding=2),
            RuntimeError,
            rf"{OP}: expected padding to leave something of the output, got an output of \[2, 2, -1\]",
        ),
        Bad(
            "two strides",
            call(stride=(1, 1)),
            RuntimeError,
            rf"{OP}: expected stride to be an int or one in a sequence, got \(1, 1\)",
        ),
        Bad(
            "word",
            call(padding="same"),
            TypeError,
            f"{OP}: expected padding to be an int or one in a sequence, got 'same'",
        ),
        Bad(
            "size of bias",
            call(bias=(2,), groups=2),
            RuntimeError,
            rf"{OP}: expected bias to have shape \[4\], one value for each output channel of weight, got \[2\]",
        ),
        bad(
            "dtype of weight",
            lambda ones: cuda_ops.functional.conv_transpose1d(ones(1, 1, 3), ones(1, 1, 3, dtype=torch.float64)),
            f"{OP}: expected weight to have the dtype of input, float32, got float64",
        ),
    ],
)
