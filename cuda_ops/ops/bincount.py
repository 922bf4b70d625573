"""bincount: how often each of the numbers 0, 1, 2, ... occurs, or the sums of the weights beside them."""

import torch
from torch import Tensor

from .._arguments import check_tensors, check_tensors_or_none, expect, integer
from .._fakes import check_devices, register_fake
from .._operators import operator


@register_fake("cuda_ops::bincount_range")
def _(input):
    return input.new_empty((2,), dtype=torch.int64)


@register_fake("cuda_ops::bincount_forward")
def _(input, weights, size):
    expect(size >= 0, "bincount", "size to be at least 0, got {}", size)
    if weights is None:
        return input.new_empty((size,), dtype=torch.int64)
    return weights.new_empty((size,), dtype=torch.float32 if weights.dtype == torch.float32 else torch.float64)


bincount_range = operator("bincount_range")
bincount_forward = operator("bincount_forward")


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    r"""How often each number occurs, :math:`\text{output}_n = \sum_i [\text{input}_i = n]`, or the sums of weights,
    :math:`\sum_i [\text{input}_i = n] \, \text{weights}_i`. As :func:`torch.bincount`.

    Args:
        input: [N], any stride: integers of at least 0, int64, int32, int16, int8 or uint8.
        weights: [N], of any dtype; those of float32 are added up in float32, all others in float64. None: counts.
        minlength: the least that the result is long.

    Returns:
        A contiguous tensor as long as the largest number and one, or `minlength`: int64 without weights and of an
        empty `input`, else float32 or float64. On CUDA the host waits for the largest number.

    Raises:
        TypeError: `input` is no tensor, `weights` none either, or `minlength` no int.
        RuntimeError: `input` is not of integers, has a negative one or other than one dimension; `weights` has another
            shape; `minlength` is below 0.
        NotImplementedError: a number of 2^31 - 1 or more.

    Exact without weights; with weights deterministic, on CUDA of more bins than fit in shared memory (384 of float32)
    under :func:`torch.use_deterministic_algorithms`. There is no gradient for `weights`: to ask for it is a
    NotImplementedError, as in PyTorch.

    Example:
        >>> cuda_ops.functional.bincount(torch.tensor([1, 3, 1]), minlength=5)
        tensor([0, 2, 0, 1, 0])
        >>> cuda_ops.functional.bincount(torch.tensor([1, 0, 1]), torch.tensor([0.5, 2.0, 1.0]))
        tensor([2.0000, 1.5000])
    """
    check_tensors("bincount", input=input)
    check_tensors_or_none("bincount", weights=weights)
    check_devices("bincount", {"input": input, "weights": weights})  # before the host waits for one of them
    least = integer("bincount", "minlength", minlength)
    expect(least >= 0, "bincount", "minlength to be at least 0, got {}", least)
    smallest, largest = bincount_range(input).tolist()
    expect(smallest >= 0, "bincount", "input to be of integers of at least 0, got {}", smallest)
    if input.numel() == 0:
        weights = None
    return bincount_forward(input, weights, max(largest + 1, least))
