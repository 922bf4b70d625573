"""mnist_step: training steps of the MNIST CNN, as many as there are rows of indices, in one kernel. It updates the
parameters in place and has no gradient; cuda_ops.training.MnistStep is what users call."""

import torch
from torch import Tensor

from .._fakes import register_fake
from .._library import ops

MAX_BATCH = 1024


@register_fake("cuda_ops::mnist_step_")
def _(parameters, losses, workspace, images, labels, indices, rates, options):
    return None


def mnist_step_supported(device: torch.device, batch: int) -> bool:
    """Whether the kernel runs on that CUDA device, for batches of that size."""
    return ops.mnist_step_supported(torch.empty(0, device=device), batch)


def mnist_step_workspace(images: Tensor, batch: int) -> int:
    """Bytes of workspace for batches of that size, on the device of `images`."""
    return ops.mnist_step_workspace(images, batch)


def mnist_step_(
    parameters: list[Tensor],
    losses: Tensor,
    workspace: Tensor,
    images: Tensor,
    labels: Tensor,
    indices: Tensor,
    rates: Tensor,
    options: list[float],
):
    """Takes a step for each row of `indices`, in place.

    Args:
        parameters: 18 tensors: of each convolution weight and bias, then its batch norm's weight, bias, running_mean,
            running_var and num_batches_tracked; then weight and bias of the two linear layers.
        losses: [steps], float32: written.
        workspace: uint8, of `mnist_step_workspace` bytes; all zero before its first use, and then left to the kernel.
        images, labels: the data set, as for :class:`cuda_ops.training.MnistStep`.
        indices: [steps, batch], int64.
        rates: [steps, 2], float32: the learning rate of the convolutions and batch norms, and of the linear layers.
        options: eps and momentum of the first batch norm, of the second; mean, std, label smoothing.
    """
    with torch.no_grad():
        ops.mnist_step_(parameters, losses, workspace, images, labels, indices, rates, options)
