import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops


def samples(make):
    # Rows of one lane and a bit less or more, of the limits between the kernels (32, 1024) and beyond; no dimensions.
    for cols in [1, 7, 8, 9, 10, 16, 31, 32, 33, 1023, 1024, 1025]:
        yield Sample((make(5, cols), 1), name=f"rows of {cols}")
    yield Sample((make(1, 5003), -1), name="one long row")
    # Rows that the GPU keeps in the registers of 32, 128 or 512 threads, two, four or eight vectors each, and one more.
    for cols in [264, 520, 1032, 2056, 4104, 8200, 16384, 16392, 32776]:
        yield Sample((make(2, cols), 1), name=f"vectors: {cols}")
    yield Sample((make(9, 512), 1), name="several rows a block")
    yield Sample((make(700, 10), 1), name="several tasks and blocks")
    yield Sample((make(), 0), name="no dimensions")
    # Columns: short, of the limit between the kernels, and long ones; inner below and above a tile of the CPU.
    # None along the first dimension, which tests repeat: of equal gradients the result is but rounding.
    for shape, dim in [((2, 33, 5), 1), ((2, 31, 3), 1), ((2, 32, 65), 1), ((2, 40, 3, 4), 1), ((3, 1100, 2), -2)]:
        yield Sample((make(*shape), dim), name=f"{shape} along {dim}")
    yield Sample((make(2, 3, 4, 5), 1), name="channels")
    yield Sample((make(3, 10, low=-1e4, high=1e4), 1), name="huge")
    yield Sample((make(3, 10, low=9999, high=10001), 1), name="huge, but near each other")


def small_samples(make):
    yield Sample((make(2, 3), 1), name="rows")
    yield Sample((make(2, 3, 2), 1), name="columns")


def empty_samples(make):
    yield Sample((make(0, 3), 1))
    yield Sample((make(3, 0), 1))
    yield Sample((make(2, 0, 3), 2))


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.softmax_forward, torch.ops.cuda_ops.softmax_backward
    yield forward, (make(3, 5), 1)
    yield forward, (make(3, 5).t(), -1)
    yield forward, (make(2, 3, 4, 5).to(memory_format=torch.channels_last), 1)
    yield backward, (make(3, 5), make(3, 5), 1)
    yield backward, (make(5, 3).t(), make(3, 5), 0)


SPEC = OpSpec(
    name="softmax",
    function=cuda_ops.functional.softmax,
    reference=torch.nn.functional.softmax,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        Bad(
            "integers",
            lambda device: cuda_ops.functional.softmax(torch.arange(3, device=device), 0),
            RuntimeError,
            "softmax: expected input to be floating point, got int64",
        ),
        Bad(
            "no such dimension",
            lambda device: cuda_ops.functional.softmax(torch.ones(2, 3, device=device), 2),
            IndexError,
            r"softmax: expected dim to be in \[-2, 1\] for an input of shape \[2, 3\], got 2",
        ),
        Bad(
            "no such dimension of a number",
            lambda device: cuda_ops.functional.softmax(torch.tensor(1.0, device=device), -2),
            IndexError,
            r"softmax: expected dim to be in \[-1, 0\] for an input of shape \[\], got -2",
        ),
        Bad(
            "grad_output of another shape",
            lambda device: torch.ops.cuda_ops.softmax_backward(
                torch.ones(2, device=device), torch.ones(3, device=device), 0
            ),
            RuntimeError,
            r"softmax_backward: expected grad_output to have the shape of output, \[3\], got \[2\]",
        ),
    ],
)
