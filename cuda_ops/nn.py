"""The ops as modules, drop-in for those of torch.nn: same constructor arguments, repr and state_dict."""

from .ops.cross_entropy import CrossEntropyLoss
from .ops.log_softmax import LogSoftmax
from .ops.nll_loss import NLLLoss

__all__ = [
    "CrossEntropyLoss",
    "LogSoftmax",
    "NLLLoss",
]
