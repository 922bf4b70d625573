"""The ops as functions, with the signatures of torch.nn.functional. One line an op."""

from .ops.polynomial import polynomial
from .ops.relu import relu
from .ops.square import square

__all__ = [
    "polynomial",
    "relu",
    "square",
]
