"""torch.autocast for our functionals: the casts that PyTorch puts in front of the ops of its two lists.

They are plain `.to` calls outside of the autograd.Functions, so that autograd casts the gradients back, and backward
runs in the dtype of forward.
"""

import torch
from torch import Tensor


def _enabled(device_type):
    # PyTorch raises for devices that autocast does not know, such as meta.
    return device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type)


def _is_cast(tensor):
    # As in PyTorch, float64 is left alone: whoever computes in it does so on purpose.
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64


def _cast(tensor, dtype):
    return tensor.to(dtype) if _is_cast(tensor) else tensor


def autocast_to_lower(op: str, input: Tensor, *others: Tensor | None):
    """The tensors (None stays None) in autocast's dtype if autocast is on for the device of `input`."""
    device_type = input.device.type
    if not _enabled(device_type):
        return (input, *others)
    if device_type == "cpu" and any(_is_cast(tensor) for tensor in (input, *others)):
        raise NotImplementedError(
            f"{op}: autocast on the CPU is not supported (the CPU backend computes in float32 and float64)"
        )
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(_cast(tensor, dtype) for tensor in (input, *others))


def autocast_to_float32(input: Tensor, *others: Tensor | None):
    """The tensors (None stays None) in float32 if autocast is on for the device of `input`."""
    if not _enabled(input.device.type):
        return (input, *others)
    return tuple(_cast(tensor, torch.float32) for tensor in (input, *others))


def autocast_input(op: str, input: Tensor) -> Tensor:
    """`input` in autocast's dtype if autocast is on for its device: for ops that take float32 parameters beside it."""
    device_type = input.device.type
    if not _enabled(device_type):
        return input
    if device_type == "cpu" and _is_cast(input):
        raise NotImplementedError(
            f"{op}: autocast on the CPU is not supported (the CPU backend computes in float32 and float64)"
        )
    return _cast(input, torch.get_autocast_dtype(device_type))
