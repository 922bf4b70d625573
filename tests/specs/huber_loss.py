from support.losses import loss_spec, weighted

import cuda_ops

SPEC = loss_spec(
    "huber_loss",
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
