"""smooth_l1_loss: a square near the target, a distance far from it."""

import torch
from torch import Tensor

from .._arguments import number
from .._autograd import autograd_function
from .._loss import reduction_number
from ._pointwise_loss import distance, pointwise_loss_operator

smooth_l1_loss_forward = pointwise_loss_operator("smooth_l1_loss")
SmoothL1LossFunction = autograd_function("smooth_l1_loss_forward", "SmoothL1LossFunction")


def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    r"""For the distance :math:`z = |\text{input}_i - \text{target}_i|`: :math:`z^2 / (2 \beta)` below :math:`\beta`,
    :math:`z - \beta / 2` above it; and its mean or sum.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        target: of the dtype of `input`, and of its shape: another one is broadcast, with a warning.
        size_average, reduce: deprecated, see torch.nn.functional.smooth_l1_loss.
        reduction: 'none', 'mean' or 'sum'. A mean over nothing is NaN, as in PyTorch.
        beta: where the one becomes the other, at least 0; with 0 it is l1_loss.

    Returns:
        One number, or with reduction 'none' a tensor like `input`. In the dtype of `input`; sums are taken in float64.

    Raises:
        TypeError: `input` or `target` is no tensor.
        ValueError: an unknown reduction.
        RuntimeError: `beta` is below 0; `input` is not floating point; a mismatch of shapes, dtypes or devices.

    Under autocast it computes in float32. Differentiable any number of times, by `input` and by `target`.

    Example:
        >>> cuda_ops.functional.smooth_l1_loss(torch.tensor([1.0, 5.0]), torch.tensor([0.5, 2.0]))
        tensor(1.3125)
    """
    if not (beta if type(beta) is float else number("smooth_l1_loss", "beta", beta)) >= 0:
        raise RuntimeError(f"smooth_l1_loss: expected beta to be at least 0, got {beta}")
    of = reduction_number("smooth_l1_loss", size_average, reduce, reduction)
    return distance("smooth_l1_loss", smooth_l1_loss_forward, input, target, None, of, beta)


class SmoothL1Loss(torch.nn.SmoothL1Loss):
    """torch.nn.SmoothL1Loss by :func:`cuda_ops.functional.smooth_l1_loss`: same arguments and repr."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return smooth_l1_loss(input, target, reduction=self.reduction, beta=self.beta)
