"""Attention in forwards that torch.fx cannot trace, as most are: they ask for sizes, masks and caches.

A call of torch.nn.functional.scaled_dot_product_attention is reached from a module's forward through names: globals of
the module of Python it stands in (`F`, `torch`, a helper), methods of its own, functions in the cells of a decorator,
and in transformers a registry, ALL_ATTENTION_FUNCTIONS, that gives a function for the name in the model's config.
`rebound` makes a copy of a function that differs in what these names mean: its code is the same but for the names of
globals, which become others, set beside them in the same namespace. What a converted class gets as its methods are such
copies; all else, other models of the same class among it, runs what it ran. Since what a registry returns is rebound
when it is asked, and what has no such call is returned as it is, `model.set_attn_implementation` works as before.
"""

import contextlib
import dis
import sys
import sysconfig
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from weakref import WeakKeyDictionary, ref

import torch
from torch.compiler import is_dynamo_compiling

from .. import _modules
from .layers import Functions, takes

# Code of these folders is not the user's: what it does is known to torch.fx, or is ours.
KNOWN = (*(f"{Path(path).parent}/" for path in (torch.__file__, __file__)), _modules.__file__)
STANDARD = f"{sysconfig.get_paths()['stdlib']}/"

NAME = "scaled_dot_product_attention"
NATIVE = torch.nn.functional.scaled_dot_product_attention
OURS = Functions.scaled_dot_product_attention
PREFIX = "_cuda_ops_"


def is_users(code) -> bool:
    file = code.co_filename
    if file.startswith(KNOWN):
        return False
    return not file.startswith((STANDARD, "<frozen")) or "-packages/" in file


def _module(of: ModuleType, **members) -> ModuleType:
    """A module that is `of`, but for these members."""
    module = ModuleType(of.__name__, of.__doc__)
    vars(module).update(members, __getattr__=lambda name: getattr(of, name))
    return module


_functional = _module(torch.nn.functional, **{NAME: OURS})
_nn = _module(torch.nn, functional=_functional)
# {id of a module: (the names by which it leads to the function, what stands in for it)}
MODULES = {
    id(torch.nn.functional): ({NAME}, _functional),
    id(torch.nn): ({NAME, "functional"}, _nn),
    id(torch): ({NAME, "functional", "nn"}, _module(torch, nn=_nn)),
}


class Registry:
    """transformers' registry of attention functions, with what it returns rebound."""

    def __init__(self, registry):
        self.registry = registry
        self.copies: dict[str, tuple[FunctionType, FunctionType]] = {}
        """{name: (function, its copy)}, so that torch.compile, which traces strings, finds them"""

    def _copy(self, name, function):
        found = self.copies.get(name)
        if found is not None and found[0] is function:
            return found[1]
        if is_dynamo_compiling():
            return function
        copy = rebound(function)
        if copy is not function:
            self.copies[name] = function, copy
        return copy

    def get_interface(self, name, default):
        return self._copy(name, self.registry.get_interface(name, default))

    def get(self, name, default=None):
        return self._copy(name, self.registry.get(name, default))

    def __getitem__(self, name):
        return self._copy(name, self.registry[name])

    def __contains__(self, name):
        return name in self.registry

    def __getattr__(self, name):
        return getattr(self.registry, name)


def _is_registry(value) -> bool:
    modeling_utils = sys.modules.get("transformers.modeling_utils")
    kind = getattr(modeling_utils, "AttentionInterface", None)
    return kind is not None and isinstance(value, kind)


class GroupedHeads:
    """transformers' use_gqa_in_sdpa, which repeats the heads of key and value for each that they serve where there is a
    mask: our attention takes them as they are."""

    def __init__(self, function):
        self.function = function

    def __call__(self, attention_mask, key, *more):
        # A single query is put beside those of the other heads instead.
        several = type(attention_mask) in _modules.PLAIN and attention_mask.dim() == 4 and attention_mask.shape[2] > 1
        taken = several and takes(key) and all(takes(tensor) for tensor in more)
        return taken or self.function(attention_mask, key, *more)


def is_gqa_question(value) -> bool:
    name = "transformers.integrations.sdpa_attention"
    return isinstance(value, FunctionType) and (value.__module__, value.__name__) == (name, "use_gqa_in_sdpa")


def _codes(code: CodeType):
    """It, and those of comprehensions and functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


class _Names:
    """What a function refers to by name."""

    def __init__(self, function: FunctionType):
        self.attributes, of_globals, self.cells = set(), set(), {}
        for code in _codes(function.__code__):
            for instruction in dis.get_instructions(code):
                if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    of_globals.add(instruction.argval)
                elif instruction.opcode in dis.hasname:
                    self.attributes.add(instruction.argval)
        space = function.__globals__
        # A name that is an attribute's too stands in the code once, and cannot become another in one place alone.
        self.globals = {name: space[name] for name in of_globals - self.attributes if name in space}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # of a cell that is not filled yet
                self.cells[name] = cell.cell_contents

    def replacements(self) -> dict[str, object]:
        """{global that leads to the function: what stands in for it}"""
        found = {}
        for name, value in self.globals.items():
            by, module = MODULES.get(id(value), (None, None))
            if value is NATIVE:
                found[name] = OURS
            elif by is not None and by <= self.attributes:
                found[name] = module
            elif is_gqa_question(value):
                found[name] = GroupedHeads(value)
            elif _is_registry(value):
                found[name] = _registries.setdefault(id(value), Registry(value))
        return found

    def functions(self):
        """Those of Python, and not of torch or the standard library, that it may call."""
        return [value for value in (*self.globals.values(), *self.cells.values()) if _is_copied(value)]


def _is_copied(value) -> bool:
    return isinstance(value, FunctionType) and is_users(value.__code__)


# Of what functions say, which is forgotten at each conversion, since globals may be others by then.
_names: WeakKeyDictionary = WeakKeyDictionary()
_leads: WeakKeyDictionary = WeakKeyDictionary()
_copies: WeakKeyDictionary = WeakKeyDictionary()  # to references: a copy may lead to the class of its function
_registries: dict[int, Registry] = {}


def forget():
    _names.clear()
    _leads.clear()


def _names_of(function: FunctionType) -> _Names:
    names = _names.get(function)
    if names is None:  # not asked again, since another thread may forget it
        names = _names[function] = _Names(function)
    return names


def _reached(function: FunctionType) -> list[FunctionType]:
    """It, and what it may call."""
    found, to_do = {function: None}, [function]
    while to_do:
        for other in _names_of(to_do.pop()).functions():
            if other not in found:
                found[other] = None
                to_do.append(other)
    return list(found)


def _leads_there(function) -> bool:
    """Whether a call of it may end in scaled_dot_product_attention."""
    if not _is_copied(function):
        return False
    leads = _leads.get(function)
    if leads is None:
        leads = _leads[function] = any(_names_of(other).replacements() for other in _reached(function))
    return leads


def _copy_of(function):
    reference = _copies.get(function) if isinstance(function, FunctionType) else None
    return None if reference is None else reference()


def rebound(function):
    """A copy of a function that calls our attention; `function` itself if it calls none, or is none of Python's."""
    copy = _copy_of(function)
    if copy is not None:
        return copy
    if not _leads_there(function):
        return function
    names = _names_of(function)
    renamed = {*names.replacements(), *(name for name, value in names.globals.items() if _leads_there(value))}
    code, cells = _with_names(function.__code__, renamed), list(function.__closure__ or ())
    changed = [n for n, name in enumerate(code.co_freevars) if _leads_there(names.cells.get(name))]
    for n in changed:
        cells[n] = CellType()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    _copies[function] = ref(copy)  # before what it calls, which may call it
    copy.__dict__.update(function.__dict__)
    for name in ("__kwdefaults__", "__annotations__", "__qualname__", "__module__", "__doc__"):
        setattr(copy, name, getattr(function, name))
    for n in changed:
        cells[n].cell_contents = rebound(names.cells[code.co_freevars[n]])
    _set_names(function)
    return copy


def _with_names(code: CodeType, renamed: set[str]) -> CodeType:
    constants = [_with_names(c, renamed) if isinstance(c, CodeType) else c for c in code.co_consts]
    names = [PREFIX + name if name in renamed else name for name in code.co_names]
    return code.replace(co_names=tuple(names), co_consts=tuple(constants))


def _set_names(function: FunctionType):
    """What the names of its copy mean, as long as the globals that they stand for are what they are now."""
    names = _names_of(function)
    space = names.replacements()
    space |= {name: rebound(value) for name, value in names.globals.items() if _leads_there(value)}
    function.__globals__.update({PREFIX + name: value for name, value in space.items()})


def methods_of(cls: type) -> dict[str, object]:
    """{name: what stands in for this method of the class}, of forward and what it calls by `self`."""
    found = {}
    for name, (method, *_) in _methods(cls).items():
        function = _function(method)
        if _leads_there(function):
            copy = rebound(function)
            found[name] = copy if function is method else type(method)(copy)
    return found


def _methods(cls: type) -> dict[str, list]:
    """{name: the class's method, and those of its bases that it may call by super()}, of forward and what that calls by
    `self`."""
    found, seen, to_do = {}, set(), ["forward"]
    while to_do:
        name = to_do.pop()
        if name in seen:
            continue
        seen.add(name)
        there = [base for base in cls.__mro__ if name in vars(base)]
        if there and not there[0].__module__.startswith("torch."):
            methods = [vars(base)[name] for base in there if _is_copied(_function(vars(base)[name]))]
            if methods and methods[0] is vars(there[0])[name]:
                found[name] = methods
                to_do += sorted(set().union(*(_called(_function(method)) for method in methods)) - seen)
    return found


def _function(method):
    return method.__func__ if isinstance(method, (staticmethod, classmethod)) else method


def _called(function: FunctionType) -> set[str]:
    """Attributes that it, or a function which it decorates, reads."""
    names = _names_of(function)
    inner = [_called(cell) for cell in names.cells.values() if _is_copied(cell) and cell is not function]
    return names.attributes.union(*inner)


def what_is_called(module: torch.nn.Module) -> tuple[list[str], str | None]:
    """The functions by whose names a forward calls attention, those of `methods_of`, and why one stays PyTorch's."""
    names, reason = [], None
    for method, *inherited in _methods(type(module)).values():
        if any(_leads_there(_function(other)) for other in inherited) and not _leads_there(_function(method)):
            reason = "its attention is that of a base class, called by super()"
        if not _leads_there(_function(method)):
            continue
        for other in _reached(_function(method)):
            if _copy_of(other) is not None:
                _set_names(other)  # anew: a helper may be another by now
            for value in _names_of(other).replacements().values():
                if not isinstance(value, Registry):
                    names.append(f"{NAME}()")
                    continue
                kind = getattr(getattr(module, "config", None), "_attn_implementation", None) or "sdpa"
                chosen = value.registry.get(kind)
                value.get(kind)  # before torch.compile asks
                if _leads_there(chosen):
                    names.append(f"{chosen.__name__}()")
                elif kind == "eager":
                    reason = "its attention is eager, which returns the weights: set_attn_implementation('sdpa')"
                else:
                    reason = f"its attention is {kind}"
    return list(dict.fromkeys(names)), reason
