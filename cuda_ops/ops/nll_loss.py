"""nll_loss: the negative log-likelihood of target classes, given the logarithms of their probabilities."""

import torch
from torch import Tensor

from .._arguments import check_tensors_or_none
from .._autograd import autograd_function
from .._fakes import register_fake
from .._loss import check_target_shape, empty_loss, reduction_number, refuse_weight_gradient
from .._modules import buffer
from .._operators import operator


@register_fake("cuda_ops::nll_loss_forward")
def _(input, target, weight, reduction, ignore_index):
    check_target_shape("nll_loss", input, target)
    return empty_loss(input, reduction)


@register_fake("cuda_ops::nll_loss_backward")
def _(grad_output, input, target, weight, total_weight, reduction, ignore_index):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


nll_loss_forward = operator("nll_loss_forward")
NllLossFunction = autograd_function("nll_loss_forward", "NllLossFunction")


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Negative log-likelihood, :math:`\text{loss}_n = -\text{weight}_{t_n} \cdot \text{input}_{n, t_n}` for the class
    :math:`t_n` of sample n; with reduction 'mean' their sum divided by :math:`\sum_n \text{weight}_{t_n}`.

    Args:
        input: log-probabilities of shape [C], [N, C] or [N, C, d1, ...], any strides; float32, float64, float16 or
            bfloat16.
        target: class indices in [0, C), int64 or uint8, with the shape of `input` without C.
        weight: [C], a weight for each class; it may not require grad.
        size_average: deprecated, see torch.nn.functional.nll_loss.
        ignore_index: targets of this value have no part in loss and gradient; it need not be a class.
        reduce: deprecated, see torch.nn.functional.nll_loss.
        reduction: 'none', 'mean' or 'sum'. A mean over nothing is NaN, as in PyTorch.

    Returns:
        One number, or with reduction 'none' a tensor with the shape of `target`. In the dtype of `input`; sums are
        taken in float64.

    Raises:
        IndexError: a target is neither a class nor `ignore_index`. On CUDA, where waiting for the kernel would cost
            more than the kernel, the loss is NaN, the sample's gradient zero, and the next call of nll_loss (forward
            or backward) that finds the mistake recorded raises; with CUDA_OPS_CHECK_INDICES=1 in the environment the
            call itself waits and raises (not while a CUDA graph is being captured). The position counts the elements
            of `target` in row-major order.
        TypeError: `input`, `target` or `weight` is no tensor, or `ignore_index` no int.
        ValueError: `target` has another number of samples than `input`; `input` has no dimension; an unknown reduction.
        RuntimeError: another mismatch of shapes, dtypes or devices; `weight` requires grad.

    Under autocast it computes in float32. Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.nll_loss(torch.tensor([[-0.5, -2.0]]), torch.tensor([1]))
        tensor(2.)
    """
    reduction = reduction_number("nll_loss", size_average, reduce, reduction)
    if weight is not None:
        check_tensors_or_none("nll_loss", weight=weight)
        refuse_weight_gradient("nll_loss", weight)
    return nll_loss_forward(input, target, weight, reduction, ignore_index)[0]


class NLLLoss(torch.nn.NLLLoss):
    """torch.nn.NLLLoss on cuda_ops.functional.nll_loss."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        weight = buffer(self, "weight")
        return nll_loss(input, target, weight=weight, ignore_index=self.ignore_index, reduction=self.reduction)
