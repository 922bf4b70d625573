"""What the specifications of linear and of its fused forms share: samples without elements, and what all of them refuse
of input, weight and bias."""

import torch

from support.opspec import Bad, Sample, bad


def empty_samples(make):
    for leading, in_features, out_features in [((0,), 3, 2), ((2, 0), 3, 2), ((3,), 0, 2), ((3,), 4, 0), ((0,), 0, 0)]:
        tensors = make(*leading, in_features), make(out_features, in_features), make(out_features)
        yield Sample(tensors, name=f"{leading} {in_features} -> {out_features}")
    yield Sample((make(3, 0), make(2, 0)), name="no bias, no in_features")


def bad_parameters(op: str, function, bias_is_like: str) -> list[Bad]:
    """`bias_is_like`: the argument whose dtype the bias has to have."""
    return [
        bad(
            "integers",
            lambda ones: function(ones(2, 3, dtype=torch.int64), ones(2, 3, dtype=torch.int64)),
            f"{op}: expected input to be floating point, got int64",
        ),
        bad(
            "features that do not fit",
            lambda ones: function(ones(2, 4), ones(3, 5)),
            rf"{op}: expected the last dimension of input to be the in_features of weight, 5 "
            r"\(weight has shape \[3, 5\]\), got input of shape \[2, 4\]",
        ),
        bad(
            "a scalar input",
            lambda ones: function(ones(), ones(3, 5)),
            f"{op}: expected input to have at least 1 dimension, got a scalar",
        ),
        bad(
            "a weight of three dimensions",
            lambda ones: function(ones(2, 5), ones(2, 3, 5)),
            rf"{op}: expected weight to have 2 dimensions, got shape \[2, 3, 5\]",
        ),
        bad(
            "a weight of another dtype",
            lambda ones: function(ones(2, 5), ones(3, 5, dtype=torch.float64)),
            f"{op}: expected weight to have the dtype of input, float32, got float64",
        ),
        bad(
            "a bias of another dtype",
            lambda ones: function(ones(2, 5), ones(3, 5), ones(3, dtype=torch.float64)),
            f"{op}: expected bias to have the dtype of {bias_is_like}, float32, got float64",
        ),
        bad(
            "a bias of another size",
            lambda ones: function(ones(2, 5), ones(3, 5), ones(4)),
            rf"{op}: expected bias to have shape \[3\], the out_features of weight, got \[4\]",
        ),
    ]
