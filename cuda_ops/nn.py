"""The ops as modules, drop-in for those of torch.nn: same constructor arguments, repr and state_dict."""

import sys

from . import nn_utils as utils
from .ops.avg_pool2d import AvgPool2d
from .ops.batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from .ops.conv2d import Conv2d
from .ops.conv_bn_relu_pool import ConvBNReLUMaxPool2d
from .ops.cross_entropy import CrossEntropyLoss
from .ops.dropout import Dropout
from .ops.linear import Linear
from .ops.linear_cross_entropy import LinearCrossEntropyLoss
from .ops.linear_gelu import LinearGELU
from .ops.linear_relu import LinearReLU
from .ops.log_softmax import LogSoftmax
from .ops.max_pool2d import MaxPool2d
from .ops.nll_loss import NLLLoss
from .ops.relu import ReLU
from .ops.softmax import Softmax, Softmax2d

# `from cuda_ops.nn.utils import clip_grad_norm_`, as of torch.nn.utils, though this module is a file.
sys.modules[f"{__name__}.utils"] = utils

__all__ = [
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv2d",
    "ConvBNReLUMaxPool2d",
    "CrossEntropyLoss",
    "Dropout",
    "Linear",
    "LinearCrossEntropyLoss",
    "LinearGELU",
    "LinearReLU",
    "LogSoftmax",
    "MaxPool2d",
    "NLLLoss",
    "ReLU",
    "Softmax",
    "Softmax2d",
    "utils",
]
