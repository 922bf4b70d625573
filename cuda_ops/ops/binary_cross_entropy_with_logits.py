"""binary_cross_entropy_with_logits: of a logit and the probability that it stands for."""

import torch
from torch import Tensor

from .._arguments import check_tensors, check_tensors_or_none
from .._autograd import autograd_function
from .._loss import reduction_number
from .._modules import buffer
from ._pointwise_loss import pointwise_loss_operator

binary_cross_entropy_with_logits_forward = pointwise_loss_operator("binary_cross_entropy_with_logits")
BCEWithLogitsLossFunction = autograd_function("binary_cross_entropy_with_logits_forward", "BCEWithLogitsLossFunction")


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    r"""Binary cross-entropy of logits, :math:`-w_i \, (p_i \, t_i \log \sigma(x_i) + (1 - t_i) \log (1 -
    \sigma(x_i)))`, and its mean or sum; by :math:`e^{-|x|}` alone, which does not overflow.

    Args:
        input: x, any shape, any strides; float32, float64, float16 or bfloat16.
        target: t, probabilities, of the shape and dtype of `input`.
        weight: w, of a shape that broadcasts to that of `input`; it may not require grad. A mean is not divided by it.
        size_average, reduce: deprecated, see torch.nn.functional.binary_cross_entropy_with_logits.
        reduction: 'none', 'mean' or 'sum'. A mean over nothing is NaN, as in PyTorch.
        pos_weight: p, what positive targets count, of a shape that broadcasts to that of `input`; it may not require
            grad.

    Returns:
        One number, or with reduction 'none' a tensor like `input`. In the dtype of `input`; sums are taken in float64.

    Raises:
        TypeError: `input`, `target`, `weight` or `pos_weight` is no tensor.
        ValueError: `target` is of another shape than `input`; an unknown reduction.
        RuntimeError: `input` is not floating point; another mismatch of shapes, dtypes or devices; a weight requires
            grad.

    Under autocast it computes in float32. Differentiable any number of times, by `input` and by `target`.

    Example:
        >>> cuda_ops.functional.binary_cross_entropy_with_logits(torch.tensor([0.0, 3.0]), torch.tensor([0.0, 1.0]))
        tensor(0.3709)
    """
    op = "binary_cross_entropy_with_logits"
    number = reduction_number(op, size_average, reduce, reduction)
    check_tensors(op, input=input, target=target)
    if input.shape != target.shape:
        raise ValueError(
            f"{op}: expected target to have the shape of input, {list(input.shape)}, got {list(target.shape)}"
        )
    if weight is not None or pos_weight is not None:
        check_tensors_or_none(op, weight=weight, pos_weight=pos_weight)
    return binary_cross_entropy_with_logits_forward(input, target, weight, pos_weight, number, 0.0)


class BCEWithLogitsLoss(torch.nn.BCEWithLogitsLoss):
    """torch.nn.BCEWithLogitsLoss by :func:`cuda_ops.functional.binary_cross_entropy_with_logits`: same arguments, repr
    and state_dict."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        weight, pos_weight = buffer(self, "weight"), buffer(self, "pos_weight")
        return binary_cross_entropy_with_logits(input, target, weight, reduction=self.reduction, pos_weight=pos_weight)
