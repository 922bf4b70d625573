"""What GPT needs beside cuda_ops.functional: the loss of its head."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import functional
from .._library import problem

if problem is None:
    from ..ops.cross_entropy import cross_entropy_backward, cross_entropy_forward

MEAN, IGNORED = 1, -100
"""cross_entropy's defaults, as its op takes them."""


MOST_FUSED_CLASSES = 1024
"""On CUDA, but for half precision on Hopper. Beyond it linear_cross_entropy's own products take more time (49 TFLOP/s
on an H200 in bf16, csrc/cuda/linear_cross_entropy/linear_cross_entropy.cu) than linear's and what it costs to store the
logits."""


def is_fused(input, weight):
    """Whether the head is best done by linear_cross_entropy, with a loss that has the digits of float32."""
    if not input.is_cuda or len(weight) <= MOST_FUSED_CLASSES:
        return True
    half = input.dtype in (torch.float16, torch.bfloat16) and weight.dtype == torch.float32
    return half and weight.shape[1] % 8 == 0 and torch.cuda.get_device_capability(input.device) == (9, 0)


def head_loss(input: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of linear(input, weight), as a number in at least float32.

    Args:
        input: (..., features), where it is in half precision beside a float32 weight.
        weight: (classes, features).
        targets: (...), int64; those of -100 have no part in it.
    """
    if is_fused(input, weight):
        return functional.linear_cross_entropy(input, weight, targets)  # in the dtype of weight
    logits = functional.linear(input, weight.to(input.dtype)).flatten(0, -2)
    targets = targets.flatten()
    if input.dtype == weight.dtype:
        return functional.cross_entropy(logits, targets)
    return MeanLoss.apply(logits, targets)


class MeanLoss(torch.autograd.Function):
    """cross_entropy of logits in half precision as a float32 number: the op's has the dtype of the logits, two or three
    digits; here it is made of what the op leaves for backward."""

    @staticmethod
    def forward(ctx, logits, targets):
        _, statistics, total_weight = cross_entropy_forward(logits, targets, None, MEAN, IGNORED, 0.0)
        ctx.save_for_backward(logits, targets, statistics, total_weight)
        # (Bad class indices are the op's to tell.)
        picked = logits.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        # The logsumexp is the sum of the first two.
        losses = statistics[1] + (statistics[0] - picked.to(statistics.dtype))
        return losses.masked_fill(targets == IGNORED, 0.0).sum() / total_weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        logits, targets, statistics, total_weight = ctx.saved_tensors
        grad = cross_entropy_backward(
            grad_output.to(logits.dtype), logits, targets, None, statistics, total_weight, MEAN, IGNORED, 0.0
        )
        return grad, None
