"""What index_add and scatter_add share: a check of fake kernels, and the forms in place."""

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._arguments import expect
from .._operators import operator


def wrapped_dim(op: str, dim: int, input: Tensor) -> int:
    bound, shape = max(input.dim(), 1), list(input.shape)
    message = "dim to be in [{}, {}] for an input of shape {}, got {}"
    expect(-bound <= dim < bound, op, message, -bound, bound - 1, shape, dim, check=torch._check_index)
    return dim % bound


def inplace_operator(name: str, forward):
    """<name>_inplace as a function that returns its input."""

    call = operator(f"{name}_inplace")

    def inplace(input: Tensor, *parameters) -> Tensor:
        if is_dynamo_compiling() or torch._C._functorch.maybe_current_level() is not None:
            # Neither torch.compile nor torch.func goes through an op that writes into its input.
            return input.copy_(forward(input, *parameters))
        call(input, *parameters)
        return input

    return inplace
