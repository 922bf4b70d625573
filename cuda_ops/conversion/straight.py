"""A trace of one module's forward, and what it depends on.

A trace is one path through a forward. It stands for all of them where the forward is a straight line: no branch and no
loop in any code of the user's that it ran (branches on arguments would be decided by the stand-ins that are traced) but
branches on an attribute of the module (`if self.downsample is not None`), all arguments tensors, those with a default
left out, and no tensor made on the way. What it read of the modules' numbers and flags (`self.training`,
`self.dropout.p`), which members its containers had, what it asked for in vain (`getattr(self, "gate", None)`) and what
a branch asked, is written into the new forward as a guard. A call that is not of this kind runs the forward that there
was; so does a module that cannot be traced.
"""

import dis
import gc
import inspect
import math
import operator
import sys
from threading import get_ident
from types import FunctionType, ModuleType

import torch
from torch import Tensor
from torch.fx import Tracer
from torch.fx.graph import inplace_methods

from .._modules import unlike
from .attention import is_users
from .recipes import Variant, subclass

# Numbers of theirs are drawn anew at each call.
RANDOM = ("random", "_random", "numpy.random", "secrets", "time")
# What may be another in the next call: the text of a trace would go on with what it was.
MODES = ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled")
MODES += ("get_autocast_dtype", "get_default_dtype")
# Where decorators of helpers (`@torch.no_grad()`) turn them, which a graph of calls does not.
OF_MODES = ("torch.autograd.grad_mode", "torch.autograd.forward_ad", "torch.amp.autocast_mode")
OF_MODES += ("torch.cuda.amp.autocast_mode", "torch.cpu.amp.autocast_mode")
# Of these it would go on with the members that there were; of modules' own methods that list modules, parameters and
# buffers, all of them that the walk comes by.
CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList)
CONTAINERS += (torch.nn.ParameterDict,)
LISTS = {f"{prefix}{name}" for name in ("modules", "parameters", "buffers", "children") for prefix in ("", "named_")}
LISTS |= {"state_dict", "apply"}
# What they give is known of no attribute.
BUILTINS = ("type", "vars", "dir", "globals", "locals")
BRANCHES = ("POP_JUMP", "JUMP_IF", "FOR_ITER", "SETUP_FINALLY", "SETUP_WITH", "BEFORE_WITH", "SEND", "YIELD_VALUE")


def _codes_of(classes, names=None) -> set:
    """Of these classes' methods in Python, or those of these names."""
    functions = [f for cls in classes for name, f in vars(cls).items() if names is None or name in names]
    return {inspect.unwrap(f).__code__ for f in functions if isinstance(f, FunctionType)}


OF_CONTAINERS, OF_LISTS = _codes_of(CONTAINERS), _codes_of([torch.nn.Module], LISTS)


class NotTraced(Exception):
    """Why a forward is left alone."""


class _InPlace:
    """`x += y` and its like as what they are: torch.fx takes them for `x = x + y`, of which nothing else that is `x`,
    or a view of it, would know."""

    def __getattr__(self, name):
        return _Attribute(self, name)


def _in_place(function):
    def method(self, other):
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _name in inplace_methods:
    if _name != "setitem":
        setattr(_InPlace, f"__{_name}__", _in_place(getattr(operator, _name)))


class _Proxy(_InPlace, torch.fx.Proxy):
    pass


class _Attribute(_InPlace, torch.fx.proxy.Attribute):
    pass


class _Shallow(Tracer):
    """Every submodule is a call, but with `inline` those that are no more than a function."""

    proxy_buffer_attributes = True  # what a forward writes into buffers is traced, not done

    def __init__(self, inline: bool):
        super().__init__(autowrap_modules=())
        self.inlined: dict[str, type] | None = {} if inline else None
        self.thread = get_ident()

    def proxy(self, node):
        return _Proxy(node, self)

    # While it traces, these stand in for what modules do in all threads.

    def call_module(self, module, forward, args, kwargs):
        if get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(module, forward, args, kwargs)

    def getattr(self, attr, attr_val, parameter_proxy_cache):
        if get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, module, name):
        known = type(module).__module__.startswith(("torch.", f"{__package__.partition('.')[0]}."))
        if self.inlined is None or known or module._modules or module._parameters or module._buffers:
            return True
        if unlike(module, (type(module),)) is not None:
            return True
        self.inlined[name] = type(module)
        return False


def is_still(module, kind: type) -> bool:
    """Whether a module that was inlined, and may have been converted since, is of that class and has no hooks."""
    cls = type(module)
    return (cls is kind or getattr(cls, "cuda_ops_native", None) is kind) and unlike(module, (cls,)) is None


def names_in(module) -> tuple[str, ...]:
    """Of the members that a container has."""
    spaces = (module._modules, module._parameters, module._buffers)
    return tuple([name for space in spaces for name, value in space.items() if value is not None])


class Trace:
    """A graph of one module's forward, and what it depends on."""

    def __init__(self, module, arguments: list[str], inline: bool):
        self.paths = {id(m): f"self.{name}" if name else "self" for name, m in module.named_modules()}
        self.reads: dict[str, str] = {}
        """{expression: its value, as text}"""
        self.read_anew: set[str] = set()
        """Expressions of modules and tensors, which the new forward reads too."""
        self.present: set[str] = set()
        """Those of them that a branch has found not to be None."""
        self.absent: set[tuple[str, str]] = set()
        """(module, name) of what it has asked for and not found."""
        self.members: dict[str, tuple[str, ...]] = {}
        """{container: the names in it}"""
        self.functions: dict[str, object] = {}
        """Functions that are attributes of a module: {expression: function}"""
        self.codes: set = set()
        self.refused = None
        tracer = _Shallow(inline)
        cls = type(module)
        spaces = [s for m in module.modules() for s in (m.__dict__, m._parameters, m._buffers, m._modules)]
        before = [(space, dict(space)) for space in spaces]
        if any(isinstance(value, Tensor) for value in module.__dict__.values()):
            raise NotTraced("it keeps tensors that are neither parameters nor buffers")
        text = f"lambda self, {', '.join(arguments)}: forward(self, {', '.join(arguments)})"
        call = eval(compile(text, __file__, "eval"), {"forward": cls.forward})
        module.__class__ = subclass(cls, {"forward": call})
        try:
            with _Observation(self, call.__code__):
                self.graph = tracer.trace(module)
        except Exception as error:  # whatever a forward comes up with where its argument is a stand-in
            raise NotTraced(f"torch.fx: {(str(error) or type(error).__name__).splitlines()[0]}") from error
        finally:
            module.__class__ = cls
            written = False
            for now, then in before:
                if now.keys() != then.keys() or any(now[name] is not then[name] for name in then):
                    written = True
                    now.clear()
                    now.update(then)
        if written:
            raise NotTraced("it makes tensors or sets attributes")
        if self.refused:
            raise NotTraced(self.refused)
        asked = [check_straight(code) for code in self.codes]
        whether_there, whether_true = (set().union(*names) for names in zip(*asked, strict=True)) if asked else ((), ())
        read = {name.rpartition(".")[2] for name in (*self.reads, *self.functions, *self.read_anew)}
        for attribute in (set(whether_there) | set(whether_true)) - read:
            raise NotTraced(f"it branches on {attribute}, which is no attribute of a module")
        for name in self.read_anew:
            attribute = name.rpartition(".")[2]
            if attribute in whether_true:
                raise NotTraced(f"it branches on {name}, of which more is asked than whether it is None")
            if attribute in whether_there:
                self.present.add(name)
        self.inlined = {f"self.{name}": kind for name, kind in (tracer.inlined or {}).items()}

    def depends(self) -> bool:
        """Whether the new forward holds for some states of the module alone."""
        return bool(self.reads or self.present or self.functions or self.inlined or self.absent or self.members)

    def read(self, module, name, value):
        """A line of the user's reads module.<name>."""
        path = self.paths.get(id(module))
        if isinstance(value, (Tensor, torch.nn.Module)):
            return  # read anew by the new forward
        if isinstance(value, type):
            self.refused = f"it reads {type(module).__name__}.{name}, a class"
            return
        if name not in object.__getattribute__(module, "__dict__") and callable(value):
            return  # a method: its code is looked at when it runs
        if path is None:
            self.refused = f"it reads {type(module).__name__}.{name}, of a module that is none of its own"
        elif isinstance(value, FunctionType) or inspect.isbuiltin(value):
            self.functions[f"{path}.{name}"] = value
        elif _is_constant(value):
            self.reads[f"{path}.{name}"] = repr(tuple(value) if isinstance(value, torch.Size) else value)
        else:
            self.refused = f"it reads {path}.{name}, of type {type(value).__name__}"

    def read_held(self, module, name):
        """A line of the user's reads a submodule, parameter or buffer, which the new forward reads too."""
        path = self.paths.get(id(module))
        held = [space for space in (module._modules, module._parameters, module._buffers) if name in space]
        if path is None:
            return
        if not held:
            self.absent.add((path, name))
        elif held[0][name] is None:
            self.reads[f"{path}.{name}"] = "None"
        else:
            self.read_anew.add(f"{path}.{name}")

    def read_members(self, container):
        """A line of the user's asks a container for its members, or for one."""
        path = self.paths.get(id(container))
        if path is None:
            self.refused = f"it reads a {type(container).__name__} that is none of its own"
        else:
            self.members[path] = names_in(container)

    def variant(self, forked=None) -> Variant:
        code, source, readers = self.graph.python_code("self"), "", ()
        names = {name: value for name, value in code.globals.items() if name in code.src}
        if forked is not None:
            graph, readers = forked
            more = graph.python_code("self")
            source = "\n" + more.src.replace("def forward(", "def forked(", 1)
            names |= {name: value for name, value in more.globals.items() if name in more.src}
        conditions = [f"{_path(name)} == {value}" for name, value in sorted(self.reads.items())]
        conditions += [f"{_path(name)} is not None" for name in sorted(self.present)]
        conditions += [f"not hasattr({_path(path)}, {name!r})" for path, name in sorted(self.absent)]
        for path, members in sorted(self.members.items()):
            names["_names_in"] = names_in
            conditions.append(f"_names_in({_path(path)}) == {members}")
        for number, (name, function) in enumerate(sorted(self.functions.items())):
            names[f"_read_{number}"] = function
            conditions.append(f"{_path(name)} is _read_{number}")
        for number, (name, kind) in enumerate(sorted(self.inlined.items())):
            names |= {f"_class_{number}": kind, "_is_still": is_still}
            conditions.append(f"_is_still({_path(name)}, _class_{number})")
        guard = "def guard(self):\n    return True\n"
        if conditions:  # of what may have gone since
            asked = " and ".join(conditions)
            guard = f"def guard(self):\n    try:\n        return {asked}\n"
            guard += "    except AttributeError:\n        return False\n"
        sorted_names = tuple(sorted(names.items(), key=lambda item: item[0]))
        return Variant(f"{guard}\n{code.src}{source}", sorted_names, readers)


class _Observation:
    """While it is entered, `trace` is told which code of the user's runs, and what that reads of modules."""

    def __init__(self, trace: Trace, first):
        self.trace, self.first = trace, first

    def __enter__(self):
        trace, first, thread = self.trace, self.first, get_ident()
        running = False

        def read(module, name):
            if get_ident() != thread:
                return object.__getattribute__(module, name)
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:  # of a submodule, parameter or buffer, which __getattr__ will find
                if is_users(sys._getframe(1).f_code):
                    trace.read_held(module, name)
                raise
            if is_users(sys._getframe(1).f_code):
                trace.read(module, name, value)
            return value

        def profile(frame, event, function):
            nonlocal running
            if event == "call" and is_users(frame.f_code) and (running or frame.f_code is first):
                for name in _variables_read(frame):
                    trace.refused = f"it reads {name}, which is no attribute of a module"
            if frame.f_code is first:  # before and after it, torch.fx looks at what the modules have
                running = event != "return"
            elif not running:
                return
            elif event == "call":
                if is_users(frame.f_code):
                    trace.codes.add(frame.f_code)
                elif frame.f_code in OF_CONTAINERS and is_users(frame.f_back.f_code):
                    trace.read_members(frame.f_locals[frame.f_code.co_varnames[0]])
                elif frame.f_code in OF_LISTS and is_users(frame.f_back.f_code):
                    trace.refused = f"it asks for {frame.f_code.co_name}()"
                elif frame.f_code.co_name == "__enter__" and frame.f_globals.get("__name__") in OF_MODES:
                    trace.refused = "a function that it calls runs in a mode of its own"
                elif frame.f_globals.get("__name__") in RANDOM:
                    trace.refused = "it draws numbers that are no tensors"
            elif event == "c_call" and is_users(frame.f_code):
                if getattr(function, "__name__", None) in MODES:
                    trace.refused = f"it asks {function.__name__}"
                owner = getattr(function, "__self__", None)
                if getattr(function, "__module__", None) in RANDOM or type(owner).__module__ in RANDOM:
                    trace.refused = "it draws numbers that are no tensors"

        # The collector's callbacks (hypothesis has one) and finalizers would run here as if the forward called them.
        self.collects = gc.isenabled()
        gc.disable()
        self.before = sys.getprofile()
        torch.nn.Module.__getattribute__ = read
        sys.setprofile(profile)

    def __exit__(self, *exception):
        sys.setprofile(self.before)
        del torch.nn.Module.__getattribute__
        if self.collects:
            gc.enable()


def _variables_read(frame) -> list[str]:
    """Names of what a function's code reads beside its arguments, globals, their attributes and variables of functions
    around it, and that is no function, class, module or dtype: a program may change it after the trace."""
    found, name, value = set(), "", None
    for each in dis.get_instructions(frame.f_code):
        if each.opname == "LOAD_GLOBAL":
            name, value = each.argval, frame.f_globals.get(each.argval, type)  # else Python's own
            if name in BUILTINS and name not in frame.f_globals:
                found.add(f"{name}()")
        elif each.opname == "LOAD_DEREF" and each.argval in frame.f_code.co_freevars and each.argval in frame.f_locals:
            name, value = each.argval, frame.f_locals[each.argval]
        elif each.opname == "LOAD_ATTR" and name and isinstance(value, (type, ModuleType)) and value is not math:
            name, value = f"{name}.{each.argval}", getattr(value, each.argval, type)
        else:
            name = ""
            continue
        if not (callable(value) or isinstance(value, (ModuleType, torch.dtype))):
            found.add(name)
    return sorted(found)


def _is_constant(value) -> bool:
    if type(value) in (tuple, list, torch.Size):
        return all(_is_constant(v) for v in value)
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def check_straight(function) -> tuple[set[str], set[str]]:
    """Raises NotTraced where the code is no straight line; returns the attributes of `self` of which a branch asks
    whether they are None, and those of which one asks more."""
    code = getattr(function, "__code__", function)
    if not hasattr(code, "co_code"):
        raise NotTraced("its forward is no function of Python")
    if getattr(code, "co_exceptiontable", b""):
        raise NotTraced(f"{code.co_name} handles exceptions, or has a with statement")
    whether_there, whether_true = set(), set()
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG", "TO_BOOL")]
    for number, instruction in enumerate(instructions):
        after = instructions[number + 1].opname if number + 1 < len(instructions) else ""
        if instruction.opname == "IS_OP" and not after.startswith("POP_JUMP"):
            raise NotTraced(f"{code.co_name} asks whether two things are one")  # of stand-ins it would be told no
        if not instruction.opname.startswith(BRANCHES):
            continue
        asks_none = instruction.opname.endswith("NONE")
        before = instructions[max(0, number - 4) : number]
        if len(before) > 2 and before[-1].opname == "IS_OP" and before[-2].argval is None:  # as Python 3.10 asks it
            before, asks_none = before[:-2], True
        attribute = before[-1].argval if before and before[-1].opname == "LOAD_ATTR" else None
        owner = before[-2] if len(before) > 1 else None
        of_module = owner is not None and owner.opname.startswith("LOAD_FAST") and owner.argval == "self"
        forwards = isinstance(instruction.argval, int) and instruction.argval > instruction.offset
        if not (instruction.opname.startswith("POP_JUMP") and forwards and attribute and of_module):
            raise NotTraced(f"{code.co_name} branches or loops")
        (whether_there if asks_none else whether_true).add(attribute)
    return whether_there, whether_true


def _path(name: str) -> str:
    """self.0.p, of a Sequential's member, is no Python."""
    first, *rest = name.split(".")
    for part in rest:
        first = f"{first}.{part}" if part.isidentifier() else f"getattr({first}, {part!r})"
    return first
