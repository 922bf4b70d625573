"""The ops as functions, with the signatures of torch.nn.functional. One line an op."""

from .ops.cross_entropy import cross_entropy
from .ops.log_softmax import log_softmax
from .ops.nll_loss import nll_loss
from .ops.square import square

__all__ = [
    "cross_entropy",
    "log_softmax",
    "nll_loss",
    "square",
]
