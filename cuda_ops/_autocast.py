"""torch.autocast for our functionals: the casts that PyTorch puts in front of the ops of its two lists.

They are plain `.to` calls outside of the autograd.Functions, so that autograd casts the gradients back, and backward
runs in the dtype of forward.
"""

import torch
from torch import Tensor


def _cast(tensor, dtype):
    # As in PyTorch, float64 is left alone: whoever computes in it does so on purpose.
    if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(dtype)
    return tensor


def autocast_to_lower(op: str, input: Tensor, *others: Tensor | None):
    """The tensors (None stays None) in autocast's dtype if autocast is on for the device of `input`."""
    device_type = input.device.type
    if not torch.is_autocast_enabled(device_type):
        return (input, *others)
    if device_type == "cpu":
        raise NotImplementedError(
            f"{op}: autocast on the CPU is not supported (the CPU backend computes in float32 and float64)"
        )
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(_cast(tensor, dtype) for tensor in (input, *others))


def autocast_to_float32(input: Tensor, *others: Tensor | None):
    """The tensors (None stays None) in float32 if autocast is on for the device of `input`."""
    if not torch.is_autocast_enabled(input.device.type):
        return (input, *others)
    return tuple(_cast(tensor, torch.float32) for tensor in (input, *others))
