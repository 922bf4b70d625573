"""explain: the tables of paths for a call, and the kernels of those that run."""

import inspect
import re

import torch
from torch.utils._pytree import tree_map_only

from .. import _library
from .._errors import UserError
from .._table import print_table
from .explanation import Device, Explanation, Kernel
from .ops import DESCRIBED, ONE_KERNEL, Ask, one_kernel

# Multiprocessors and bytes of shared memory a block, where only the capability is given: of a T4, A100, A40, L40 and
# H200, and of a B200.
ASSUMED = {
    75: (40, 64 << 10),
    80: (108, 163 << 10),
    86: (84, 99 << 10),
    89: (142, 99 << 10),
    90: (132, 227 << 10),
    100: (148, 227 << 10),
}


def _device(capability, multiprocessors, shared_memory) -> Device:
    if capability is None:
        if not torch.cuda.is_available():
            raise UserError("explain: there is no GPU here; say which one to assume by capability, such as 9.0")
        p = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts = 10 * p.major + p.minor, p.multi_processor_count, p.shared_memory_per_block_optin
    else:
        try:
            major, minor = str(capability).split(".")
            number = 10 * int(major) + int(minor)
        except ValueError:
            raise UserError(f"explain: expected capability to be such as 9.0, got {capability!r}") from None
        if number < min(ASSUMED):
            raise UserError(f"explain: cuda_ops runs on compute capability 7.5 and newer, got {capability}")
        facts = (
            number,
            *ASSUMED[max(n for n in ASSUMED if n <= number)],
        )  # of one that is not listed, the next lower one's
    for name, value in (("multiprocessors", multiprocessors), ("shared_memory", shared_memory)):
        if value is not None and not (type(value) is int and 0 < value <= 1 << 30):
            raise UserError(f"explain: expected {name} to be a whole number of at least 1, got {value!r}")
    return Device(facts[0], multiprocessors or facts[1], shared_memory or facts[2])


def _kernels(products) -> dict[str, Kernel]:
    """What the kernels of the paths that run took on this GPU; empty where that cannot be asked."""
    wanted = {name for product in products if product.chosen for name in product.chosen.kernels}
    if not torch.cuda.is_available():
        return {}
    from .._kernels import kernels

    try:
        rows = kernels(sorted(_library.FOLDER.glob("_ops*.so"))[0], torch.cuda.current_device())
    except (ImportError, OSError, RuntimeError, ValueError):
        return {}
    found: dict[str, list] = {}
    for row in rows:
        for name in wanted.intersection(re.findall(r"\w+", row["name"])):
            found.setdefault(name, []).append(row)

    def span(rows, key):
        return min(row[key] for row in rows), max(row[key] for row in rows)

    return {
        name: Kernel(name, span(rows, "registers"), span(rows, "static_shared_bytes")) for name, rows in found.items()
    }


def op_of(function) -> str:
    name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
    if name not in DESCRIBED and name not in ONE_KERNEL:
        known = ", ".join(sorted([*DESCRIBED, *ONE_KERNEL]))
        raise UserError(f"explain: expected a function of cuda_ops.functional, one of {known}; got {name}")
    return name


def _check(op, function, args, kwargs):
    """Raises what the call itself would of sizes that do not fit, for which any kernel would be named. A call of which
    arguments were left out, or are None where they have no default, is not looked at, nor what fake kernels cannot
    do."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return
    if any(
        value is None and signature.parameters[name].default is inspect.Parameter.empty for name, value in given.items()
    ):
        return

    def on_meta(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    try:
        with torch.no_grad():
            args, kwargs = tree_map_only(torch.Tensor, on_meta, (args, kwargs))
            function(*args, **kwargs)
    except NotImplementedError:
        return
    except (AssertionError, IndexError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"explain: this call is an error: {error}") from None


def explain(
    function,
    *args,
    capability: str | float | None = None,
    multiprocessors: int | None = None,
    shared_memory: int | None = None,
    show: bool = True,
    **kwargs,
) -> Explanation:
    """Prints and returns which CUDA kernels take a call of a function of cuda_ops.functional, forward and for each
    gradient, and why the others in the op's table of paths do not. Nothing is computed.

    Args:
        function: such as ``cuda_ops.functional.conv2d``, or its name.
        args, kwargs: the call's arguments; those that the choice does not depend on may be left out. Only sizes, dtypes
            and strides of tensors are looked at; all count as aligned to 16 bytes, and they may be on any device.
        capability: compute capability of the GPU to assume, such as ``"9.0"``; default: the current GPU.
        multiprocessors, shared_memory: how many SMs it has, and how many bytes a block may have; default: those of a
            usual GPU of that capability.
        show: whether to print.

    Returns:
        The tables: ``explanation["forward"].chosen.name``.

    Raises:
        UserError: there is no GPU and no capability is given, the function is not one of ours, or sizes do not fit.
        NotImplementedError: the library was built without CUDA, and has no tables.

    ``CUDA_OPS_<OP>_PATH`` in the environment and ``allow_tf32`` count as in the call itself.
    """
    op = op_of(function)
    if _library.problem is not None:
        raise ImportError(_library.problem)
    if not _library.has_cuda():
        raise NotImplementedError("explain: this build of cuda_ops has no CUDA kernels, and so no tables of paths")
    device = _device(capability, multiprocessors, shared_memory)
    from .. import functional

    try:
        arguments = inspect.signature(getattr(functional, op)).bind_partial(*args, **kwargs).arguments
        _check(op, getattr(functional, op), args, kwargs)
        products = tuple(DESCRIBED.get(op, ONE_KERNEL.get(op) and one_kernel(op))(Ask(device), arguments))
    except KeyError as error:
        raise UserError(f"explain: {op} needs the argument {error}") from None
    explanation = Explanation(op, device, products, _kernels(products) if capability is None else {})
    if show:
        _show(explanation)
    return explanation


def _amount(span, unit=""):
    return f"{span[0]}{unit}" if span[0] == span[1] else f"{span[0]} to {span[1]}{unit}"


def _show(explanation: Explanation):
    print(f"{explanation.op} on {explanation.device}")
    for product in explanation.products:
        title = f"{product.name} ({product.note})" if product.note else product.name
        rows, styles = [], []
        for path in product.paths:
            verdict = "runs" if path.chosen else path.reason or "could, but a row before it does"
            rows.append(["→" if path.chosen else "", path.name, verdict, path.file])
            styles.append("bold green" if path.chosen else None if path.supports else "dim")
        print_table(title, ["", "path", "", "file"], rows, styles)
    for kernel in explanation.kernels.values():
        shared = _amount(kernel.static_shared_bytes, " bytes of static shared memory")
        print(f"{kernel.name}: {_amount(kernel.registers)} registers, {shared} (all its instances)")
