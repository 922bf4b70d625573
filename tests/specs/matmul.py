import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops


def samples(make):
    # (shape of input, shape of other): one element; nothing that fits a tile, the lecture's sizes; around the CPU's
    # tiles of 14 and 32; around the GPU's tiles of 64 and 128 and with rows that are and are not whole 16 bytes; long
    # sums, which are split on the GPU; more than one block of 256 deep and of 1536 wide on the CPU; many rows for
    # several threads; a row, a column (of 37: 33 random gradients happen to cancel where the layout makes rows equal).
    for left, right in [
        ((1, 1), (1, 1)),
        ((35, 19), (19, 79)),
        ((14, 31), (31, 33)),
        ((65, 64), (64, 136)),
        ((129, 17), (17, 127)),
        ((3, 1025), (1025, 2)),
        ((7, 257), (257, 1601)),
        ((600, 9), (9, 5)),
        ((1, 40), (40, 33)),
        ((37, 40), (40, 1)),
        # vectors
        ((6,), (6,)),
        ((6,), (6, 4)),
        ((4, 6), (6,)),
        # batches: of both, of one, broadcast
        ((3, 5, 7), (3, 7, 4)),
        ((70, 2, 3), (70, 3, 4)),
        ((3, 5, 7), (7, 4)),
        ((5, 7), (3, 7, 4)),
        ((2, 1, 5, 7), (3, 7, 4)),
        ((2, 3, 5, 7), (2, 3, 7, 4)),
        ((3, 5, 7), (7,)),
        ((7,), (2, 3, 7, 4)),
    ]:
        yield Sample((make(*left), make(*right)), name=f"{left} {right}")


def small_samples(make):
    yield Sample((make(3, 4), make(4, 2)), name="matrices")
    yield Sample((make(3), make(3)), name="vectors")
    yield Sample((make(2, 2, 3), make(3, 2)), name="a batch on the left")
    yield Sample((make(2, 3), make(2, 3, 2)), name="a batch on the right")
    yield Sample((make(2, 1, 2, 3), make(2, 3, 2)), name="broadcast")


def empty_samples(make):
    for left, right in [
        ((0, 3), (3, 2)),
        ((3, 0), (0, 2)),
        ((3, 4), (4, 0)),
        ((0,), (0,)),
        ((0, 2, 3), (0, 3, 4)),
        ((2, 0, 3), (3, 4)),
        ((2, 3, 0), (2, 0, 4)),
        ((0, 1, 2, 3), (5, 3, 4)),
    ]:
        yield Sample((make(*left), make(*right)), name=f"{left} {right}")


def op_samples(make):
    op = torch.ops.cuda_ops.matmul_forward
    yield op, (make(3, 5), make(5, 4))
    yield op, (make(5, 3).t(), make(4, 5).t())
    yield op, (make(2, 3, 5), make(2, 4, 5).transpose(1, 2))


matmul = cuda_ops.functional.matmul
SPEC = OpSpec(
    name="matmul",
    function=matmul,
    reference=torch.matmul,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        bad(
            "integers",
            lambda ones: matmul(ones(2, 3, dtype=torch.int64), ones(3, 3, dtype=torch.int64)),
            "matmul: expected input to be floating point, got int64",
        ),
        bad(
            "a scalar",
            lambda ones: matmul(ones(), ones(3)),
            "matmul: expected input to have at least 1 dimension, got a scalar",
        ),
        bad(
            "a scalar on the right",
            lambda ones: matmul(ones(3), ones()),
            "matmul: expected other to have at least 1 dimension, got a scalar",
        ),
        bad(
            "matrices that do not fit",
            lambda ones: matmul(ones(2, 4), ones(5, 3)),
            "matmul: expected other to have as many rows as input has columns, 4, "
            r"got input of shape \[2, 4\] and other of shape \[5, 3\]",
        ),
        bad(
            "vectors that do not fit",
            lambda ones: matmul(ones(4), ones(5)),
            "matmul: expected other to have as many rows as input has columns, 4, "
            r"got input of shape \[4\] and other of shape \[5\]",
        ),
        bad(
            "batches that do not broadcast",
            lambda ones: matmul(ones(2, 4, 5), ones(3, 5, 2)),
            "matmul: expected the dimensions before the last two to broadcast, "
            r"got input of shape \[2, 4, 5\] and other of shape \[3, 5, 2\]",
        ),
        bad(
            "another dtype",
            lambda ones: matmul(ones(2, 5), ones(5, 3, dtype=torch.float64)),
            "matmul: expected other to have the dtype of input, float32, got float64",
        ),
        bad(
            "the op and a vector",
            lambda ones: torch.ops.cuda_ops.matmul_forward(ones(5), ones(5, 3)),
            r"matmul: expected input to have 2 to 3 dimensions, got shape \[5\]",
        ),
        bad(
            "the op and two batches",
            lambda ones: torch.ops.cuda_ops.matmul_forward(ones(2, 4, 5), ones(3, 5, 3)),
            r"got input of shape \[2, 4, 5\] and other of shape \[3, 5, 3\]",
        ),
    ],
)
