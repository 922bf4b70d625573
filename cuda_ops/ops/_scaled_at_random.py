"""What dropout1d, dropout2d, dropout3d and stochastic_depth share: numbers at random, which stand for many elements."""

import torch
from torch import Tensor

from .._arguments import check_tensors, flag, number
from .dropout import dropout


def scaled_at_random(op: str, input: Tensor, shape, p, training, inplace=False) -> Tensor:
    """`input` times numbers of `shape`, which broadcast: 0 with probability p, else 1 / (1 - p)."""
    check_tensors(op, input=input)
    if not 0.0 <= number(op, "p", p) <= 1.0:
        raise ValueError(f"{op}: expected p to be between 0 and 1, got {p}")
    if not input.is_floating_point():
        raise RuntimeError(f"{op}: expected input to be floating point, got {str(input.dtype).removeprefix('torch.')}")
    if not flag(op, "training", training) or p == 0.0:
        return input
    # One number for each of what is kept or not: drawn in float32 at least, so that the CPU takes halves too.
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    factors = dropout(torch.ones(shape, dtype=dtype, device=input.device), p).to(input.dtype)
    return input.mul_(factors) if flag(op, "inplace", inplace) else input * factors


def channels_of(op, input, axes, batched_only=False):
    """Sizes of (N, C), or of (C) without a batch, and a 1 for each other dimension."""
    check_tensors(op, input=input)
    dimensions = input.dim()
    if dimensions != axes + 2 and (batched_only or dimensions != axes + 1):
        without = "" if batched_only else f", or {axes + 1} without a batch"
        raise NotImplementedError(
            f"{op}: expected input to have {axes + 2} dimensions{without}, got shape {list(input.shape)}"
        )
    return (*input.shape[:-axes], *(1,) * axes)
