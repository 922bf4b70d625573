"""convert and revert: the classes of a model's modules, there and back."""

import contextlib
import fnmatch
import threading
from collections.abc import Iterable

import torch
from torch.nn.utils import parametrize

from .. import nn
from .attention import NAME, forget, what_is_called
from .fusing import BLOCKS, forget_steps, forking_blocks, residual_blocks, runs_of
from .layers import LAYERS, VIEWS_OF_TORCHVISION, converted_layer, native_class
from .recipes import BLOCK, SEQUENCE, converted_class
from .report import Fusion, Layer, Report
from .rewritten import NotRewritten, rewritten
from .straight import NotTraced
from .traced import recipe_of
from .windows import FORWARDS

Selection = str | type | Iterable[str | type]

OURS = {getattr(nn, name) for name in nn.__all__ if isinstance(getattr(nn, name), type)}
# Layers that compute nothing, or what a view does.
NOTHING = {torch.nn.Identity, torch.nn.Flatten, torch.nn.Unflatten}
CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList)
CONTAINERS += (torch.nn.ParameterDict,)


def convert(
    model: torch.nn.Module, fuse: bool = True, *, only: Selection | None = None, exclude: Selection = ()
) -> Report:
    r"""Makes the layers of a model ours, in place: every module whose class is one of torch.nn's that cuda_ops.nn has.

    What changes is the class of these modules, nothing else. Parameters, buffers, hooks, attributes, modes, devices,
    shared modules and tied weights stay, and so do names and state_dict; optimizers go on with the same parameters.
    :func:`revert` gives every module the class that it had.

    Args:
        model: any module. A subclass of a torch.nn layer is left alone, and so is what has a forward set on it.
        fuse: whether to let one op compute what several layers do: Conv2d–BatchNorm2d–ReLU–MaxPool2d, Linear–ReLU,
            Linear–GELU, residual sum and LayerNorm or RMSNorm, with Dropout before it, BatchNorm2d–ReLU (ReLU6, SiLU,
            Hardswish) with or without a residual sum between them, LayerScale, StochasticDepth and residual sum, and
            Conv2d–BatchNorm2d with or without one of these activations: in evaluation without gradients the norm is
            folded into the convolution (:func:`cuda_ops.functional.conv_bn_act`), anew at each call, so that parameters
            and statistics may change in any way, in a CUDA graph too. The gate of a squeeze-and-excitation block and
            its product with the image are one op (:func:`cuda_ops.functional.scale_channels`), and without gradients so
            are its two convolutions (:func:`cuda_ops.functional.excitation`). Where residual blocks that end in a
            norm with such a sum follow each other, backward of the norm adds up the gradients of the next block's
            branch and sum, each of which reads an alias of its output. Under autocast a LayerNorm in front of a
            layer that lowers its input returns that layer's dtype at once. Attention of torchvision's Swin Transformer
            and MaxViT is read and written in the image (:func:`cuda_ops.functional.window_attention`), and
            ShuffleNetV2's branches are shuffled as they are put together. It happens in Sequential, in torchvision's
            dense layers, and in any forward that torch.fx can trace and that is a straight line (no loop, and no branch
            but on an attribute of the module; no value of a global, no mode of PyTorch's asked for or turned, no walk
            through its parameters); there functions of torch.nn.functional become ours too. Layers with hooks, or
            changed later, are called one by one. Of other forwards, such as those of transformers' blocks, neighbouring
            statements become one where they are plain: a residual sum and the norm behind it, a norm and the layer that
            alone takes what it returns (under autocast rounded once for all of that layer's products), a linear layer
            and its activation, the rotation of Llama's queries and keys. In every forward, calls of
            torch.nn.functional.scaled_dot_product_attention become ours, and those of transformers' models whose
            attention is sdpa; eager attention, which returns the weights, is left.
        only: names of submodules (with * and ? as in file names), names of classes, or classes: what to convert.
        exclude: likewise, what to leave. A name stands for all below it too.

    Returns:
        A report: `print(report)` shows what is ours now, what was left and why; `report.names()` tells it by layer,
        `report.as_dict()` as data.

    Raises:
        TypeError: `model` is no module, `only` or `exclude` is neither names nor classes.

    What our kernels do not take (integers, sparse tensors) is computed by
    PyTorch's, decided at each call; so is a TransformerEncoderLayer in evaluation without gradients, which then calls
    none of its layers. Dropout draws other numbers than PyTorch's after the same seed. ReLU6 and Hardtanh
    save their output for the gradient, as ReLU does, and a fused residual sum what was added: these must not be written
    into afterwards; nor, under autocast on CUDA, weights of linear layers between forward and backward, of whose
    gradients none is rounded to autocast's dtype on the way. Under autocast the first layer that is called has the
    float32 parameters of all rounded: what a forward writes into a later layer's by way of `.data` comes too late for
    that pass. Converting again takes what is new. Convert after torch.fx has rewritten a model, not before: it does
    not see through our layers.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> print(cuda_ops.convert(model))
        Sequential: 3 of 3 layers are ours
          class   ours  left  why
          Linear     2     0
          ReLU       1     0
          linear_relu: 1 × 2 calls in one
        >>> type(cuda_ops.revert(model)[0]) is torch.nn.Linear
        True
    """
    _check_model("convert", model)
    only = None if only is None else _selection("only", only)
    exclude = _selection("exclude", exclude)
    report = Report(_kind(model))
    with _one_at_a_time:
        _convert(model, fuse, only, exclude, report)
    return report


# While they trace, torch.fx and straight.py put functions of theirs in the place of those that all modules have.
_one_at_a_time = threading.RLock()


def _convert(model, fuse, only, exclude, report: Report):
    forget()
    forget_steps()
    modules = []
    for name, names, module in _with_names(model):
        chosen = (only is None or _is_in(names, module, only)) and not _is_in(names, module, exclude)
        modules.append((name, module, chosen))
    for name, module, chosen in modules:
        layer = _swap(name, module, chosen)
        if layer is not None:
            report.layers.append(layer)
    for name, module, chosen in modules:
        if fuse and chosen:
            _fuse(name, module, report)
    for _, module, chosen in modules:
        if fuse and chosen:
            _fuse_blocks(module)
    forget()


def revert(model: torch.nn.Module) -> torch.nn.Module:
    """Undoes :func:`convert` for a model, or for a part of one: each module gets the class that it had.

    Args:
        model: any module; what was not converted is left alone.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> model = torch.nn.ReLU()
        >>> report = cuda_ops.convert(model)
        >>> type(cuda_ops.revert(model)) is torch.nn.ReLU
        True
    """
    _check_model("revert", model)
    for module in model.modules():
        native = native_class(module)
        if native is not None:
            module.__class__ = native
        elif parametrize.is_parametrized(module):
            native = vars(type(module).__bases__[0]).get("cuda_ops_native")
            if native is not None:
                module.__class__ = _with_base(type(module), native)
    return model


def _check_model(function, model):
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{function}: expected model to be a torch.nn.Module, got {type(model).__name__}")


def _selection(argument, selection) -> list[str | type]:
    values = [selection] if isinstance(selection, (str, type)) else selection
    values = list(values) if isinstance(values, Iterable) else [None]
    if not all(isinstance(value, (str, type)) for value in values):
        raise TypeError(f"convert: expected {argument} to be names or classes of modules, got {selection!r}")
    return values


def _with_names(model):
    """(first name, all names, module) of each module once, in order."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), (module, []))[1].append(name)
    return [(names[0], names, module) for module, names in found.values()]


def _is_in(names, module, selection) -> bool:
    kind = native_class(module) or type(module)
    for one in selection:
        if isinstance(one, type):
            if kind is one or type(module) is one:
                return True
        elif one == kind.__name__ or any(fnmatch.fnmatchcase(n, one) or n.startswith(f"{one}.") for n in names):
            return True
    return False


def _is_converted(kind: type) -> bool:
    """Whether it is the class of a converted layer (and not that of a module whose forward was traced)."""
    return LAYERS.get(vars(kind).get("cuda_ops_native")) is kind


def _kind(module) -> str:
    """The class as the report names it: torch.nn's by its name, others with their module."""
    kind = native_class(module) or type(module)
    known = kind in OURS or kind.__module__.startswith("torch.nn.")
    return kind.__qualname__ if known else f"{kind.__module__}.{kind.__qualname__}"


def _swap(name, module, chosen) -> Layer | None:
    """Gives a module its new class; what the report says of it, which for containers is nothing."""
    kind = type(module)
    if kind is torch.nn.modules.linear.NonDynamicallyQuantizableLinear:
        return None  # MultiheadAttention's out_proj, whose weight the attention reads itself
    if _is_converted(kind) or kind in OURS:
        return Layer(name, _kind(module))
    if parametrize.is_parametrized(module) and (kind.__bases__[0] in LAYERS or _is_converted(kind.__bases__[0])):
        kind = kind.__bases__[0]
        if chosen and kind in LAYERS:
            module.__class__ = _with_base(type(module), LAYERS[kind])
        return Layer(name, kind.__qualname__, None if chosen or _is_converted(kind) else "not chosen")
    if converted_layer(kind) is None:
        # One of torch.nn's that computes by its own parameters may have a submodule beside.
        computes = not module._modules or (module._parameters and kind.__module__.startswith("torch.nn."))
        computes = computes and not isinstance(module, CONTAINERS)
        return Layer(name, _kind(module), _why_unknown(module)) if computes else None
    layer = Layer(name, _kind(module), _why_not(module) if chosen else "not chosen")
    if layer.reason is None:
        module.__class__ = LAYERS[kind]
    return layer


def _why_unknown(module) -> str:
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript"
    if issubclass(kind, torch.nn.modules.lazy.LazyModuleMixin):
        return "lazy: convert after the first forward"
    if kind in NOTHING or (kind.__module__, kind.__qualname__) in VIEWS_OF_TORCHVISION:
        return "nothing to compute"
    base = next((base for base in kind.__mro__[1:] if base in LAYERS), None)
    if base is not None:
        return f"a subclass of {base.__name__}"
    return "cuda_ops.nn has none" if kind.__module__.startswith("torch.nn.") else "not of torch.nn"


def _why_not(module) -> str | None:
    """Why a layer of a class that we have is left alone."""
    if "forward" in module.__dict__:
        return "has a forward that was set on it"
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not module.eps > 0:
        return "eps is not above 0"
    if isinstance(module, torch.nn.Embedding) and (module.max_norm is not None or module.sparse):
        return "max_norm" if module.max_norm is not None else "sparse gradients"
    return None


def _with_base(parametrized: type, base: type) -> type:
    """The class of a parametrized module, which is that module's own, on another base."""
    members = {name: value for name, value in vars(parametrized).items() if name not in ("__dict__", "__weakref__")}
    return type(parametrized.__name__, (base,), members)


def _fuse_blocks(module):
    """A Sequential of blocks whose classes are others only now."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return
    if kind.forward is torch.nn.Sequential.forward and "forward" not in module.__dict__:
        steps = runs_of(tuple(type(child) for child in module._modules.values()))
        if any(function in (residual_blocks, forking_blocks) for *_, function in steps):
            module.__class__ = converted_class(kind, SEQUENCE)


def _fuse(name, module, report: Report):
    kind = type(module)
    if _is_converted(kind) or kind in OURS or isinstance(module, torch.jit.ScriptModule):
        return
    kind = module.__class__ = native_class(module) or kind  # once more, since its layers may be others by now
    if kind.forward is torch.nn.Sequential.forward and "forward" not in module.__dict__:
        names, types = list(module._modules), tuple(type(child) for child in module._modules.values())
        found = [(function, names[first:end]) for first, end, _, function in runs_of(types) if function]
        if found:
            module.__class__ = converted_class(kind, SEQUENCE)
            several = [(function, parts) for function, parts in found if len(parts) > 1]
            report.fusions += [Fusion(name, function.__name__, tuple(parts)) for function, parts in several]
        return
    block = BLOCKS.get((kind.__module__, kind.__qualname__))
    if block is not None and "forward" not in module.__dict__:
        module.__class__ = converted_class(kind, BLOCK)
        report.fusions += [Fusion(name, function.__name__, parts) for parts, function in block[1].items()]
        return
    if getattr(kind.forward, "__module__", "").startswith("torch.nn."):
        return  # torch.nn's own, of a layer, a container or a subclass of one
    recipe, gains = None, []
    try:
        recipe, gains = recipe_of(module)
    except NotTraced as reason:
        report.untraced[name] = str(reason)
    text = None
    in_windows = FORWARDS.get((kind.__module__, kind.__qualname__)) if "forward" not in module.__dict__ else None
    if recipe is None and in_windows is None:
        with contextlib.suppress(NotRewritten):
            text, gains = rewritten(module)
    calls, why_not = ([], None) if "forward" in module.__dict__ else what_is_called(module)
    if why_not is not None and not calls:
        report.layers.append(Layer(name, _kind(module), why_not))
    if calls and not any(op == NAME for op, _ in gains):
        gains += [(NAME, (call,)) for call in calls]
    if in_windows is not None:
        gains += [in_windows[1:]]
    if recipe is not None or text is not None or calls or why_not or in_windows is not None:
        module.__class__ = converted_class(kind, recipe, bool(calls or why_not), text)
    report.fusions += [Fusion(name, op, parts) for op, parts in gains]
    if gains and not (module._modules or module._parameters or module._buffers):
        # A layer that is no more than its forward, which is a call of ours now.
        report.layers = [Layer(name, each.kind) if each.name == name else each for each in report.layers]
