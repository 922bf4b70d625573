import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

from .layer_norm import KERNEL_SHAPES, eps_for
from .layer_norm import reference as layer_norm_reference

# As layer_norm's: of each kind of kernel the first and the last length, and those that are not whole vectors.
COLS = [1, 2, 7, 8, 33, 64, 100, 129, 256, 257, 512, 513, 768, 1023, 1025, 2048, 2049, 4096, 4097, 8200, 16392]


def shapes(least=1):
    for cols in [cols for cols in COLS if cols >= least]:
        yield 5 if cols < 2000 else 2, cols
    yield from [(1, 768), (700, 24), (300, 200)]


def samples(make):
    for rows, cols in shapes(2):  # of one element weight's gradient is nothing but rounding
        arguments = make(rows, cols), make(rows, cols), (cols,), make(cols), make(cols), eps_for(cols)
        yield Sample(arguments, name=f"{rows} rows of {cols}")
    yield Sample((make(6, 40), make(6, 40), (40,), make(40)), name="weight alone")
    yield Sample((make(6, 40), make(6, 40), (40,), None, make(40)), name="bias alone")
    yield Sample((make(2, 3, 4, 5), make(2, 3, 4, 5), (4, 5)), name="two dimensions")
    yield Sample((make(6, 33), make(6, 33), (33,), None, None, 0.25, 0.5, False), name="evaluation: nothing dropped")


def kernel_samples(make):
    for rows, cols in KERNEL_SHAPES:
        for p in (0.0, 0.5):
            yield Sample((make(rows, cols), make(rows, cols), (cols,), make(cols), make(cols), 1e-5, p))


def small_samples(make):
    yield Sample((make(4, 5), make(4, 5), (5,), make(5), make(5)), name="weight and bias")
    yield Sample((make(2, 2, 3), make(2, 2, 3), (2, 3)), {"eps": 0.5}, name="two dimensions")


def empty_samples(make):
    yield Sample((make(0, 3), make(0, 3), (3,), make(3), make(3)))
    yield Sample((make(3, 0), make(3, 0), (0,), make(0), make(0)))


def op_samples(make):
    forward = torch.ops.cuda_ops.add_layer_norm_forward
    for cols in (5, 8):
        input, residual, weight, bias = make(4, cols), make(4, cols), make(cols), make(cols)
        yield forward, (input, residual, (cols,), weight, bias, 1e-5, 0.0)
        yield forward, (make(cols, 4).t(), residual, (cols,), None, None, 1e-5, 0.0)


add_layer_norm = cuda_ops.functional.add_layer_norm


def reference(input, residual, normalized_shape, weight=None, bias=None, eps=1e-5, p=0.0, training=True):
    if p and training:
        raise ValueError("draws random numbers, of which tests/ops/test_layer_norm.py knows")
    sum = input + residual
    return layer_norm_reference(sum, normalized_shape, weight, bias, eps), sum


SPEC = OpSpec(
    name="add_layer_norm",
    function=add_layer_norm,
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
            lambda ones: add_layer_norm(ones(2, 3, dtype=torch.int64), ones(2, 3), (3,)),
            "add_layer_norm: expected input to be floating point, got int64",
        ),
        bad(
            "another shape",
            lambda ones: add_layer_norm(ones(2, 4), ones(2, 4), (3,)),
            r"add_layer_norm: expected input to end in the dimensions of normalized_shape, \[3\], got shape \[2, 4\]",
        ),
        bad(
            "residual of another shape",
            lambda ones: add_layer_norm(ones(2, 3), ones(1, 3), (3,)),
            r"add_layer_norm: expected residual to have the shape of input, \[2, 3\], got \[1, 3\]",
        ),
        bad(
            "residual of another dtype",
            lambda ones: add_layer_norm(ones(2, 3), ones(2, 3, dtype=torch.float64), (3,)),
            "add_layer_norm: expected residual to have the dtype of input, float32, got float64",
        ),
        bad(
            "bias of another shape",
            lambda ones: add_layer_norm(ones(2, 3), ones(2, 3), (3,), None, ones(2)),
            r"add_layer_norm: expected bias to have the shape normalized_shape, \[3\], got \[2\]",
        ),
        bad(
            "p above 1",
            lambda ones: add_layer_norm(ones(2, 3), ones(2, 3), (3,), p=1.5),
            "add_layer_norm: expected p to be between 0 and 1, got 1.5",
            ValueError,
        ),
        bad(
            "p above 1 in the op",
            lambda ones: torch.ops.cuda_ops.add_layer_norm_forward(ones(2, 3), ones(2, 3), [3], None, None, 1e-5, 1.5),
            "add_layer_norm: expected p to be between 0 and 1, got 1.5",
        ),
    ],
)
