"""cross_entropy: log_softmax and the loss over classes at one go, without storing the former.

With q, how much each class counts for a sample (its one-hot target or its probabilities, smoothed and weighted), the
loss is sum(q * (logsumexp(input) - input)), and its gradient sum(q) * softmax(input) - q.
"""

import math

import torch
from torch import Tensor

from .._arguments import check_tensors, check_tensors_or_none
from .._autograd import autograd_function
from .._fakes import register_fake
from .._loss import (
    accumulate_dtype,
    check_target_shape,
    columns_shape,
    empty_loss,
    reduction_number,
    refuse_weight_gradient,
)
from .._modules import buffer
from .._operators import composite, operator
from .log_softmax import log_softmax_forward


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


cross_entropy_forward = operator("cross_entropy_forward")
cross_entropy_backward = operator("cross_entropy_backward")
CrossEntropyFunction = autograd_function("cross_entropy_forward", "CrossEntropyFunction")


# What backward has beside the gradient for input, and what is differentiated further or forward, is composed of
# differentiable ops.


@composite("cross_entropy_tangent")
def cross_entropy_tangent(tangent, input, target, weight, total_weight, reduction, ignore_index, label_smoothing):
    """What `tangent`, input's, gives to the loss: the sum of its products with the gradient."""
    dim, dtype = class_dim(input), accumulate_dtype(input)
    v = tangent.to(dtype)
    q, counts = weighted_shares(input, target, weight, ignore_index, label_smoothing)[:2]
    softmax = log_softmax_forward(input.to(dtype), dim).exp()
    per_column = (v * (q.sum(dim, keepdim=True) * softmax - q)).sum(dim, keepdim=True)
    if counts is not None:
        per_column = torch.where(counts, per_column, 0)
    loss = per_column.squeeze(dim) if reduction == 0 else per_column.sum()
    # As in PyTorch, a mean over nothing is NaN of what the samples give, but constant where there are no probabilities.
    if reduction == 1 and (counts is not None or input.numel() > 0):
        loss = loss / total_weight
    if label_smoothing > 0 and counts is not None and input.shape[dim] == 0:
        loss = loss * math.nan  # as is what is smoothed over no classes
    return loss.to(input.dtype)


@composite("cross_entropy_share_gradients")
def _(grad_output, input, target, weight, total_weight, reduction, label_smoothing, wanted):
    """For class probabilities and for their weights, those that are wanted."""
    scale = column_scale(grad_output, input, total_weight, reduction)
    grad_share = -log_softmax_forward(input, class_dim(input)) * scale
    grads = []
    if wanted[0]:
        weighted = grad_share if weight is None else grad_share * along_classes(weight, input)
        grads.append(weighted * (1 - label_smoothing))
    if wanted[1]:
        shares = smoothed(target, label_smoothing, input.shape[class_dim(input)])
        grads.append(sum_over_columns(grad_share * shares))
    return grads


def share_tangent(tangent_target, tangent_weight, input, target, weight, label_smoothing):
    """What the tangent of class probabilities or of their weights gives to q: the loss is linear in it."""
    if tangent_target is None:
        return smoothed(target, label_smoothing, input.shape[class_dim(input)]) * along_classes(tangent_weight, input)
    tangent = tangent_target * (1 - label_smoothing)
    return tangent if weight is None else tangent * along_classes(weight, input)


@composite("cross_entropy_share_tangent")
def _(tangent_target, tangent_weight, input, target, weight, reduction, label_smoothing):
    q = share_tangent(tangent_target, tangent_weight, input, target, weight, label_smoothing)
    return cross_entropy_forward(input, q, None, reduction, -1, 0.0)[0]


@composite("cross_entropy_backward_share")
def _(
    tangent_target,
    tangent_weight,
    grad_output,
    input,
    target,
    weight,
    total_weight,
    reduction,
    label_smoothing,
):
    q = share_tangent(tangent_target, tangent_weight, input, target, weight, label_smoothing)
    _, statistics, _ = cross_entropy_forward(input, q, None, reduction, -1, 0.0)
    return cross_entropy_backward(grad_output, input, q, None, statistics, total_weight, reduction, -1, 0.0)


@composite("cross_entropy_backward_input")
def cross_entropy_backward_input(
    tangent, grad_output, input, target, weight, total_weight, reduction, ignore_index, label_smoothing
):
    """The derivative of grad_input by input times `tangent`: symmetric, so that it serves backward and forward."""
    dim, dtype = class_dim(input), accumulate_dtype(input)
    v = tangent.to(dtype)
    q, counts, _ = weighted_shares(input, target, weight, ignore_index, label_smoothing)
    scale = counted_scale(grad_output, input, total_weight, reduction, counts)
    softmax = log_softmax_forward(input.to(dtype), dim).exp()
    expected = (v * softmax).sum(dim, keepdim=True)
    return (scale * q.sum(dim, keepdim=True) * softmax * (v - expected)).to(input.dtype)


@composite("cross_entropy_backward_gradients")
def _(
    grad_grad_input,
    grad_output,
    input,
    target,
    weight,
    total_weight,
    reduction,
    ignore_index,
    label_smoothing,
    wanted,
):
    """Those of grad_output, input, target and weight that are wanted, of grad_input = scale * (sum(q) * softmax - q).
    statistics and total_weight count as what they are, functions of the others."""
    parameters = (total_weight, reduction, ignore_index, label_smoothing)
    grads = []
    if wanted[0]:
        grads.append(cross_entropy_tangent(grad_grad_input, input, target, weight, *parameters))
    if wanted[1]:
        grads.append(cross_entropy_backward_input(grad_grad_input, grad_output, input, target, weight, *parameters))
    if not (wanted[2] or wanted[3]):
        return grads
    dim, dtype = class_dim(input), accumulate_dtype(input)
    v = grad_grad_input.to(dtype)
    _, counts, shares = weighted_shares(input, target, weight, ignore_index, label_smoothing)
    scale = counted_scale(grad_output, input, total_weight, reduction, counts)
    softmax = log_softmax_forward(input.to(dtype), dim).exp()
    grad_q = scale * ((v * softmax).sum(dim, keepdim=True) - v)
    if wanted[2]:
        weighted = grad_q if weight is None else grad_q * along_classes(weight.to(dtype), input)
        grads.append((weighted * (1 - label_smoothing)).to(target.dtype))
    if wanted[3]:
        grads.append(sum_over_columns(grad_q * shares).to(weight.dtype))
    return grads


def weighted_shares(input, target, weight, ignore_index, label_smoothing):
    """q, where samples count (None with class probabilities), and q before the weights, in the dtype of sums."""
    dtype, classes = accumulate_dtype(input), input.shape[class_dim(input)]
    counts = None
    if target.is_floating_point():
        shares = smoothed(target.to(dtype), label_smoothing, classes)
    else:
        one_hot, counts = one_hot_target(target, input.to(dtype), ignore_index)
        shares = smoothed(one_hot, label_smoothing, classes) * counts
    q = shares if weight is None else shares * along_classes(weight.to(dtype), input)
    return q, counts, shares


def counted_scale(grad_output, input, total_weight, reduction, counts):
    scale = column_scale(grad_output.to(accumulate_dtype(input)), input, total_weight, reduction)
    return scale if counts is None else torch.where(counts, scale, 0)


def class_dim(input):
    return 0 if input.dim() == 1 else 1


def along_classes(weight, input):
    """`weight`, [C], so that it multiplies something with the shape of `input`."""
    return weight if input.dim() == 1 else weight.reshape(-1, *[1] * (input.dim() - 2))


def sum_over_columns(values):
    """[C] of [C], [N, C] or [N, C, d1, ...]."""
    return values if values.dim() == 1 else values.transpose(0, 1).flatten(1).sum(1)


def smoothed(shares, label_smoothing, classes):
    if classes == 0:
        return shares
    return shares * (1 - label_smoothing) + label_smoothing / classes if label_smoothing > 0 else shares


def one_hot_target(target, input, ignore_index):
    """The target as 0 and 1 with the shape of `input`, and, with one class, which samples count."""
    dim = class_dim(input)
    target = target.reshape(columns_shape(input)).to(torch.int64).unsqueeze(dim)
    counts = (target != ignore_index) & (target >= 0) & (target < input.shape[dim])
    one_hot = torch.zeros_like(input, memory_format=torch.contiguous_format)
    if input.shape[dim] == 0:  # and no index would be one of a class
        return one_hot, counts
    return one_hot.scatter(dim, torch.where(counts, target, 0), counts.to(input.dtype)), counts


def column_scale(grad_output, input, total_weight, reduction):
    """What the gradient of each sample's loss is multiplied by, so that it multiplies something like `input`."""
    if reduction == 0:
        return grad_output.unsqueeze(class_dim(input))
    if reduction == 1 and input.numel() > 0:  # what is multiplied has elements
        return grad_output / total_weight.to(grad_output.dtype)
    return grad_output


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
        input: logits of shape [C], [N, C] or [N, C, d1, ...], any strides; float32, float64, float16 or
            bfloat16.
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
        what `input`, `target` and `weight` promote to); float16 and bfloat16 compute in float32, and sums over samples
        are in float64.

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

    Under autocast it computes in float32. Differentiable any number of times; from the second derivative on by
    PyTorch's own ops, as is the gradient for class probabilities.

    Example:
        >>> cuda_ops.functional.cross_entropy(torch.zeros(2, 4), torch.tensor([3, 0]))
        tensor(1.3863)
    """
    reduction = reduction_number("cross_entropy", size_average, reduce, reduction)
    if not (isinstance(input, Tensor) and isinstance(target, Tensor)):
        check_tensors("cross_entropy", input=input, target=target)
    if weight is not None:
        check_tensors_or_none("cross_entropy", weight=weight)
    if target.is_floating_point():
        input, target, weight = promoted(input, target, weight)
    elif weight is not None:
        refuse_weight_gradient("cross_entropy", weight)
    return cross_entropy_forward(input, target, weight, reduction, ignore_index, label_smoothing)[0]


def promoted(input, target, weight):
    """In one dtype, to which PyTorch's ops would promote them."""
    dtype = input.dtype
    if (target.dtype == dtype and (weight is None or weight.dtype == dtype)) or not dtype.is_floating_point:
        return input, target, weight  # which the op refuses in the last case
    for tensor in (target, weight):
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    return input.to(dtype), target.to(dtype), None if weight is None else weight.to(dtype)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss on cuda_ops.functional.cross_entropy."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            input,
            target,
            weight=buffer(self, "weight"),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
