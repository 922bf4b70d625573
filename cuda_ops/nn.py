"""The ops as modules, drop-in for those of torch.nn: same constructor arguments, repr and state_dict."""

from .ops.linear import Linear

__all__ = [
    "Linear",
]
