from support.losses import loss_spec

import cuda_ops

SPEC = loss_spec(
    "smooth_l1_loss",
    keywords=({}, {"beta": 0.25}, {"beta": 3.0}, {"beta": 0.0}),
    bad=[
        (
            "beta below 0",
            lambda ones: cuda_ops.functional.smooth_l1_loss(ones(3), ones(3), beta=-1.0),
            ": expected beta to be at least 0, got -1.0",
        )
    ],
)
