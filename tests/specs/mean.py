import torch
from support.reductions import reduction_spec

SPEC = reduction_spec(
    "mean",
    torch.mean,
    arguments=lambda dim, keepdim: ([dim], keepdim, None),
    # Sums of values around 0 cancel: what is left is small beside what was added.
    relative_norm={torch.float32: 1e-5},
)
