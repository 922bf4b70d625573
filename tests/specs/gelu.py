import torch
from support.activations import activation_spec
from support.opspec import bad

import cuda_ops

SPEC = activation_spec(
    "gelu",
    torch.nn.functional.gelu,
    [{}, {"approximate": "tanh"}],
    defaults=("none",),
    bad=[
        bad(
            "another approximation",
            lambda ones: cuda_ops.functional.gelu(ones(3), approximate="fast"),
            "gelu: expected approximate to be 'none' or 'tanh', got 'fast'",
        )
    ],
)
