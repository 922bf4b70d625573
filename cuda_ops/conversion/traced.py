"""Other modules' own forward: traced by torch.fx, one module at a time, its submodules being calls.

A trace is one path through a forward. It stands for all of them where the forward is a straight line: no branch and no
loop in any code of the user's that it ran (branches on arguments would be decided by the stand-ins that are traced) but
branches on an attribute of the module (`if self.downsample is not None`), all arguments tensors, those with a default
left out, and no tensor made on the way. What it read of the modules' numbers and flags (`self.training`,
`self.dropout.p`), which members its containers had, what it asked for in vain (`getattr(self, "gate", None)`) and what
a branch asked, is written into the new forward as a guard. A call that is not of this kind runs the forward that there
was; so does a module that cannot be traced.

Of the trace, runs of layers become calls of fusing.py, and functions of torch.nn.functional become ours. The new
forward is a text that calls the same submodules by name: it holds no module, no parameter and no tensor.
"""

import copyreg
import dis
import gc
import importlib
import inspect
import linecache
import math
import operator
import sys
from dataclasses import dataclass
from types import FunctionType, ModuleType

import torch
from torch import Tensor
from torch.fx import Graph, Tracer

from .._modules import unlike
from . import fusing, windows
from .attention import NATIVE, is_users, methods_of, rebound
from .fusing import ACTIVATIONS, GATES, LETTER_OF, is_simple_window
from .layers import FUNCTIONS, Functions
from .rewritten import forward_of

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


# Sequential and its subclasses, with its forward, take fusing.run_sequence; others the forward that fusing.BLOCKS has.
SEQUENCE, BLOCK = "sequence", "block"
_classes: dict[tuple, type] = {}


def converted_class(cls: type, recipe, attention: bool = False, text: str | None = None) -> type:
    """The subclass of `cls` with the forward of the recipe, if there is one, or of that text (rewritten.py), and with
    `attention` the methods by which it calls ours; the same one for the same arguments."""
    key = cls, recipe if recipe in (SEQUENCE, BLOCK, None) else recipe.key, attention, text
    if key not in _classes:
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
        _classes[key] = type(cls.__name__, (cls,), members)
    return _classes[key]


def _new(cls, recipe, attention=False, text=None):
    made = converted_class(cls, recipe, attention, text)
    return made.__new__(made)


def _forward(native, count: int, variants):
    def forward(self, *args, **kwargs):
        if len(args) == count and not kwargs and all(isinstance(argument, Tensor) for argument in args):
            for guard, traced, _ in variants:
                if guard(self):
                    return traced(self, *args)
        return native(self, *args, **kwargs)

    return forward


def recipe_of(module: torch.nn.Module) -> tuple[Recipe | None, list[tuple[str, tuple[str, ...]]]]:
    """The recipe for this module's class, and what it fuses or replaces: (what, names of layers); None where there is
    nothing to gain. Raises NotTraced with the reason."""
    arguments = _required(module)
    _check_straight(inspect.unwrap(type(module).forward))
    variants, blocks, gains, was_training = [], [], [], module.training
    try:
        for training in (was_training, not was_training):
            module.training = training
            try:
                trace = _Trace(module, arguments, inline=True)
            except NotTraced:
                trace = _Trace(module, arguments, inline=False)
            found = _rewrite(trace.graph, module)
            if found:
                variants.append(trace.variant(_forked_block(trace.graph) if len(arguments) == 1 else None))
                blocks.append(None if trace.depends() else _residual_block(trace.graph))
                gains += [gain for gain in found if gain not in gains]
            if "self.training" not in trace.reads:
                break
    finally:
        module.training = was_training
    block = blocks[0] if len(blocks) == 1 and len(arguments) == 1 else None
    return (Recipe(len(arguments), tuple(variants), block) if variants else None), gains


def _residual_block(graph: Graph):
    """Names of a branch, a weight and a StochasticDepth (or None, or what it is called with), and whether the sum is in
    place, of a graph that is layer_scale_add of the branch of its argument, and of that; else None."""
    nodes = [node for node in graph.nodes if node.op != "get_attr"]
    if [node.op for node in nodes] != ["placeholder", "call_module", "call_function", "output"]:
        return None
    input, branch, total, output = nodes
    if total.target is not fusing.layer_scale_add or output.args[0] is not total or branch.args != (input,):
        return None
    depth = total.args[3]
    name = depth.target if isinstance(depth, torch.fx.Node) else depth
    names = branch.target + total.args[2].target + (name if type(name) is str else "")
    if branch.kwargs or total.args[:2] != (branch, input) or "." in names:
        return None
    return branch.target, total.args[2].target, name, total.args[4]


def _forked_block(graph: Graph):
    """Of a graph that is batch_norm_act of a branch, which begins with a convolution of the argument, and of a sum with
    that argument, or with one layer's result of it: the graph with an argument for each of these two, which returns its
    output for two readers likewise (fusing.forking_blocks); and the names of the layers that read. Else None."""
    (input,) = [node for node in graph.nodes if node.op == "placeholder"]
    total = next(node for node in graph.nodes if node.op == "output").args[0]
    if not isinstance(total, torch.fx.Node) or total.target is not fusing.batch_norm_act or len(input.users) != 2:
        return None
    residual = total.args[3]
    of_sum = total if residual is input else residual
    if residual is None or total.args[0] is input or of_sum not in input.users or len(total.users) != 1:
        return None
    (of_branch,) = [node for node in input.users if node is not of_sum]
    if not of_branch.args:
        return None
    conv = of_branch.args[1] if of_branch.target is fusing.conv_bn_act else of_branch
    readers = [conv.target]
    if of_branch.args[0] is not input or (conv is of_branch and (conv.op != "call_module" or conv.args != (input,))):
        return None
    if of_sum is not total:
        if of_sum.op != "call_module" or of_sum.args != (input,) or of_sum.kwargs or len(of_sum.users) != 1:
            return None
        readers.append(of_sum.target)
    if any("." in name for name in readers):
        return None
    forked, copies = Graph(), {}
    pair = forked.graph_copy(graph, copies)
    with forked.inserting_after(copies[input]):
        other = forked.placeholder("other")
    copies[of_sum].replace_input_with(copies[input], other)
    pair.target = fusing.batch_norm_act_forked
    forked.output(pair)
    return forked, tuple(readers)


def _required(module) -> list[str]:
    if "forward" in module.__dict__:
        raise NotTraced("has a forward that was set on it")
    names = []
    for parameter in list(inspect.signature(type(module).forward).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL or (
            parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        ):
            raise NotTraced(f"takes *{parameter.name}")
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.default is parameter.empty:
            names.append(parameter.name)
    if not names:
        raise NotTraced("takes no argument that is always a tensor")
    return names


class _Shallow(Tracer):
    """Every submodule is a call, but with `inline` those that are no more than a function."""

    proxy_buffer_attributes = True  # what a forward writes into buffers is traced, not done

    def __init__(self, inline: bool):
        super().__init__(autowrap_modules=())
        self.inlined: dict[str, type] | None = {} if inline else None

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


class _Trace:
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
        module.__class__ = type(cls.__name__, (cls,), {"forward": call})
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
        asked = [_check_straight(code) for code in self.codes]
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

    def __init__(self, trace: _Trace, first):
        self.trace, self.first = trace, first

    def __enter__(self):
        trace, first = self.trace, self.first
        running = False

        def read(module, name):
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


def _check_straight(function) -> tuple[set[str], set[str]]:
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


# What is found in a trace.


def _rewrite(graph: Graph, module) -> list[tuple[str, tuple[str, ...]]]:
    """Fuses and replaces; returns what, and the layers by name."""
    found = _Finder(graph, module)
    for node in list(graph.nodes):
        found.try_norm(node)
    for node in list(graph.nodes):
        found.try_pool(node)
    for node in list(graph.nodes):
        found.try_batch_norm(node)
    for node in list(graph.nodes):
        found.try_fold(node)
    for node in list(graph.nodes):
        found.try_activation(node)
    for node in list(graph.nodes):
        found.try_gated(node)
    for node in list(graph.nodes):
        found.try_excitation(node)
    for node in list(graph.nodes):
        found.try_layer_scale(node)
    for node in list(graph.nodes):
        found.try_function(node)
    if found.gains:  # not worth a forward of its own
        for node in list(graph.nodes):
            found.try_norm_before(node)
        for node in list(graph.nodes):
            found.try_sum(node)
        for node in list(graph.nodes):
            found.try_sequences(node)
    return found.gains


class _Finder:
    def __init__(self, graph: Graph, module):
        self.graph, self.module, self.gains, self.done = graph, module, [], set()

    def letter(self, node) -> str:
        """Of a node that calls a layer, or a function in its place, with one tensor and constants."""
        if not isinstance(node, torch.fx.Node) or not node.args or not isinstance(node.args[0], torch.fx.Node):
            return "-"
        if node.op == "call_module":
            alone = len(node.args) == 1 and not node.kwargs
            return LETTER_OF.get(type(self.module.get_submodule(node.target)), "-") if alone else "-"
        if node.op == "call_function":
            function = FUNCTIONS.get(node.target)
            for letter, name in ACTIVATIONS.items():
                if function is getattr(Functions, name) and set(node.kwargs) <= {"inplace"}:
                    return letter
            for letter, name in GATES.items():
                if function is getattr(Functions, name) and set(node.kwargs) <= {"inplace"}:
                    return letter
            if function is Functions.gelu and len(node.args) == 1 and set(node.kwargs) <= {"approximate"}:
                return "g"
            if node.target is torch.nn.functional.max_pool2d and self.window(node):
                return "p"
        if node.op == "call_method" and node.target in ("relu", "sigmoid") and len(node.args) == 1:
            return "r" if node.target == "relu" else "S"
        return "-"

    @staticmethod
    def window(node):
        """kernel_size, stride and padding of a call of max_pool2d, if there is nothing else."""
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
        given = dict(zip(names, node.args[1:], strict=False)) | node.kwargs
        kernel, stride, padding = given.pop("kernel_size", None), given.pop("stride", None), given.pop("padding", 0)
        plain = all(given.pop(name, value) == value for name, value in zip(names[3:], (1, False, False), strict=True))
        numbers = [v for w in (kernel, stride, padding) for v in (w if isinstance(w, (tuple, list)) else [w])]
        if given or not plain or kernel is None or not all(type(v) is int or v is stride for v in numbers):
            return None
        area = kernel[0] * kernel[-1] if isinstance(kernel, (tuple, list)) else kernel * kernel
        return (kernel, stride, padding) if 0 < area <= fusing.MOST_WINDOW else None

    def before(self, node, letter):
        """The node whose result `node` alone takes, if it is of that letter."""
        source = node.args[0]
        return source if self.letter(source) == letter and len(source.users) == 1 else None

    def layer(self, node):
        """The module of a node as an argument; None for a function."""
        return self.graph.get_attr(node.target) if node is not None and node.op == "call_module" else None

    def call(self, where, function, *arguments):
        new = self.graph.call_function(function, arguments)
        self.done.add(new)
        return new

    def gain(self, what, *nodes):
        names = [node.target if node.op == "call_module" else f"{node.name}()" for node in nodes if node is not None]
        self.gains.append((what, tuple(names)))

    def replace(self, nodes, new):
        """`new` for the last of the nodes, which end in each other alone."""
        nodes[-1].replace_all_uses_with(new)
        for node in reversed(nodes):
            self.graph.erase_node(node)

    def try_pool(self, pool):
        if self.letter(pool) != "p":
            return
        relu = self.before(pool, "r")
        norm = relu and self.before(relu, "b")
        conv = norm and self.before(norm, "c")
        if not conv or conv.op != "call_module" or norm.op != "call_module":
            return
        if pool.op == "call_module" and not is_simple_window(self.module.get_submodule(pool.target)):
            return
        # Where the first of them is, here and below: what that reads may be written to before the last.
        with self.graph.inserting_before(conv):
            window = self.window(pool) if pool.op == "call_function" else None
            layers = [self.layer(node) for node in (conv, norm, relu, pool)]
            new = self.call(pool, fusing.conv_bn_relu_pool, conv.args[0], *layers, window)
        self.gain("conv_bn_relu_pool", conv, norm, relu, pool)
        self.replace((conv, norm, relu, pool), new)

    def try_batch_norm(self, node):
        """The norm, then a sum or not, then an activation."""
        letter = self.letter(node)
        if letter not in ACTIVATIONS:
            return
        total, residual, inplace = node.args[0], None, False
        norm = self.before(node, "b")
        if norm is None and total not in self.done and len(total.users) == 1:
            inplace = isinstance(total, torch.fx.Node) and total.target in (operator.iadd, "add_")
            if inplace and len(total.args) == 2 and not total.kwargs and isinstance(total.args[1], torch.fx.Node):
                sides = [total.args]  # it is written into the norm's result
            else:
                sides = [total.args, total.args[::-1]] if self.is_sum(total) else []
            for first, second in sides:
                if self.letter(first) == "b" and len(first.users) == 1 and first is not second:
                    norm, residual = first, second
                    break
        if norm is None or norm.op != "call_module":
            return
        conv = self.before(norm, "c") if residual is None else None
        folds = conv is not None and conv.op == "call_module"
        with self.graph.inserting_before(conv if folds else norm if residual is None else node):
            activation = self.layer(node) if node.op == "call_module" else ACTIVATIONS[letter]
            if folds:
                new = self.call(node, fusing.conv_bn_act, conv.args[0], self.layer(conv), self.layer(norm), activation)
                self.gain("conv_bn_act", conv, norm, node)
                self.replace((conv, norm, node), new)
                return
            new = self.call(node, fusing.batch_norm_act, norm.args[0], self.layer(norm), activation, residual, inplace)
        nodes = (norm, node) if residual is None else (norm, total, node)
        self.gain("batch_norm_act", *nodes)
        self.replace(nodes, new)

    def try_fold(self, norm):
        """A norm behind a convolution, and nothing behind it that goes with the two."""
        conv = self.before(norm, "c") if self.letter(norm) == "b" else None
        if conv is None or conv.op != "call_module":
            return
        with self.graph.inserting_before(conv):
            new = self.call(norm, fusing.conv_bn_act, conv.args[0], self.layer(conv), self.layer(norm))
        self.gain("conv_bn_act", conv, norm)
        self.replace((conv, norm), new)

    def try_activation(self, node):
        letter = self.letter(node)
        linear = self.before(node, "l") if letter in "rg" else None
        if not linear or linear.op != "call_module":
            return
        function = fusing.linear_relu if letter == "r" else fusing.linear_gelu
        with self.graph.inserting_before(linear):
            extra = [node.kwargs.get("approximate", "none")] if letter == "g" and node.op == "call_function" else []
            new = self.call(node, function, linear.args[0], self.layer(linear), self.layer(node), *extra)
        self.gain(function.__name__, linear, node)
        self.replace((linear, node), new)

    def try_gated(self, product):
        """An activation times something that it has not made."""
        if not self.is_of_two(product, (operator.mul, torch.mul), "mul"):
            return
        for activation, value in (product.args, product.args[::-1]):
            letter = self.letter(activation)
            alone = letter in "sgSH" and len(activation.users) == 1 and activation is not value
            if letter in GATES and not self.is_pointwise(activation.args[0]):
                continue  # what it opens are not an image's channels
            if alone and len(activation.args) == 1 and not activation.kwargs.get("inplace"):
                break
        else:
            return
        if letter in GATES:
            function = "scale_channels"
            with self.graph.inserting_before(product):
                arguments = activation.args[0], self.layer(activation), value, GATES[letter]
                new = self.call(product, fusing.scale_channels, *arguments)
            self.gain(function, activation, product)
            self.replace((activation, product), new)
            return
        function = "swiglu" if letter == "s" else "geglu"
        with self.graph.inserting_before(product):
            extra = [activation.kwargs.get("approximate", "none")] if activation.op == "call_function" else []
            layer = self.layer(activation)
            new = self.call(product, fusing.gated, activation.args[0], layer, value, function, *extra)
        self.gain(function, activation, product)
        self.replace((activation, product), new)

    def try_excitation(self, conv2):
        """Two convolutions of 1x1 with an activation between them, of an image that is pooled to a pixel."""
        if not self.is_pointwise(conv2):
            return
        activation = conv2.args[0]
        letter = self.letter(activation)
        conv1 = self.before(activation, "c") if letter in ACTIVATIONS and len(activation.users) == 1 else None
        if conv1 is None or not self.is_pointwise(conv1) or not self.is_pooled(conv1.args[0]):
            return
        with self.graph.inserting_before(conv1):  # where its input is as it was read
            function = self.layer(activation) or ACTIVATIONS[letter]
            new = self.call(conv2, fusing.excitation, conv1.args[0], self.layer(conv1), function, self.layer(conv2))
        self.gain("excitation", conv1, activation, conv2)
        self.replace((conv1, activation, conv2), new)

    def is_pooled(self, node) -> bool:
        if not isinstance(node, torch.fx.Node) or node.op != "call_module":
            return False
        module = self.module.get_submodule(node.target)
        return isinstance(module, torch.nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1))

    def is_pointwise(self, node) -> bool:
        """Whether a node is a convolution of 1x1, as those of a squeeze-and-excitation block are, for one user, so that
        nobody writes to its result."""
        is_conv = self.letter(node) == "c" and node.op == "call_module" and len(node.users) == 1
        return is_conv and self.module.get_submodule(node.target).kernel_size == (1, 1)

    def try_norm(self, norm):
        if norm.op != "call_module" or self.letter(norm) not in "nm":
            return
        total = norm.args[0]
        if total in self.done or not self.is_sum(total):
            return
        input, residual = total.args
        if self.letter(input) != "d" and self.letter(residual) == "d":
            input, residual = residual, input
        drop = input if self.letter(input) == "d" and input.op == "call_module" and len(input.users) == 1 else None
        function = fusing.add_layer_norm if self.letter(norm) == "n" else fusing.add_rms_norm
        if drop is not None and not self.stays(drop):
            drop = None
        with self.graph.inserting_before(total):
            source = drop.args[0] if drop is not None else input
            consumer = self.consumer(norm) if function is fusing.add_layer_norm else None
            more = () if consumer is None else (self.layer(consumer),)
            both = self.call(total, function, source, residual, self.layer(drop), self.layer(norm), *more)
            output, sum_ = (self.call(total, operator.getitem, both, i) for i in (0, 1))
        self.gain(function.__name__, drop, total, norm)
        norm.replace_all_uses_with(output)
        self.graph.erase_node(norm)
        self.replace((total,) if drop is None else (drop, total), sum_)

    def consumer(self, node):
        """The module's node that alone takes this one's result, if it is one."""
        users = list(node.users)
        return users[0] if len(users) == 1 and users[0].op == "call_module" else None

    def try_norm_before(self, norm):
        """A norm alone, and the module that takes what it returns."""
        if norm.op != "call_module" or self.letter(norm) != "n":
            return
        consumer = self.consumer(norm)
        if consumer is None:
            return
        with self.graph.inserting_before(norm):
            new = self.call(norm, fusing.layer_norm_before, norm.args[0], self.layer(norm), self.layer(consumer))
        self.replace((norm,), new)

    def try_sum(self, total):
        if total in self.done or not self.is_sum(total):
            return
        for dropped, residual in (total.args, total.args[::-1]):
            depth = self.depth(dropped)
            if depth is not None and dropped is not residual and len(dropped.users) == 1:
                with self.graph.inserting_before(total):
                    depth = self.layer(dropped) if dropped.op == "call_module" else depth
                    new = self.call(total, fusing.residual_sum_of_rows, dropped.args[0], residual, depth)
                self.replace((dropped, total), new)
                return
        with self.graph.inserting_before(total):
            new = self.call(total, fusing.residual_sum, *total.args)
        self.replace((total,), new)

    def try_sequences(self, node):
        """Sequentials one behind the other, whose blocks may go together from the one to the next."""
        chain = [node]
        if not self.is_sequence(node) or (self.is_sequence(node.args[0]) and len(node.args[0].users) == 1):
            return
        while len(chain[-1].users) == 1 and self.is_sequence(next(iter(chain[-1].users))):
            chain.append(next(iter(chain[-1].users)))
        if len(chain) > 1:
            with self.graph.inserting_before(chain[-1]):
                layers = [self.layer(each) for each in chain]
                new = self.call(chain[-1], fusing.run_sequences, node.args[0], *layers)
            self.replace(chain, new)

    def is_sequence(self, node) -> bool:
        if not isinstance(node, torch.fx.Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return False
        module = self.module.get_submodule(node.target)
        forward = getattr(type(module), "forward", None)
        return forward in (torch.nn.Sequential.forward, fusing.run_sequence) and "forward" not in module.__dict__

    def try_layer_scale(self, total):
        """A parameter times a module's result, dropped by rows or not, and a residual sum."""
        if self.is_sum(total):
            sides = [total.args, total.args[::-1]]
        elif isinstance(total, torch.fx.Node) and total.target is operator.iadd and not total.kwargs:
            sides = [total.args]
        else:
            return
        for scaled, residual in sides:
            if not isinstance(residual, torch.fx.Node) or scaled is residual:
                continue
            depth, product = self.depth(scaled), scaled
            if depth is not None:
                product = scaled.args[0]
            if not all(isinstance(node, torch.fx.Node) and len(node.users) == 1 for node in (scaled, product)):
                continue
            if not self.is_of_two(product, (operator.mul, torch.mul), "mul") or product.args[0] is product.args[1]:
                continue
            weight, branch = product.args if product.args[0].op == "get_attr" else product.args[::-1]
            # A branch that others read may be written to by them.
            if weight.op == "get_attr" and branch.op == "call_module" and len(branch.users) == 1:
                break
        else:
            return
        inplace = total.target is operator.iadd
        with self.graph.inserting_before(total):
            of_depth = () if depth is None else (self.layer(scaled) if scaled.op == "call_module" else depth,)
            arguments = (branch, residual, weight, *(of_depth or (None,)), inplace)
            new = self.call(total, fusing.layer_scale_add, *arguments)
        nodes = (product, total) if depth is None else (product, scaled, total)
        self.gain("layer_scale_add", *nodes)
        self.replace(nodes, new)

    def depth(self, node):
        """p, mode and training of a node that is stochastic depth; () if it is the module."""
        if not isinstance(node, torch.fx.Node) or not node.args:
            return None
        if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
            kind = type(self.module.get_submodule(node.target))
            kind = getattr(kind, "cuda_ops_native", kind)
            return () if (kind.__module__, kind.__name__) == fusing.STOCHASTIC_DEPTH else None
        if node.op != "call_function" or len(node.args) != 4 or node.kwargs:
            return None
        function = node.target
        known = (getattr(function, "__module__", ""), getattr(function, "__name__", ""))
        constants = tuple(node.args[1:])
        plain = all(type(value) in (float, int, str, bool) for value in constants)
        return constants if known == (fusing.STOCHASTIC_DEPTH[0], "stochastic_depth") and plain else None

    def stays(self, drop) -> bool:
        """Whether dropout leaves its input as it was, for others that read it."""
        return not self.module.get_submodule(drop.target).inplace

    @classmethod
    def is_sum(cls, node) -> bool:
        return cls.is_of_two(node, (operator.add, torch.add), "add")

    @staticmethod
    def is_of_two(node, functions, method) -> bool:
        """Of two tensors (or what the op, at the call, finds to be none), out of place."""
        if not isinstance(node, torch.fx.Node) or node.kwargs or len(node.args) != 2:
            return False
        if not all(isinstance(argument, torch.fx.Node) for argument in node.args):
            return False
        is_function = node.op == "call_function" and node.target in functions
        return is_function or (node.op == "call_method" and node.target == method)

    def try_function(self, node):
        """A function of torch.nn.functional, or a method that is one, becomes ours."""
        function = None
        if node.op == "call_function" and (node.args or node.target is NATIVE):  # the latter's tensors may have names
            function = FUNCTIONS.get(node.target)
        elif node.op == "call_method" and node.target in ("relu", "sigmoid", "tanh"):
            function = getattr(Functions, node.target) if len(node.args) == 1 else None
        elif node.op == "call_method" and node.target in ("softmax", "log_softmax"):
            dims = [*node.args[1:], *node.kwargs.values()]
            named = set(node.kwargs) <= {"dim"} and len(dims) == 1 and type(dims[0]) is int
            function = getattr(Functions, node.target) if named else None
        if function is not None:
            with self.graph.inserting_before(node):
                new = self.graph.call_function(function, node.args, node.kwargs)
            self.gains.append((function.__name__, (f"{node.name}()",)))
            node.replace_all_uses_with(new)
            self.graph.erase_node(node)
