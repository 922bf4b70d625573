"""kl_div: the divergence of Kullback and Leibler, of logarithms of probabilities."""

import torch
from torch import Tensor

from .._arguments import flag
from .._autograd import autograd_function
from .._loss import REDUCTIONS, reduction_number
from ._pointwise_loss import broadcast, pointwise_loss_operator

kl_div_forward = pointwise_loss_operator("kl_div")
KLDivLossFunction = autograd_function("kl_div_forward", "KLDivLossFunction")


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    r"""Divergence of Kullback and Leibler, elementwise :math:`t_i \, (\log t_i - \text{input}_i)`, 0 log 0 being
    0; with `log_target` :math:`e^{t_i} (t_i - \text{input}_i)`.

    Args:
        input: logarithms of probabilities, any shape, any strides; float32, float64, float16 or
            bfloat16.
        target: t, probabilities, or their logarithms; of the dtype of `input`, and of a shape that broadcasts with its.
        size_average, reduce: deprecated, see torch.nn.functional.kl_div.
        reduction: 'none', 'sum', 'batchmean' (the sum divided by the length of input's first dimension, which is the
            divergence's own mean), or 'mean' (over all elements). A mean over nothing is NaN, as in PyTorch.
        log_target: whether `target` has logarithms.

    Returns:
        One number, or with reduction 'none' a tensor like `input`. In the dtype of `input`; sums are taken in float64.

    Raises:
        TypeError: `input` or `target` is no tensor, or `log_target` no bool.
        ValueError: an unknown reduction.
        RuntimeError: `input` is not floating point; a mismatch of shapes, dtypes or devices.

    Under autocast it computes in float32. Differentiable any number of times, by `input` and by `target`, of which the
    gradient at 0 is NaN, as in PyTorch.

    Example:
        >>> cuda_ops.functional.kl_div(torch.tensor([-1.0, -0.5]), torch.tensor([0.25, 0.75]), reduction="sum")
        tensor(0.0627)
    """
    is_batch_mean = reduction == "batchmean" and size_average is None and reduce is None
    number = REDUCTIONS["sum"] if is_batch_mean else reduction_number("kl_div", size_average, reduce, reduction)
    parameter = 1.0 if flag("kl_div", "log_target", log_target) else 0.0
    first, second = broadcast("kl_div", input, target, warn=False)
    loss = kl_div_forward(first, second, None, None, number, parameter)
    return loss / input.shape[0] if is_batch_mean and input.dim() > 0 else loss


class KLDivLoss(torch.nn.KLDivLoss):
    """torch.nn.KLDivLoss by :func:`cuda_ops.functional.kl_div`: same arguments and repr."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return kl_div(input, target, reduction=self.reduction, log_target=self.log_target)
