import torch
from support.reductions import reduction_spec

SPEC = reduction_spec(
    "argmin",
    torch.argmin,
    arguments=lambda dim, keepdim: (dim, keepdim),
    values="distinct",
    dims="one",
    gradgrad=False,
    empty=False,
)
