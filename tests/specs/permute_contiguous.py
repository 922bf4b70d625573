import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

# Rows that stay rows; matrices smaller than a tile, of whole tiles and of more, of vectors and of single elements, of
# batches, several of which are a tile; few rows that are interleaved, and back; dimensions that fall together, and
# none; the most that kernels take, and more.
CASES = [
    ((5,), (0,)),
    ((3, 5), (0, 1)),
    ((3, 5), (1, 0)),
    ((8, 8), (1, 0)),
    ((33, 31), (1, 0)),
    ((64, 64), (1, 0)),
    ((72, 136), (1, 0)),
    ((65, 129), (1, 0)),
    ((200, 24), (-1, -2)),
    ((136, 264), (1, 0)),
    ((37, 8, 16), (0, 2, 1)),
    ((67, 2, 131), (2, 1, 0)),
    ((3, 2049), (1, 0)),
    ((1031, 5), (1, 0)),
    ((49, 264), (1, 0)),
    ((6, 7, 45), (1, 0, 2)),
    ((2, 33, 65), (0, 2, 1)),
    ((3, 40, 16), (2, 0, 1)),
    ((3, 16, 40), (1, 0, 2)),
    ((3, 5, 7), (1, 0, 2)),
    ((2, 3, 9, 17), (0, 2, 3, 1)),
    ((2, 3, 41, 53), (0, 2, 3, 1)),
    ((2, 41, 53, 3), (0, 3, 1, 2)),
    ((2, 9, 17, 16), (0, 3, 1, 2)),
    ((2, 24, 5, 40), (3, 1, 0, 2)),
    ((2, 10, 4, 12), (0, 2, 1, 3)),
    ((1, 3, 1, 4), (3, 2, 1, 0)),
    ((2, 3, 2, 3, 2), (4, 2, 0, 3, 1)),
    ((2,) * 9, (8, 6, 4, 2, 0, 1, 3, 5, 7)),
]


def samples(make):
    for shape, dims in CASES:
        yield Sample((make(*shape), dims), name=f"{shape} as {dims}")


def small_samples(make):
    yield Sample((make(2, 3), (1, 0)))
    yield Sample((make(2, 3, 2), [2, 0, 1]))


def empty_samples(make):
    yield Sample((make(0, 3), (1, 0)))
    yield Sample((make(2, 0, 3), (2, 0, 1)))


def op_samples(make):
    forward = torch.ops.cuda_ops.permute_contiguous_forward
    yield forward, (make(3, 5), [1, 0])
    yield forward, (make(3, 5).t(), [1, 0])
    yield forward, (make(2, 3, 4, 5).to(memory_format=torch.channels_last), [0, 2, 3, 1])


permute = cuda_ops.functional.permute_contiguous
SPEC = OpSpec(
    name="permute_contiguous",
    function=permute,
    reference=lambda input, dims: input.permute(tuple(dims)).contiguous(),
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        bad("integers", lambda ones: permute(ones(2, dtype=torch.int64), (0,)), "floating point, got int64"),
        bad(
            "too few",
            lambda ones: permute(ones(2, 3), (0,)),
            r"permute_contiguous: expected dims to name the 2 dimensions of input, got \[0\]",
        ),
        bad(
            "one twice",
            lambda ones: permute(ones(2, 3), (0, -2)),
            r"permute_contiguous: expected dims to name each dimension once, got \[0, -2\]",
        ),
        bad(
            "no such dimension",
            lambda ones: permute(ones(2, 3), (0, 2)),
            r"permute_contiguous: expected dims to be in \[-2, 1\] for an input of shape \[2, 3\], got 2",
            IndexError,
        ),
        bad(
            "a text",
            lambda ones: permute(ones(2, 3), "10"),
            "permute_contiguous: expected dims to be an int or a tuple of ints, got '10'",
            TypeError,
        ),
    ],
)
