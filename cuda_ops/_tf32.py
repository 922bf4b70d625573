"""PyTorch's switches for TF32, for the time of a block."""

import contextlib

from ._library import torch


@contextlib.contextmanager
def tf32(allowed: bool):
    """Products and convolutions of float32 may, or may not, round their factors to TF32 meanwhile."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    try:
        for flag in flags:
            flag.allow_tf32 = allowed
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value
