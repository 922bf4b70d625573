"""What max_pool2d and avg_pool2d share in Python: their arguments as pairs, and the shape of their outputs."""

import torch
from torch._prims_common import suggest_memory_format


def pair(op: str, name: str, value) -> tuple[int, int]:
    """An int, one int in a sequence or two of them, as (height, width)."""
    if isinstance(value, (tuple, list)):
        if len(value) not in (1, 2):
            raise RuntimeError(f"{op}: expected {name} to be an int or two ints, got {value}")
        return value[0], value[-1]
    return value, value


def pair_or_kernel(op: str, name: str, value, kernel_size: tuple[int, int]) -> tuple[int, int]:
    """As `pair`; None and an empty sequence mean kernel_size."""
    if value is None or (isinstance(value, (tuple, list)) and len(value) == 0):
        return kernel_size
    return pair(op, name, value)


def _pooled_size(input, kernel, stride, padding, dilation, ceil_mode):
    room = input + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return room // stride + 1
    # No branch on a size, which may be symbolic: the last window must start before the input ends.
    return torch.sym_min((room + stride - 1) // stride, (input + padding - 1) // stride) + 1


def empty_pooled(input, kernel_size, stride, padding, dilation, ceil_mode, dtype=None):
    """A tensor with the shape and strides of the pooled `input`, for fake kernels."""
    plane = [
        _pooled_size(*axis, ceil_mode)
        for axis in zip(input.shape[-2:], kernel_size, stride, padding, dilation, strict=True)
    ]
    return torch.empty(
        (*input.shape[:-2], *plane),
        dtype=dtype or input.dtype,
        device=input.device,
        memory_format=suggest_memory_format(input),
    )
