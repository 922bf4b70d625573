"""The ops as functions, with the signatures of torch.nn.functional. One line an op."""

from .ops.conv2d import conv2d
from .ops.square import square

__all__ = [
    "conv2d",
    "square",
]
