import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

from .add_layer_norm import shapes
from .layer_norm import KERNEL_SHAPES, eps_for


def samples(make):
    for rows, cols in shapes():
        yield Sample((make(rows, cols), make(rows, cols), (cols,), make(cols), eps_for(cols)), name=f"{rows} of {cols}")
    yield Sample((make(2, 3, 4, 5), make(2, 3, 4, 5), (4, 5)), name="two dimensions")
    yield Sample((make(6, 33), make(6, 33), (33,), None, 0.25, 0.5, False), name="evaluation: nothing dropped")


def kernel_samples(make):
    for rows, cols in KERNEL_SHAPES:
        yield Sample((make(rows, cols), make(rows, cols), (cols,), make(cols), 1e-5, 0.5))


def small_samples(make):
    yield Sample((make(4, 5), make(4, 5), (5,), make(5)), name="weight")
    yield Sample((make(2, 2, 3), make(2, 2, 3), (2, 3)), {"eps": 0.5}, name="two dimensions")


def empty_samples(make):
    yield Sample((make(0, 3), make(0, 3), (3,), make(3)))
    yield Sample((make(3, 0), make(3, 0), (0,), make(0)))


def op_samples(make):
    forward = torch.ops.cuda_ops.add_rms_norm_forward
    for cols in (5, 8):
        input, residual, weight = make(4, cols), make(4, cols), make(cols)
        yield forward, (input, residual, (cols,), weight, 1e-5, 0.0)
        yield forward, (make(cols, 4).t(), residual, (cols,), None, 1e-5, 0.0)


add_rms_norm = cuda_ops.functional.add_rms_norm


def reference(input, residual, normalized_shape, weight=None, eps=None, p=0.0, training=True):
    if p and training:
        raise ValueError("draws random numbers, of which tests/ops/test_layer_norm.py knows")
    sum = input + residual
    return torch.nn.functional.rms_norm(sum, normalized_shape, weight, eps), sum


SPEC = OpSpec(
    name="add_rms_norm",
    function=add_rms_norm,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    kernel_samples=kernel_samples,
    gradgrad=True,
    cancels=True,
    # The sum is rounded before it is normalised, as in the chain of two ops.
    relative_norm={torch.float16: 4e-3, torch.bfloat16: 3.2e-2},
    bad=[
        bad(
            "integers",
            lambda ones: add_rms_norm(ones(2, 3, dtype=torch.int64), ones(2, 3), (3,)),
            "add_rms_norm: expected input to be floating point, got int64",
        ),
        bad(
            "another shape",
            lambda ones: add_rms_norm(ones(2, 4), ones(2, 4), (3,)),
            r"add_rms_norm: expected input to end in the dimensions of normalized_shape, \[3\], got shape \[2, 4\]",
        ),
        bad(
            "residual of another shape",
            lambda ones: add_rms_norm(ones(2, 3), ones(1, 3), (3,)),
            r"add_rms_norm: expected residual to have the shape of input, \[2, 3\], got \[1, 3\]",
        ),
        bad(
            "p below 0",
            lambda ones: add_rms_norm(ones(2, 3), ones(2, 3), (3,), p=-0.5),
            "add_rms_norm: expected p to be between 0 and 1, got -0.5",
            ValueError,
        ),
    ],
)
