import math

import torch
from support.activations import activation_spec
from support.opspec import bad

import cuda_ops


def reference(input, approximate="none"):
    """PyTorch's own adds 1 to erf or tanh, which cancels below 0: float64 has seven digits left at -5.4."""
    if approximate == "none":
        return 0.5 * input * torch.special.erfc(input * -math.sqrt(0.5))

    def doubled(x):
        return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)

    # Not by torch.sigmoid, whose derivative takes 1 - s, but of what is not finite. Where e^-z is too large, 1 is
    # nothing beside it.
    finite = input.isfinite()
    x = torch.where(finite, input, 0)
    # The cubes of its derivatives have to have numbers too.
    furthest = math.log(torch.finfo(input.dtype).max) / 3
    z = doubled(x)
    accurate = x / (1 + torch.exp(-z.clamp(min=-furthest)))
    accurate = torch.where(z < -furthest, x * torch.exp(z.clamp(max=-furthest)), accurate)
    return torch.where(finite, accurate, input * torch.sigmoid(doubled(input)))


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
