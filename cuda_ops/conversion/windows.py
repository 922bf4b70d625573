"""Attention in windows of images: torchvision's Swin Transformer and MaxViT.

Their layers roll the image, copy it into windows, attend within each, and copy the result back. Ours leave pixels where
they are: projections do not depend on the order of pixels, and cuda_ops.functional.window_attention reads and writes
windows in the image.
"""

import functools

import torch
from torch import Tensor

from .. import functional
from .._arguments import autocasts
from .._modules import PLAIN, has_plain_parameters, parameter, unlike
from ..ops.window_attention import POSITIONS
from . import fusing
from .fusing import HALVES, MAXVIT, SWIN
from .layers import takes


def relative_position_bias(attention, positions: int) -> Tensor:
    """(heads, positions, positions), of a table's rows."""
    table, index = parameter(attention, "relative_position_bias_table"), attention.relative_position_index
    rows = functional.embedding(index.view(positions, positions), table)
    return functional.permute_contiguous(rows, (2, 0, 1))


def is_worth_it(input: Tensor, in_float32: bool = False, positions: int = 1, head_dim: int = 8) -> bool:
    """Whether ours were measured to beat what they stand in for: in halves on CUDA, of windows and heads that the
    tensor cores' kernels take; `in_float32`: there too."""
    if not input.is_cuda or positions > 64 or head_dim > 64 or head_dim % 8 != 0:
        return False
    if input.dtype in HALVES or (in_float32 and input.dtype is torch.float32):
        return True
    return autocasts("cuda") and torch.get_autocast_dtype("cuda") in HALVES


def shifted_window_attention(self, x: Tensor) -> Tensor | None:
    """The forward of torchvision's ShiftedWindowAttention; None where the op does not take the call."""
    window, shift = tuple(self.window_size), tuple(self.shift_size)
    weights = parameter(self.qkv, "weight"), parameter(self.proj, "weight")
    takes_part = (
        all(type(weight) in PLAIN for weight in weights)
        and is_worth_it(x, True, window[0] * window[1], weights[1].shape[1] // self.num_heads)
        and x.dim() == 4
        and not (self.training and self.attention_dropout > 0.0)
        and 0 < window[0] * window[1] <= POSITIONS
        and all(0 <= by < size for by, size in zip(shift, window, strict=True))
    )
    if not takes_part:
        return None
    bias = relative_position_bias(self, window[0] * window[1])
    height, width = x.shape[1:3]
    below, right = -height % window[0], -width % window[1]
    if below or right:
        x = torch.nn.functional.pad(x, (0, 0, 0, right, 0, below))
    x = functional.linear(x, weights[0], parameter(self.qkv, "bias"))
    x = functional.window_attention(x, bias, self.num_heads, window, shift)
    x = functional.linear(x, weights[1], parameter(self.proj, "bias"))
    if self.training and self.dropout > 0.0:
        x = functional.dropout(x, self.dropout, True)
    return x[:, :height, :width, :].contiguous() if below or right else x


def patch_merging(self, x: Tensor) -> Tensor | None:
    """The forward of torchvision's PatchMerging of even images, which takes four slices and puts them together: their
    gradients are images of zeros that are added up. None of others."""
    if not is_worth_it(x, True) or x.dim() != 4 or x.shape[1] % 2 or x.shape[2] % 2:
        return None
    n, height, width, channels = x.shape
    squares = x.reshape(n, height // 2, 2, width // 2, 2, channels)
    squares = functional.permute_contiguous(squares, (0, 1, 3, 4, 2, 5))
    squares = squares.view(n, height // 2, width // 2, 4 * channels)
    return self.reduction(fusing.layer_norm_before(squares, self.norm, self.reduction))


def partition_attention(self, x: Tensor) -> Tensor | None:
    """The forward of torchvision's PartitionAttentionLayer; None where the op does not take the call."""
    if not (x.dim() == 4 and _is_as_made(self)):
        return None
    (norm, attention, drop), depth = self.attn_layer, self.stochastic_dropout
    if not is_worth_it(x, False, attention.max_seq_len, attention.head_dim):
        return None
    (height, width), p, positions = self.grid_size, self.p, attention.max_seq_len
    is_grid = self.partition_type == "grid"
    window = (height // p, width // p) if is_grid else (p, p)
    fits = tuple(x.shape[2:]) == (height, width) and height % p == width % p == 0
    if not fits or window[0] * window[1] != positions or positions > POSITIONS:
        return None
    image = x.permute(0, 2, 3, 1)
    bias = relative_position_bias(attention, positions)
    branch = attention.to_qkv(fusing.layer_norm_before(image, norm, attention.to_qkv))
    branch = functional.window_attention(branch, bias, attention.n_heads, window, 0, is_grid, attention.scale_factor)
    branch = depth(drop(attention.merge(branch)))
    norm, *others = self.mlp_layer
    branch, image = fusing.add_layer_norm(branch, image, None, norm, others[0])
    branch = fusing.run_layers(branch, others)
    return fusing.residual_sum_of_rows(branch, image, depth).permute(0, 3, 1, 2)


def _is_as_made(layer) -> bool:
    """Whether a PartitionAttentionLayer's parts that are not called are no more than their forwards."""
    attn, mlp = layer.attn_layer, layer.mlp_layer
    if len(attn) != 3 or len(mlp) < 2:
        return False
    parts = (layer.partition_op, layer.departition_op, layer.partition_swap, layer.departition_swap, attn, mlp, attn[1])
    kind = getattr(type(attn[1]), "cuda_ops_native", None) or type(attn[1])
    known = (kind.__module__, kind.__qualname__) == (MAXVIT, "RelativePositionalMultiHeadAttention")
    return known and fusing.is_plain(mlp[0], "n") and all(unlike(part, (type(part),)) is None for part in parts)


# {(module, class): (its forward, what it fuses or replaces, names of these layers)}
FORWARDS = {
    (SWIN, "ShiftedWindowAttention"): (shifted_window_attention, "window_attention", ("qkv", "proj")),
    (SWIN, "PatchMerging"): (patch_merging, "permute_contiguous", ("norm", "reduction")),
    (MAXVIT, "PartitionAttentionLayer"): (
        partition_attention,
        "window_attention",
        ("partition_op", "attn_layer", "departition_op"),
    ),
}


def forward_of(cls: type, otherwise):
    """The forward of such a class, and `otherwise` for what the op does not take."""
    ours = FORWARDS[cls.__module__, cls.__qualname__][0]

    @functools.wraps(otherwise)
    def forward(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and takes(args[0]) and has_plain_parameters(self):
            output = ours(self, args[0])
            if output is not None:
                return output
        return otherwise(self, *args, **kwargs)

    return forward
