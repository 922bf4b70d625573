"""What the losses over classes, nll_loss and cross_entropy, share in Python."""

import torch
from torch.nn import _reduction


def reduction_number(op, size_average, reduce, reduction):
    """`reduction` as the ops take it: 0 for 'none', 1 for 'mean', 2 for 'sum'. The two legacy arguments come first if
    they are given, with PyTorch's warning."""
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if reduction not in ("none", "mean", "sum", "elementwise_mean"):
        raise ValueError(f"{op}: expected reduction to be 'none', 'mean' or 'sum', got {reduction!r}")
    return _reduction.get_enum(reduction)


def refuse_weight_gradient(op, weight):
    """As in PyTorch, class weights are constants where the targets are class indices."""
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{op}: expected weight not to require grad with class indices; it is not differentiable")


def columns_shape(input):
    """Of an input [C], [N, C] or [N, C, d1, ...]: its shape without the classes."""
    return () if input.dim() == 1 else (input.shape[0], *input.shape[2:])


def accumulate_dtype(input):
    """The dtype of sums over elements of `input`: float32 for the halves."""
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def empty_loss(input, reduction):
    """For fakes: (loss, total_weight); the latter has no elements where there is no reduction."""
    return (
        input.new_empty(columns_shape(input) if reduction == 0 else ()),
        input.new_empty((0,) if reduction == 0 else (), dtype=accumulate_dtype(input)),
    )
