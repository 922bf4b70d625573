"""What fused modules ask of the modules whose parameters they read, at a cost that small calls do not feel.

To Python parameters and buffers are no attributes: it looks through all classes, makes an AttributeError and only then
asks torch.nn.Module.__getattr__, which for the twenty tensors of a small network takes longer than an op.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

# Classes of tensors that are no more than their elements (or stand for such while a graph is traced).
PLAIN = {torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor), FakeTensor, FunctionalTensor}


def has_plain_parameters(module) -> bool:
    """Whether the module's own parameters are tensors as any other: quantized or sharded weights are subclasses of
    Tensor, which say themselves what a layer's function makes of them."""
    # all() of a generator would take twice as long.
    for value in module._parameters.values():  # noqa: SIM110
        if value is not None and type(value) not in PLAIN:
            return False
    return True


def parameter(module, name: str):
    """module.<name>, found where a parameter usually is."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def buffer(module, name: str):
    """module.<name>, found where a buffer usually is."""
    buffers = module._buffers
    return buffers[name] if name in buffers else getattr(module, name)


def unlike(module, types: tuple[type, ...]) -> str | None:
    """What a call of `module` does that the forward of one of `types` alone does not: what a fused op, which reads its
    parameters and does not call it, would leave out. None if there is nothing.

    Pruning, and spectral and weight normalisation of the old kind, are hooks; parametrizations, FSDP and lazy modules
    are classes of their own; torchao's quantized weights are of a class of their own.
    """
    if type(module) not in types:
        return f"is of class {type(module).__module__}.{type(module).__qualname__}, not a plain {types[-1].__name__}"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "has hooks"
    if "forward" in module.__dict__:
        return "has a forward that was set on it"
    if module._compiled_call_impl is not None:
        return "has been compiled by itself"
    if _global_forward_hooks or _global_forward_pre_hooks or _global_backward_hooks or _global_backward_pre_hooks:
        return "has hooks, which all modules have"
    if not has_plain_parameters(module):
        return "has parameters of a class of their own"
    return None


def as_node(module, args, kwargs):
    """The call of a layer as one node of the graph that torch.fx.symbolic_trace is making, as a call of torch.nn's is,
    which it knows by the name of their Python module. None where nothing is traced."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.fx.Proxy):
            return value.tracer.create_proxy("call_module", value.tracer.path_of_module(module), args, kwargs)
    return None


def refuse_to_be_scripted(module):
    """As __prepare_scriptable__, which torch.jit.script asks before it reads a forward."""
    raise NotImplementedError(
        f"cuda_ops.nn.{type(module).__name__}: torch.jit.script is not supported, which compiles Python's text: use "
        "torch.compile, torch.export or torch.jit.trace, or script the model with PyTorch's layers (cuda_ops.revert)"
    )
