"""torch.nn, with our ops as modules in place of its own: same constructor arguments, repr and state_dict.

`__all__` lists what is ours; every other public name is torch.nn's (`native_names()`), so that a program may write
`from cuda_ops import nn` where it wrote `from torch import nn`. `nn.functional` is cuda_ops.functional.
"""

from typing import TYPE_CHECKING

import torch.nn

from . import functional as functional
from . import nn_init as init
from . import nn_utils as utils
from ._modules import refuse_to_be_scripted
from ._superset import superset
from .ops.adaptive_avg_pool2d import AdaptiveAvgPool2d
from .ops.adaptive_max_pool2d import AdaptiveMaxPool2d
from .ops.avg_pool2d import AvgPool2d
from .ops.batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from .ops.binary_cross_entropy_with_logits import BCEWithLogitsLoss
from .ops.conv1d import Conv1d
from .ops.conv2d import Conv2d
from .ops.conv_bn_relu_pool import ConvBNReLUMaxPool2d
from .ops.conv_transpose1d import ConvTranspose1d
from .ops.conv_transpose2d import ConvTranspose2d
from .ops.cross_entropy import CrossEntropyLoss
from .ops.dropout import Dropout
from .ops.dropout1d import Dropout1d
from .ops.dropout2d import Dropout2d
from .ops.dropout3d import Dropout3d
from .ops.elu import ELU
from .ops.embedding import Embedding
from .ops.gelu import GELU
from .ops.group_norm import GroupNorm
from .ops.hardsigmoid import Hardsigmoid
from .ops.hardswish import Hardswish
from .ops.hardtanh import Hardtanh
from .ops.huber_loss import HuberLoss
from .ops.instance_norm import InstanceNorm1d, InstanceNorm2d, InstanceNorm3d
from .ops.kl_div import KLDivLoss
from .ops.l1_loss import L1Loss
from .ops.layer_norm import LayerNorm
from .ops.leaky_relu import LeakyReLU
from .ops.linear import Linear
from .ops.linear_cross_entropy import LinearCrossEntropyLoss
from .ops.linear_gelu import LinearGELU
from .ops.linear_relu import LinearReLU
from .ops.log_softmax import LogSoftmax
from .ops.max_pool2d import MaxPool2d
from .ops.mish import Mish
from .ops.mse_loss import MSELoss
from .ops.multihead_attention import MultiheadAttention
from .ops.nll_loss import NLLLoss
from .ops.prelu import PReLU
from .ops.relu import ReLU
from .ops.relu6 import ReLU6
from .ops.rms_norm import RMSNorm
from .ops.sigmoid import Sigmoid
from .ops.silu import SiLU
from .ops.smooth_l1_loss import SmoothL1Loss
from .ops.softmax import Softmax, Softmax2d
from .ops.softplus import Softplus
from .ops.stochastic_depth import StochasticDepth
from .ops.tanh import Tanh

__all__ = [
    "ELU",
    "GELU",
    "AdaptiveAvgPool2d",
    "AdaptiveMaxPool2d",
    "AvgPool2d",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "ConvBNReLUMaxPool2d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "CrossEntropyLoss",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "Embedding",
    "GroupNorm",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "HuberLoss",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "KLDivLoss",
    "L1Loss",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LinearCrossEntropyLoss",
    "LinearGELU",
    "LinearReLU",
    "LogSoftmax",
    "MSELoss",
    "MaxPool2d",
    "Mish",
    "MultiheadAttention",
    "NLLLoss",
    "PReLU",
    "RMSNorm",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "SmoothL1Loss",
    "Softmax",
    "Softmax2d",
    "Softplus",
    "StochasticDepth",
    "Tanh",
    "init",
    "utils",
]

if TYPE_CHECKING:  # type checkers see torch.nn's other names here; the first one of a name is the one they take
    from torch.nn import *  # noqa: F403

    def native_names() -> list[str]: ...

else:
    native_names, __getattr__, __dir__ = superset(globals(), torch.nn)
    for _name in __all__:
        if isinstance(globals()[_name], type):
            globals()[_name].__prepare_scriptable__ = refuse_to_be_scripted
