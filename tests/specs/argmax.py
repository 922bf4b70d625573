import torch
from support.reductions import reduction_spec

SPEC = reduction_spec(
    "argmax",
    torch.argmax,
    arguments=lambda dim, keepdim: (dim, keepdim),
    values="distinct",
    dims="one",
    gradgrad=False,
    empty=False,
)
