"""Optimizers, drop-in for those of torch.optim: same arguments, same state_dict."""

from .ops.adam import Adam, AdamW
from .ops.sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
]
