import torch
from support.reductions import CASES, reduction_spec

DEGENERATE = [((5, 1), 1), ((2, 1, 3), 1), ((4, 6), 0), ((33, 31), 0), ((40, 264), 0), ((700, 3), 0)]


def reference(input, dim=None, *, correction=1, keepdim=False):
    return torch.var(input, None if dim == () else dim, correction=correction, keepdim=keepdim)


SPEC = reduction_spec(
    "var",
    reference,
    [{}, {"correction": 0}, {"correction": 0.5}],
    # One element has no variance, and neither has a dimension that tests repeat, the first: test_reduction.py.
    cases=[*[case for case in CASES if len(case[0]) > 1 and case not in DEGENERATE], ((2, 20_011), None)],
    cancels=True,
    arguments=lambda dim, keepdim: ([dim], 1.0, keepdim),
)
