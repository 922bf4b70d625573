"""What adaptive_avg_pool2d and adaptive_max_pool2d share in Python: their argument, and the shape of their outputs."""

import torch
from torch._prims_common import suggest_memory_format

from .._arguments import check_tensors, expect, pair


def output_plane(op: str, input, output_size) -> tuple[int, int]:
    """Height and width of the output; None stands for the input's."""
    if type(output_size) is int:
        return output_size, output_size
    check_tensors(op, input=input)
    if isinstance(output_size, (tuple, list)):
        if len(output_size) != 2:
            raise RuntimeError(f"{op}: expected output_size to be an int or two of them, got {output_size!r}")
        if input.dim() >= 2:
            output_size = tuple(
                size if wanted is None else wanted for wanted, size in zip(output_size, input.shape[-2:], strict=True)
            )
    return pair(op, "output_size", output_size)


def empty_adaptive(op, input, output_size, dtype=None):
    """A tensor with the shape and strides of the pooled `input`, for fake kernels."""
    shape = tuple(input.shape)
    expect(len(shape) in (3, 4), op, "input to have 3 or 4 dimensions, got shape {}", shape)
    for size in shape[-3:]:
        expect(size > 0, op, "input to have no empty dimension but the batch, got shape {}", shape)
    expect(len(output_size) == 2, op, "output_size to be an int or two ints, got {}", output_size)
    for size in output_size:
        expect(size >= 0, op, "output_size to be non-negative 32-bit integers, got {}", output_size)
    return torch.empty(
        (*shape[:-2], *output_size),
        dtype=dtype or input.dtype,
        device=input.device,
        memory_format=suggest_memory_format(input),
    )


def empty_unpooled(like, input_size, dtype, memory_format):
    """The gradient of the input, for fake kernels."""
    return torch.empty((*like.shape[:-2], *input_size), dtype=dtype, device=like.device, memory_format=memory_format)
