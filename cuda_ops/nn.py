"""The ops as modules, drop-in for those of torch.nn: same constructor arguments, repr and state_dict."""

from .ops.conv2d import Conv2d

__all__ = [
    "Conv2d",
]
