import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

from .layer_norm import COLS, KERNEL_SHAPES, LONG, eps_for


def arguments(make, rows, cols):
    return make(rows, cols), (cols,), make(cols), eps_for(cols)


def samples(make):
    for cols in COLS:
        yield Sample(arguments(make, 5, cols), name=f"rows of {cols}")
    for cols in LONG:
        yield Sample(arguments(make, 3, cols), name=f"rows of {cols}")
    for rows, cols in [(1, 768), (700, 24), (9000, 3), (300, 200), (67, 513)]:
        yield Sample(arguments(make, rows, cols), name=f"{rows} rows of {cols}")
    yield Sample((make(6, 40), (40,)), name="without weight")
    yield Sample((make(2, 3, 4, 5), (4, 5), make(4, 5)), name="two dimensions")
    yield Sample((make(2, 3, 4, 5), (2, 3, 4, 5), make(2, 3, 4, 5)), name="all dimensions")
    yield Sample((make(2, 7), [7], None, 0.25), name="all positional")


def kernel_samples(make):
    for rows, cols in KERNEL_SHAPES:
        yield Sample(arguments(make, rows, cols))


def small_samples(make):
    yield Sample((make(4, 5), (5,), make(5)), name="weight")
    yield Sample((make(2, 2, 3), (2, 3), make(2, 3)), {"eps": 0.5}, name="two dimensions")
    yield Sample((make(2, 4), (4,)), {"eps": 0.5}, name="nothing but input")


def empty_samples(make):
    yield Sample((make(0, 3), (3,), make(3)))
    yield Sample((make(3, 0), (0,), make(0)))


def op_samples(make):
    ops = torch.ops.cuda_ops
    for cols in (5, 8):
        input, weight, shape = make(4, cols), make(cols), (cols,)
        yield ops.rms_norm_forward, (input, shape, weight, 1e-5)
        yield ops.rms_norm_forward, (make(cols, 4).t(), shape, None, 1e-5)
        rstd = make(4, low=0.5, requires_grad=False)
        rstd = rstd if input.dtype == torch.float64 else rstd.float()
        yield ops.rms_norm_backward, (make(4, cols), None, input, shape, weight, rstd, 1e-5, [True, True])
        yield ops.rms_norm_backward, (make(4, cols), make(4, cols), input, shape, None, rstd, 1e-5, [True, False])


rms_norm = cuda_ops.functional.rms_norm
SPEC = OpSpec(
    name="rms_norm",
    function=rms_norm,
    reference=torch.nn.functional.rms_norm,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    kernel_samples=kernel_samples,
    gradgrad=True,
    cancels=True,
    bad=[
        bad("integers", lambda ones: rms_norm(ones(2, 3, dtype=torch.int64), (3,)), "floating point, got int64"),
        bad(
            "another shape",
            lambda ones: rms_norm(ones(2, 4), (3,)),
            r"rms_norm: expected input to end in the dimensions of normalized_shape, \[3\], got shape \[2, 4\]",
        ),
        bad(
            "no dimensions",
            lambda ones: rms_norm(ones(3), ()),
            r"rms_norm: expected normalized_shape to have at least one dimension, got \[\]",
        ),
        bad(
            "a number",
            lambda ones: rms_norm(ones(3), 3),
            "rms_norm: expected normalized_shape to be a tuple of ints, got 3",
            TypeError,
        ),
        bad(
            "weight of another shape",
            lambda ones: rms_norm(ones(2, 3), (3,), ones(2)),
            r"rms_norm: expected weight to have the shape normalized_shape, \[3\], got \[2\]",
        ),
        bad(
            "weight of another dtype",
            lambda ones: rms_norm(ones(2, 3), (3,), ones(3, dtype=torch.float64)),
            "rms_norm: expected weight to have the dtype of input, float32, got float64",
        ),
        bad(
            "an rstd that forward did not return",
            lambda ones: torch.ops.cuda_ops.rms_norm_backward(
                ones(4, 3), None, ones(4, 3), [3], None, ones(3), 1e-5, [True, True]
            ),
            "rms_norm_backward: expected rstd to be what forward returned",
        ),
    ],
)
