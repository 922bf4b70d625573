"""Shared by the losses over classes: nll_loss and cross_entropy."""

import torch
from torch.nn import _reduction

from ._arguments import expect

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def reduction_number(op, size_average, reduce, reduction):
    """`reduction` as the ops take it: 0 for 'none', 1 for 'mean', 2 for 'sum'. The two legacy arguments come first if
    they are given, with PyTorch's warning."""
    if size_average is None and reduce is None:
        number = REDUCTIONS.get(reduction) if isinstance(reduction, str) else None
        if number is not None:
            return number
    else:
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
    """The dtype of sums over elements of `input`: float32 for float16 and bfloat16."""
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def check_target_shape(op, input, target):
    """The checks of csrc/torch/loss.cpp on shapes, for fake kernels."""
    got = f"for an input of shape {list(input.shape)}, got {list(target.shape)}"
    expect(input.dim() >= 1, op, "input to have a dimension of classes, got shape []", check=torch._check_value)
    columns = columns_shape(input)
    if input.dim() == 1 and target.dim() == 1:
        expect(target.shape[0] == 1, op, "target to have shape [] {}", got, check=torch._check_value)
        return
    message = "target to have shape {} {}"
    if target.dim() >= 1 and columns:
        expect(target.shape[0] == columns[0], op, message, list(columns), got, check=torch._check_value)
    expect(target.dim() == len(columns), op, message, list(columns), got)
    for size, wanted in zip(target.shape, columns, strict=True):
        expect(size == wanted, op, message, list(columns), got)


def empty_loss(input, reduction):
    """For fakes: (loss, total_weight); the latter has no elements where there is no reduction."""
    return (
        input.new_empty(columns_shape(input) if reduction == 0 else ()),
        input.new_empty((0,) if reduction == 0 else (), dtype=accumulate_dtype(input)),
    )
