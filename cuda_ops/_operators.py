"""Calls of the registered ops, at the cost of one of PyTorch's own functions."""

import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ._arguments import check_dtype, expect, flag, integer, number, numbers, pair
from ._library import library

try:
    from . import _C
except ImportError:  # built without Python's headers: by torch.ops, which takes the host longer
    _C = None


def operator(name: str) -> Callable:
    """The registered op cuda_ops::`name` as a function whose arguments are all positional.

    Arguments of just the types of its schema go to PyTorch's dispatcher directly. Others, such as subclasses of Tensor
    or integers of NumPy, go by way of torch.ops; those that do not fit are a TypeError that names op and argument.
    """
    overload = getattr(torch.ops.cuda_ops, name).default
    op = re.split("_(?:forward|inference|inplace)", name)[0]
    # The real type is that of the schema's text: a dtype is an int otherwise.
    parameters = [(argument.name, str(argument.real_type), argument.N) for argument in overload._schema.arguments]

    def by_torch_ops(*arguments):
        if len(arguments) != len(parameters):
            raise TypeError(f"{op}: expected {len(parameters)} arguments, got {len(arguments)}")
        pairs = zip(parameters, arguments, strict=True)
        return overload(*[_checked(op, *parameter, value) for parameter, value in pairs])

    directly = by_torch_ops if _C is None else _C.bind(f"cuda_ops::{name}", by_torch_ops)

    # torch.compile knows the ops of torch.ops, and no functions of C++. A function of just these arguments, since one
    # of any (*arguments) takes the host a tenth of a small op's time.
    names = ", ".join(argument for argument, _, _ in parameters)
    text = f"lambda {names}: by_torch_ops({names}) if is_dynamo_compiling() else directly({names})"
    call = eval(text, {"by_torch_ops": by_torch_ops, "directly": directly, "is_dynamo_compiling": is_dynamo_compiling})
    call.__name__ = call.__qualname__ = name
    return call


def composite(name: str) -> Callable:
    """Registers a function as the op cuda_ops::`name`, which is defined in C++ and made of other ops.

    To an implementation in Python the dispatcher passes lists of any length for the schema's bool[3], and takes as many
    results from it as it returns, past the end of the schema's too. So lists that say which results are wanted are
    checked here.
    """
    overload = getattr(torch.ops.cuda_ops, name).default
    lists = [
        (i, argument.name, argument.N)
        for i, argument in enumerate(overload._schema.arguments)
        if argument.N and str(argument.real_type) == "List[bool]"
    ]

    def register(function):
        def checked(*arguments):
            for i, argument, size in lists:
                expect(len(arguments[i]) == size, name, "{} to have {} values, got {}", argument, size, arguments[i])
            return function(*arguments)

        torch.library.impl(library, name, "CompositeImplicitAutograd")(checked if lists else function)
        return function

    return register


def check_tangent(op: str, name: str, tensor: Tensor | None, tangent: Tensor | None):
    """Refuses a tangent, where there is one, of a tensor that cannot have it."""
    if tangent is None:
        return
    if not isinstance(tensor, Tensor) or (tangent.shape, tangent.dtype) != (tensor.shape, tensor.dtype):
        got = "None" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
        raise RuntimeError(
            f"{op}: expected {name} to have the dtype and shape of its tangent, {tangent.dtype} of shape "
            f"{list(tangent.shape)}, got {got}"
        )
    if not tensor.is_floating_point():
        raise RuntimeError(f"{op}: expected {name} to be floating point, got {tensor.dtype}")


def dual(op: str, name: str, tensor: Tensor | None, tangent: Tensor | None) -> Tensor | None:
    """A tensor with its tangent, for ops whose tangent is composed of those of others; as it is without one."""
    check_tangent(op, name, tensor, tangent)
    return tensor if tangent is None else torch._make_dual(tensor, tangent, level=0)


def _checked(op, argument, kind, size, value):
    """`value` as an argument of that type (a list of that size) in a schema, or an error that names both."""
    is_optional = kind.startswith("Optional")
    if is_optional:
        kind = kind[len("Optional[") : -1]
        if value is None:
            return None
    if kind == "Tensor":
        if isinstance(value, torch.fx.Proxy):  # symbolic_trace makes a node of the op
            return value
        if not isinstance(value, Tensor):
            expected = "a Tensor or None" if is_optional else "a Tensor"
            raise TypeError(f"{op}: expected {argument} to be {expected}, got {type(value).__name__}")
        if value.is_nested:
            raise NotImplementedError(f"{op}: expected {argument} to be a dense tensor, got a nested tensor")
        return value
    if kind == "ScalarType":
        check_dtype(op, value)
    if kind == "str" and not isinstance(value, str):
        raise TypeError(f"{op}: expected {argument} to be a str, got {value!r}")
    if kind in ("int", "SymInt"):
        return _of_64_bits(op, argument, [integer(op, argument, value)])[0]
    if kind == "bool":
        return flag(op, argument, value)
    if kind == "float":
        return number(op, argument, value)
    if kind == "List[float]":
        return numbers(op, argument, value)
    if kind in ("List[int]", "List[SymInt]"):
        if size == 2:
            return _of_64_bits(op, argument, pair(op, argument, value))
        if isinstance(value, (tuple, list)):
            return _of_64_bits(op, argument, [integer(op, argument, v) for v in value])
        return _of_64_bits(op, argument, [integer(op, argument, value)]) * size if size else value
    return value


def _of_64_bits(op, argument, values):
    """`values`, unless one is an int that no kernel could be given."""
    for value in values:
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise OverflowError(f"{op}: expected {argument} to be an integer of 64 bits, got {value}")
    return values
