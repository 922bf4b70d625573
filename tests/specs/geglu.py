from support.gated import gated_spec

import cuda_ops
from specs.gelu import reference

SPEC = gated_spec(
    "geglu",
    reference,
    ({}, {"approximate": "tanh"}),
    ("none",),
    bad=[
        (
            "another approximation",
            lambda ones: cuda_ops.functional.geglu(ones(2), ones(2), "sigmoid"),
            ": expected approximate to be 'none' or 'tanh', got 'sigmoid'",
        )
    ],
)
