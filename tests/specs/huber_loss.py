from support.losses import loss_spec, reduced, weighted

import cuda_ops


def reference(input, target, reduction="mean", delta=1.0, weight=None):
    difference = input - target
    is_far = difference.abs() >= delta
    near = difference.masked_fill(is_far, 0)
    far = difference.masked_fill(~is_far, delta).abs()
    losses = 0.5 * near * near + delta * (far - delta) + 0.5 * delta * delta * is_far.to(input.dtype)
    return reduced(losses, weight, reduction, by_weights=False)


SPEC = loss_spec(
    "huber_loss",
    reference=reference,
    keywords=({}, {"delta": 0.25}, {"delta": 3.0}),
    more=weighted,
    bad=[
        (
            "delta of 0",
            lambda ones: cuda_ops.functional.huber_loss(ones(3), ones(3), delta=0.0),
            ": expected delta to be above 0, got 0.0",
        )
    ],
)
