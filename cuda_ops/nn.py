"""The ops as modules, drop-in for those of torch.nn: same constructor arguments, repr and state_dict."""

from .ops.batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from .ops.linear import Linear
from .ops.relu import ReLU

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Linear",
    "ReLU",
]
