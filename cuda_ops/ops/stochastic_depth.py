"""stochastic_depth: zeroes whole rows of a batch, or all of it, as torchvision.ops.stochastic_depth."""

import torch
from torch import Tensor

from .._arguments import check_tensors
from ._scaled_at_random import scaled_at_random


def stochastic_depth(input: Tensor, p: float, mode: str, training: bool = True) -> Tensor:
    r"""Drops the branch of a residual sum at random (Huang et al., Deep Networks with Stochastic Depth, 2016): what is
    kept is scaled by :math:`1 / (1 - p)`. As :func:`torchvision.ops.stochastic_depth`, which it does not need.

    Args:
        input: (N, \*), any strides; any floating-point dtype.
        p: probability to be zeroed, from 0 to 1.
        mode: 'row': of each row of the batch by itself; 'batch': of all of it.
        training: if False, `input` is returned as it is.

    Returns:
        A tensor like `input`; `input` itself if not `training`, or if p is 0.

    Raises:
        TypeError: `input` is no tensor, `p` no number or `training` no bool.
        ValueError: p is not between 0 and 1, or `mode` is another word.
        RuntimeError: `input` is not floating point, or has no rows for mode 'row': no dimensions.

    The numbers are :func:`dropout`'s. Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.stochastic_depth(torch.ones(2, 3), 0.5, "row", training=False).sum()
        tensor(6.)
    """
    check_tensors("stochastic_depth", input=input)
    if mode not in ("batch", "row"):
        raise ValueError(f"stochastic_depth: expected mode to be 'batch' or 'row', got {mode!r}")
    if mode == "row" and input.dim() == 0:
        raise RuntimeError("stochastic_depth: expected input to have rows for mode 'row', got shape []")
    shape = [1] * input.dim()
    if mode == "row":
        shape[0] = input.shape[0]
    return scaled_at_random("stochastic_depth", input, shape, p, training)


class StochasticDepth(torch.nn.Module):
    """torchvision.ops.StochasticDepth by :func:`cuda_ops.functional.stochastic_depth`: same arguments and repr."""

    def __init__(self, p: float, mode: str) -> None:
        super().__init__()
        self.p = p
        self.mode = mode

    def forward(self, input: Tensor) -> Tensor:
        return stochastic_depth(input, self.p, self.mode, self.training)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(p={self.p}, mode={self.mode})"
