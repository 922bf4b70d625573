import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

from .dropout import op_samples

function = cuda_ops.functional.dropout3d


def samples(make):
    # Values: test_dropout.py.
    for shape in [(2, 3, 2, 2, 3), (3, 2, 2, 2), (1, 1, 1, 1, 1)]:
        yield Sample((make(*shape),), name=f"{shape}")


def small_samples(make):
    yield Sample((make(2, 3, 2, 2, 2),), name="p = 0.5")
    yield Sample((make(2, 3, 2, 2, 2), 1.0), name="p = 1")


def empty_samples(make):
    yield Sample((make(0, 3, 2, 2, 2),))


SPEC = OpSpec(
    name="dropout3d",
    function=function,
    reference=torch.nn.functional.dropout3d,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    random=True,
    bad=[
        bad(
            "integers",
            lambda ones: function(ones(2, 3, 2, 2, 2).long()),
            "dropout3d: expected input to be floating point, got int64",
        ),
        bad(
            "p above 1",
            lambda ones: function(ones(2, 3, 2, 2, 2), 1.5),
            "dropout3d: expected p to be between 0 and 1, got 1.5",
            ValueError,
        ),
        bad(
            "p no number",
            lambda ones: function(ones(2, 3, 2, 2, 2), "0.5"),
            "dropout3d: expected p to be a number",
            TypeError,
        ),
        bad(
            "training no bool",
            lambda ones: function(ones(2, 3, 2, 2, 2), training=1),
            "dropout3d: expected training to be a bool, got 1",
            TypeError,
        ),
        bad(
            "dimensions",
            lambda ones: function(ones(3)),
            r"dropout3d: expected input to have 5 dimensions.*, got shape \[3\]",
            NotImplementedError,
        ),
        bad(
            "a leaf in place",
            lambda ones: function(ones(2, 3, 2, 2, 2).requires_grad_(), inplace=True),
            "leaf Variable that requires grad is being used in an in-place operation",
        ),
    ],
)
