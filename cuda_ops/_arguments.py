"""Types of arguments, checked where PyTorch checks them, so that a wrong one is a TypeError that names it and not an
error of the dispatcher; and the check of a condition on sizes, for fake kernels."""

import operator

import torch
from torch import Tensor


def check_tensors(op: str, **tensors):
    """Raises unless all are tensors, or what stands for them while torch.fx traces symbolically."""
    for name, value in tensors.items():
        if not isinstance(value, (Tensor, torch.fx.Proxy)):
            raise TypeError(f"{op}: expected {name} to be a Tensor, got {type(value).__name__}")


def check_tensors_or_none(op: str, **tensors):
    for name, value in tensors.items():
        if value is not None and not isinstance(value, (Tensor, torch.fx.Proxy)):
            raise TypeError(f"{op}: expected {name} to be a Tensor or None, got {type(value).__name__}")


def as_integer(value):
    """`value` as an int (or what stands for one while a graph is traced), or a TypeError. As in PyTorch, an integer of
    NumPy or a tensor of one integer will do, a bool will not."""
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, (int, torch.SymInt)):
        return value
    return operator.index(value)


def integer(op: str, name: str, value):
    if type(value) is int:
        return value
    try:
        return as_integer(value)
    except TypeError:
        raise TypeError(f"{op}: expected {name} to be an int, got {value!r}") from None


def flag(op: str, name: str, value) -> bool:
    """A bool, Python's or NumPy's: a string or a number is a mistake that Python would take for True or False."""
    if value is True or value is False:
        return value
    if getattr(value, "dtype", None) == "bool":
        return bool(value)
    raise TypeError(f"{op}: expected {name} to be a bool, got {value!r}")


def number(op: str, name: str, value):
    """A float of what stands for one number: as in PyTorch a float, an int, a scalar of NumPy, or a tensor without
    dimensions; no gradient would reach one that requires it, and no text is a number."""
    if type(value) is float or isinstance(value, torch.SymFloat):
        return value
    if type(value) is int:
        return float(value)
    if isinstance(value, Tensor) and value.requires_grad:
        raise TypeError(
            f"{op}: expected {name} to be a number, got a tensor that requires grad ({name} is a constant: no gradient "
            "reaches it)"
        )
    if not isinstance(value, (str, bytes, bytearray)) and getattr(value, "ndim", 0) == 0:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):  # the last one: a tensor without a value, on meta
            pass
    raise TypeError(f"{op}: expected {name} to be a number, got {value!r}")


def numbers(op: str, name: str, values) -> list[float]:
    """Numbers in a sequence (or anything else that can be iterated over but a text)."""
    if isinstance(values, Tensor):
        raise NotImplementedError(_no_tensor(op, name))
    if isinstance(values, (str, bytes, bytearray)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{op}: expected {name} to be numbers, got {values!r}")
    values = list(values)
    if any(isinstance(value, Tensor) for value in values):
        raise NotImplementedError(_no_tensor(op, name))
    return [number(op, f"{name}[{i}]", value) for i, value in enumerate(values)]


def _no_tensor(op, name):
    return (
        f"{op}: expected {name} to be numbers, got a tensor (they are constants, without a gradient; "
        f"`{name}.tolist()` makes numbers of them)"
    )


def check_dtype(op: str, value):
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{op}: expected dtype to be a torch.dtype, got {value!r}")


def pair(op: str, name: str, value) -> tuple:
    """An int, or one or two of them in a sequence, as (height, width)."""
    # The common cases first, in a function that small calls do feel.
    if type(value) is int:
        return value, value
    if type(value) is tuple and len(value) == 2 and type(value[0]) is type(value[1]) is int:
        return value
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    try:
        values = tuple([as_integer(v) for v in values])
    except TypeError:
        raise TypeError(f"{op}: expected {name} to be an int or two of them, got {value!r}") from None
    if len(values) not in (1, 2):
        raise RuntimeError(f"{op}: expected {name} to be an int or two of them, got {value!r}")
    return values if len(values) == 2 else values * 2


def single(op: str, name: str, value):
    """An int, or one in a sequence, as an int."""
    if type(value) is int:
        return value
    values = value if isinstance(value, (tuple, list)) else (value,)
    try:
        values = [as_integer(v) for v in values]
    except TypeError:
        raise TypeError(f"{op}: expected {name} to be an int or one in a sequence, got {value!r}") from None
    if len(values) != 1:
        raise RuntimeError(f"{op}: expected {name} to be an int or one in a sequence, got {value!r}")
    return values[0]


def expect(condition, op: str, message: str, *values, check=torch._check):
    """For fake kernels, which meta tensors meet where others meet the checks of the glue: raises unless `condition`,
    which may be symbolic, holds."""
    check(condition, lambda: f"{op}: expected " + message.format(*values))


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for tensors of a type of device; PyTorch knows it of those that have any alone, and to ask
    it of another, such as meta, is an error."""
    return device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type)
