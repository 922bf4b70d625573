import math

import torch
from support.opspec import bad
from support.reductions import reduction_spec

import cuda_ops

norm = cuda_ops.functional.norm


def reference(input, p="fro", dim=None, keepdim=False, dtype=None):
    dim = None if dim == () else dim
    return torch.linalg.vector_norm(input, 2 if p == "fro" else p, dim, keepdim, dtype=dtype)


SPEC = reduction_spec(
    "norm",
    reference,
    [{}, *({"p": p} for p in (1, 2.0, 3, 1.5, math.inf, -math.inf))],
    cancels=True,
    arguments=lambda dim, keepdim: (2.0, [dim], keepdim, None),
    relative_norm={torch.float32: 5e-6},
    bad=[
        bad(
            "the nuclear norm",
            lambda ones: norm(ones(3, 3), "nuc"),
            'norm: expected p to be a number, got "nuc"',
            NotImplementedError,
        ),
        bad("no number", lambda ones: norm(ones(3), "two"), "norm: expected p to be a number, got 'two'", TypeError),
        bad(
            "the largest of none",
            lambda ones: norm(ones(0), math.inf),
            r"norm: expected elements, of which p = inf has a norm, got an input of shape \[0\]",
        ),
    ],
)
