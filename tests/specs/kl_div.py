import torch
from support.losses import loss_spec
from support.opspec import Sample

import cuda_ops


def reference(input, target, reduction="mean", log_target=False):
    """PyTorch's, without its warning that 'mean' is no mean of divergences."""
    losses = torch.nn.functional.kl_div(input, target, reduction="none", log_target=log_target)
    if reduction == "batchmean":
        return losses.sum() / input.shape[0]
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def positive(make, *shape):
    # Not near 0, where the second derivative by the target is beyond any bound.
    return make(*shape, low=0.25, high=2.0)


def more(make):
    yield Sample((make(5, 7), positive(make, 5, 7)), {"reduction": "batchmean"}, "batchmean")
    zeros = torch.zeros(3, 4, dtype=make.dtype, device=make.device)
    yield Sample((make(3, 4), zeros), {"reduction": "none"}, "targets of 0")
    yield Sample((make(6, 4), positive(make, 4)), {"reduction": "sum"}, "a target that is broadcast")


SPEC = loss_spec(
    "kl_div",
    target=positive,
    keywords=({}, {"log_target": True}),
    reference=reference,
    more=more,
    bad=[
        (
            "log_target as a number",
            lambda ones: cuda_ops.functional.kl_div(ones(3), ones(3), log_target=1),
            ": expected log_target to be a bool, got 1",
            TypeError,
        )
    ],
)
