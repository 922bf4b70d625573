"""Which CUDA kernel takes a call, and why: the rows of an op's table of paths (cuda_ops/paths.h), in order, for forward
and each gradient, with the file of the one that runs and its kernels' registers and shared memory.

Nothing is computed, so that tensors may be on the meta device, and with --capability no GPU is needed.

A call is the op's name with the sizes of its tensors, a dtype (float32, float64, bf16, fp16; tf32 is float32 where TF32
is allowed; int32 and int64 behind sizes, of labels and indices), channels_last, and other arguments by name:

  python -m cuda_ops explain "conv2d(64x32x14x14, 64x32x3x3, bf16, channels_last, padding=1)"
  python -m cuda_ops explain "linear_relu(1024x3136:bf16, 128x3136:float32)" --capability 9.0
"""

from .._tf32 import tf32
from .answer import explain
from .command import add_arguments, main, parse_call
from .ops import DESCRIBED, ONE_KERNEL

__all__ = ["DESCRIBED", "ONE_KERNEL", "add_arguments", "explain", "main", "parse_call", "tf32"]
