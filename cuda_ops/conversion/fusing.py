"""Runs of layers that one op of ours computes, each as a function of its input and of the layers.

The layers are asked at every call whether they are still what they were (`unlike`): with hooks, pruning, a compiled
call of their own (`layer.compile()`), another class or another module in their place, or where the op does not take the
input, they are called one after the other, as they would have been.
"""

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import functional, nn
from .._arguments import autocasts, pair
from .._modules import PLAIN, parameter, unlike
from ..ops._pool2d import pair_or_kernel
from ..ops.batch_norm import module_arguments
from ..ops.batch_norm_act import batch_norm_act_forked_module, batch_norm_act_module
from ..ops.concat_batch_norm_act import concat_batch_norm_act
from ..ops.conv_bn_act import conv_bn_act_modules
from ..ops.conv_bn_relu_pool import conv_bn_relu_pool_modules
from ..ops.dropout import dropout
from ..ops.excitation import ACTIVATIONS as EXCITATIONS
from ..ops.interleave import interleave
from ..ops.layer_norm_rounded import add_layer_norm_rounded_forward, layer_norm_rounded_forward
from ..ops.layer_scale_add import layer_scale_add_forward
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
    "S": "Sigmoid",
    "H": "Hardsigmoid",
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
GATES = {"S": "sigmoid", "H": "hardsigmoid"}  # scale_channels
ATTENTION = (layers.MultiheadAttention, nn.MultiheadAttention)
MOST_PRODUCTS = 1 << 26  # of excitation, whose weights are read anew for every eight images
MOST_WINDOW = 255  # of conv_bn_relu_pool
MOST_BLOCK_CHANNELS = 32  # of its input on the CPU: with more, conv2d's products are faster than what the block saves
HALVES = (torch.float16, torch.bfloat16)
LAYER_NORM_2D = ("torchvision.models.convnext", "LayerNorm2d")
SWIN, MAXVIT = "torchvision.models.swin_transformer", "torchvision.models.maxvit"


def letter_of_class(cls: type) -> str:
    letter, native = LETTER_OF.get(cls), getattr(cls, "cuda_ops_native", None)
    if letter is None and native is not None and (native.__module__, native.__qualname__) == LAYER_NORM_2D:
        letter = "2"  # its converted class is made when the first one is met
    if letter is None and getattr(cls, "cuda_ops_block", None):
        letter = "B"
    if letter is None and getattr(cls, "cuda_ops_forked", None):
        letter = "R"
    return letter or "-"


def letter_of(module) -> str:
    return letter_of_class(type(module))


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


def excitation(input: Tensor, conv1, activation, conv2) -> Tensor:
    """conv2(activation(conv1(input))) of images that are pooled to a pixel, in evaluation without gradients.
    `activation`: a layer, or the name of a function."""
    letter = LETTER_OF.get(type(activation), "-")
    name = activation if type(activation) is str else ACTIVATIONS.get(letter)
    if (
        takes(input)
        and input.dim() == 4
        and input.shape[2:].numel() == 1
        and name in EXCITATIONS
        and not (torch.is_grad_enabled() or torch.jit.is_tracing())  # backward computes it anew
        and all(is_plain(conv, "c") and _is_pointwise(conv) for conv in (conv1, conv2))
        and (name is activation or is_plain(activation, letter))
        and input.shape[0] * conv1.out_channels * (conv1.in_channels + conv2.out_channels) <= MOST_PRODUCTS
    ):
        parameters = [parameter(conv, which) for conv in (conv1, conv2) for which in ("weight", "bias")]
        dtypes = {tensor.dtype for tensor in parameters if tensor is not None}
        device = input.device.type
        is_cast = autocasts(device) and input.dtype is not torch.float64
        dtype = torch.get_autocast_dtype(device) if is_cast else input.dtype
        if dtypes == {dtype} or (dtypes == {torch.float32} and dtype in HALVES):
            return functional.excitation(input, *parameters, name)
    output = conv1(input)
    return conv2(getattr(Functions, name)(output) if name is activation else activation(output))


def _is_pointwise(conv) -> bool:
    """Whether a convolution makes a pixel of a pixel."""
    return conv.kernel_size == (1, 1) and conv.padding in ((0, 0), "valid", "same") and conv.groups == 1


def scale_channels(scale: Tensor, activation, input: Tensor, function: str) -> Tensor:
    """activation(scale) * input, with one of a squeeze-and-excitation block's factors for each channel of each image.
    function: sigmoid or hardsigmoid, for an activation that is such a layer or a function of that name."""
    letter = "S" if function == "sigmoid" else "H"
    if (
        takes(input)
        and takes(scale)
        and input.dim() == scale.dim() > 2
        and scale.shape[:2] == input.shape[:2]
        and scale.shape[2:].numel() == 1
        and scale.dtype is input.dtype
        and scale.device == input.device
        and is_plain(activation, letter)
        and not getattr(activation, "inplace", False)
    ):
        return functional.scale_channels(input, scale, function)
    factor = getattr(Functions, function)(scale) if activation is None else activation(scale)
    return factor * input


def batch_norm_act(input: Tensor, norm, activation, residual: Tensor | None = None, inplace: bool = False) -> Tensor:
    """activation(norm(input) + residual). `activation`: a layer, or the name of a function. `inplace`: whether the sum
    was written into what the norm returned."""
    name = _activation_of_norm(input, norm, activation, residual)
    if name is not None:
        return batch_norm_act_module(input, norm, residual, name)
    name = activation if type(activation) is str else None
    output = norm(input)
    if residual is not None:
        output = output.add_(residual) if inplace else output + residual
    return activation(output) if name is None else getattr(Functions, name)(output)


def batch_norm_act_forked(input, norm, activation, residual: Tensor, inplace: bool) -> tuple[Tensor, Tensor]:
    """The same for two readers, as a tensor for each."""
    name = _activation_of_norm(input, norm, activation, residual)
    if name is not None:
        return batch_norm_act_forked_module(input, norm, residual, name)
    output = batch_norm_act(input, norm, activation, residual, inplace)
    return output, output


def _activation_of_norm(input, norm, activation, residual) -> str | None:
    """The activation's name; None where our op is not what these layers do."""
    letter = LETTER_OF.get(type(activation), "-")
    name = activation if type(activation) is str else ACTIVATIONS.get(letter)
    fits = (
        takes(input)
        and input.dim() == 4
        and name is not None
        and is_plain(norm, "b")
        and (name is activation or is_plain(activation, letter))
        and norm.eps > 0
        and (residual is None or _is_like(residual, input))
    )
    return name if fits else None


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
            # Which autograd keeps none of: a concatenation of them is no inference tensor.
            and not (torch.is_grad_enabled() and any(feature.is_inference() for feature in self))
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


def _takes_features(layer) -> bool:
    """Whether a call of the layer is dense_layer and nothing else, which could keep or change what it is given."""
    cls = type(layer)
    is_ours = getattr(cls, "forward", None) is dense_layer  # TorchScript's modules have none
    return is_ours and unlike(layer, (cls,)) is None


def dense_block(self, init_features):
    """The forward of torchvision's DenseBlock."""
    if not (takes(init_features) and _is_eager()):
        return type(self).cuda_ops_native.forward(self, init_features)
    features = [init_features]
    if all(_takes_features(layer) for layer in self.values()):
        features = Features(features)
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
        # Of one a concatenation is a copy, which whoever has the feature may not write to.
        alone = type(features) is Features and len(features) == 1 and not features[0].is_inference()
        output = features[0] if alone else torch.cat(features, 1)
        output = batch_norm_act(output, self.norm1, self.relu1)
    output = self.conv2(conv_bn_act(output, self.conv1, self.norm2, self.relu2))
    return Functions.dropout(output, self.drop_rate, self.training) if self.drop_rate > 0 else output


def inverted_residual(self, x):
    """The forward of torchvision's InvertedResidual of ShuffleNetV2, whose branches' channels are shuffled as they are
    put together."""
    if not (takes(x) and x.dim() == 4 and x.shape[1] % 2 == 0):
        return type(self).cuda_ops_native.forward(self, x)
    if self.stride == 1:
        first, second = x.chunk(2, 1)
        second = self.branch2(second)
    else:
        first, second = self.branch1(x), self.branch2(x)
    if _is_like(second, first):
        return functional.interleave(first, second)
    both = torch.cat((first, second), 1)
    return both.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


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
        if input.is_cpu and conv.in_channels > MOST_BLOCK_CHANNELS:
            output = batch_norm_act(conv(input), norm, "relu" if relu is None else relu)
            return Functions.max_pool2d(output, *window) if pool is None else pool(output)
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


def _lowers(module) -> bool:
    """Whether the module's forward hands its input, and nothing else of it, to a product, which autocast lowers."""
    if type(module) in ATTENTION:
        return unlike(module, ATTENTION) is None
    if getattr(type(module), "forward", None) is run_sequence:
        return len(module._modules) > 0 and unlike(module, (type(module),)) is None and _lowers(module[0])
    native = getattr(type(module), "cuda_ops_native", None)
    if native is not None and (native.__module__, native.__qualname__) == (SWIN, "ShiftedWindowAttention"):
        return unlike(module, (type(module),)) is None
    letter = letter_of(module)
    return letter in ("l", "c") and is_plain(module, letter)


def lowered_dtype(consumer, *inputs) -> torch.dtype | None:
    """The dtype to which autocast rounds what `consumer` is given, where that is what an op makes of `inputs` in
    float32."""
    device = inputs[0].device.type
    if consumer is None or not autocasts(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    fits = dtype in HALVES and all(input.dtype is torch.float32 or input.dtype is dtype for input in inputs)
    return dtype if fits and _lowers(consumer) else None


def layer_norm_before(input: Tensor, norm, consumer) -> Tensor:
    """norm(input), which goes to `consumer` alone: under autocast in the dtype that this lowers it to."""
    if takes(input) and is_plain(norm, "n"):
        dtype = lowered_dtype(consumer, input)
        if dtype is not None:
            weight, bias = parameter(norm, "weight"), parameter(norm, "bias")
            return layer_norm_rounded_forward(input, norm.normalized_shape, weight, bias, norm.eps, dtype)[0]
    return norm(input)


def layer_norm_2d_before(input: Tensor, norm, conv) -> Tensor:
    """Likewise torchvision's LayerNorm2d, whose result goes to a convolution."""
    if takes(input) and input.dim() == 4 and unlike(norm, (type(norm),)) is None and is_plain(conv, "c"):
        dtype = lowered_dtype(conv, input)
        if dtype is not None and conv.padding_mode == "zeros":
            weight, bias = parameter(norm, "weight"), parameter(norm, "bias")
            rows = input.permute(0, 2, 3, 1)
            rows = layer_norm_rounded_forward(rows, norm.normalized_shape, weight, bias, norm.eps, dtype)[0]
            return rows.permute(0, 3, 1, 2)
    return norm(input)


def add_layer_norm(input: Tensor, residual: Tensor, dropout, norm, consumer=None) -> tuple[Tensor, Tensor]:
    """norm(dropout(input) + residual), and the sum. consumer: what alone takes the norm's output, if that is known."""
    if is_plain(norm, "n") and is_plain(dropout, "d"):
        weight, bias = parameter(norm, "weight"), parameter(norm, "bias")
        p, training = (0.0, False) if dropout is None else (dropout.p, dropout.training)
        if _is_sum_of_rows(input, residual, dropout):
            return functional.add_layer_norm(
                input, residual, norm.normalized_shape, weight, bias, norm.eps, p, training
            )
        if _are_alike(input, residual) and not (training and p > 0.0):
            dtype = lowered_dtype(consumer, input, residual)
            if dtype is not None:
                if residual.dtype is dtype:  # the kernel has them the other way round
                    input, residual = residual, input
                shape = norm.normalized_shape
                return add_layer_norm_rounded_forward(input, residual, shape, weight, bias, norm.eps, dtype)[:2]
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


def residual_sum(input, residual):
    """input + residual. PyTorch's kernel reads tensors of two dtypes element by element."""
    if _are_alike(input, residual) and input.is_cuda and input.dtype is not residual.dtype:
        if input.dtype is torch.float32 and residual.dtype in HALVES:
            return functional.layer_scale_add(residual, input)
        if residual.dtype is torch.float32 and input.dtype in HALVES:
            return functional.layer_scale_add(input, residual)
    return input + residual


def residual_sum_of_rows(branch: Tensor, residual: Tensor, depth, inplace: bool = False) -> Tensor:
    """depth(branch) + residual, in one pass where rows are dropped. depth: as of layer_scale_add. `inplace`: whether
    the sum was written into depth(branch), of which nobody else knows, and so has its dtype."""
    rows = _rows_kept(depth, branch)
    fits = _is_like(residual, branch) if inplace else _are_alike(branch, residual)
    if rows is not None and rows[0] is not None and fits and branch.dim() > 1:
        return functional.layer_scale_add(branch, residual, None, rows[0])
    branch = functional.stochastic_depth(branch, *depth) if type(depth) is tuple else depth(branch)
    return branch.add_(residual) if inplace else residual_sum(branch, residual)


def layer_scale_add(branch: Tensor, residual: Tensor, weight: Tensor, depth=None, inplace: bool = False) -> Tensor:
    """depth(weight * branch) + residual, written into the former if `inplace`. depth: a StochasticDepth, or (p, mode,
    training) of a call of its function."""
    return layer_scale_add_and_copy(branch, residual, weight, depth, inplace, None)[0]


def layer_scale_add_and_copy(branch, residual, weight, depth, inplace, dtype) -> tuple[Tensor, Tensor | None]:
    """The same, and the sum rounded to `dtype`, where the op makes that; else None."""
    rows = _rows_kept(depth, branch)
    if (
        rows is not None
        and _are_alike(branch, residual)
        and type(weight) in PLAIN
        and branch.dim() > 1
        and 0 < weight.dim() < branch.dim()
        and branch.shape[-weight.dim()] == weight.numel() == weight.shape[0]
        and weight.device == branch.device
        and weight.is_floating_point()
    ):
        product = torch.promote_types(weight.dtype, branch.dtype)
        if not inplace or torch.promote_types(product, residual.dtype) is product:
            with_copy = dtype is branch.dtype and product is torch.float32
            both = layer_scale_add_forward(branch, residual, weight, rows[0], dtype if with_copy else None)
            return both[0], both[1] if with_copy else None
    result = weight * branch
    if depth is not None:
        result = functional.stochastic_depth(result, *depth) if type(depth) is tuple else depth(result)
    if inplace:
        result += residual
        return result, None
    return result + residual, None


def is_residual_block(module) -> bool:
    """Whether its forward is layer_scale_add of what its branch makes of the input, and of that, and is what runs."""
    return getattr(type(module), "cuda_ops_block", None) is not None and unlike(module, (type(module),)) is None


def residual_blocks(input: Tensor, *blocks) -> Tensor:
    """Such blocks behind each other. Where autocast would lower the sum for the next one's branch, the op has rounded
    it, and adds up the gradients of both."""
    if not takes(input):
        for block in blocks:
            input = block(input)
        return input
    copy = None
    for block, following in zip(blocks, (*blocks[1:], None), strict=True):
        branch, weight, depth, inplace = type(block).cuda_ops_block
        output = getattr(block, branch)(input if copy is None else copy)
        dtype = None
        if following is not None:
            dtype = lowered_dtype(getattr(following, type(following).cuda_ops_block[0]), output)
        depth = getattr(block, depth) if type(depth) is str else depth
        input, copy = layer_scale_add_and_copy(output, input, parameter(block, weight), depth, inplace, dtype)
    return input


def forking_blocks(input: Tensor, *blocks) -> Tensor:
    """Residual blocks that end in batch_norm_act, one behind the other: of each input the branch reads one tensor and
    the sum another, whose gradients the norm that made both adds up."""
    if not (torch.is_grad_enabled() and type(input) is Tensor and takes(input) and not input.is_meta and _is_eager()):
        for block in blocks:
            input = block(input)
        return input
    other = input
    for block in blocks:
        forked = _forked_of(block)
        if forked is None:
            input = other = block(input)
        else:
            input, other = forked(block, input, other)
    return input


def _forked_of(block):
    """The block's forward with a tensor for each reader of its input; None where something else may read it, or write
    into it, or the block is called for more than its forward."""
    variants = getattr(type(block), "cuda_ops_forked", None)
    if not variants or unlike(block, (type(block),)) is not None:
        return None
    for guard, forked, readers in variants:
        if guard(block):
            return forked if all(_begins_with_conv(block._modules.get(name)) for name in readers) else None
    return None


def _begins_with_conv(module) -> bool:
    if isinstance(module, torch.nn.Sequential):
        if type(module).forward not in (run_sequence, torch.nn.Sequential.forward):
            return False
        if unlike(module, (type(module),)) is not None:
            return False
        module = next(iter(module._modules.values()), None)
    return module is not None and is_plain(module, "c")


def _rows_kept(depth, branch) -> tuple[Tensor | None] | None:
    """The factors of the branch's rows, (None,) where there is nothing to drop; None if `depth` is something else."""
    if depth is None:
        return (None,)
    if type(depth) is not tuple:
        kind = getattr(type(depth), "cuda_ops_native", type(depth))
        if (kind.__module__, kind.__name__) != STOCHASTIC_DEPTH or unlike(depth, (type(depth),)) is not None:
            return None
        depth = depth.p, depth.mode, depth.training
    p, mode, training = depth
    if mode not in ("row", "batch") or not 0.0 <= p <= 1.0:
        return None  # refused by its own
    if not training or p == 0.0:
        return (None,)
    if mode != "row" or not takes(branch):
        return None
    dtype = torch.float64 if branch.dtype is torch.float64 else torch.float32
    return (dropout(torch.ones(branch.shape[0], dtype=dtype, device=branch.device), p),)


def _are_alike(input, residual) -> bool:
    """Tensors of one shape and device, of dtypes that we compute with."""
    return takes(input) and takes(residual) and input.shape == residual.shape and input.device == residual.device


def _is_like(residual, input) -> bool:
    """Tensors that are alike, and of one dtype."""
    return _are_alike(input, residual) and input.dtype == residual.dtype


def _is_sum_of_rows(input, residual, dropout) -> bool:
    # Under autocast the sum would be made in another dtype than that of its operands.
    return _is_like(residual, input) and not autocasts(input.device.type) and is_plain(dropout, "d")


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
    ("torchvision.models.shufflenetv2", "InvertedResidual"): (inverted_residual, {("branch1", "branch2"): interleave}),
}


STOCHASTIC_DEPTH = ("torchvision.ops.stochastic_depth", "StochasticDepth")


_steps: dict[tuple[type, ...], tuple] = {}


def forget_steps():
    """Else classes that a program makes anew for each model would stay for good."""
    _steps.clear()


def steps_of(classes: tuple[type, ...]) -> tuple[tuple[int, int, int, object], ...]:
    if is_dynamo_compiling():  # which traces no dictionary of classes, and does this once
        return runs_of(classes)
    steps = _steps.get(classes)
    if steps is None:
        steps = _steps[classes] = runs_of(classes)
    return steps


def runs_of(classes: tuple[type, ...]) -> tuple[tuple[int, int, int, object], ...]:
    """(first, end, end of what it sees, function) of each step of a Sequential of such layers: those of a run, or one
    layer and None. A norm in front of a product sees that too."""
    word = "".join([letter_of_class(cls) for cls in classes])
    steps, first = [], 0
    while first < len(word):
        run = next((run for run in RUNS if word.startswith(run, first)), None)
        end = first + (len(run) if run else 1)
        while word.startswith("BB", first) and word.startswith("B", end):
            end += 1
        while word.startswith("R", first) and word.startswith("R", end):
            end += 1
        if word.startswith("nl", first):
            steps.append((first, end, end + 1, layer_norm_before))
        elif word.startswith("BB", first):
            steps.append((first, end, end, residual_blocks))
        elif word.startswith("R", first):
            steps.append((first, end, end, forking_blocks))
        elif word.startswith("2c", first):
            steps.append((first, end, end + 1, layer_norm_2d_before))
        else:
            steps.append((first, end, end, RUNS[run] if run else None))
        first = end
    return tuple(steps)


def run_sequence(self, input):
    """torch.nn.Sequential.forward, with the runs among its layers in one op each; what they are is asked anew at each
    call, so that layers may come, go and change."""
    return run_layers(input, list(self._modules.values()))


def run_sequences(input, *sequences):
    """Sequentials behind each other, as one of all their layers where that is the same."""
    modules = []
    for sequence in sequences:
        if type(sequence).forward is run_sequence and unlike(sequence, (type(sequence),)) is None:
            modules += sequence._modules.values()
        else:
            modules.append(sequence)
    return run_layers(input, modules)


def run_layers(input, modules: list):
    for first, end, seen, function in steps_of(tuple([type(module) for module in modules])):
        if function is residual_blocks and not all(map(is_residual_block, modules[first:end])):
            for module in modules[first:end]:
                input = module(input)
        else:
            input = function(input, *modules[first:seen]) if function else modules[first](input)
    return input
