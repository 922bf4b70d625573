"""token_position_embedding: rows of a table by tokens, and of another by where these stand, added up."""

import torch
from torch import Tensor

from .._arguments import check_dtype, check_tensors, expect
from .._autograd import autograd_function
from .._fakes import register_fake, require_ops
from .._operators import operator

require_ops("token_position_embedding_tangent", "position_embedding_rows")


@register_fake("cuda_ops::token_position_embedding_forward")
def _(tokens, token_weight, position_weight, dtype):
    op = "token_position_embedding"
    for name, weight in (("token_weight", token_weight), ("position_weight", position_weight)):
        expect(weight.dim() == 2, op, "{} to have 2 dimensions, got shape {}", name, list(weight.shape))
    expect(tokens.dim() >= 1, op, "tokens to have a dimension of positions, got shape []")
    cols, shape = token_weight.shape[1], list(position_weight.shape)
    message = "position_weight to have the columns of token_weight, {}, got shape {}"
    expect(position_weight.shape[1] == cols, op, message, cols, shape)
    message = "tokens to have at most {} positions, the rows of position_weight, got shape {}"
    expect(tokens.shape[-1] <= position_weight.shape[0], op, message, shape[0], list(tokens.shape))
    return token_weight.new_empty((*tokens.shape, cols), dtype=dtype)


@register_fake("cuda_ops::position_embedding_backward")
def _(grad_output, size, dtype):
    return grad_output.new_empty(size, dtype=dtype)


token_position_embedding_forward = operator("token_position_embedding_forward")
TokenPositionEmbeddingFunction = autograd_function("token_position_embedding_forward", "TokenPositionEmbeddingFunction")


def token_position_embedding(
    tokens: Tensor, token_weight: Tensor, position_weight: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    r"""What a transformer begins with, in one pass: :math:`\text{output}_{b, t} = \text{token\_weight}_{
    \text{tokens}_{b, t}} + \text{position\_weight}_t`.

    Args:
        tokens: [..., T], int64 or int32, any strides: indices in [0, V).
        token_weight: [V, D], any strides; float32, float64, float16 or bfloat16.
        position_weight: [P, D], of the dtype of `token_weight`; P is at least T.
        dtype: of the output: that of the weights (None), or float16 or bfloat16 beside float32 weights, whose
            gradients then are float32, summed of the halves.

    Returns:
        A contiguous tensor [..., T, D].

    Raises:
        IndexError: a token is not in [0, V). On CUDA its row is NaN, it has no part in the gradient, and a later call
            raises, as :func:`cuda_ops.functional.embedding` tells.
        TypeError: `tokens`, `token_weight` or `position_weight` is no tensor, or `dtype` no dtype.
        RuntimeError: a mismatch of shapes, dtypes or devices; more positions than `position_weight` has.
        NotImplementedError: another `dtype`; 2^31 tokens or rows, or more.

    Gradients as those of :func:`cuda_ops.functional.embedding`; differentiable any number of times.

    Example:
        >>> table, places = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0, 20.0], [30.0, 40.0]])
        >>> cuda_ops.functional.token_position_embedding(torch.tensor([1, 0]), table, places)
        tensor([[13., 24.],
                [31., 42.]])
    """
    if dtype is None:
        check_tensors("token_position_embedding", token_weight=token_weight)
        dtype = token_weight.dtype
    else:
        check_dtype("token_position_embedding", dtype)
    return token_position_embedding_forward(tokens, token_weight, position_weight, dtype)
