"""The ops as functions, with the signatures of torch.nn.functional. One line an op."""

from .ops.add2 import add2
from .ops.add_layer_norm import add_layer_norm
from .ops.add_rms_norm import add_rms_norm
from .ops.amax import amax
from .ops.amin import amin
from .ops.argmax import argmax
from .ops.argmin import argmin
from .ops.avg_pool2d import avg_pool2d
from .ops.batch_norm import batch_norm
from .ops.conv2d import conv2d
from .ops.conv_bn_relu_pool import conv_bn_relu_pool
from .ops.cross_entropy import cross_entropy
from .ops.dropout import dropout
from .ops.elu import elu
from .ops.gather_normalize import gather_normalize
from .ops.gelu import gelu
from .ops.group_norm import group_norm
from .ops.hardsigmoid import hardsigmoid
from .ops.hardswish import hardswish
from .ops.hardtanh import hardtanh
from .ops.instance_norm import instance_norm
from .ops.layer_norm import layer_norm
from .ops.leaky_relu import leaky_relu
from .ops.linear import linear
from .ops.linear_cross_entropy import linear_cross_entropy
from .ops.linear_gelu import linear_gelu
from .ops.linear_relu import linear_relu
from .ops.log_softmax import log_softmax
from .ops.masked_softmax import masked_softmax
from .ops.matmul import matmul
from .ops.max_pool2d import max_pool2d
from .ops.mean import mean
from .ops.mish import mish
from .ops.nll_loss import nll_loss
from .ops.norm import norm
from .ops.permute_contiguous import permute_contiguous
from .ops.polynomial import polynomial
from .ops.prod import prod
from .ops.relu import relu
from .ops.relu6 import relu6
from .ops.rms_norm import rms_norm
from .ops.sigmoid import sigmoid
from .ops.silu import silu
from .ops.softmax import softmax
from .ops.softplus import softplus
from .ops.square import square
from .ops.std import std
from .ops.sum import sum
from .ops.tanh import tanh
from .ops.var import var

__all__ = [
    "add2",
    "add_layer_norm",
    "add_rms_norm",
    "amax",
    "amin",
    "argmax",
    "argmin",
    "avg_pool2d",
    "batch_norm",
    "conv2d",
    "conv_bn_relu_pool",
    "cross_entropy",
    "dropout",
    "elu",
    "gather_normalize",
    "gelu",
    "group_norm",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "instance_norm",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_cross_entropy",
    "linear_gelu",
    "linear_relu",
    "log_softmax",
    "masked_softmax",
    "matmul",
    "max_pool2d",
    "mean",
    "mish",
    "nll_loss",
    "norm",
    "permute_contiguous",
    "polynomial",
    "prod",
    "relu",
    "relu6",
    "rms_norm",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "square",
    "std",
    "sum",
    "tanh",
    "var",
]
