"""What the losses of elements share: fake kernels, broadcasting, and the mean by weights."""

import warnings

import torch
from torch import Tensor

from .._arguments import check_tensors, check_tensors_or_none, expect
from .._fakes import register_fake, require_ops
from .._loss import REDUCTIONS
from .._operators import operator


def pointwise_loss_operator(name: str):
    """The registered op <name>_forward as a function of (input, target, weight, pos_weight, reduction, parameter)."""
    require_ops(f"{name}_tangent", f"{name}_second")

    def check(op, input, target):
        message = "target to have the shape of input, {}, got {}"
        expect(input.dim() == target.dim(), op, message, list(input.shape), list(target.shape))
        for size, wanted in zip(target.shape, input.shape, strict=True):
            expect(size == wanted, op, message, list(input.shape), list(target.shape))

    @register_fake(f"cuda_ops::{name}_forward")
    def _(input, target, weight, pos_weight, reduction, parameter):
        check(name, input, target)
        if reduction != REDUCTIONS["none"]:
            return input.new_empty(())
        return like_input(input, weight, pos_weight)

    @register_fake(f"cuda_ops::{name}_backward")
    def _(grad_output, input, target, weight, pos_weight, reduction, parameter, by_target):
        check(f"{name}_backward", input, target)
        return like_input(input, weight, pos_weight)

    return operator(f"{name}_forward")


def like_input(input, weight, pos_weight):
    """Contiguous where the place of an element counts, since it has a weight."""
    if weight is None and pos_weight is None:
        return torch.empty_like(input)
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def broadcast(op: str, input: Tensor, target: Tensor, *, warn: bool = True) -> tuple[Tensor, Tensor]:
    """Both in their common shape, with PyTorch's warning where that is not the shape of both."""
    check_tensors(op, input=input, target=target)
    if input.shape == target.shape:
        return input, target
    if warn:
        warnings.warn(
            f"{op}: the target's size {tuple(target.shape)} is not that of the input, {tuple(input.shape)}; they are "
            "broadcast, which is most often a mistake",
            stacklevel=4,
        )
    return torch.broadcast_tensors(input, target)


def distance(
    op: str, forward, input, target, weight, reduction: int, parameter: float = 0.0, *, by_weights: bool = True
) -> Tensor:
    """A loss of the distance between input and target. by_weights: its mean is divided by the sum of the weights."""
    if weight is None and type(input) is type(target) is Tensor and input.shape == target.shape:
        return forward(input, target, None, None, reduction, parameter)
    first, second = broadcast(op, input, target)
    check_tensors_or_none(op, weight=weight)
    if weight is None:
        return forward(first, second, None, None, reduction, parameter)
    if weight.shape != input.shape:
        raise ValueError(
            f"{op}: expected weight to have the shape of input, {list(input.shape)}, got {list(weight.shape)}"
        )
    losses = forward(first, second, None, None, REDUCTIONS["none"], parameter) * weight
    if reduction == REDUCTIONS["none"]:
        return losses
    if reduction == REDUCTIONS["sum"]:
        return losses.sum()
    return losses.sum() / weight.sum() if by_weights else losses.mean()
