"""A step of AdamW in Triton: a kernel for each parameter."""

import math

import triton
import triton.language as tl
from torch import Tensor

from cuda_ops.ladder import adamw as ladder

BLOCK = 1024


@triton.jit
def adamw_kernel(
    param_pointer,
    grad_pointer,
    exp_avg_pointer,
    exp_avg_sq_pointer,
    count,
    keep,
    fresh1,
    beta2,
    size,
    correction,
    eps,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    param = tl.load(param_pointer + at, mask=inside)
    grad = tl.load(grad_pointer + at, mask=inside)
    exp_avg = tl.load(exp_avg_pointer + at, mask=inside)
    exp_avg_sq = tl.load(exp_avg_sq_pointer + at, mask=inside)
    exp_avg += fresh1 * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    param = param * keep - size * (exp_avg / (tl.sqrt(exp_avg_sq) * correction + eps))
    tl.store(param_pointer + at, param, mask=inside)
    tl.store(exp_avg_pointer + at, exp_avg, mask=inside)
    tl.store(exp_avg_sq_pointer + at, exp_avg_sq, mask=inside)


def adamw(*tensors: Tensor):
    """Params, grads, exp_avgs and exp_avg_sqs, as many of each, float32 on CUDA, with the ladder's options."""
    size = ladder.LR / (1 - ladder.BETA1**ladder.STEP)
    correction = 1 / math.sqrt(1 - ladder.BETA2**ladder.STEP)
    for param, grad, exp_avg, exp_avg_sq in zip(*ladder.lists(tensors), strict=True):
        count = param.numel()
        adamw_kernel[(triton.cdiv(count, BLOCK),)](
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            count,
            1 - ladder.LR * ladder.WEIGHT_DECAY,
            1 - ladder.BETA1,
            ladder.BETA2,
            size,
            correction,
            ladder.EPS,
            BLOCK,
        )
    return ladder.outputs(tensors)
