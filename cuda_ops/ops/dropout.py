"""dropout: zeroes elements at random. On CUDA the mask is not stored: backward draws it again from seed and offset. On
the CPU, where that takes longer than to read it, a bit an element is kept behind them."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .._arguments import check_tensors, expect, flag, number
from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import operator


def empty_state(input):
    """Seed and offset, and on the CPU what is kept."""
    size = 2 + (input.numel() + 63) // 64 if input.device.type == "cpu" else 2
    return torch.empty(size, dtype=torch.int64, device=input.device)


@register_fake("cuda_ops::dropout_forward")
def _(input, p, call=None):
    return torch.empty_like(input), empty_state(input)


@register_fake("cuda_ops::dropout_backward")
def _(grad_output, state, p, stride):
    fits = len(stride) == grad_output.dim()
    expect(fits, "dropout_backward", "stride to have one element a dimension of grad_output, got {}", list(stride))
    return torch.empty_strided(grad_output.shape, stride, dtype=grad_output.dtype, device=grad_output.device)


dropout_forward = operator("dropout_forward")
DropoutFunction = autograd_function("dropout_forward", "DropoutFunction")


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    r"""Zeroes each element with probability `p` and scales the others by :math:`1 / (1 - p)`, so that the expected
    value stays; as :func:`torch.nn.functional.dropout`.

    The numbers come from Philox-4x32-10, keyed by PyTorch's default generator of input's device: the same after the
    same :func:`torch.manual_seed`, whatever the number of threads, other ones on every call and on every replay of a
    CUDA graph. They are not the numbers that PyTorch's own dropout would draw.

    Args:
        input: any shape, any strides; float32, float64, float16 or bfloat16.
        p: probability of an element to be zeroed, from 0 to 1.
        training: if False, `input` is returned as it is.
        inplace: whether to write the result into `input`.

    Returns:
        A tensor like `input`, with its strides where they are dense; `input` itself if `inplace`, if not `training`, or
        if p is 0.

    Raises:
        TypeError: `input` is no tensor, `p` no number or `training` no bool.
        ValueError: p is not between 0 and 1.
        RuntimeError: `input` is not floating point, or `inplace` is asked for a leaf that requires grad.

    Differentiable any number of times, with the mask of forward.

    Example:
        >>> cuda_ops.functional.dropout(torch.ones(3), p=0.5, training=False)
        tensor([1., 1., 1.])
    """
    if not 0.0 <= (p if type(p) is float else number("dropout", "p", p)) <= 1.0:
        raise ValueError(f"dropout: expected p to be between 0 and 1, got {p}")
    if not flag("dropout", "training", training) or p == 0.0:
        check_tensors("dropout", input=input)
        return input
    # In a compiled graph each call needs an argument of its own, so that no two are merged. An uninitialised tensor
    # is one: no two of them are taken for the same.
    call = torch.empty(0, device=input.device) if is_compiling() else None
    output, _ = dropout_forward(input, p, call)
    # copy_ is what tells autograd that input has changed.
    return input.copy_(output) if inplace else output


class Dropout(torch.nn.Dropout):
    """:class:`torch.nn.Dropout`, computed by :func:`cuda_ops.functional.dropout`."""

    def forward(self, input):
        return dropout(input, self.p, self.training, self.inplace)
