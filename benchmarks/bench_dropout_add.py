import torch
from harness import MATRIX_SHAPES, Bench, Implementation, compiled_on_cuda, elementwise_cases

import cuda_ops


def composed(input, residual):
    return torch.nn.functional.dropout(input, 0.1) + residual


BENCH = Bench(
    op="dropout_add",
    ours=Implementation("ours", lambda x, r: cuda_ops.functional.dropout_add(x, r, 0.1)),
    native=[Implementation("eager", composed)],
    cases=elementwise_cases(MATRIX_SHAPES, streams=(3, 2), inputs=2),
    random=True,
    beside=compiled_on_cuda(composed),
)
