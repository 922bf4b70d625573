"""One call of each functional, for tests of what all of them do."""

import torch

from cuda_ops import functional as F

# One call of each functional that takes the tensor x, [3, 1, 8, 8], on its device and in its dtype. A new op need
# not be here: its specification is what tests it.
CALLS = {
    "add2": lambda x: F.add2(x, x),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, x.new_zeros(1), x.new_ones(1), training=True),
    "conv2d": lambda x: F.conv2d(x, x.new_ones(2, 1, 3, 3), x.new_ones(2)),
    "conv_bn_relu_pool": lambda x: F.conv_bn_relu_pool(x, x.new_ones(2, 1, 3, 3), x.new_ones(2), None, None),
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(1), torch.arange(3, device=x.device)),
    "dropout": lambda x: F.dropout(x, 0.5),
    "linear": lambda x: F.linear(x, x.new_ones(4, 8), x.new_ones(4)),
    "linear_cross_entropy": lambda x: F.linear_cross_entropy(
        x.flatten(1), x.new_ones(5, 64).cumsum(0), torch.arange(3, device=x.device)
    ),
    "linear_relu": lambda x: F.linear_relu(x, x.new_ones(4, 8), x.new_ones(4)),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "nll_loss": lambda x: F.nll_loss(x.flatten(1), torch.arange(3, device=x.device)),
    "polynomial": lambda x: F.polynomial(x),
    "relu": lambda x: F.relu(x),
    "square": lambda x: F.square(x),
}
