"""What the activation functions share: fake kernels, and the form in place."""

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._fakes import register_fake
from .._operators import operator


def activation_operators(name: str):
    """The registered ops <name>_forward and <name>_backward as functions of positional arguments, with fake kernels."""

    @register_fake(f"cuda_ops::{name}_forward")
    def _(input, *parameters):
        return torch.empty_like(input)

    @register_fake(f"cuda_ops::{name}_backward")
    def _(grad_output, saved, *parameters):
        return torch.empty_like(saved)

    return operator(f"{name}_forward"), operator(f"{name}_backward")


def inplace_operator(name: str, forward, saves_input: bool = True):
    """<name>_inplace, with a fake kernel, as a function that returns its input. `saves_input`: whether that is what
    `forward` saves for its gradient, and not its output."""

    @register_fake(f"cuda_ops::{name}_inplace")
    def _(input, *parameters):
        return None

    call = operator(f"{name}_inplace")

    def inplace(input: Tensor, *parameters) -> Tensor:
        if is_dynamo_compiling():
            # torch.compile does not trace autograd through an op that writes into its input. The graph that it makes
            # has no writes anyway but those into arguments, so that this costs nothing there.
            before = input.clone() if saves_input else input
            return input.copy_(forward(before, *parameters))
        call(input, *parameters)
        return input

    return inplace
