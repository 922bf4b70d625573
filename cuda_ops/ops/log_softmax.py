"""log_softmax: input - log(sum(exp(input))) along one dimension."""

import torch
from torch import Tensor
from torch.nn.functional import _get_softmax_dim

from .._arguments import autocasts, check_dtype, check_tensors, expect
from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator


@register_fake("cuda_ops::log_softmax_forward")
def _(input, dim):
    bound = max(input.dim(), 1)
    message = "dim to be in [{}, {}] for an input of shape {}, got {}"
    shape = list(input.shape)
    expect(-bound <= dim < bound, "log_softmax", message, -bound, bound - 1, shape, dim, check=torch._check_index)
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@register_fake("cuda_ops::log_softmax_backward")
def _(grad_output, output, dim):
    return torch.empty_like(output, memory_format=torch.contiguous_format)


log_softmax_forward = operator("log_softmax_forward")
LogSoftmaxFunction = autograd_function("log_softmax_forward", "LogSoftmaxFunction")


def log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    r"""Logarithm of the softmax, :math:`\text{output}_i = \text{input}_i - \log \sum_j \exp(\text{input}_j)` along
    `dim`, in a form that neither overflows nor loses digits for large inputs.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        dim: the dimension whose exponentials sum up to 1. None is deprecated: it warns, and picks 0 for an input of
            0, 1 or 3 dimensions and 1 for others, as PyTorch does.
        dtype: if given, `input` is cast to it first.

    Returns:
        A contiguous tensor with the shape of `input`; where a NaN or +inf is along `dim`, or -inf alone, all NaN.

    Raises:
        TypeError: `input` is no tensor, or `dim` no int, or `dtype` no dtype.
        RuntimeError: `input` is not floating point.
        IndexError: `input` has no dimension `dim`.

    Under CUDA's autocast it computes in float32. Differentiable any number of times; from the second derivative on by
    PyTorch's own ops.

    Example:
        >>> cuda_ops.functional.log_softmax(torch.tensor([0.0, 0.0]), dim=0)
        tensor([-0.6931, -0.6931])
    """
    if dim is None:
        check_tensors("log_softmax", input=input)
        dim = _get_softmax_dim("log_softmax", input.dim(), _stacklevel)
    if dtype is not None:
        return log_softmax_in(dtype, input, dim)
    return log_softmax_forward(input, dim)


def log_softmax_in(dtype, input, dim):
    """In that dtype, under autocast too."""
    check_tensors("log_softmax", input=input)
    check_dtype("log_softmax", dtype)
    device_type = input.device.type
    input = input.to(dtype)
    if autocasts(device_type):
        with torch.autocast(device_type, enabled=False):
            return log_softmax_forward(input, dim)
    return log_softmax_forward(input, dim)


class LogSoftmax(torch.nn.LogSoftmax):
    """torch.nn.LogSoftmax on cuda_ops.functional.log_softmax."""

    def forward(self, input: Tensor) -> Tensor:
        return log_softmax(input, self.dim, _stacklevel=5)
