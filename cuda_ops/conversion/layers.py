"""The classes of converted layers, one for each class of cuda_ops.nn that has a namesake in torch.nn, and functions for
those of cuda_ops.functional likewise.

They compute with our kernels where these take the call, and as PyTorch does where not (integers,
another kind of device, sparse and nested tensors, subclasses of Tensor such as DTensor, arguments
that ours refuse by name): a model that ran before it was converted runs afterwards, wherever it is moved to. A path
that the environment forces (CUDA_OPS_CONV2D_PATH and the like) and that cannot do a call is an error all the same.
"""

import copyreg
import importlib
import inspect
import re

import torch

from .. import functional, nn
from .._library import has_cuda
from .._modules import PLAIN, as_node, has_plain_parameters, parameter
from ..ops.linear import linear_rounded_forward, linear_untransposed_forward

DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
HALVES = {torch.float16, torch.bfloat16}
ON_CUDA = DTYPES if has_cuda() else set()
STRIDED = torch.strided


def takes(tensor) -> bool:
    """Whether our kernels compute with such a tensor, here and now. Small calls feel this: `tensor.device` costs more
    than all that is asked here."""
    if type(tensor) not in PLAIN or tensor.layout is not STRIDED or tensor.is_nested:
        return False
    if tensor.is_cuda:
        return tensor.dtype in ON_CUDA
    return (tensor.is_cpu or tensor.is_meta) and tensor.dtype in DTYPES


def is_forced(error: NotImplementedError) -> bool:
    """Whether it says that a path which the environment names cannot do the call: who asked for that path is to know,
    and not to see PyTorch's kernel in its place."""
    return re.search("CUDA_OPS_.+_PATH", str(error)) is not None


# Layers whose first argument is no floating point number: their weight decides.
OF_INDICES = ("Embedding", "EmbeddingBag")


def _layer(name: str, ours: type, native: type) -> type:
    if name in OF_INDICES:

        def forward(self, *args, **kwargs):
            node = as_node(self, args, kwargs)
            if node is not None:
                return node
            if takes(self.weight):
                try:
                    return ours.forward(self, *args, **kwargs)
                except NotImplementedError as error:  # max_norm, which writes into the weight, and sparse gradients
                    if is_forced(error):
                        raise
            return native.forward(self, *args, **kwargs)
    else:
        forward = _forward(_linear if name == "Linear" else ours.forward, native)
    made = _class(name, ours, forward, native, f"cuda_ops.nn.{name}, and torch.nn.{name} for what that does not take.")
    if hasattr(ours, "_apply_instance_norm"):  # what the native forward calls too
        made._apply_instance_norm = _forward(ours._apply_instance_norm, native, method="_apply_instance_norm")
    return made


def _linear(self, input):
    weight, bias = parameter(self, "weight"), parameter(self, "bias")
    half = _half_of_parameters(input, weight, bias)
    if half is not None:
        return linear_rounded_forward(input.to(half), weight, bias, False)[0]
    return functional.linear(input, weight, bias)


def _half_of_parameters(input, weight, bias) -> torch.dtype | None:
    """The dtype to which autocast rounds float32 parameters on CUDA, for gradients that are left as they are summed;
    None where autocast is not on, or may keep what it has rounded for another call, as it does without gradients."""
    if not (input.is_cuda and torch.is_autocast_enabled("cuda") and torch.is_grad_enabled() and weight.requires_grad):
        return None
    if weight.dtype is not torch.float32 or (bias is not None and bias.dtype is not torch.float32):
        return None
    half = torch.get_autocast_dtype("cuda")
    return half if half in HALVES and input.dtype in (torch.float32, half) else None


def _forward(ours, native: type, fits=None, method: str = "forward"):
    """fits(module, input): whether ours computes what the class does, where that depends on the two."""

    def forward(self, *args, **kwargs):
        if args and takes(args[0]) and has_plain_parameters(self) and (fits is None or fits(self, args[0])):
            try:
                return ours(self, *args, **kwargs)
            except NotImplementedError as error:  # an argument that is refused by name, before anything is written
                if is_forced(error):
                    raise
        node = as_node(self, args, kwargs)
        return getattr(native, method)(self, *args, **kwargs) if node is None else node

    return forward


def _class(name: str, base: type, forward, native: type, text: str) -> type:
    forward.__wrapped__ = native.forward  # whose arguments inspect.signature tells
    members = {"forward": forward, "__doc__": text, "__module__": __name__, "cuda_ops_native": native}
    return type(name, (base,), members)


def _layers():
    """{torch.nn's class: its converted class}. Ours have to be torch.nn's but for forward and what it calls: what their
    constructor would add is missing in a module that torch.nn's has made."""
    classes = {}
    for name in nn.__all__:
        ours, native = getattr(nn, name), getattr(torch.nn, name, None)
        if isinstance(ours, type) and native and issubclass(ours, native) and ours.__init__ is native.__init__:
            classes[native] = _layer(name, ours, native)
    return classes


LAYERS = _layers()
globals().update({converted.__name__: converted for converted in LAYERS.values()})  # where pickle looks for them


# Layers of torchvision's and transformers' models, by their modules: these packages are imported by whoever has such a
# model. Converted classes are made when the first layer is met.


def _stochastic_depth(self, input):
    return functional.stochastic_depth(input, self.p, self.mode, self.training)


def _layer_norm_2d(self, x):
    rows = functional.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
    return rows.permute(0, 3, 1, 2)


def _frozen_batch_norm_2d(self, x):
    if not self.eps > 0:
        raise NotImplementedError("batch_norm: expected eps to be above 0")
    return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


def _window_partition(self, x, p):
    batch, channels, height, width = x.shape
    windows = x.reshape(batch, channels, height // p, p, width // p, p)
    windows = functional.permute_contiguous(windows, (0, 2, 4, 3, 5, 1))
    return windows.view(batch, (height // p) * (width // p), p * p, channels)


def _window_departition(self, x, p, h_partitions, w_partitions):
    batch, channels = x.shape[0], x.shape[3]
    windows = x.reshape(batch, h_partitions, w_partitions, p, p, channels)
    windows = functional.permute_contiguous(windows, (0, 5, 1, 3, 2, 4))
    return windows.view(batch, channels, h_partitions * p, w_partitions * p)


OF_TORCHVISION = {
    "FrozenBatchNorm2d": ("torchvision.ops.misc", _frozen_batch_norm_2d),
    "LayerNorm2d": ("torchvision.models.convnext", _layer_norm_2d),
    "StochasticDepth": ("torchvision.ops.stochastic_depth", _stochastic_depth),
    "WindowDepartition": ("torchvision.models.maxvit", _window_departition),
    "WindowPartition": ("torchvision.models.maxvit", _window_partition),
}
VIEWS_OF_TORCHVISION = {("torchvision.ops.misc", "Permute"), ("torchvision.models.maxvit", "SwapAxes")}


def _conv1d(self, x):
    """linear, whose weight lies (in, out). A product and a sum apart would have the bias's dtype under autocast."""
    weight, bias = parameter(self, "weight"), parameter(self, "bias")
    half = _half_of_parameters(x, weight, bias)
    if half is not None:
        return linear_rounded_forward(x.to(half), weight, bias, True)[0]
    return linear_untransposed_forward(x, weight, bias)


def _gelu_of_tanh(self, input):
    return functional.gelu(input, approximate="tanh")


def _rms_norm(self, hidden_states):
    weight = parameter(self, "weight")
    return functional.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


def _is_normalised_alike(self, input):
    """transformers' layers round float64 to float32 on the way, and promote: as they stand, they do it still."""
    weight = parameter(self, "weight")
    return input.dtype is weight.dtype and input.dtype is not torch.float64 and input.shape[-1:] == weight.shape


# {(module, class): (forward, when it fits)}. Nearly all of transformers' models have a norm of their own that is one of
# the last two but for its name: such a class is known by the code of its forward.
OF_TRANSFORMERS = {
    ("transformers.pytorch_utils", "Conv1D"): (_conv1d, None),
    ("transformers.activations", "NewGELUActivation"): (_gelu_of_tanh, None),
    ("transformers.activations", "AccurateGELUActivation"): (_gelu_of_tanh, None),
    ("transformers.models.llama.modeling_llama", "LlamaRMSNorm"): (_rms_norm, _is_normalised_alike),
    ("transformers.models.t5.modeling_t5", "T5LayerNorm"): (_rms_norm, _is_normalised_alike),
}


def _of_transformers(native: type):
    """(forward, when it fits) of a class of transformers', or None."""
    found = OF_TRANSFORMERS.get((native.__module__, native.__qualname__))
    if found or not native.__qualname__.endswith("Norm"):
        return found
    for (module, name), (forward, fits) in OF_TRANSFORMERS.items():
        if name.endswith("Norm") and _has_forward_of(native, getattr(importlib.import_module(module), name)):
            return forward, fits
    return None


def _has_forward_of(native: type, other: type) -> bool:
    codes = [getattr(vars(cls).get("forward"), "__code__", None) for cls in (native, other)]
    if None in codes or any(code.co_freevars or code.co_flags & inspect.CO_VARARGS for code in codes):
        return False  # none of its own, or one that is decorated
    said = [
        # Texts are what the function says of itself.
        (code.co_code, code.co_names, code.co_varnames, [c for c in code.co_consts if not isinstance(c, str)])
        for code in codes
    ]
    return said[0] == said[1]


def converted_layer(native: type) -> type | None:
    """The converted class of just this class, or None."""
    name = native.__qualname__
    text = f"{native.__module__}.{name} by cuda_ops.functional, and itself for what that does not take."
    if native not in LAYERS and (native.__module__, name) in {(m, n) for n, (m, _) in OF_TORCHVISION.items()}:
        forward = _forward(OF_TORCHVISION[name][1], native)
        globals()[name] = LAYERS[native] = _class(name, native, forward, native, text)
    elif native not in LAYERS and native.__module__.startswith("transformers."):
        found = _of_transformers(native)
        if found is not None:
            LAYERS[native] = _class(name, native, _forward(found[0], native, found[1]), native, text)
            LAYERS[native].cuda_ops_computes = found[0]
            LAYERS[native].__reduce_ex__ = _reduce_to_native
    return LAYERS.get(native)


def _reduce_to_native(self, protocol):
    """Many of transformers' classes have one name; pickle takes them by what they are made of."""
    native = native_class(self)
    create, _, *rest = native.__reduce_ex__(self, protocol)
    return (_new_layer, (native,), *rest) if create is copyreg.__newobj__ else (create, _, *rest)


def _new_layer(native: type):
    converted = converted_layer(native)
    return converted.__new__(converted)


def __getattr__(name: str):
    """Where pickle looks for converted layers of torchvision that this process has not met yet."""
    if name in OF_TORCHVISION:
        return converted_layer(getattr(importlib.import_module(OF_TORCHVISION[name][0]), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def native_class(module: torch.nn.Module) -> type | None:
    """The class that a converted module had; None if it is not converted."""
    return vars(type(module)).get("cuda_ops_native")


class Functions:
    """The functions of cuda_ops.functional that torch.nn.functional has too, and the latter's for what ours do not
    take."""


def _function(name: str, ours, native):
    def call(input, *args, **kwargs):
        if takes(input):
            try:
                return ours(input, *args, **kwargs)
            except NotImplementedError as error:
                if is_forced(error):
                    raise
        return native(input, *args, **kwargs)

    call.__name__, call.__qualname__, call.__module__ = name, f"Functions.{name}", __name__
    return call


FUNCTIONS = {}
for _name in functional.__all__:
    if _native := getattr(torch.nn.functional, _name, None):
        FUNCTIONS[_native] = _function(_name, getattr(functional, _name), _native)
        setattr(Functions, _name, staticmethod(FUNCTIONS[_native]))


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Asked of all tensors, since a mask or a cache may be of another kind than the queries."""
    if takes(query) and takes(key) and takes(value) and (attn_mask is None or type(attn_mask) in PLAIN):
        try:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
        except NotImplementedError as error:
            if is_forced(error):
                raise
    if enable_gqa and attn_mask is not None:  # for which PyTorch has no fused kernel
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (key, value))
        enable_gqa = False
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


scaled_dot_product_attention.__qualname__ = "Functions.scaled_dot_product_attention"
FUNCTIONS[torch.nn.functional.scaled_dot_product_attention] = scaled_dot_product_attention
Functions.scaled_dot_product_attention = staticmethod(scaled_dot_product_attention)
# torch.relu is not torch.nn.functional.relu, but means the same where it has the same arguments.
for _name in ("relu", "sigmoid", "tanh"):
    FUNCTIONS[getattr(torch, _name)] = getattr(Functions, _name)
