"""huber_loss: half a square near the target, a multiple of the distance far from it."""

import torch
from torch import Tensor

from .._arguments import number
from .._autograd import autograd_function
from .._loss import reduction_number
from ._pointwise_loss import distance, pointwise_loss_operator

huber_loss_forward = pointwise_loss_operator("huber_loss")
HuberLossFunction = autograd_function("huber_loss_forward", "HuberLossFunction")


def huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    r"""For the distance :math:`z = |\text{input}_i - \text{target}_i|`: :math:`z^2 / 2` below :math:`\delta`,
    :math:`\delta \, (z - \delta / 2)` above it; and its mean or sum.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        target: of the dtype of `input`, and of its shape: another one is broadcast, with a warning.
        reduction: 'none', 'mean' or 'sum'. A mean over nothing is NaN, as in PyTorch.
        delta: where the one becomes the other, above 0.
        weight: of the shape of `input`, what each loss is multiplied by. A mean is not divided by it.

    Returns:
        One number, or with reduction 'none' a tensor like `input`. In the dtype of `input`; sums are taken in float64.

    Raises:
        TypeError: `input` or `target` is no tensor.
        ValueError: an unknown reduction; `weight` is of another shape than `input`.
        RuntimeError: `delta` is not above 0; `input` is not floating point; a mismatch of shapes, dtypes or devices.

    Under autocast it computes in float32. Differentiable any number of times, by `input` and by `target`.

    Example:
        >>> cuda_ops.functional.huber_loss(torch.tensor([1.0, 5.0]), torch.tensor([0.5, 2.0]))
        tensor(1.3125)
    """
    if not (delta if type(delta) is float else number("huber_loss", "delta", delta)) > 0:
        raise RuntimeError(f"huber_loss: expected delta to be above 0, got {delta}")
    of = reduction_number("huber_loss", None, None, reduction)
    return distance("huber_loss", huber_loss_forward, input, target, weight, of, delta, by_weights=False)


class HuberLoss(torch.nn.HuberLoss):
    """torch.nn.HuberLoss by :func:`cuda_ops.functional.huber_loss`: same arguments and repr."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return huber_loss(input, target, self.reduction, self.delta)
