"""The ops of GPT that cuda_ops does not have yet, under the names and signatures that they will have.

INTERIM: attention is composed of our matmul, masked_softmax and dropout, and the embeddings are PyTorch's. Once
`cuda_ops.functional` has `scaled_dot_product_attention`, `embedding` and `token_position_embedding`, this file becomes
three imports; nothing else knows of it but models/gpt.py.
"""

import math

import torch
from torch import Tensor

from .. import functional


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """As torch.nn.functional's, of (batch, heads, length, features)."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = functional.matmul(query, key.transpose(-2, -1))
    weights = functional.masked_softmax(scores, attn_mask, scale, is_causal)
    # Under autocast the softmax is float32.
    weights = functional.dropout(weights.to(value.dtype), dropout_p) if dropout_p else weights.to(value.dtype)
    return functional.matmul(weights, value)


def embedding(input: Tensor, weight: Tensor) -> Tensor:
    """As torch.nn.functional's."""
    return torch.nn.functional.embedding(input, weight)


def token_position_embedding(input: Tensor, token_weight: Tensor, position_weight: Tensor) -> Tensor:
    """embedding(input, token_weight) + position_weight, whose rows are the positions of `input`'s columns."""
    return embedding(input, token_weight) + position_weight


class Embedding(torch.nn.Embedding):
    """torch.nn.Embedding by the above."""

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight)
