import torch
from support.reductions import CASES, reduction_spec


def reference(input, dim=None, *, correction=1, keepdim=False):
    return torch.std(input, None if dim == () else dim, correction=correction, keepdim=keepdim)


SPEC = reduction_spec(
    "std",
    reference,
    [{}, {"correction": 0}, {"correction": 0.5}],
    # One element has no variance: test_reduction.py.
    cases=[case for case in CASES if case not in [((), None), ((1,), 0), ((5, 1), 1), ((2, 1, 3), 1)]],
    arguments=lambda dim, keepdim: ([dim], 1.0, keepdim),
)
