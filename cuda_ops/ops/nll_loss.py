"""nll_loss: the negative log-likelihood of target classes, given the logarithms of their probabilities."""

import torch
from torch import Tensor

from .._arguments import check_tensors, check_tensors_or_none, integer
from .._autocast import autocast_to_float32
from .._autograd_old import Function
from .._fakes import register_fake
from .._library import ops
from .._loss import check_target_shape, empty_loss, reduction_number, refuse_weight_gradient


@register_fake("cuda_ops::nll_loss_forward")
def _(input, target, weight, reduction, ignore_index):
    check_target_shape("nll_loss", input, target)
    return empty_loss(input, reduction)


@register_fake("cuda_ops::nll_loss_backward")
def _(grad_output, input, target, weight, total_weight, reduction, ignore_index):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


class NllLossFunction(Function):
    """Returns the loss and total_weight, what a mean is divided by; the latter for backward alone."""

    @staticmethod
    def forward(ctx, input, target, weight, reduction, ignore_index):
        loss, total_weight = ops.nll_loss_forward(input, target, weight, reduction, ignore_index)
        ctx.save_for_backward(input, target, weight, total_weight)
        ctx.mark_non_differentiable(total_weight)
        ctx.set_materialize_grads(False)
        ctx.parameters = (reduction, ignore_index)
        return loss, total_weight

    @staticmethod
    def backward(ctx, grad_output, _):
        grad_input = None
        if grad_output is not None and ctx.needs_input_grad[0]:
            grad_input = NllLossBackwardFunction.apply(grad_output, *ctx.saved_tensors, *ctx.parameters)
        return grad_input, None, None, None, None


class NllLossBackwardFunction(Function):
    """The loss is linear in its input, so that its gradient is linear in grad_output, does not depend on the input, and
    has the loss itself as its gradient."""

    @staticmethod
    def forward(ctx, grad_output, input, target, weight, total_weight, reduction, ignore_index):
        ctx.save_for_backward(target, weight)
        ctx.parameters = (reduction, ignore_index)
        return ops.nll_loss_backward(grad_output, input, target, weight, total_weight, reduction, ignore_index)

    @staticmethod
    def backward(ctx, grad_grad_input):
        grad_grad_output = None
        if ctx.needs_input_grad[0]:
            grad_grad_output, _ = NllLossFunction.apply(grad_grad_input, *ctx.saved_tensors, *ctx.parameters)
        return grad_grad_output, None, None, None, None, None, None


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
        input: log-probabilities of shape [C], [N, C] or [N, C, d1, ...], any strides; float32 or float64, on CUDA
            float16 and bfloat16 too.
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
        NotImplementedError: `input` is float16 or bfloat16 on the CPU.

    Under autocast it computes in float32. Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.nll_loss(torch.tensor([[-0.5, -2.0]]), torch.tensor([1]))
        tensor(2.)
    """
    check_tensors("nll_loss", input=input, target=target)
    check_tensors_or_none("nll_loss", weight=weight)
    ignore_index = integer("nll_loss", "ignore_index", ignore_index)
    reduction = reduction_number("nll_loss", size_average, reduce, reduction)
    refuse_weight_gradient("nll_loss", weight)
    input, weight = autocast_to_float32(input, weight)
    loss, _ = NllLossFunction.apply(input, target, weight, reduction, ignore_index)
    return loss


class NLLLoss(torch.nn.NLLLoss):
    """torch.nn.NLLLoss on cuda_ops.functional.nll_loss."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return nll_loss(input, target, weight=self.weight, ignore_index=self.ignore_index, reduction=self.reduction)
