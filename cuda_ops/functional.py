"""The ops as functions, with the signatures of torch.nn.functional. One line an op."""

from .ops.square import square

__all__ = [
    "square",
]
