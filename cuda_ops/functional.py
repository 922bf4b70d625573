"""The ops as functions, with the signatures of torch.nn.functional. One line an op."""

from .ops.avg_pool2d import avg_pool2d
from .ops.dropout import dropout
from .ops.max_pool2d import max_pool2d
from .ops.square import square

__all__ = [
    "avg_pool2d",
    "dropout",
    "max_pool2d",
    "square",
]
