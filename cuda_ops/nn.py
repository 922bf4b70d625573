"""The ops as modules, drop-in for those of torch.nn: same constructor arguments, repr and state_dict."""

from .ops.linear import Linear
from .ops.relu import ReLU

__all__ = [
    "Linear",
    "ReLU",
]
