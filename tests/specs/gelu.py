import math

import torch
from support.activations import activation_spec
from support.opspec import bad

import cuda_ops


def reference(input, approximate="none"):
    """PyTorch's own adds 1 to erf or tanh, which cancels below 0: float64 has seven digits left at -5.4."""
    if approximate == "none":
        return 0.5 * input * torch.special.erfc(input * -math.sqrt(0.5))
    # Not by torch.sigmoid, whose derivative takes 1 - s. Where e^-z has no number, the quotient is 0.
    lowest = math.log(torch.finfo(input.dtype).tiny)
    z = 2 * math.sqrt(2 / math.pi) * (input + 0.044715 * input**3)
    return input / (1 + torch.exp(-z.clamp(min=lowest)))


SPEC = activation_spec(
    "gelu",
    reference,
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
