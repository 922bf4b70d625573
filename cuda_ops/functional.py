"""torch.nn.functional, with our ops in place of its own, and more of ours. One line an op.

`__all__` lists what is ours; every other public name is torch.nn.functional's (`native_names()`).
"""

from typing import TYPE_CHECKING

import torch.nn.functional

from ._superset import superset
from .ops.adaptive_avg_pool2d import adaptive_avg_pool2d
from .ops.adaptive_max_pool2d import adaptive_max_pool2d
from .ops.add2 import add2
from .ops.add_layer_norm import add_layer_norm
from .ops.add_rms_norm import add_rms_norm
from .ops.amax import amax
from .ops.amin import amin
from .ops.argmax import argmax
from .ops.argmin import argmin
from .ops.attention import flash_attention, flash_attention_qkvpacked, scaled_dot_product_attention
from .ops.attention_cache import flash_attention_with_kvcache
from .ops.attention_varlen import flash_attention_varlen
from .ops.avg_pool2d import avg_pool2d
from .ops.batch_norm import batch_norm
from .ops.batch_norm_act import batch_norm_act
from .ops.binary_cross_entropy_with_logits import binary_cross_entropy_with_logits
from .ops.bincount import bincount
from .ops.concat import cat, concat
from .ops.conv1d import conv1d
from .ops.conv2d import conv2d
from .ops.conv_bn_act import conv_bn_act
from .ops.conv_bn_relu_pool import conv_bn_relu_pool
from .ops.conv_transpose1d import conv_transpose1d
from .ops.conv_transpose2d import conv_transpose2d
from .ops.cross_entropy import cross_entropy
from .ops.cumsum import cumsum
from .ops.dropout import dropout
from .ops.dropout1d import dropout1d
from .ops.dropout2d import dropout2d
from .ops.dropout3d import dropout3d
from .ops.dropout_add import dropout_add
from .ops.elu import elu
from .ops.embedding import embedding
from .ops.excitation import excitation
from .ops.gather_normalize import gather_normalize
from .ops.geglu import geglu
from .ops.gelu import gelu
from .ops.group_norm import group_norm
from .ops.hardsigmoid import hardsigmoid
from .ops.hardswish import hardswish
from .ops.hardtanh import hardtanh
from .ops.histc import histc
from .ops.huber_loss import huber_loss
from .ops.index_add import index_add, index_add_
from .ops.instance_norm import instance_norm
from .ops.interleave import interleave
from .ops.kl_div import kl_div
from .ops.l1_loss import l1_loss
from .ops.layer_norm import layer_norm
from .ops.layer_scale_add import layer_scale_add
from .ops.leaky_relu import leaky_relu
from .ops.linear import linear
from .ops.linear_cross_entropy import linear_cross_entropy
from .ops.linear_gelu import linear_gelu
from .ops.linear_relu import linear_relu
from .ops.log_softmax import log_softmax
from .ops.logsumexp import logsumexp
from .ops.masked_softmax import masked_softmax
from .ops.matmul import matmul
from .ops.max_pool2d import max_pool2d
from .ops.mean import mean
from .ops.mish import mish
from .ops.mse_loss import mse_loss
from .ops.multihead_attention import multi_head_attention_forward
from .ops.nll_loss import nll_loss
from .ops.norm import norm
from .ops.permute_contiguous import permute_contiguous
from .ops.polynomial import polynomial
from .ops.prelu import prelu
from .ops.prod import prod
from .ops.relu import relu
from .ops.relu6 import relu6
from .ops.rms_norm import rms_norm
from .ops.rotary_embedding import rotary_embedding
from .ops.scale_channels import scale_channels
from .ops.scatter_add import scatter_add, scatter_add_
from .ops.sigmoid import sigmoid
from .ops.silu import silu
from .ops.smooth_l1_loss import smooth_l1_loss
from .ops.softmax import softmax
from .ops.softplus import softplus
from .ops.square import square
from .ops.std import std
from .ops.stochastic_depth import stochastic_depth
from .ops.sum import sum
from .ops.swiglu import swiglu
from .ops.tanh import tanh
from .ops.token_position_embedding import token_position_embedding
from .ops.var import var
from .ops.window_attention import window_attention

__all__ = [
    "adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "add2",
    "add_layer_norm",
    "add_rms_norm",
    "amax",
    "amin",
    "argmax",
    "argmin",
    "avg_pool2d",
    "batch_norm",
    "batch_norm_act",
    "binary_cross_entropy_with_logits",
    "bincount",
    "cat",
    "concat",
    "conv1d",
    "conv2d",
    "conv_bn_act",
    "conv_bn_relu_pool",
    "conv_transpose1d",
    "conv_transpose2d",
    "cross_entropy",
    "cumsum",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "dropout_add",
    "elu",
    "embedding",
    "excitation",
    "flash_attention",
    "flash_attention_qkvpacked",
    "flash_attention_varlen",
    "flash_attention_with_kvcache",
    "gather_normalize",
    "geglu",
    "gelu",
    "group_norm",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "histc",
    "huber_loss",
    "index_add",
    "index_add_",
    "instance_norm",
    "interleave",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "layer_scale_add",
    "leaky_relu",
    "linear",
    "linear_cross_entropy",
    "linear_gelu",
    "linear_relu",
    "log_softmax",
    "logsumexp",
    "masked_softmax",
    "matmul",
    "max_pool2d",
    "mean",
    "mish",
    "mse_loss",
    "multi_head_attention_forward",
    "nll_loss",
    "norm",
    "permute_contiguous",
    "polynomial",
    "prelu",
    "prod",
    "relu",
    "relu6",
    "rms_norm",
    "rotary_embedding",
    "scale_channels",
    "scaled_dot_product_attention",
    "scatter_add",
    "scatter_add_",
    "sigmoid",
    "silu",
    "smooth_l1_loss",
    "softmax",
    "softplus",
    "square",
    "std",
    "stochastic_depth",
    "sum",
    "swiglu",
    "tanh",
    "token_position_embedding",
    "var",
    "window_attention",
]

if TYPE_CHECKING:  # see nn.py
    from torch.nn.functional import *  # noqa: F403

    def native_names() -> list[str]: ...

else:
    native_names, __getattr__, __dir__ = superset(globals(), torch.nn.functional)
