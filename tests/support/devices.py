"""The devices and dtypes that tests run over."""

import pytest
import torch

from cuda_ops import _library

CUDA_MISSING = (
    "needs a GPU"
    if not torch.cuda.is_available()
    else None
    if _library.has_cuda()
    else "needs a build with CUDA (CUDA_OPS_CUDA=1)"
)
CPU_DTYPES = [torch.float32, torch.float64]
CUDA_DTYPES = [*CPU_DTYPES, torch.float16, torch.bfloat16]


def needs_hopper():
    """Skips a test of what is for compute capability 9.0 alone: wgmma, TMA."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def needs_ampere():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU of compute capability 8.0")


def cuda_param(*values, **kwargs):
    """pytest.param for a case that needs a GPU."""
    return pytest.param(*values, marks=pytest.mark.cuda, **kwargs)
