"""The ops as functions, with the signatures of torch.nn.functional. One line an op."""

from .ops.add2 import add2
from .ops.avg_pool2d import avg_pool2d
from .ops.batch_norm import batch_norm
from .ops.conv2d import conv2d
from .ops.conv_bn_relu_pool import conv_bn_relu_pool
from .ops.cross_entropy import cross_entropy
from .ops.dropout import dropout
from .ops.gather_normalize import gather_normalize
from .ops.linear import linear
from .ops.linear_cross_entropy import linear_cross_entropy
from .ops.linear_gelu import linear_gelu
from .ops.linear_relu import linear_relu
from .ops.log_softmax import log_softmax
from .ops.masked_softmax import masked_softmax
from .ops.matmul import matmul
from .ops.max_pool2d import max_pool2d
from .ops.nll_loss import nll_loss
from .ops.polynomial import polynomial
from .ops.relu import relu
from .ops.softmax import softmax
from .ops.square import square

__all__ = [
    "add2",
    "avg_pool2d",
    "batch_norm",
    "conv2d",
    "conv_bn_relu_pool",
    "cross_entropy",
    "dropout",
    "gather_normalize",
    "linear",
    "linear_cross_entropy",
    "linear_gelu",
    "linear_relu",
    "log_softmax",
    "masked_softmax",
    "matmul",
    "max_pool2d",
    "nll_loss",
    "polynomial",
    "relu",
    "softmax",
    "square",
]
