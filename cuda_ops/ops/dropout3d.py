"""dropout3d: zeroes whole channels of volumes at random."""

import torch
from torch import Tensor

from ._scaled_at_random import channels_of, scaled_at_random


def dropout3d(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    r"""Zeroes each channel of each volume with probability `p`, and scales the others by :math:`1 / (1 - p)`; as
    :func:`torch.nn.functional.dropout3d`.

    Args:
        input: (N, C, D, H, W), or (C, D, H, W) without a batch; any strides; any floating-point dtype.
        p: probability of a channel to be zeroed, from 0 to 1.
        training: if False, `input` is returned as it is.
        inplace: whether to write the result into `input`.

    Returns:
        A tensor like `input`; `input` itself if `inplace`, if not `training`, or if p is 0.

    Raises:
        TypeError: `input` is no tensor, `p` no number, `training` or `inplace` no bool.
        ValueError: p is not between 0 and 1.
        RuntimeError: `input` is not floating point, or `inplace` is asked for a leaf that requires grad.
        NotImplementedError: `input` has another number of dimensions.

    The numbers are :func:`dropout`'s, one a channel. Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.dropout3d(torch.ones(1, 2, 3, 3, 3), p=0.5, training=False).shape
        torch.Size([1, 2, 3, 3, 3])
    """
    return scaled_at_random("dropout3d", input, channels_of("dropout3d", input, 3), p, training, inplace)


class Dropout3d(torch.nn.Dropout3d):
    """:class:`torch.nn.Dropout3d`, computed by :func:`cuda_ops.functional.dropout3d`."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout3d(input, self.p, self.training, self.inplace)
