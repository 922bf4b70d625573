"""What stands in for statements of forwards that rewritten.py has rewritten, as functions of tensors and modules, which
are asked at every call whether they are still plain, as in fusing.py."""

import ast
import dis
import inspect
from types import FunctionType

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import functional
from .._arguments import autocasts
from .._modules import parameter, unlike
from ..ops.layer_norm_rounded import (
    add_layer_norm_rounded_forward,
    add_rms_norm_rounded_forward,
    layer_norm_rounded_forward,
    rms_norm_rounded_forward,
)
from . import layers
from .fusing import HALVES, _are_alike, _is_eager, _is_sum_of_rows, _lowers, is_plain, letter_of
from .layers import takes

HELPERS = ("norm_before", "add_norm", "product_and_activation", "is_lowered_again", "rotation")
LEAST_ROWS = 2  # of the input, for each row of a weight that is turned
# Of a tensor, what does not depend on its elements and dtype.
SIZES = ("shape", "size", "dim", "ndim", "device", "numel")


def _computes(module, function) -> bool:
    """Whether a module is one of transformers', is computed by this function of layers.py, and has no hooks."""
    cls = type(module)
    return getattr(cls, "cuda_ops_computes", None) is function and unlike(module, (cls,)) is None


def is_norm(module) -> str | None:
    """The name of the op that a module is; None if it is no norm."""
    letter = letter_of(module) if module is not None else "-"
    if letter in "nm":
        return "layer_norm" if letter == "n" else "rms_norm"
    return "rms_norm" if getattr(type(module), "cuda_ops_computes", None) is layers._rms_norm else None


def _is_linear(module) -> bool:
    return is_plain(module, "l") if letter_of(module) == "l" else _computes(module, layers._conv1d)


# ---- what autocast lowers

_lowered_names: dict[tuple, tuple[str, ...] | None] = {}


def lowered_names(module: torch.nn.Module, key: int | str) -> tuple[str, ...] | None:
    """The submodules to which a module's forward hands that argument, where it does nothing else with it but to ask for
    its sizes; None where it does, or its text is not known."""
    cls = layers.native_class(module) or type(module)
    if (cls, key) not in _lowered_names:
        _lowered_names[cls, key] = _handed_on(inspect.unwrap(cls.forward), key)
    return _lowered_names[cls, key]


def _handed_on(function, key):
    from .rewritten import TWISTED, NotRewritten, text_of

    try:
        tree = text_of(function) if isinstance(function, FunctionType) else None
    except NotRewritten:
        tree = None
    if tree is None or any(isinstance(node, TWISTED) for node in ast.walk(tree) if node is not tree):
        return None
    names = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)]
    if isinstance(key, int):
        if key + 1 >= len(names):
            return None
        key = names[key + 1]
    if key not in (*names, *(argument.arg for argument in tree.args.kwonlyargs)):
        return None
    tracked, found = {key}, []
    for statement in tree.body:
        if not _hands_on(statement, tracked, found):
            return None
    return tuple(dict.fromkeys(found)) or None


def _hands_on(statement, tracked: set[str], found: list[str]) -> bool:
    """Goes through a statement: what it does with values of these names. Names that become such values, or are so no
    longer, are added and taken out."""
    allowed, aliases = set(), set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords and _is(node.args[0], tracked):
            function = node.func
            if isinstance(function, ast.Attribute) and _is(function.value, {"self"}):
                found.append(function.attr)
                allowed.add(id(node.args[0]))
        elif isinstance(node, ast.Attribute) and _is(node.value, tracked) and node.attr in SIZES:
            allowed.add(id(node.value))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
            ours = [value for value in values if _is(value, tracked)]
            allowed |= {id(value) for value in ours}
            if ours:
                aliases.add(node.targets[0].id)
    for node in ast.walk(statement):
        if isinstance(node, ast.AugAssign) and _is(node.target, tracked):
            return False
        if _is(node, tracked) and isinstance(node.ctx, ast.Load) and id(node) not in allowed:
            return False
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            for element in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                if isinstance(element, ast.Name):
                    tracked.discard(element.id)
    tracked |= aliases
    return True


def _is(node, names) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _lowers_argument(module, key) -> bool:
    """Whether a module's forward hands that argument to plain linear layers, and does nothing else with it."""
    if not isinstance(module, torch.nn.Module):
        return False
    if _lowers(module) or _computes(module, layers._conv1d):
        return key in (0, "input", "x")
    names = lowered_names(module, key)
    if names is None or unlike(module, (type(module),)) is not None:
        return False
    children = [module._modules[name] for name in names if module._modules.get(name) is not None]
    return len(children) > 0 and all(_is_linear(child) for child in children)


def _half_for(consumer, key, *inputs) -> torch.dtype | None:
    """The dtype to which autocast rounds what `consumer` is given, where that is what an op makes of `inputs` in
    float32."""
    device = inputs[0].device.type
    if not autocasts(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    fits = dtype in HALVES and all(input.dtype is torch.float32 or input.dtype is dtype for input in inputs)
    return dtype if fits and _lowers_argument(consumer, key) else None


# ---- the functions


def _rms_arguments(norm, input) -> tuple | None:
    """normalized_shape, weight and eps of a norm that is rms_norm of such an input."""
    if is_plain(norm, "m") and letter_of(norm) == "m":
        return norm.normalized_shape, parameter(norm, "weight"), norm.eps
    if _computes(norm, layers._rms_norm):
        weight = parameter(norm, "weight")
        if weight.dtype is input.dtype and input.dtype is not torch.float64 and input.shape[-1:] == weight.shape:
            return weight.shape, weight, norm.variance_epsilon
    return None


def norm_before(input: Tensor, norm, consumer, key) -> Tensor:
    """norm(input), which `consumer` alone is given, as that argument: under autocast in the dtype that this lowers it
    to."""
    if takes(input) and input.dtype is torch.float32:
        dtype = _half_for(consumer, key, input)
        if dtype is not None and letter_of(norm) == "n" and is_plain(norm, "n"):
            weight, bias = parameter(norm, "weight"), parameter(norm, "bias")
            return layer_norm_rounded_forward(input, norm.normalized_shape, weight, bias, norm.eps, dtype)[0]
        rms = _rms_arguments(norm, input) if dtype is not None else None
        if rms is not None and rms[2] is not None:
            return rms_norm_rounded_forward(input, *rms, dtype)[0]
    return norm(input)


def add_norm(input: Tensor, residual: Tensor, norm, consumer, key) -> tuple[Tensor, Tensor]:
    """norm(input + residual), which `consumer` alone is given, and the sum."""
    is_layer_norm = letter_of(norm) == "n" and is_plain(norm, "n")
    if _is_sum_of_rows(input, residual, None):
        if is_layer_norm:
            weight, bias = parameter(norm, "weight"), parameter(norm, "bias")
            return functional.add_layer_norm(input, residual, norm.normalized_shape, weight, bias, norm.eps)
        rms = _rms_arguments(norm, input)
        if rms is not None:
            return functional.add_rms_norm(input, residual, *rms)
    elif _are_alike(input, residual) and input.dtype is not residual.dtype:
        dtype = _half_for(consumer, key, input, residual)
        if dtype is not None:
            if residual.dtype is dtype:  # the kernels have them the other way round
                input, residual = residual, input
            if is_layer_norm:
                arguments = norm.normalized_shape, parameter(norm, "weight"), parameter(norm, "bias"), norm.eps
                return add_layer_norm_rounded_forward(input, residual, *arguments, dtype)[:2]
            rms = _rms_arguments(norm, residual)
            if rms is not None and rms[2] is not None:
                return add_rms_norm_rounded_forward(input, residual, *rms, dtype)[:2]
    total = input + residual
    return norm_before(total, norm, consumer, key), total


def is_activation(linear, activation) -> str | None:
    """The name of the op that a linear layer and an activation behind it are."""
    if linear is None or activation is None or not (letter_of(linear) == "l" or _computes(linear, layers._conv1d)):
        return None
    if letter_of(activation) in "rg":
        return "linear_relu" if letter_of(activation) == "r" else "linear_gelu"
    return "linear_gelu" if _computes(activation, layers._gelu_of_tanh) else None


def product_and_activation(input: Tensor, linear, activation) -> Tensor:
    """activation(linear(input))."""
    letter = letter_of(activation)
    approximate = "tanh" if _computes(activation, layers._gelu_of_tanh) else getattr(activation, "approximate", "none")
    function = is_activation(linear, activation) if takes(input) else None
    plain = function and (letter == "-" or is_plain(activation, letter)) and _is_linear(linear)
    if not plain:
        return activation(linear(input))
    weight, bias = parameter(linear, "weight"), parameter(linear, "bias")
    if letter_of(linear) != "l":
        weight = _transposed(weight, input)
        if weight is None:
            return activation(linear(input))
    if function == "linear_relu":
        return functional.linear_relu(input, weight, bias)
    return functional.linear_gelu(input, weight, bias, approximate)


def _transposed(weight, input) -> Tensor | None:
    """A weight of Conv1D's as linear_gelu's kernels have it; None where it is not worth the copy."""
    dtype = torch.get_autocast_dtype("cuda") if autocasts(input.device.type) else weight.dtype
    if not input.is_cuda or dtype not in HALVES or weight.dim() != 2:
        return None
    if input.numel() < LEAST_ROWS * weight.shape[0] ** 2:  # of few rows, as where text is generated, the copy is more
        return None
    if not (is_dynamo_compiling() or _is_eager()):  # torch.func and forward mode know no such Function
        return None
    return _RoundedTranspose.apply(weight, dtype)


class _RoundedTranspose(torch.autograd.Function):
    """weight.t() in a half, contiguous; of the gradient too a kernel exchanges rows and columns, which PyTorch's copies
    read element by element."""

    @staticmethod
    def forward(ctx, weight, dtype):
        ctx.dtype = weight.dtype
        return functional.permute_contiguous(weight.to(dtype), (1, 0))

    @staticmethod
    def backward(ctx, grad):
        return functional.permute_contiguous(grad, (1, 0)).to(ctx.dtype), None


def is_lowered_again(input: Tensor, linear) -> bool:
    """Whether autocast would make of `input`, were it cast to float32, what it is now, in front of the layer's
    product."""
    return takes(input) and input.dtype in HALVES and _lowered_to(input) is input.dtype and _is_linear(linear)


def _lowered_to(input) -> torch.dtype | None:
    device = input.device.type
    return torch.get_autocast_dtype(device) if autocasts(device) else None


_rotations: dict[int, tuple[FunctionType, bool]] = {}


def is_rotation(function) -> bool:
    """Whether a function is transformers' apply_rotary_pos_emb of Llama: known by what it does, of doubles and of
    halves beside float32, and by its code, which has no branches."""
    if not isinstance(function, FunctionType) or function.__name__ != "apply_rotary_pos_emb":
        return False
    known = _rotations.get(id(function))
    if known is None or known[0] is not function:
        known = _rotations[id(function)] = function, _rotates(function)
    return known[1]


def _rotates(function) -> bool:
    generator = torch.Generator().manual_seed(0)

    def make(*shape, dtype=torch.float64):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    inner = inspect.unwrap(function)
    parameters = list(inspect.signature(inner).parameters.values())
    if len(parameters) < 4 or any(p.default is p.empty for p in parameters[4:]):
        return False
    if any(
        instruction.opname.startswith(("POP_JUMP", "JUMP", "FOR_ITER")) for instruction in dis.get_instructions(inner)
    ):
        return False
    try:
        with torch.no_grad():
            q, k, cos, sin = make(2, 3, 5, 4), make(2, 1, 5, 4), make(2, 5, 4), make(2, 5, 4)
            outputs = function(q, k, cos, sin)
            mixed = function(q.bfloat16(), k.bfloat16(), cos.float(), sin.float())
    except Exception:  # of other arguments
        return False
    if not isinstance(outputs, tuple) or len(outputs) != 2 or any(m.dtype != torch.float32 for m in mixed):
        return False
    return all(
        output.shape == given.shape and torch.allclose(output, functional.rotary_embedding(given, cos, sin))
        for output, given in zip(outputs, (q, k), strict=True)
    )


def rotation(function, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, lowers: bool) -> tuple[Tensor, Tensor]:
    """function(query, key, cos, sin). lowers: whether the results go nowhere but to attention, which autocast
    lowers."""
    known = _rotations.get(id(function))
    if known is None or known[0] is not function or not known[1] or not _takes_tables(query, key, cos, sin):
        return function(query, key, cos, sin)
    dtype = None
    if lowers:
        half = _lowered_to(query)
        if half in HALVES and query.dtype is half and cos.dtype in (half, torch.float32):
            dtype = half
    return tuple([functional.rotary_embedding(tensor, cos, sin, dtype) for tensor in (query, key)])


def _takes_tables(query, key, cos, sin) -> bool:
    if not all(takes(tensor) for tensor in (query, key, cos, sin)) or cos.requires_grad or sin.requires_grad:
        return False
    if query.dim() != 4 or key.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or cos.dtype is not sin.dtype:
        return False
    batch, _, length, features = query.shape
    fits = key.shape[0] == batch and key.shape[2:] == query.shape[2:] and key.dtype is query.dtype
    if not fits or features % 2 or cos.shape[0] not in (1, batch) or cos.shape[1:] != (length, features):
        return False
    return query.device == key.device == cos.device == sin.device
