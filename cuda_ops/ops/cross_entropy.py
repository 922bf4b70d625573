"""cross_entropy: log_softmax and the loss over classes at one go, without storing the former.

With q, how much each class counts for a sample (its one-hot target or its probabilities, smoothed and weighted), the
loss is sum(q * (logsumexp(input) - input)), and its gradient sum(q) * softmax(input) - q.
"""

import math

import torch
from torch import Tensor

from .._arguments import check_tensors, check_tensors_or_none, integer
from .._autocast import autocast_to_float32
from .._autograd_old import Function
from .._fakes import register_fake
from .._library import ops
from .._loss import (
    accumulate_dtype,
    check_target_shape,
    columns_shape,
    empty_loss,
    reduction_number,
    refuse_weight_gradient,
)
from .log_softmax import LogSoftmaxFunction


@register_fake("cuda_ops::cross_entropy_forward")
def _(input, target, weight, reduction, ignore_index, label_smoothing):
    if not target.is_floating_point():
        check_target_shape("cross_entropy", input, target)
    loss, total_weight = empty_loss(input, reduction)
    statistics = input.new_empty((3, math.prod(columns_shape(input))), dtype=accumulate_dtype(input))
    return loss, statistics, total_weight


@register_fake("cuda_ops::cross_entropy_backward")
def _(grad_output, input, target, weight, statistics, total_weight, reduction, ignore_index, label_smoothing):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


class CrossEntropyFunction(Function):
    """Returns the loss, and for backward alone the statistics of each sample and total_weight, what a mean is divided
    by. The gradients for class probabilities and for their weights, which few ask for, are composed of differentiable
    ops."""

    @staticmethod
    def forward(ctx, input, target, weight, reduction, ignore_index, label_smoothing):
        parameters = (reduction, ignore_index, label_smoothing)
        loss, statistics, total_weight = ops.cross_entropy_forward(input, target, weight, *parameters)
        ctx.save_for_backward(input, target, weight, statistics, total_weight)
        ctx.mark_non_differentiable(statistics, total_weight)
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        return loss, statistics, total_weight

    @staticmethod
    def backward(ctx, grad_output, *_):
        input, target, weight, statistics, total_weight = ctx.saved_tensors
        reduction, _, label_smoothing = ctx.parameters
        grad_input = grad_target = grad_weight = None
        if grad_output is None:
            return None, None, None, None, None, None
        if ctx.needs_input_grad[0]:
            grad_input = CrossEntropyBackwardFunction.apply(
                grad_output, input, target, weight, statistics, total_weight, *ctx.parameters
            )
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            scale = column_scale(grad_output, input, total_weight, reduction)
            grad_share = -LogSoftmaxFunction.apply(input, class_dim(input)) * scale
        if ctx.needs_input_grad[1]:
            weighted = grad_share if weight is None else grad_share * along_classes(weight, input)
            grad_target = weighted * (1 - label_smoothing)
        if ctx.needs_input_grad[2]:
            shares = smoothed(target, label_smoothing, input.shape[class_dim(input)])
            grad_weight = sum_over_columns(grad_share * shares)
        return grad_input, grad_target, grad_weight, None, None, None


class CrossEntropyBackwardFunction(Function):
    """grad_input = scale * (sum(q) * softmax - q). Its own gradients, which are needed for second derivatives alone,
    are composed of differentiable ops; statistics and total_weight count as what they are, functions of the others."""

    @staticmethod
    def forward(
        ctx, grad_output, input, target, weight, statistics, total_weight, reduction, ignore_index, label_smoothing
    ):
        ctx.save_for_backward(grad_output, input, target, weight, total_weight)
        ctx.parameters = (reduction, ignore_index, label_smoothing)
        return ops.cross_entropy_backward(grad_output, input, target, weight, statistics, total_weight, *ctx.parameters)

    @staticmethod
    def backward(ctx, grad_grad_input):
        grad_output, input, target, weight, total_weight = ctx.saved_tensors
        reduction, ignore_index, label_smoothing = ctx.parameters
        dim, dtype, classes = class_dim(input), accumulate_dtype(input), input.shape[class_dim(input)]
        x, v = input.to(dtype), grad_grad_input.to(dtype)
        scale = column_scale(grad_output.to(dtype), input, total_weight, reduction)
        if target.is_floating_point():
            shares = smoothed(target.to(dtype), label_smoothing, classes)
        else:
            one_hot, counts = one_hot_target(target, x, ignore_index)
            shares = smoothed(one_hot, label_smoothing, classes) * counts
            scale = torch.where(counts, scale, 0)
        w = None if weight is None else along_classes(weight.to(dtype), input)
        q = shares if w is None else shares * w
        softmax = LogSoftmaxFunction.apply(x, dim).exp()
        expected = (v * softmax).sum(dim, keepdim=True)
        total = q.sum(dim, keepdim=True)

        grads = [None] * 9
        if ctx.needs_input_grad[0]:
            per_column = (v * (total * softmax - q)).sum(dim, keepdim=True)
            if reduction == 1:
                per_column = per_column / total_weight
            if not target.is_floating_point():
                per_column = torch.where(counts, per_column, 0)
            per_column = per_column.squeeze(dim)
            grads[0] = (per_column if reduction == 0 else per_column.sum()).to(input.dtype)
        if ctx.needs_input_grad[1]:
            grads[1] = (scale * total * softmax * (v - expected)).to(input.dtype)
        grad_q = scale * (expected - v)
        if ctx.needs_input_grad[2]:
            grads[2] = ((grad_q if w is None else grad_q * w) * (1 - label_smoothing)).to(target.dtype)
        if ctx.needs_input_grad[3]:
            grads[3] = sum_over_columns(grad_q * shares).to(weight.dtype)
        return tuple(grads)


def class_dim(input):
    return 0 if input.dim() == 1 else 1


def along_classes(weight, input):
    """`weight`, [C], so that it multiplies something with the shape of `input`."""
    return weight if input.dim() == 1 else weight.reshape(-1, *[1] * (input.dim() - 2))


def sum_over_columns(values):
    """[C] of [C], [N, C] or [N, C, d1, ...]."""
    return values if values.dim() == 1 else values.transpose(0, 1).flatten(1).sum(1)


def smoothed(shares, label_smoothing, classes):
    return shares * (1 - label_smoothing) + label_smoothing / classes if label_smoothing > 0 else shares


def one_hot_target(target, input, ignore_index):
    """The target as 0 and 1 with the shape of `input`, and, with one class, which samples count."""
    dim = class_dim(input)
    target = target.reshape(columns_shape(input)).to(torch.int64).unsqueeze(dim)
    counts = (target != ignore_index) & (target >= 0) & (target < input.shape[dim])
    one_hot = torch.zeros_like(input, memory_format=torch.contiguous_format)
    return one_hot.scatter(dim, torch.where(counts, target, 0), counts.to(input.dtype)), counts


def column_scale(grad_output, input, total_weight, reduction):
    """What the gradient of each sample's loss is multiplied by, so that it multiplies something like `input`."""
    if reduction == 0:
        return grad_output.unsqueeze(class_dim(input))
    return grad_output / total_weight.to(grad_output.dtype) if reduction == 1 else grad_output


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Cross-entropy between targets and the softmax of `input`,
    :math:`\text{loss}_n = \sum_c q_{nc} \left(\log \sum_j \exp(\text{input}_{nj}) - \text{input}_{nc}\right)`, where q
    is the target (one-hot for a class index), smoothed, times the weight of the class.

    Args:
        input: logits of shape [C], [N, C] or [N, C, d1, ...], any strides; float32 or float64, on CUDA float16 and
            bfloat16 too.
        target: class indices in [0, C), int64 or uint8, with the shape of `input` without C; or class probabilities,
            floating point with the shape of `input`, which may require grad.
        weight: [C], a weight for each class; it may require grad with class probabilities alone.
        size_average: deprecated, see torch.nn.functional.cross_entropy.
        ignore_index: class indices of this value have no part in loss and gradient; it need not be a class.
        reduce: deprecated, see torch.nn.functional.cross_entropy.
        reduction: 'none', 'mean' or 'sum'. The mean is the sum divided by the sum of the targets' weights, or, with
            class probabilities, by the number of samples; over nothing it is NaN, as in PyTorch.
        label_smoothing: in [0, 1]: the part of the target that is spread evenly over the classes.

    Returns:
        One number, or with reduction 'none' one for each sample. In the dtype of `input` (with class probabilities:
        what `input`, `target` and `weight` promote to); the halves compute in float32, sums over samples are taken in
        float64.

    Raises:
        IndexError: a target is neither a class nor `ignore_index`. On CUDA, where waiting for the kernel would cost
            more than the kernel, the loss is NaN, the sample's gradient zero, and the next call of cross_entropy
            (forward or backward) that finds the mistake recorded raises; with CUDA_OPS_CHECK_INDICES=1 in the
            environment the call itself waits and raises (not while a CUDA graph is being captured). The position
            counts the elements of `target` in row-major order.
        TypeError: `input`, `target` or `weight` is no tensor, or `ignore_index` no int.
        ValueError: `target` has another number of samples than `input`; `input` has no dimension; an unknown reduction.
        RuntimeError: another mismatch of shapes, dtypes or devices; `label_smoothing` outside of [0, 1]; `weight`
            requires grad with class indices; an `ignore_index` that is not negative with class probabilities.
        NotImplementedError: `input` is float16 or bfloat16 on the CPU.

    Under autocast it computes in float32. Differentiable any number of times; from the second derivative on by
    PyTorch's own ops, as is the gradient for class probabilities.

    Example:
        >>> cuda_ops.functional.cross_entropy(torch.zeros(2, 4), torch.tensor([3, 0]))
        tensor(1.3863)
    """
    check_tensors("cross_entropy", input=input, target=target)
    check_tensors_or_none("cross_entropy", weight=weight)
    ignore_index = integer("cross_entropy", "ignore_index", ignore_index)
    reduction = reduction_number("cross_entropy", size_average, reduce, reduction)
    input, target, weight = autocast_to_float32(input, target, weight)
    if not target.is_floating_point():
        refuse_weight_gradient("cross_entropy", weight)
    elif input.is_floating_point():  # else the op refuses it
        tensors = (input, target) if weight is None else (input, target, weight)
        dtype = tensors[0].dtype
        for tensor in tensors[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
        input, target = input.to(dtype), target.to(dtype)
        weight = None if weight is None else weight.to(dtype)
    return CrossEntropyFunction.apply(input, target, weight, reduction, ignore_index, label_smoothing)[0]


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss on cuda_ops.functional.cross_entropy."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
