"""Optimizers, drop-in for those of torch.optim: same arguments, same state_dict."""

from .ops.sgd import SGD

__all__ = [
    "SGD",
]
