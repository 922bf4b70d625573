import torch
from support.opspec import bad
from support.reductions import reduction_spec

import cuda_ops

SPEC = reduction_spec(
    "sum",
    torch.sum,
    arguments=lambda dim, keepdim: ([dim], keepdim, None),
    # Sums of values around 0 cancel: what is left is small beside what was added.
    relative_norm={torch.float32: 1e-5},
    bad=[
        bad(
            "dtype of integers",
            lambda ones: cuda_ops.functional.sum(ones(3), dtype=torch.int64),
            "sum: expected dtype to be floating point, got Long",
            NotImplementedError,
        )
    ],
)
