"""embedding: rows of a table by their indices."""

import torch
from torch import Tensor

from .._arguments import check_tensors, expect, flag, integer, number
from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._modules import parameter
from .._operators import operator

require_ops("embedding_backward_grad_output")


@register_fake("cuda_ops::embedding_forward")
def _(input, weight, padding_idx, scale_grad_by_freq):
    expect(weight.dim() == 2, "embedding", "weight to have 2 dimensions, got shape {}", list(weight.shape))
    return weight.new_empty((*input.shape, weight.shape[1]))


@register_fake("cuda_ops::embedding_backward")
def _(grad_output, input, size, dtype, padding_idx, scale_grad_by_freq):
    op = "embedding_backward"
    expect(len(size) == 2, op, "size to be that of a table, two sizes of at least 0, got {}", size)
    message = "grad_output to have shape {}, got {}"
    expected = (*input.shape, size[1])
    expect(grad_output.dim() == len(expected), op, message, list(expected), list(grad_output.shape))
    for actual, wanted in zip(grad_output.shape, expected, strict=True):
        expect(actual == wanted, op, message, list(expected), list(grad_output.shape))
    return grad_output.new_empty(size, dtype=dtype)


@register_fake("cuda_ops::embedding_backward_add")
def _(grad_weight, grad_output, input):
    return None


embedding_forward = operator("embedding_forward")
EmbeddingFunction = autograd_function("embedding_forward", "EmbeddingFunction")


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    r"""The rows of a table that indices name: :math:`\text{output}_i = \text{weight}_{\text{input}_i}`.

    Args:
        input: int64 or int32, any shape and strides: indices in [0, V).
        weight: [V, D], any strides; float32, float64, float16 or bfloat16.
        padding_idx: a row that has no gradient, -V to V - 1; negative ones count from the end. None: every row has.
        max_norm: None. (Rows are not renormalised.)
        norm_type: of the norm for `max_norm`, and so without effect.
        scale_grad_by_freq: whether to divide the gradient of a row by how many indices name it.
        sparse: False. The gradient is dense.

    Returns:
        A contiguous tensor, the shape of `input` followed by D.

    Raises:
        IndexError: an index is not in [0, V). On CUDA, where waiting for the kernel would cost more than the kernel,
            its row is NaN, it has no part in the gradient, and the next call (forward or backward) that finds the
            mistake recorded raises; with CUDA_OPS_CHECK_INDICES=1 in the environment the call itself waits and raises
            (not while a CUDA graph is being captured). The position counts the elements of `input` in row-major order.
        TypeError: `input` or `weight` is no tensor, `padding_idx` no int, `scale_grad_by_freq` or `sparse` no bool.
        ValueError: there is no row `padding_idx`.
        RuntimeError: a mismatch of shapes, dtypes or devices.
        NotImplementedError: `max_norm` or `sparse` is given; 2^31 indices
            or rows, or more.

    The gradient is dense and deterministic: the rows of the gradient that belong to one row of the table are added in
    their order, in float32 for the halves. Differentiable any number of times.

    Example:
        >>> table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> cuda_ops.functional.embedding(torch.tensor([1, 0, 1]), table)
        tensor([[3., 4.],
                [1., 2.],
                [3., 4.]])
    """
    if max_norm is not None:
        raise NotImplementedError(f"embedding: expected max_norm to be None, got {max_norm!r}")
    if sparse is not False and flag("embedding", "sparse", sparse):
        raise NotImplementedError("embedding: expected sparse to be False, got True (the gradient is dense)")
    if type(norm_type) is not float:
        number("embedding", "norm_type", norm_type)
    if padding_idx is None:
        padding_idx = -1
    else:
        check_tensors("embedding", weight=weight)
        rows = weight.shape[0] if weight.dim() > 0 else 0
        given = integer("embedding", "padding_idx", padding_idx)
        if not -rows <= given < rows:
            raise ValueError(f"embedding: expected padding_idx to be in [{-rows}, {rows - 1}], got {given}")
        padding_idx = given if given >= 0 else given + rows
    return embedding_forward(input, weight, padding_idx, scale_grad_by_freq)


class Embedding(torch.nn.Embedding):
    """torch.nn.Embedding by :func:`cuda_ops.functional.embedding`: same arguments, repr and state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return embedding(
            input,
            parameter(self, "weight"),
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
