import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops

function = cuda_ops.functional.avg_pool2d


def samples(make):
    # The sizes of the MNIST model's poolings, smaller; rows of 31 and 33 windows around a warp and a vector.
    yield Sample((make(2, 3, 28, 28), 2), name="28x28, 2")
    yield Sample((make(2, 2, 5, 62), 2), name="31 windows a row")
    yield Sample((make(1, 2, 5, 66), 2), name="33 windows a row")
    yield Sample((make(1, 33, 7, 7), 2), name="odd size, 33 channels")
    yield Sample((make(3, 9, 8), 3), name="no batch")
    yield Sample((make(2, 1, 6, 1), (3, 1)), name="one channel, one column")
    yield Sample((make(1, 1, 1, 1), 1), name="one element")
    yield Sample((make(2, 5, 7, 7), 7), name="global")
    # Whole vectors of channels, which channels_last takes 16 bytes at a time.
    yield Sample((make(2, 16, 9, 11), 3, 2, 1), {"ceil_mode": True}, name="16 channels, 3, stride 2")
    yield Sample((make(1, 8, 10, 9), 2, 1, 1), {"count_include_pad": False}, name="8 channels, padding not counted")
    # Windows that overlap, that leave gaps, and those of ResNet's stem.
    yield Sample((make(2, 2, 9, 10), 3, 1), name="stride 1")
    yield Sample((make(2, 2, 9, 10), 2, (3, 5)), name="gaps")
    yield Sample((make(2, 2, 15, 16), 3, 2, 1), name="3, stride 2, padding 1")
    yield Sample((make(2, 2, 7, 8), (4, 2), (2, 1), (2, 1)), name="pairs, full padding")
    yield Sample((make(2, 2, 6, 8), 2, 2, 1), name="2, padding 1")
    # The divisor: with and without padding, past the padding (ceil_mode), overridden.
    yield Sample((make(2, 2, 7, 8), 3, 2, 1), {"count_include_pad": False}, name="padding not counted")
    yield Sample((make(2, 2, 8, 9), 3, 2), {"ceil_mode": True}, name="ceil_mode")
    yield Sample((make(2, 2, 8, 10), 3, 2, 1, True), name="ceil_mode, padding")
    yield Sample((make(2, 2, 8, 10), 3, 2, 1, True, False), name="ceil_mode, padding not counted")
    yield Sample((make(2, 2, 7, 5), 2, 3), {"padding": 1, "ceil_mode": True}, name="ceil_mode, last window left out")
    yield Sample((make(2, 2, 8, 8), 3, 2, 1), {"divisor_override": 5}, name="divisor")
    yield Sample((make(2, 2, 8, 8), 2), {"divisor_override": -3, "ceil_mode": True}, name="negative divisor")
    yield Sample((make(3, 8, 8), [2], [], [1]), name="lists of one int, stride of none")


def small_samples(make):
    yield Sample((make(1, 2, 4, 4), 2), name="2")
    yield Sample((make(1, 2, 4, 5), 3, 2, 1, True), name="overlap")
    yield Sample((make(2, 5, 5), (2, 3), 1, (0, 1), False, False), name="padding not counted, no batch")
    yield Sample((make(1, 1, 3, 4), 2, 1), {"divisor_override": 3}, name="divisor")


def empty_samples(make):
    yield Sample((make(0, 3, 4, 4), 2))
    yield Sample((make(0, 3, 4, 4), 3, 2, 1))


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.avg_pool2d_forward, torch.ops.cuda_ops.avg_pool2d_backward
    window = ([3, 2], [2, 1], [1, 0], True, False, None)
    x = make(2, 3, 6, 7)
    for input in (x, x.contiguous(memory_format=torch.channels_last), x[0], x.transpose(2, 3).contiguous().mT, x[:0]):
        grad_output = torch.ones_like(forward(input, *window))
        yield forward, (input, *window)
        for channels_last in (False, True)[: input.dim() - 2]:
            yield backward, (grad_output, list(input.shape[-2:]), *window, channels_last)
    yield forward, (x, [2, 2], [2, 2], [0, 0], False, True, 3)


def bad_call(*arguments, **kwargs):
    return lambda device: function(torch.ones(1, 2, 4, 4, device=device), *arguments, **kwargs)


def bad_input(*shape, dtype=torch.float32):
    return lambda device: function(torch.ones(*shape, device=device, dtype=dtype), 2)


def bad_backward(shape, channels_last=False, divisor_override=None):
    return lambda device: torch.ops.cuda_ops.avg_pool2d_backward(
        torch.ones(shape, device=device), [4, 4], [2, 2], [2, 2], [0, 0], False, True, divisor_override, channels_last
    )


SPEC = OpSpec(
    name="avg_pool2d",
    function=function,
    reference=torch.nn.functional.avg_pool2d,
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
            "avg_pool2d: expected input to be floating point, got int64",
        ),
        Bad("matrix", bad_input(4, 4), RuntimeError, "avg_pool2d: expected input to have 3 or 4 dimensions"),
        Bad("no channels", bad_input(1, 0, 4, 4), RuntimeError, "expected input to have no empty dimension but the"),
        Bad("too small", bad_input(1, 2, 1, 4), RuntimeError, "avg_pool2d: expected input to have room for a window"),
        Bad("kernel 0", bad_call(0), RuntimeError, "avg_pool2d: expected kernel_size to be positive 32-bit integers"),
        Bad("three sizes", bad_call((1, 2, 3)), RuntimeError, "avg_pool2d: expected kernel_size to be an int or two"),
        Bad("stride 0", bad_call(2, 0), RuntimeError, "avg_pool2d: expected stride to be positive 32-bit integers"),
        Bad("padding", bad_call(2, padding=2), RuntimeError, "expected padding to be at most half of kernel_size"),
        Bad("negative padding", bad_call(2, padding=-1), RuntimeError, "expected padding to be non-negative 32-bit"),
        Bad(
            "divisor 0",
            bad_call(2, divisor_override=0),
            RuntimeError,
            "avg_pool2d: expected divisor_override to be None or not zero, got 0",
        ),
        Bad(
            "grad_output of another shape",
            bad_backward((1, 1, 2, 3)),
            RuntimeError,
            "avg_pool2d_backward: expected grad_output to have height 2 and width 2, got shape",
        ),
        Bad(
            "channels_last without a batch",
            bad_backward((1, 2, 2), channels_last=True),
            RuntimeError,
            "avg_pool2d_backward: expected grad_output to have 4 dimensions for channels_last",
        ),
    ],
)
