"""l1_loss: the mean absolute error."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from .._loss import reduction_number
from ._pointwise_loss import distance, pointwise_loss_operator

l1_loss_forward = pointwise_loss_operator("l1_loss")
L1LossFunction = autograd_function("l1_loss_forward", "L1LossFunction")


def l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    r"""Mean absolute error, :math:`|\text{input}_i - \text{target}_i|`, and its mean or sum.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        target: of the dtype of `input`, and of its shape: another one is broadcast, with a warning.
        size_average, reduce: deprecated, see torch.nn.functional.l1_loss.
        reduction: 'none', 'mean' or 'sum'. A mean over nothing is NaN, as in PyTorch.
        weight: of the shape of `input`, what each loss is multiplied by; a mean is divided by its sum then.

    Returns:
        One number, or with reduction 'none' a tensor like `input`. In the dtype of `input`; sums are taken in float64.

    Raises:
        TypeError: `input` or `target` is no tensor.
        ValueError: an unknown reduction; `weight` is of another shape than `input`.
        RuntimeError: `input` is not floating point; a mismatch of shapes, dtypes or devices.

    Under autocast it computes in float32. Differentiable any number of times, by `input` and by `target`.

    Example:
        >>> cuda_ops.functional.l1_loss(torch.tensor([1.0, 5.0]), torch.tensor([0.5, 2.0]))
        tensor(1.7500)
    """
    number = reduction_number("l1_loss", size_average, reduce, reduction)
    return distance("l1_loss", l1_loss_forward, input, target, weight, number)


class L1Loss(torch.nn.L1Loss):
    """torch.nn.L1Loss by :func:`cuda_ops.functional.l1_loss`: same arguments and repr."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return l1_loss(input, target, reduction=self.reduction)
