"""The CNN of `python -m cuda_ops mnist`."""

import torch
from torch import Tensor

from .. import functional
from .._library import problem
from .._modules import parameter, unlike
from .backends import get_backend

if problem is None:
    from .. import nn
    from ..ops.conv_bn_relu_pool import are_fusable, conv_bn_relu_pool_modules

    LINEARS, RELUS = (nn.Linear, torch.nn.Linear), (nn.ReLU, torch.nn.ReLU)
    MAX_POOL2DS = nn.MaxPool2d, torch.nn.MaxPool2d


class MnistCNN(torch.nn.Module):
    r"""Two blocks of convolution, batch norm, ReLU and max pooling, then two linear layers; 421,834 parameters.

    conv 3×3 (1 → 32) · batch norm · ReLU · max-pool 2 · conv 3×3 (32 → 64) · batch norm · ReLU · max-pool 2 · flatten ·
    linear (3136 → 128) · ReLU · linear (128 → 10).

    Args:
        backend: "custom" for the layers of cuda_ops.nn, "native" for those of torch.nn; "fused" for our ops that each
            do the work of several layers (conv_bn_relu_pool, linear_relu, linear_cross_entropy), by the layers'
            parameters; where a layer has become something else (by hooks, pruning, another in its place) they are
            called one after the other. Parameters and buffers have the same names and shapes in all of them, so that
            one state_dict fits all.

    Shape:
        Input (N, 1, 28, 28), output (N, 10): one logit a digit.

    Raises:
        ValueError: there is no such backend.

    Example:
        >>> native, custom = MnistCNN("native"), MnistCNN("custom")
        >>> custom.load_state_dict(native.state_dict(), strict=True)
        <All keys matched successfully>
    """

    # Batch norm takes the mean away, and with it whatever constant the convolution before it adds: the gradient of
    # these biases is zero but for rounding.
    zero_gradients = ("conv1.bias", "conv2.bias")
    layers = ("conv1", "norm1", "conv2", "norm2", "linear1", "linear2")

    def __init__(self, backend: str = "custom"):
        super().__init__()
        nn = get_backend(backend).nn
        self.backend = backend
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.linear1 = nn.Linear(64 * 7 * 7, 128)
        self.linear2 = nn.Linear(128, 10)

    def forward(self, input: Tensor, labels: Tensor | None = None, label_smoothing: float = 0.0) -> Tensor:
        """The logits of `input`, or with `labels` their `loss`."""
        if self.backend == "fused" and self._is_fusable():
            return self._fused(input, labels, label_smoothing)
        x = self.pool(self.relu(self.norm1(self.conv1(input))))
        x = self.pool(self.relu(self.norm2(self.conv2(x))))
        x = self.linear2(self.relu(self.linear1(x.flatten(1))))
        if labels is None:
            return x
        cross_entropy = get_backend(self.backend).functional.cross_entropy
        return cross_entropy(x, labels, label_smoothing=label_smoothing)

    def _is_fusable(self) -> bool:
        """Whether the layers still do what _fused does by their parameters."""
        modules = self._modules
        pool = modules["pool"]
        return (
            are_fusable(modules["conv1"], modules["norm1"])
            and are_fusable(modules["conv2"], modules["norm2"])
            and unlike(modules["relu"], RELUS) is None
            and unlike(pool, MAX_POOL2DS) is None
            and pool.kernel_size == pool.stride == 2
            and pool.padding == 0
            and pool.dilation == 1
            and not (pool.ceil_mode or pool.return_indices)
            and unlike(modules["linear1"], LINEARS) is None
            and unlike(modules["linear2"], LINEARS) is None
        )

    def _fused(self, input: Tensor, labels: Tensor | None, label_smoothing: float) -> Tensor:
        # What conv2 reads is channels_last, its tensor cores' order; what it writes is contiguous, so that flatten is a
        # view.
        conv1, norm1, conv2, norm2, linear1, linear2 = [self._modules[name] for name in self.layers]
        x = conv_bn_relu_pool_modules(input, conv1, norm1, channels_last=True)
        x = conv_bn_relu_pool_modules(x, conv2, norm2, channels_last=False)
        x = functional.linear_relu(x.flatten(1), parameter(linear1, "weight"), parameter(linear1, "bias"))
        weight, bias = parameter(linear2, "weight"), parameter(linear2, "bias")
        if labels is None:
            return functional.linear(x, weight, bias)
        return functional.linear_cross_entropy(x, weight, labels, bias, label_smoothing=label_smoothing)

    def loss(self, images: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross-entropy of the logits of `images`.

        Args:
            images: (N, 1, 28, 28).
            labels: (N,), int64, the digits.
            label_smoothing: as for torch.nn.functional.cross_entropy.
        """
        return self(images, labels, label_smoothing)
