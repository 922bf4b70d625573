"""The sum of all elements by cub::DeviceReduce (cub_reduce.cu)."""

import ctypes

import torch
from torch import Tensor

from . import compiled

FUNCTIONS = compiled.library("cub_reduce")
BY_DTYPE = {torch.float32: FUNCTIONS.cub_reduce_f32, torch.float64: FUNCTIONS.cub_reduce_f64}


def reduce(input: Tensor) -> Tensor:
    """Of contiguous float32 or float64 on CUDA: a tensor of one element."""
    output, size = input.new_empty(1), ctypes.c_size_t(0)
    rest = (input, output, ctypes.c_int64(input.numel()), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
    compiled.call(BY_DTYPE[input.dtype], None, ctypes.byref(size), *rest)
    workspace = torch.empty(size.value, dtype=torch.uint8, device=input.device)
    compiled.call(BY_DTYPE[input.dtype], workspace, ctypes.byref(size), *rest)
    return output
