"""What max_pool2d and avg_pool2d share in Python: their arguments as pairs, and the shape of their outputs."""

import torch
from torch._prims_common import suggest_memory_format

from .._arguments import expect, pair


def is_none(stride) -> bool:
    """Whether `stride` is not given: None, or an empty sequence."""
    return stride is None or (type(stride) is not int and isinstance(stride, (tuple, list)) and len(stride) == 0)


def pair_or_kernel(op: str, name: str, value, kernel_size: tuple[int, int]) -> tuple[int, int]:
    """As `pair`; None and an empty sequence mean kernel_size."""
    if is_none(value):
        return kernel_size
    return pair(op, name, value)


def _pooled_size(input, kernel, stride, padding, dilation, ceil_mode):
    room = input + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return room // stride + 1
    # No branch on a size, which may be symbolic: the last window must start before the input ends.
    return torch.sym_min((room + stride - 1) // stride, (input + padding - 1) // stride) + 1


def _check_sizes(op, input, kernel_size, stride, padding, dilation):
    shape = tuple(input.shape)
    expect(len(shape) in (3, 4), op, "input to have 3 or 4 dimensions, got shape {}", shape)
    for size in shape[-3:]:
        expect(size > 0, op, "input to have no empty dimension but the batch, got shape {}", shape)
    for name, values in (("kernel_size", kernel_size), ("stride", stride), ("dilation", dilation)):
        expect(len(values) == 2, op, "{} to be two integers, got {}", name, values)
        expect(min(values) > 0, op, "{} to be positive 32-bit integers, got {}", name, values)
    expect(len(padding) == 2, op, "padding to be two integers, got {}", padding)
    expect(min(padding) >= 0, op, "padding to be non-negative 32-bit integers, got {}", padding)
    half = all(p <= k // 2 for p, k in zip(padding, kernel_size, strict=True))
    expect(
        half, op, "padding to be at most half of kernel_size, got padding {} and kernel_size {}", padding, kernel_size
    )


def empty_pooled(op, input, kernel_size, stride, padding, dilation, ceil_mode, dtype=None):
    """A tensor with the shape and strides of the pooled `input`, for fake kernels."""
    _check_sizes(op, input, kernel_size, stride, padding, dilation)
    plane = [
        _pooled_size(*axis, ceil_mode)
        for axis in zip(input.shape[-2:], kernel_size, stride, padding, dilation, strict=True)
    ]
    for size in plane:
        expect(
            size > 0, op, "input to have room for a window of kernel_size {}, got shape {}", kernel_size, input.shape
        )
    return torch.empty(
        (*input.shape[:-2], *plane),
        dtype=dtype or input.dtype,
        device=input.device,
        memory_format=suggest_memory_format(input),
    )
