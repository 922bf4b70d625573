"""mse_loss: the mean squared error."""

import torch
from torch import Tensor

from .._autograd import autograd_function
from .._loss import reduction_number
from ._pointwise_loss import distance, pointwise_loss_operator

mse_loss_forward = pointwise_loss_operator("mse_loss")
MSELossFunction = autograd_function("mse_loss_forward", "MSELossFunction")


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    r"""Mean squared error, :math:`(\text{input}_i - \text{target}_i)^2`, and its mean or sum.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        target: of the dtype of `input`, and of its shape: another one is broadcast, with a warning.
        size_average, reduce: deprecated, see torch.nn.functional.mse_loss.
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
        >>> cuda_ops.functional.mse_loss(torch.tensor([1.0, 5.0]), torch.tensor([0.5, 2.0]))
        tensor(4.6250)
    """
    number = reduction_number("mse_loss", size_average, reduce, reduction)
    return distance("mse_loss", mse_loss_forward, input, target, weight, number)


class MSELoss(torch.nn.MSELoss):
    """torch.nn.MSELoss by :func:`cuda_ops.functional.mse_loss`: same arguments and repr."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return mse_loss(input, target, reduction=self.reduction)
