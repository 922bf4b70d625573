"""logsumexp: log(sum(exp(input))) along dimensions."""

import torch
from torch import Tensor

from .._arguments import check_tensors, expect, flag
from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._operators import operator

require_ops("logsumexp_tangent", "logsumexp_backward_input", "logsumexp_backward_output")


def reduced_shape(input, dim, keepdim):
    bound = max(input.dim(), 1)
    message, shape = "dim to be in [{}, {}] for an input of shape {}, got {}", list(input.shape)
    for d in dim:
        expect(-bound <= d < bound, "logsumexp", message, -bound, bound - 1, shape, d, check=torch._check_index)
    reduced = {d % bound for d in dim} if dim else set(range(bound))
    expect(not dim or len(reduced) == len(dim), "logsumexp", "dim to name each dimension once, got {}", list(dim))
    if keepdim:
        return [1 if d in reduced else size for d, size in enumerate(input.shape)]
    return [size for d, size in enumerate(input.shape) if d not in reduced]


@register_fake("cuda_ops::logsumexp_forward")
def _(input, dim, keepdim):
    return input.new_empty(reduced_shape(input, dim, keepdim))


@register_fake("cuda_ops::logsumexp_backward")
def _(grad_output, input, output, dim, keepdim):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


logsumexp_forward = operator("logsumexp_forward")
LogSumExpFunction = autograd_function("logsumexp_forward", "LogSumExpFunction")


def logsumexp(input: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    r"""Logarithm of the sum of exponentials along `dim`, :math:`\log \sum_j \exp(\text{input}_j)`, without overflow for
    large inputs; as :func:`torch.logsumexp`.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        dim: a dimension, or several; they may count from the end. An empty tuple stands for all.
        keepdim: whether these dimensions stay, with one element.

    Returns:
        A contiguous tensor, of the shape of `input` without `dim`. It is NaN where a NaN is summed up, else +inf where
        a +inf is, and -inf where nothing is, or -inf alone.

    Raises:
        TypeError: `input` is no tensor, `dim` no ints, or `keepdim` no bool.
        RuntimeError: `input` is not floating point, or `dim` names a dimension twice.
        IndexError: `input` has no dimension `dim`.

    Under CUDA's autocast it computes in float32. Differentiable any number of times.

    Example:
        >>> cuda_ops.functional.logsumexp(torch.tensor([[0.0, 0.0], [1000.0, -1000.0]]), dim=1)
        tensor([6.9315e-01, 1.0000e+03])
    """
    check_tensors("logsumexp", input=input)
    return logsumexp_forward(input, dim, flag("logsumexp", "keepdim", keepdim))
