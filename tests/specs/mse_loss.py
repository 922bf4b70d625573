from support.losses import loss_spec, reduced, weighted

import cuda_ops

SPEC = loss_spec(
    "mse_loss",
    reference=lambda input, target, **keywords: reduced((input - target).square(), **keywords),
    more=weighted,
    bad=[
        (
            "a weight of another shape",
            lambda ones: cuda_ops.functional.mse_loss(ones(3), ones(3), weight=ones(1)),
            r": expected weight to have the shape of input, \[3\], got \[1\]",
            ValueError,
        )
    ],
)
