"""round_list: float32 tensors in half precision, all of them in one launch."""

import torch
from torch import Tensor

from .._fakes import register_fake
from .._library import ops


@register_fake("cuda_ops::round_list")
def _(tensors, dtype):
    return [tensor.new_empty(tensor.shape, dtype=dtype) for tensor in tensors]


def round_list(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Each of the float32 tensors, which are on one device, rounded to float16 or bfloat16; contiguous, and without a
    gradient. On CUDA one launch for 128 of them."""
    return ops.round_list(tensors, dtype) if tensors else []
