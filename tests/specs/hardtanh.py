import torch
from support.activations import activation_spec
from support.opspec import bad

import cuda_ops

SPEC = activation_spec(
    "hardtanh",
    torch.nn.functional.hardtanh,
    [{}, {"min_val": -0.25, "max_val": 2.5}],
    saved="output",
    inplace=True,
    nan_gradient=False,
    defaults=(-1.0, 1.0),
    bad=[
        bad(
            "bounds in the wrong order",
            lambda ones: cuda_ops.functional.hardtanh(ones(3), 1.0, -1.0),
            "hardtanh: expected min_val to be at most max_val, got 1.0 and -1.0",
            ValueError,
        )
    ],
)
