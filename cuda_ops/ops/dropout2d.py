"""dropout2d: zeroes whole channels of images at random."""

import torch
from torch import Tensor

from ._scaled_at_random import channels_of, scaled_at_random


def dropout2d(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    r"""Zeroes each channel of each image with probability `p`, and scales the others by :math:`1 / (1 - p)`; as
    :func:`torch.nn.functional.dropout2d`.

    Args:
        input: (N, C, H, W), any strides; any floating-point dtype.
        p: probability of a channel to be zeroed, from 0 to 1.
        training: if False, `input` is returned as it is.
        inplace: whether to write the result into `input`.

    Returns:
        A tensor like `input`; `input` itself if `inplace`, if not `training`, or if p is 0.

    Raises:
        TypeError: `input` is no tensor, `p` no number, `training` or `inplace` no bool.
        ValueError: p is not between 0 and 1.
        RuntimeError: `input` is not floating point, or `inplace` is asked for a leaf that requires grad.
        NotImplementedError: `input` has another number of dimensions (three are (N, C, L) to PyTorch, which warns that
            this will change: :func:`dropout1d` says it).

    The numbers are :func:`dropout`'s, one a channel. Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.dropout2d(torch.ones(1, 2, 3, 3), p=0.5, training=False).shape
        torch.Size([1, 2, 3, 3])
    """
    return scaled_at_random("dropout2d", input, channels_of("dropout2d", input, 2, True), p, training, inplace)


class Dropout2d(torch.nn.Dropout2d):
    """:class:`torch.nn.Dropout2d`, computed by :func:`cuda_ops.functional.dropout2d`."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout2d(input, self.p, self.training, self.inplace)
