"""The ops as modules, drop-in for those of torch.nn: same constructor arguments, repr and state_dict."""

import sys

from . import nn_utils as utils
from .ops.avg_pool2d import AvgPool2d
from .ops.batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from .ops.conv2d import Conv2d
from .ops.conv_bn_relu_pool import ConvBNReLUMaxPool2d
from .ops.cross_entropy import CrossEntropyLoss
from .ops.dropout import Dropout
from .ops.elu import ELU
from .ops.gelu import GELU
from .ops.group_norm import GroupNorm
from .ops.hardsigmoid import Hardsigmoid
from .ops.hardswish import Hardswish
from .ops.hardtanh import Hardtanh
from .ops.instance_norm import InstanceNorm1d, InstanceNorm2d, InstanceNorm3d
from .ops.layer_norm import LayerNorm
from .ops.leaky_relu import LeakyReLU
from .ops.linear import Linear
from .ops.linear_cross_entropy import LinearCrossEntropyLoss
from .ops.linear_gelu import LinearGELU
from .ops.linear_relu import LinearReLU
from .ops.log_softmax import LogSoftmax
from .ops.max_pool2d import MaxPool2d
from .ops.mish import Mish
from .ops.nll_loss import NLLLoss
from .ops.relu import ReLU
from .ops.relu6 import ReLU6
from .ops.rms_norm import RMSNorm
from .ops.sigmoid import Sigmoid
from .ops.silu import SiLU
from .ops.softmax import Softmax, Softmax2d
from .ops.softplus import Softplus
from .ops.tanh import Tanh

# `from cuda_ops.nn.utils import clip_grad_norm_`, as of torch.nn.utils, though this module is a file.
sys.modules[f"{__name__}.utils"] = utils

__all__ = [
    "ELU",
    "GELU",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv2d",
    "ConvBNReLUMaxPool2d",
    "CrossEntropyLoss",
    "Dropout",
    "GroupNorm",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LinearCrossEntropyLoss",
    "LinearGELU",
    "LinearReLU",
    "LogSoftmax",
    "MaxPool2d",
    "Mish",
    "NLLLoss",
    "RMSNorm",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softmax2d",
    "Softplus",
    "Tanh",
    "utils",
]
