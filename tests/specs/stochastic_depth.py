import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

from .dropout import op_samples

function = cuda_ops.functional.stochastic_depth


def reference(input, p, mode, training=True):
    """torchvision.ops.stochastic_depth, which need not be installed."""
    if not training or p == 0.0:
        return input
    size = [input.shape[0] if mode == "row" and i == 0 else 1 for i in range(input.dim())]
    return input * torch.empty(size, dtype=input.dtype, device=input.device).bernoulli_(1 - p).div_(max(1 - p, 1e-30))


def samples(make):
    # Values: test_dropout.py.
    for shape in [(1,), (3, 4), (33, 2, 3, 5)]:
        yield Sample((make(*shape), 0.5, "row"), name=f"rows of {shape}")
        yield Sample((make(*shape), 0.5, "batch"), name=f"{shape}")


def small_samples(make):
    yield Sample((make(3, 2), 0.5, "row"), name="rows")
    yield Sample((make(3, 2), 0.25, "batch"), name="the batch")
    yield Sample((make(3, 2), 1.0, "row"), name="p = 1")


def empty_samples(make):
    yield Sample((make(0, 3), 0.5, "row"))


SPEC = OpSpec(
    name="stochastic_depth",
    function=function,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    random=True,
    bad=[
        bad(
            "integers",
            lambda ones: function(ones(3).long(), 0.5, "row"),
            "stochastic_depth: expected input to be floating point, got int64",
        ),
        bad(
            "p below 0",
            lambda ones: function(ones(3), -0.5, "row"),
            "stochastic_depth: expected p to be between 0 and 1, got -0.5",
            ValueError,
        ),
        bad(
            "mode",
            lambda ones: function(ones(3), 0.5, "column"),
            "stochastic_depth: expected mode to be 'batch' or 'row', got 'column'",
            ValueError,
        ),
        bad(
            "no rows",
            lambda ones: function(ones(), 0.5, "row"),
            r"stochastic_depth: expected input to have rows for mode 'row', got shape \[\]",
        ),
    ],
)
