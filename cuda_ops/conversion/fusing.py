"""Runs of layers that one op of ours computes, each as a function of its input and of the layers.

The layers are asked at every call whether they are still what they were (`unlike`): with hooks, pruning, another class
or another module in their place, or where the op does not take the input, they are called one after the other, as they
would have been.
"""

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import functional, nn
from .._arguments import pair
from .._modules import parameter, unlike
from ..ops._pool2d import pair_or_kernel
from ..ops.batch_norm import module_arguments
from ..ops.batch_norm_act import batch_norm_act_module
from ..ops.concat_batch_norm_act import concat_batch_norm_act
from ..ops.conv_bn_act import conv_bn_act_modules
from ..ops.conv_bn_relu_pool import conv_bn_relu_pool_modules
from . import layers
from .layers import Functions, takes

# A run is written as a word, of a letter for each class of layers.
LETTERS = {
    "c": "Conv2d",
    "b": "BatchNorm2d",
    "r": "ReLU",
    "6": "ReLU6",
    "s": "SiLU",
    "h": "Hardswish",
    "p": "MaxPool2d",
    "l": "Linear",
    "g": "GELU",
    "d": "Dropout",
    "n": "LayerNorm",
    "m": "RMSNorm",
}
CLASSES = {letter: (getattr(layers, name), getattr(nn, name)) for letter, name in LETTERS.items()}
LETTER_OF = {cls: letter for letter, classes in CLASSES.items() for cls in classes}
ACTIVATIONS = {"r": "relu", "6": "relu6", "s": "silu", "h": "hardswish"}  # batch_norm_act's
MOST_WINDOW = 255  # of conv_bn_relu_pool


def letter_of(module) -> str:
    return LETTER_OF.get(type(module), "-")


def is_plain(module, letter: str) -> bool:
    """Whether a call of `module` is what its class alone says; None, for a function in its place, is."""
    return module is None or unlike(module, CLASSES[letter]) is None


def linear_relu(input: Tensor, linear, relu=None) -> Tensor:
    if takes(input) and is_plain(linear, "l") and is_plain(relu, "r"):
        return functional.linear_relu(input, parameter(linear, "weight"), parameter(linear, "bias"))
    output = linear(input)
    return Functions.relu(output) if relu is None else relu(output)


def linear_gelu(input: Tensor, linear, gelu=None, approximate: str = "none") -> Tensor:
    if takes(input) and is_plain(linear, "l") and is_plain(gelu, "g"):
        approximate = approximate if gelu is None else gelu.approximate
        return functional.linear_gelu(input, parameter(linear, "weight"), parameter(linear, "bias"), approximate)
    output = linear(input)
    return Functions.gelu(output, approximate=approximate) if gelu is None else gelu(output)


def gated(input: Tensor, activation, value: Tensor, function: str, approximate: str = "none") -> Tensor:
    """activation(input) * value. function: swiglu or geglu, for an activation that is SiLU or GELU, or a function of
    that name."""
    letter = "s" if function == "swiglu" else "g"
    approximate = approximate if activation is None else getattr(activation, "approximate", "none")
    inplace = getattr(activation, "inplace", False)
    if takes(input) and _is_like(value, input) and is_plain(activation, letter) and not inplace:
        arguments = () if function == "swiglu" else (approximate,)
        return getattr(functional, function)(input, value, *arguments)
    if activation is not None:
        return activation(input) * value
    output = Functions.silu(input) if function == "swiglu" else Functions.gelu(input, approximate=approximate)
    return output * value


def batch_norm_act(input: Tensor, norm, activation, residual: Tensor | None = None, inplace: bool = False) -> Tensor:
    """activation(norm(input) + residual). `activation`: a layer, or the name of a function. `inplace`: whether the sum
    was written into what the norm returned."""
    letter = LETTER_OF.get(type(activation), "-")
    name = activation if type(activation) is str else ACTIVATIONS.get(letter)
    if (
        takes(input)
        and input.dim() == 4
        and name is not None
        and is_plain(norm, "b")
        and (name is activation or is_plain(activation, letter))
        and norm.eps > 0
        and (residual is None or _is_like(residual, input))
    ):
        return batch_norm_act_module(input, norm, residual, name)
    output = norm(input)
    if residual is not None:
        output = output.add_(residual) if inplace else output + residual
    return getattr(Functions, name)(output) if name is activation else activation(output)


def conv_bn_act(input: Tensor, conv, norm, activation=None) -> Tensor:
    """activation(norm(conv(input))), whose norm is folded into the convolution in evaluation without gradients.
    `activation`: a layer, the name of a function, or None."""
    letter = LETTER_OF.get(type(activation), "-")
    name = activation if type(activation) is str else ACTIVATIONS.get(letter)
    if (
        takes(input)
        and input.dim() == 4
        and not norm.training
        and not (torch.is_grad_enabled() or torch.jit.is_tracing())  # as for conv_bn_relu_pool
        and is_plain(conv, "c")
        and is_plain(norm, "b")
        and (name is activation or (name is not None and is_plain(activation, letter)))
        and conv.padding_mode == "zeros"
        and norm.eps > 0
        and norm.running_mean is not None
    ):
        return conv_bn_act_modules(input, conv, norm, name)
    output = conv(input)
    return norm(output) if activation is None else batch_norm_act(output, norm, activation)


def _is_like(residual, input) -> bool:
    return (
        takes(residual)
        and residual.shape == input.shape
        and residual.dtype == input.dtype
        and residual.device == input.device
    )


class Features(list):
    """The tensors that layers of a DenseBlock take, each of which is normalised by every later layer: with the moments
    of those that have been, and handed on from layer to layer (csrc/torch/concat_batch_norm_act.cpp)."""

    def __init__(self, features):
        super().__init__(features)
        self.moments, self.normalised = [], []
        """Of the first tensors; (tensor, version) of each, when the moments were taken."""

    def batch_norm_act(self, norm, activation) -> Tensor | None:
        """activation(norm(of all of them, one behind the other)); None where that is not what the layers would do."""
        letter = LETTER_OF.get(type(activation), "-")
        first = self[0]
        fits = (
            letter in ACTIVATIONS
            and is_plain(norm, "b")
            and is_plain(activation, letter)
            and norm.eps > 0
            and first.dim() == 4
            and all(type(feature) is Tensor and not feature.is_meta for feature in self)
            and all(feature.dtype == first.dtype and feature.device == first.device for feature in self)
        )
        if not fits:
            return None
        known = 0
        for feature, (tensor, version) in zip(self, self.normalised, strict=False):
            if feature is not tensor or feature._version != version:
                break
            known += 1
        *statistics, weight, bias, training, momentum = module_arguments(norm)
        output, passed, self.moments = concat_batch_norm_act(
            self,
            self.moments[:known] if training else [],
            weight,
            bias,
            *statistics,
            ACTIVATIONS[letter],
            training,
            momentum,
            norm.eps,
        )
        if passed:
            self[:] = passed
        # An inference tensor has no version, by which one sees that it has been written to.
        versioned = self.moments and not any(feature.is_inference() for feature in self)
        self.normalised = [(feature, feature._version) for feature in self] if versioned else []
        return output


def _is_eager() -> bool:
    """Whether tensors are what they are, and not stood in for by what records, batches or differentiates."""
    return not (
        is_dynamo_compiling()
        or torch.jit.is_tracing()
        or torch._C._functorch.maybe_current_level() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def dense_block(self, init_features):
    """The forward of torchvision's DenseBlock."""
    if not _is_eager():
        return type(self).cuda_ops_native.forward(self, init_features)
    features = Features([init_features])
    for layer in self.values():
        features.append(layer(features))
    return torch.cat(features, 1)


def dense_layer(self, input):
    """The forward of torchvision's DenseLayer, which takes a tensor or a list of them."""
    features = [input] if isinstance(input, Tensor) else input
    if self.memory_efficient or not all(takes(feature) for feature in features):
        return type(self).cuda_ops_native.forward(self, input)
    output = features.batch_norm_act(self.norm1, self.relu1) if type(features) is Features else None
    if output is None:
        output = features[0] if len(features) == 1 else torch.cat(features, 1)
        output = batch_norm_act(output, self.norm1, self.relu1)
    output = self.conv2(conv_bn_act(output, self.conv1, self.norm2, self.relu2))
    return Functions.dropout(output, self.drop_rate, self.training) if self.drop_rate > 0 else output


def conv_bn_relu_pool(input: Tensor, conv, norm, relu, pool, window=None) -> Tensor:
    """`window`: kernel_size, stride and padding of the pooling, where `pool` is None."""
    if (
        takes(input)
        and input.dim() == 4
        and is_plain(conv, "c")
        and is_plain(norm, "b")
        and is_plain(relu, "r")
        and is_plain(pool, "p")
        and conv.padding_mode == "zeros"
        and norm.eps > 0
        # The gradients of evaluation compute the block anew: there the layers are faster. What torch.jit.trace has seen
        # may be asked for gradients later, and its own check traces again without.
        and (norm.training or not (torch.is_grad_enabled() or torch.jit.is_tracing()))
        and (pool is None or is_simple_window(pool))
    ):
        if pool is not None:
            window = pool.kernel_size, pool.stride, pool.padding
        return conv_bn_relu_pool_modules(input, conv, norm, *window)
    output = norm(conv(input))
    output = Functions.relu(output) if relu is None else relu(output)
    return Functions.max_pool2d(output, *window) if pool is None else pool(output)


def is_simple_window(pool) -> bool:
    """Whether conv_bn_relu_pool has such a pooling."""
    if pool.ceil_mode or pool.return_indices or pair("max_pool2d", "dilation", pool.dilation) != (1, 1):
        return False
    height, width = pair_or_kernel("max_pool2d", "kernel_size", pool.kernel_size, (1, 1))
    return height * width <= MOST_WINDOW


def add_layer_norm(input: Tensor, residual: Tensor, dropout, norm) -> tuple[Tensor, Tensor]:
    """norm(dropout(input) + residual), and the sum."""
    if _is_sum_of_rows(input, residual, dropout) and is_plain(norm, "n"):
        weight, bias = parameter(norm, "weight"), parameter(norm, "bias")
        p, training = (0.0, False) if dropout is None else (dropout.p, dropout.training)
        return functional.add_layer_norm(input, residual, norm.normalized_shape, weight, bias, norm.eps, p, training)
    total = (input if dropout is None else dropout(input)) + residual
    return norm(total), total


def add_rms_norm(input: Tensor, residual: Tensor, dropout, norm) -> tuple[Tensor, Tensor]:
    """norm(dropout(input) + residual), and the sum."""
    if _is_sum_of_rows(input, residual, dropout) and is_plain(norm, "m"):
        p, training = (0.0, False) if dropout is None else (dropout.p, dropout.training)
        weight = parameter(norm, "weight")
        return functional.add_rms_norm(input, residual, norm.normalized_shape, weight, norm.eps, p, training)
    total = (input if dropout is None else dropout(input)) + residual
    return norm(total), total


def _is_sum_of_rows(input, residual, dropout) -> bool:
    return (
        takes(input)
        and takes(residual)
        and input.shape == residual.shape
        and input.dtype == residual.dtype
        and input.device == residual.device
        # Under autocast the sum would be made in another dtype than that of its operands.
        and not torch.is_autocast_enabled(input.device.type)
        and is_plain(dropout, "d")
    )


# The longest come first.
RUNS = {"cbrp": conv_bn_relu_pool, "lr": linear_relu, "lg": linear_gelu}
RUNS |= {f"cb{letter}": conv_bn_act for letter in ACTIVATIONS} | {"cb": conv_bn_act}
RUNS |= {f"b{letter}": batch_norm_act for letter in ACTIVATIONS}

# Modules with a forward that torch.fx cannot trace: (its forward, the runs that it has: {names of layers: function}).
BLOCKS = {
    ("torchvision.models.densenet", "_DenseBlock"): (dense_block, {}),
    ("torchvision.models.densenet", "_DenseLayer"): (
        dense_layer,
        {("norm1", "relu1"): batch_norm_act, ("conv1", "norm2", "relu2"): conv_bn_act},
    ),
}


_steps: dict[tuple[type, ...], tuple] = {}


def steps_of(classes: tuple[type, ...]) -> tuple[tuple[int, int, object], ...]:
    if is_dynamo_compiling():  # which traces no dictionary of classes, and does this once
        return runs_of(classes)
    steps = _steps.get(classes)
    if steps is None:
        steps = _steps[classes] = runs_of(classes)
    return steps


def runs_of(classes: tuple[type, ...]) -> tuple[tuple[int, int, object], ...]:
    """(first, end, function) of each step of a Sequential of such layers: those of a run, or one layer and None."""
    word = "".join([LETTER_OF.get(cls, "-") for cls in classes])
    steps, first = [], 0
    while first < len(word):
        run = next((run for run in RUNS if word.startswith(run, first)), None)
        end = first + (len(run) if run else 1)
        steps.append((first, end, RUNS[run] if run else None))
        first = end
    return tuple(steps)


def run_sequence(self, input):
    """torch.nn.Sequential.forward, with the runs among its layers in one op each; what they are is asked anew at each
    call, so that layers may come, go and change."""
    modules = list(self._modules.values())
    for first, end, function in steps_of(tuple([type(module) for module in modules])):
        input = function(input, *modules[first:end]) if function else modules[first](input)
    return input
