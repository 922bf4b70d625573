import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

function = cuda_ops.functional.prelu

# (shape of input, elements of weight). One weight for all: less than a vector, with a rest, several blocks; one for
# each channel: planes of whole vectors and not, rows of channels of whole vectors and not, more than a tile of them.
CASES = [
    ((1,), 1),
    ((7,), 1),
    ((1025,), 1),
    ((3, 5, 7), 1),
    ((40, 1000), 1),
    ((4, 5), 5),
    ((300, 8), 8),
    ((33, 31), 31),
    ((5, 600), 600),
    ((2, 3, 7), 3),
    ((2, 8, 64), 8),
    ((3, 5, 6, 6), 5),
    ((2, 4, 33, 31), 4),
    ((2, 1, 5), 1),
    ((2, 16, 3, 3), 16),
]


def reference(input, weight):
    """By its formula: PyTorch's second derivative takes the other side at 0 than its first. prelu itself refuses what
    does not fit."""
    torch.nn.functional.prelu(input.detach(), weight.detach())
    shape = [1] * input.dim()
    if weight.numel() != 1:
        shape[1] = -1
    return torch.where(input > 0, input, weight.reshape(shape) * input.masked_fill(input > 0, 0))


def samples(make):
    # Away from 0, where numeric and analytic gradients differ.
    for shape, count in CASES:
        yield Sample((make(*shape), make(count)), name=f"{shape}, weight of {count}")
    yield Sample((make(), make(1)), name="no dimensions")
    yield Sample((make(3, 4), make()), name="weight without dimensions")


def small_samples(make):
    yield Sample((make.distinct(5), make(1)))
    yield Sample((make.distinct(2, 3), make(3)))
    yield Sample((make.distinct(2, 2, 3), make(2)))


def empty_samples(make):
    yield Sample((make(0, 3), make(3)))
    yield Sample((make(2, 3, 0), make(1)))


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.prelu_forward, torch.ops.cuda_ops.prelu_backward
    x = make(2, 3, 4, 5)
    for input in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3)):
        for weight in (make(3), make(1)):
            yield forward, (input, weight)
            yield backward, (torch.ones_like(input), input, weight)


SPEC = OpSpec(
    name="prelu",
    function=function,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    # The gradient of one weight is a sum of values around 0, which cancel; PyTorch rounds each product to the dtype.
    relative_norm={torch.float32: 1e-5},
    bad=[
        bad(
            "integers",
            lambda ones: function(ones(3, dtype=torch.int64), ones(1)),
            "prelu: expected input to be floating point, got int64",
        ),
        bad("no tensor", lambda ones: function(1.0, ones(1)), "prelu: expected input to be a Tensor", TypeError),
        bad("no weight", lambda ones: function(ones(3), 0.5), "prelu: expected weight to be a Tensor", TypeError),
        bad(
            "weight of another dtype",
            lambda ones: function(ones(3), ones(1, dtype=torch.float64)),
            "prelu: expected weight to",
        ),
        bad("matrix of weights", lambda ones: function(ones(2, 3), ones(3, 1)), "prelu: expected weight to have"),
        bad(
            "too many weights",
            lambda ones: function(ones(2, 3), ones(2)),
            "prelu: expected weight to have 1 element or 3, one for each channel of input, got 2",
        ),
    ],
)
