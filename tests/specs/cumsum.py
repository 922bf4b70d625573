import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

function = cuda_ops.functional.cumsum

# (shape, dim). Rows of one element, of less than a vector, of a warp, of several rows in a chunk, of more than one;
# rows that are no whole vectors, and chunks that begin within a row; columns of one block, of several above each other,
# of vectors and single elements; both.
CASES = [
    ((1,), 0),
    ((7,), 0),
    ((5, 1), 1),
    ((6, 3), -1),
    ((300, 7), 1),
    ((33, 31), 1),
    ((9, 128), 1),
    ((3, 1025), 1),
    ((5, 3001), 1),
    ((3, 8192), 1),
    ((2, 20_000), 1),
    ((1, 30_007), 1),
    ((4, 6), 0),
    ((31, 33), 0),
    ((1000, 3), 0),
    ((700, 64), 0),
    ((3000, 8), 0),
    ((2, 5, 7), 1),
    ((2, 300, 24), 1),
    ((3, 2, 260), -2),
    ((2, 3, 4, 5), 2),
]


def samples(make):
    for shape, dim in CASES:
        yield Sample((make(*shape), dim), name=f"{shape} along {dim}")
    yield Sample((make(), 0), name="no dimensions")


def small_samples(make):
    yield Sample((make(2, 3), 1))
    yield Sample((make(3, 2), 0))
    yield Sample((make(2, 3, 2), -2))


def empty_samples(make):
    yield Sample((make(0, 3), 1))
    yield Sample((make(0, 3), 0))
    yield Sample((make(2, 0, 3), 1))


def op_samples(make):
    forward = torch.ops.cuda_ops.cumsum_forward
    for reverse in (False, True):
        yield forward, (make(3, 5), 1, None, reverse)
        yield forward, (make(3, 5).t(), 1, None, reverse)
        yield forward, (make(2, 3, 4, 5).to(memory_format=torch.channels_last), 2, torch.float64, reverse)


SPEC = OpSpec(
    name="cumsum",
    function=function,
    reference=torch.cumsum,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        bad(
            "integers",
            lambda ones: function(ones(3, dtype=torch.int64), 0),
            "cumsum: expected input to be floating point, got int64",
        ),
        bad(
            "dtype of integers",
            lambda ones: function(ones(3), 0, dtype=torch.int64),
            "cumsum: expected dtype to be floating point, got Long",
            NotImplementedError,
        ),
        bad("no dtype", lambda ones: function(ones(3), 0, dtype=3), "cumsum: expected dtype to be a torch", TypeError),
        bad("no tensor", lambda ones: function(1.0, 0), "cumsum: expected input to be a Tensor, got float", TypeError),
        bad(
            "no such dimension",
            lambda ones: function(ones(2, 3), 2),
            r"cumsum: expected dim to be in \[-2, 1\] for an input of shape \[2, 3\], got 2",
            IndexError,
        ),
        bad(
            "two dimensions",
            lambda ones: function(ones(2, 3), (0, 1)),
            r"cumsum: expected dim to be an int, got \(0, 1\)",
            TypeError,
        ),
    ],
)
