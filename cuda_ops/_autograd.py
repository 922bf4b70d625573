"""torch.autograd.Function of the ops.

An op's derivatives stand beside its schema (csrc/torch/<op>.cpp), and autograd follows them in C++ wherever the op is
called. The Functions made here follow the same lines in Python: for whoever composes a Function of his own of ours,
and to read what autograd does.
"""

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from ._operators import operator

ATTRIBUTES = {
    "": lambda tensor: tensor,
    "mT": lambda tensor: tensor.mT,
    "size": lambda tensor: tensor.shape,
    "plane": lambda tensor: tensor.shape[-2:],
    "stride": lambda tensor: tensor.stride(),
    "dtype": lambda tensor: tensor.dtype,
    "channels_last": lambda tensor: suggest_memory_format(tensor) == torch.channels_last,
    "channels_last_1d": lambda tensor: suggest_memory_format(tensor.unsqueeze(2)) == torch.channels_last,
}
LITERALS = {"none": None, "true": True, "false": False}


class Call:
    """What a derivative calls, "<op>(<sources>)"; or the gradient that it passes on."""

    def __init__(self, text: str):
        name, _, sources = text.strip().removesuffix(")").rpartition("(")
        # Each with the argument whose gradient it is for, or "" for all of them.
        pairs = [source.strip().partition(" if ")[::2] for source in sources.split(",")]
        self.sources = [(source.strip(), condition.strip()) for source, condition in pairs]
        namespace, _, name = name.rpartition("::")
        self.op = None
        if name:
            self.op = getattr(torch.ops.aten if namespace == "aten" else torch.ops.cuda_ops, name)

    def arguments(self, values: dict, wanted: dict[str, bool]) -> list:
        """What the sources stand for, of what their names stand for."""

        def value(source, condition):
            if condition and not wanted[condition]:
                return None
            if source == "wanted":
                return list(wanted.values())
            if source.startswith("wants_") and source not in values:
                return wanted.get(source.removeprefix("wants_"), False)
            if source.lstrip("-").isdigit():
                return int(source)
            if source.startswith("["):
                return [word == "true" for word in source[1:-1].split()]
            name, _, attribute = source.partition(".")
            tensor = LITERALS[name] if name in LITERALS else values[name]
            return ATTRIBUTES[attribute](tensor) if isinstance(tensor, Tensor) else tensor

        return [value(source, condition) for source, condition in self.sources]

    def __call__(self, values: dict, wanted: dict[str, bool]):
        arguments = self.arguments(values, wanted)
        return arguments[0] if self.op is None else self.op(*arguments)


class Derivative:
    """One line of an op's derivatives, "<arguments>: <call>" or "<arguments>: <call> or <call>":
    csrc/torch/autograd.h says what they mean."""

    def __init__(self, text: str):
        targets, calls = text.split(":", 1)
        self.targets = [target.strip() for target in targets.split(",")]
        self.calls = [Call(call) for call in calls.split(" or ")]
        self.sources = [source for call in self.calls for source, _ in call.sources]

    def __call__(self, values: dict, wanted: dict[str, bool]):
        """The gradients of the targets, of all that the sources name."""
        results = self.calls[-1 if torch.is_grad_enabled() else 0](values, wanted)
        if isinstance(results, list):  # the wanted ones alone
            rest = iter(results)
            return [next(rest) if want else None for want in wanted.values()]
        return [results] if isinstance(results, Tensor) else list(results)


def is_derivative(text: str) -> bool:
    """Whether a line says a gradient, and not a tangent or that there is none."""
    return "<-" not in text and text.split(":", 1)[1].strip() != "not differentiable"


def autograd_function(name: str, class_name: str) -> type[torch.autograd.Function]:
    """The op cuda_ops::`name` as a subclass of torch.autograd.Function, whose apply takes the arguments of its schema.

    It is differentiable as often as the op, and under torch.func's transforms.
    """
    schema = getattr(torch.ops.cuda_ops, name).default._schema
    arguments = [argument.name for argument in schema.arguments]
    returns = [result.name or "output" for result in schema.returns]
    derivatives = [Derivative(text) for text in torch.ops.cuda_ops.derivatives(name) if is_derivative(text)]
    sources = {source.partition(".")[0] for derivative in derivatives for source in derivative.sources}
    differentiable = {result for result in returns if f"grad_{result}" in sources - set(arguments)}
    call = operator(name)

    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs):
            return call(*inputs)

        @staticmethod
        def setup_context(ctx, inputs, output):
            outputs = (output,) if isinstance(output, Tensor) else output
            ctx.mark_non_differentiable(
                *[o for result, o in zip(returns, outputs, strict=True) if result not in differentiable]
            )
            values = dict(zip([*arguments, *returns], [*inputs, *outputs], strict=True))
            ctx.tensors = [n for n in values if n in sources and isinstance(values[n], Tensor)]
            ctx.constants = {n: v for n, v in values.items() if not isinstance(v, Tensor)}
            ctx.save_for_backward(*[values[n] for n in ctx.tensors])

        @staticmethod
        def backward(ctx, *grads):
            values = {f"grad_{result}": grad for result, grad in zip(returns, grads, strict=True)}
            values |= ctx.constants | dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))
            needs = dict(zip(arguments, ctx.needs_input_grad, strict=True))
            results = dict.fromkeys(arguments)
            for derivative in derivatives:
                wanted = {target: needs[target] for target in derivative.targets}
                if any(wanted.values()):
                    for target, grad in zip(wanted, derivative(values, wanted), strict=False):
                        results[target] = grad if wanted[target] else None
            return tuple(results.values())

    Function.__name__ = Function.__qualname__ = class_name
    Function.__doc__ = f"torch.ops.cuda_ops.{name} as an autograd.Function."
    return Function
