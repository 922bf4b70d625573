"""The ops as modules, drop-in for those of torch.nn: same constructor arguments, repr and state_dict."""

from .ops.avg_pool2d import AvgPool2d
from .ops.dropout import Dropout
from .ops.max_pool2d import MaxPool2d

__all__ = [
    "AvgPool2d",
    "Dropout",
    "MaxPool2d",
]
