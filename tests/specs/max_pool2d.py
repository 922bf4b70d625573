import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops

function = cuda_ops.functional.max_pool2d


def reference(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    """PyTorch's. Where a window has nothing but padding, which dilation makes possible, the place that PyTorch gives is
    beyond the plane, and its backward writes there, beyond the last plane's memory too: then its forward pass, whose
    maxima have their gradients by their places."""
    functional, window = torch.nn.functional, (kernel_size, stride, padding, dilation, ceil_mode)
    output, indices = functional.max_pool2d(input, *window, return_indices=True)
    # Of a plane of its own: vmap decides nothing by what is in its batch.
    plane = torch.zeros((1, *input.shape[-2:]), dtype=input.dtype, device=input.device)
    is_padding = functional.max_pool2d(plane, *window).isinf()
    if is_padding.any():
        indices = indices.masked_fill(is_padding, -1)
        values = input.flatten(-2).gather(-1, indices.clamp(min=0).flatten(-2)).view(output.shape)
        output = values.masked_fill(is_padding, -torch.inf)
    return (output, indices) if return_indices else output


def samples(make):
    x = make.distinct
    # The MNIST model's two poolings, smaller; rows of 31 and 33 windows around a warp and a vector.
    yield Sample((x(2, 3, 28, 28), 2), name="28x28, 2")
    yield Sample((x(2, 2, 5, 62), 2), name="31 windows a row")
    yield Sample((x(1, 2, 5, 66), 2), name="33 windows a row")
    yield Sample((x(1, 33, 7, 7), 2), name="odd size, 33 channels")
    yield Sample((x(3, 9, 8), 3), name="no batch")
    yield Sample((x(2, 1, 6, 1), (3, 1)), name="one channel, one column")
    yield Sample((x(1, 1, 1, 1), 1), name="one element")
    # Whole vectors of channels, which channels_last takes 16 bytes at a time.
    yield Sample((x(2, 16, 9, 11), 3, 2, 1), {"ceil_mode": True}, name="16 channels, 3, stride 2")
    yield Sample((x(1, 8, 10, 9), 2, 1, 1, 2), {"return_indices": True}, name="8 channels, dilation 2")
    # Windows that overlap, that leave gaps, and those of ResNet's stem.
    yield Sample((x(2, 2, 9, 10), 3, 1), name="stride 1")
    yield Sample((x(2, 2, 9, 10), 2, (3, 5)), name="gaps")
    yield Sample((x(2, 2, 15, 16), 3, 2, 1), name="3, stride 2, padding 1")
    yield Sample((x(2, 2, 7, 8), (4, 2), (2, 1), (2, 1)), name="pairs, full padding")
    yield Sample((x(2, 2, 6, 8), 2, 2, 1), name="2, padding 1")
    yield Sample((x(1, 2, 11, 12), 3, 2, 1, 2), name="dilation 2")
    yield Sample((x(1, 2, 11, 12), (2, 3), (1, 2), (1, 0), (3, 2)), name="dilation pair")
    yield Sample((x(2, 2, 8, 9), 3, 2), {"ceil_mode": True}, name="ceil_mode")
    yield Sample((x(2, 2, 7, 5), 2, 3), {"padding": 1, "ceil_mode": True}, name="ceil_mode, last window left out")
    yield Sample((x(2, 2, 4, 4), 5, 3), {"padding": 2, "dilation": 2, "ceil_mode": True}, name="window over all")
    yield Sample((x(1, 2, 2, 9), (2, 3), (1, 2), (1, 0), (3, 2)), {"return_indices": True}, name="padding along rows")
    yield Sample((x(2, 2, 5, 1), (3, 2), 1, 1, (1, 2)), {"return_indices": True}, name="padding along columns")
    yield Sample((x(2, 3, 8, 8), 3, 2, 1), {"return_indices": True}, name="indices")
    yield Sample((x(3, 8, 8), [2], [], [1], [1]), {"return_indices": True}, name="lists of one int, stride of none")


def small_samples(make):
    x = make.distinct
    yield Sample((x(1, 2, 4, 4), 2), name="2")
    yield Sample((x(1, 2, 4, 5), 3, 2, 1), {"ceil_mode": True, "return_indices": True}, name="overlap")
    yield Sample((x(2, 5, 5), (2, 3), 1, (0, 1), 2), name="dilation, no batch")


def empty_samples(make):
    yield Sample((make(0, 3, 4, 4), 2))
    yield Sample((make(0, 3, 4, 4), 3, 2, 1), {"return_indices": True})


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.max_pool2d_forward, torch.ops.cuda_ops.max_pool2d_backward
    window = ([3, 2], [2, 1], [1, 0], [1, 2], True)
    x = make.distinct(2, 3, 6, 7)
    for input in (x, x.contiguous(memory_format=torch.channels_last), x[0], x.transpose(2, 3).contiguous().mT, x[:0]):
        output, indices = forward(input, *window)
        yield forward, (input, *window)
        yield backward, (torch.ones_like(output), indices, list(input.shape[-2:]), *window)


def bad_call(*arguments, **kwargs):
    return lambda device: function(torch.ones(1, 2, 4, 4, device=device), *arguments, **kwargs)


def bad_input(*shape, dtype=torch.float32):
    return lambda device: function(torch.ones(*shape, device=device, dtype=dtype), 2)


def bad_backward(shape, indices, input_size=(4, 4), dtype=torch.int64):
    return lambda device: torch.ops.cuda_ops.max_pool2d_backward(
        torch.ones(shape, device=device),
        torch.zeros(indices, device=device, dtype=dtype),
        input_size,
        [2, 2],
        [2, 2],
        [0, 0],
        [1, 1],
        False,
    )


SPEC = OpSpec(
    name="max_pool2d",
    function=function,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        Bad(
            "integers",
            bad_input(1, 2, 4, 4, dtype=torch.int64),
            RuntimeError,
            "max_pool2d: expected input to be floating point, got int64",
        ),
        Bad("matrix", bad_input(4, 4), RuntimeError, "max_pool2d: expected input to have 3 or 4 dimensions"),
        Bad("no channels", bad_input(1, 0, 4, 4), RuntimeError, "expected input to have no empty dimension but the"),
        Bad("empty plane", bad_input(2, 0, 4), RuntimeError, "expected input to have no empty dimension but the batch"),
        Bad("too small", bad_input(1, 2, 1, 4), RuntimeError, "max_pool2d: expected input to have room for a window"),
        Bad("kernel 0", bad_call(0), RuntimeError, "max_pool2d: expected kernel_size to be positive 32-bit integers"),
        Bad("three sizes", bad_call((1, 2, 3)), RuntimeError, "max_pool2d: expected kernel_size to be an int or two"),
        Bad("stride 0", bad_call(2, 0), RuntimeError, "max_pool2d: expected stride to be positive 32-bit integers"),
        Bad("padding", bad_call(2, padding=2), RuntimeError, "expected padding to be at most half of kernel_size"),
        Bad("negative padding", bad_call(2, padding=-1), RuntimeError, "expected padding to be non-negative 32-bit"),
        Bad("dilation 0", bad_call(2, dilation=0), RuntimeError, "max_pool2d: expected dilation to be positive 32-bit"),
        Bad("2^31", bad_call(2, 1 << 31), RuntimeError, "max_pool2d: expected stride to be positive 32-bit integers"),
        Bad(
            "window too far",
            bad_call(3, 1 << 30, dilation=(1 << 31) - 1, padding=1, ceil_mode=True),
            RuntimeError,
            "max_pool2d: expected input",
        ),
        Bad(
            "grad_output of another shape",
            bad_backward((1, 1, 2, 3), (1, 1, 2, 2)),
            RuntimeError,
            r"max_pool2d_backward: expected grad_output to have the shape of indices, \[1, 1, 2, 2\], got",
        ),
        Bad(
            "indices of another shape",
            bad_backward((1, 1, 2, 3), (1, 1, 2, 3)),
            RuntimeError,
            "max_pool2d_backward: expected indices to have height 2 and width 2, got shape",
        ),
        Bad(
            "indices of another dtype",
            bad_backward((1, 1, 2, 2), (1, 1, 2, 2), dtype=torch.int32),
            RuntimeError,
            "max_pool2d_backward: expected indices to be int64, got int32",
        ),
    ],
)
