"""What makes a class of another: a forward that was traced, as a text with guards. It holds no module, parameter or
tensor, and is picklable, so that converted modules are."""

import copyreg
import functools
import importlib
import linecache
from dataclasses import dataclass
from types import MethodType, ModuleType
from weakref import WeakValueDictionary

from torch import Tensor

from . import fusing, windows
from .attention import methods_of, rebound
from .rewritten import forward_of


@dataclass(frozen=True)
class Variant:
    """A forward as text, for the modes and numbers with which it was traced."""

    source: str
    names: tuple[tuple[str, object], ...]
    """What the text calls by name."""
    readers: tuple[str, ...] = ()
    """Of a text that has `forked` too (fusing.forking_blocks): the layers that read the block's input."""

    def __reduce__(self):
        names = [(name, _ModuleName(v.__name__) if isinstance(v, ModuleType) else v) for name, v in self.names]
        return _variant_of, (self.source, names, self.readers)

    def functions(self):
        """(guard, forward, forked or None)."""
        namespace = dict(self.names)
        file = f"<cuda_ops.convert {hash(self.source):x}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)  # for tracebacks
        exec(compile(self.source, file, "exec"), namespace)
        return namespace["guard"], namespace["forward"], namespace.get("forked")


class _ModuleName(str):
    """For pickle, which keeps no modules."""


def _variant_of(source, names, readers=()):
    def value(v):
        return importlib.import_module(v) if isinstance(v, _ModuleName) else v

    return Variant(source, tuple((name, value(v)) for name, v in names), readers)


@dataclass(frozen=True)
class Recipe:
    """What makes a class of another: picklable, so that converted modules are."""

    arguments: int
    variants: tuple[Variant, ...]
    block: tuple | None = None
    """Of a forward that is no more than layer_scale_add: what fusing.residual_blocks is to know of it."""

    @property
    def key(self):
        """The same for recipes that do the same: of one text, calling the same functions."""
        texts = [(variant.source, *((name, id(value)) for name, value in variant.names)) for variant in self.variants]
        return (self.arguments, self.block, *texts)

    def __deepcopy__(self, memo):
        return self


class _Quiet:
    """In front of a class that hears of its subclasses: what registers them, or wants arguments of each, is to hear of
    none of ours. (With __slots__ its layout would be another than a module's.)"""

    def __init_subclass__(cls):
        pass


def subclass(cls: type, members: dict) -> type:
    hears = isinstance(cls.__init_subclass__, MethodType)  # object's is none of Python's
    return type(cls.__name__, (_Quiet, cls) if hears else (cls,), members)


# Sequential and its subclasses, with its forward, take fusing.run_sequence; others the forward that fusing.BLOCKS has.
SEQUENCE, BLOCK = "sequence", "block"
_classes: WeakValueDictionary[tuple, type] = WeakValueDictionary()


def converted_class(cls: type, recipe, attention: bool = False, text: str | None = None) -> type:
    """The subclass of `cls` with the forward of the recipe, if there is one, or of that text (rewritten.py), and with
    `attention` the methods by which it calls ours; the same one for the same arguments."""
    key = cls, recipe if recipe in (SEQUENCE, BLOCK, None) else recipe.key, attention, text
    made = _classes.get(key)
    if made is None:
        members = methods_of(cls) if attention else {}
        if text is not None:
            forward = forward_of(cls, text)
            members["forward"] = rebound(forward) if attention else forward
        if recipe == BLOCK:
            members["forward"] = fusing.BLOCKS[cls.__module__, cls.__qualname__][0]
        elif recipe == SEQUENCE:
            members["forward"] = fusing.run_sequence
        elif recipe is not None:
            functions = [variant.functions() for variant in recipe.variants]
            members["forward"] = _forward(members.get("forward", cls.forward), recipe.arguments, functions)
            members["cuda_ops_block"] = recipe.block
            if all(forked for *_, forked in functions):
                readers = [variant.readers for variant in recipe.variants]
                members["cuda_ops_forked"] = [
                    (guard, forked, names) for (guard, _, forked), names in zip(functions, readers, strict=True)
                ]
        if (cls.__module__, cls.__qualname__) in windows.FORWARDS:
            members["forward"] = windows.forward_of(cls, members.get("forward", cls.forward))

        def __reduce_ex__(self, protocol):
            create, arguments, *rest = cls.__reduce_ex__(self, protocol)
            if create is not copyreg.__newobj__ or arguments != (type(self),):
                return (create, arguments, *rest)  # of a class that says itself how it is copied
            return (_new, (cls, recipe, attention, text), *rest)

        members |= {"__reduce_ex__": __reduce_ex__, "cuda_ops_native": cls}
        members |= {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
        made = _classes[key] = subclass(cls, members)
    return made


def _new(cls, recipe, attention=False, text=None):
    made = converted_class(cls, recipe, attention, text)
    return made.__new__(made)


def _forward(native, count: int, variants):
    @functools.wraps(native)  # whose arguments torch.fx and others ask for by inspect.signature
    def forward(self, *args, **kwargs):
        if len(args) == count and not kwargs and all(isinstance(argument, Tensor) for argument in args):
            for guard, traced, _ in variants:
                if guard(self):
                    return traced(self, *args)
        return native(self, *args, **kwargs)

    return forward
