import torch
from support.reductions import reduction_spec


def reference(input, dim=None, keepdim=False):
    return torch.amin(input, () if dim is None else dim, keepdim)


SPEC = reduction_spec(
    "amin",
    reference,
    arguments=lambda dim, keepdim: ([dim], keepdim),
    values="distinct",
    empty=False,
)
