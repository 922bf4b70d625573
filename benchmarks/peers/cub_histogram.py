"""Counts of 0 to 255 by cub::DeviceHistogram (cub_histogram.cu)."""

import ctypes

import torch
from torch import Tensor

from . import compiled

FUNCTIONS = compiled.library("cub_histogram")
BY_DTYPE = {torch.uint8: FUNCTIONS.cub_histogram_u8, torch.int32: FUNCTIONS.cub_histogram_i32}


def histogram(input: Tensor) -> Tensor:
    """Of contiguous uint8 or int32 on CUDA: 256 counts, int32."""
    output, size = input.new_empty(256, dtype=torch.int32), ctypes.c_size_t(0)
    rest = (input, output, ctypes.c_int64(input.numel()), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
    compiled.call(BY_DTYPE[input.dtype], None, ctypes.byref(size), *rest)
    workspace = torch.empty(size.value, dtype=torch.uint8, device=input.device)
    compiled.call(BY_DTYPE[input.dtype], workspace, ctypes.byref(size), *rest)
    return output
