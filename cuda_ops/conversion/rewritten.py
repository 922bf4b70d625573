"""Forwards that torch.fx cannot trace, since they branch on arguments or take any number of them, as those of
transformers' blocks do: rewritten statement by statement, as text.

What is looked for are neighbouring statements of a forward's own lines, whatever stands around them:

    x = self.norm(y); z = self.layer(x)         the norm's result goes to the layer alone, whose products lower it under
                                                autocast: it is rounded as it is stored, once for all of them
    y = a + b; x = self.norm(y); ...            sum and norm in one pass
    x = self.linear(x); x = self.act(x)         one product
    if ...: x = x.to(self.wo.weight.dtype)      a cast that autocast's own undoes
    q, k = apply_rotary_pos_emb(q, k, ...)      a rotation

The functions that stand in for them (fusing_blocks.py) ask the modules at each call, and compute what the statements
did where these are not plain. The new forward has the other statements as they were, in the same namespace, and the
decorators that there were; the text is trusted only where it compiles to the code that the class has.
"""

import __future__

import ast
import copy
import dis
import inspect
import linecache
import textwrap
from types import CellType, FunctionType

import torch

from . import fusing_blocks
from .attention import PREFIX, is_users
from .fusing_blocks import is_activation, is_norm, is_rotation, lowered_names

# Statements that may run twice, later, or not at all: the order of the text is not that of time.
TWISTED = (ast.For, ast.While, ast.Try, ast.With, ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.Yield, ast.Await)
TWISTED += (ast.Global, ast.Nonlocal, ast.Delete, ast.NamedExpr)
HELPERS = {f"{PREFIX}{name}": getattr(fusing_blocks, name) for name in fusing_blocks.HELPERS}
FUTURE = 0
for _name in __future__.all_feature_names:
    FUTURE |= getattr(__future__, _name).compiler_flag
_forwards: dict[tuple, object] = {}


class NotRewritten(Exception):
    """Why a forward stays as it is."""


def text_of(function) -> ast.FunctionDef:
    """The text of a function of the user's, without its decorators, if it is what was compiled."""
    if not isinstance(function, FunctionType) or not is_users(function.__code__) or function.__code__.co_freevars:
        raise NotRewritten("no plain function of Python")
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, ValueError, SyntaxError) as error:
        raise NotRewritten("no text") from error
    if not isinstance(tree, ast.FunctionDef):
        raise NotRewritten("no function")
    tree.decorator_list = []
    if _said(_compiled(tree, function, "<text>")) != _said(function.__code__):
        raise NotRewritten("its text is not what was compiled")
    return tree


def _said(code) -> list:
    """What a function does, whatever stood around it: a method of an imported name is called by another instruction."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "PUSH_NULL")]
    opcodes = [i.opname.replace("LOAD_METHOD", "LOAD_ATTR") for i in instructions]
    values = [None if i.opcode in (*dis.hasjrel, *dis.hasjabs) else i.argval for i in instructions]
    return [code.co_varnames[: code.co_argcount], *zip(opcodes, values, strict=True)]


def _compiled(tree, function, file: str):
    module = ast.fix_missing_locations(ast.Module([tree], type_ignores=[]))
    code = compile(module, file, "exec", flags=function.__code__.co_flags & FUTURE, dont_inherit=True)
    return next(constant for constant in code.co_consts if inspect.iscode(constant))


def rewritten(module: torch.nn.Module) -> tuple[str, list[tuple[str, tuple[str, ...]]]]:
    """The text of a new forward of this module's class, and what it fuses: (what, names of layers and functions)."""
    if "forward" in module.__dict__:
        raise NotRewritten("has a forward that was set on it")
    function = inspect.unwrap(type(module).forward)
    tree = text_of(function)
    found = _Finder(tree, module, function.__globals__)
    if not found.changed:
        raise NotRewritten("nothing to gain")
    text = ast.unparse(ast.fix_missing_locations(tree))
    forward_of(type(module), text)  # whether its decorators can be put around it
    return text, found.gains


def forward_of(cls: type, text: str):
    """The forward of that text, with what decorates the class's own."""
    key = cls.forward, text
    if key not in _forwards:
        chain = [cls.forward]
        while hasattr(chain[-1], "__wrapped__"):
            chain.append(chain[-1].__wrapped__)
        inner = chain[-1]
        file = f"<cuda_ops.convert {cls.__qualname__} {hash(text):x}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)  # for tracebacks
        code = _compiled(ast.parse(text).body[0], inner, file)
        made = FunctionType(code, inner.__globals__, inner.__name__, inner.__defaults__)
        _name_like(made, inner)
        for outer, wrapped in zip(reversed(chain[:-1]), reversed(chain[1:]), strict=True):
            made = _rewrapped(outer, wrapped, made)
        inner.__globals__.update(HELPERS)
        _forwards[key] = made
    return _forwards[key]


def _name_like(made, function):
    for name in ("__kwdefaults__", "__annotations__", "__qualname__", "__module__", "__doc__"):
        setattr(made, name, getattr(function, name))


def _rewrapped(outer, wrapped, made):
    """A decorator's function, of another function than `wrapped`."""
    if not isinstance(outer, FunctionType):
        raise NotRewritten("a decorator that is no function")
    cells, found = list(outer.__closure__ or ()), 0
    for number, cell in enumerate(cells):
        try:
            is_it = cell.cell_contents is wrapped
        except ValueError:
            is_it = False
        if is_it:
            cells[number], found = CellType(made), found + 1
    if not found:
        raise NotRewritten("a decorator that keeps its function elsewhere")
    made_outer = FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, tuple(cells))
    made_outer.__dict__.update(outer.__dict__)
    made_outer.__wrapped__ = made
    _name_like(made_outer, outer)
    return made_outer


# ---- what the text says


def _loads(node, name: str) -> int:
    """How often the name's value is read; `name += ...` reads it too."""
    read = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    read += [n.target for n in ast.walk(node) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)]
    return sum(n.id == name for n in read)


def _stores(statement, name: str) -> bool:
    """Whether an assignment gives the name another value, whatever happens."""
    if not isinstance(statement, ast.Assign):
        return False
    targets = [e for t in statement.targets for e in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _assigned(statement) -> str | None:
    """The name that is assigned to, and nothing else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


def _name(node) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _called(node) -> str | None:
    """The name of a call self.<name>(...)."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if is_call and _name(node.func.value) == "self" else None


def _of_one(node) -> tuple[str, str] | None:
    """(layer, argument) of self.<layer>(<name>)."""
    layer = _called(node)
    if layer is None or node.keywords or len(node.args) != 1 or _name(node.args[0]) is None:
        return None
    return layer, node.args[0].id


def _call(helper: str, *arguments) -> ast.Call:
    return ast.Call(ast.Name(f"{PREFIX}{helper}", ast.Load()), list(arguments), [])


def _read(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _attribute(name: str) -> ast.Attribute:
    return ast.Attribute(_read("self"), name, ast.Load())


def _assign(name: str, value) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _asks_none(test) -> str | None:
    """The name of which a test asks whether it is None."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        other = test.comparators[0]
        return _name(test.left) if isinstance(other, ast.Constant) and other.value is None else None
    return None


class _Finder:
    """Rewrites the statements of a forward, in place."""

    def __init__(self, tree: ast.FunctionDef, module, space: dict):
        self.tree, self.module, self.space = tree, module, space
        self.gains, self.changed = [], False
        if any(isinstance(node, TWISTED) for node in ast.walk(tree) if node is not tree):
            raise NotRewritten("it loops")
        self.body, number = tree.body, 0
        while number < len(self.body):
            for attempt in (self.try_sum, self.try_norm, self.try_activation, self.try_cast, self.try_rotation):
                if attempt(number):
                    self.changed = True
                    break
            number += 1

    def layer(self, name: str):
        return self.module._modules.get(name)

    def replace(self, first: int, last: int, statements: list):
        self.body[first : last + 1] = statements

    def gain(self, what: str, *parts: str):
        self.gains.append((what, parts))

    def is_dead(self, name: str, after: int) -> bool:
        """Whether nobody reads the value that the name has behind a statement of the body."""
        for statement in self.body[after + 1 :]:
            if _loads(statement, name):
                return False
            if _stores(statement, name):
                return True
        return True

    def norm_at(self, number: int):
        """(result, norm, argument, layer, key) of a norm whose result goes to a layer in the next statement alone."""
        if number + 1 >= len(self.body):
            return None
        result, call = _assigned(self.body[number]), _of_one(getattr(self.body[number], "value", None))
        if result is None or call is None or not is_norm(self.layer(call[0])):
            return None
        consumer = self.body[number + 1]
        if _loads(consumer, result) != 1 or not (_stores(consumer, result) or self.is_dead(result, number + 1)):
            return None
        if not isinstance(consumer, (ast.Assign, ast.Return)):
            return None
        for node in ast.walk(consumer):
            layer = _called(node)
            if layer is None or self.layer(layer) is None:
                continue
            keys = [k for k, argument in enumerate(node.args) if _name(argument) == result]
            keys += [k.arg for k in node.keywords if k.arg is not None and _name(k.value) == result]
            if any(isinstance(argument, ast.Starred) for argument in node.args) or len(keys) != 1:
                continue
            lowered_names(self.layer(layer), keys[0])  # before torch.compile asks
            return result, *call, layer, keys[0]
        return None

    def try_norm(self, number: int) -> bool:
        found = self.norm_at(number)
        if found is None:
            return False
        result, norm, argument, layer, key = found
        value = _call("norm_before", _read(argument), _attribute(norm), _attribute(layer), ast.Constant(key))
        self.replace(number, number, [_assign(result, value)])
        return True

    def is_sum(self, statement) -> str | None:
        """The name of a sum of two values, names or what layers return of names."""
        total, value = _assigned(statement), getattr(statement, "value", None)
        if total is None or not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
            return None
        return total if all(_name(side) or _of_one(side) for side in (value.left, value.right)) else None

    def try_sum(self, number: int) -> bool:
        total = self.is_sum(self.body[number])
        if total is None:
            return False
        branch, at = None, number + 1
        if at < len(self.body) and isinstance(self.body[at], ast.If) and not self.body[at].orelse:
            asked = _asks_none(self.body[at].test)
            if asked is None or asked == total:
                return False
            branch, at = self.body[at], at + 1
        aliases = []
        while at < len(self.body) and _assigned(self.body[at]) and _name(self.body[at].value) in (total, *aliases):
            aliases.append(_assigned(self.body[at]))
            at += 1
        found = self.norm_at(at) if at < len(self.body) else None
        if found is None or found[2] not in (total, *aliases):
            return False
        result, norm, argument, layer, key = found
        sum_ = self.body[number]
        arguments = (_attribute(norm), _attribute(layer), ast.Constant(key))
        normed, summed = f"{PREFIX}normed", f"{PREFIX}summed"
        both = _call("add_norm", sum_.value.left, sum_.value.right, *arguments)
        pair = ast.Tuple([ast.Name(normed, ast.Store()), ast.Name(summed, ast.Store())], ast.Store())
        fused = [ast.Assign([pair], both), _assign(total, _read(summed))]
        fused += [_assign(alias, _read(summed)) for alias in aliases]
        fused += [_assign(result, _read(normed))]
        fused += [ast.Delete([ast.Name(normed, ast.Del()), ast.Name(summed, ast.Del())])]
        if branch is not None:
            alone = _assign(result, _call("norm_before", _read(argument), *copy.deepcopy(arguments)))
            aliased = [_assign(alias, _read(total)) for alias in aliases]
            apart = [copy.deepcopy(sum_), *branch.body, *aliased, alone]
            fused = [ast.If(branch.test, apart, fused)]
        self.replace(number, at, fused)
        self.gain(f"add_{is_norm(self.layer(norm))}", "add()", norm)
        return True

    def try_activation(self, number: int) -> bool:
        if number + 1 >= len(self.body):
            return False
        both = self.body[number : number + 2]
        first, second = (_of_one(getattr(statement, "value", None)) for statement in both)
        result, output = (_assigned(statement) for statement in both)
        if first is None or second is None or result is None or output is None or second[1] != result:
            return False
        function = is_activation(self.layer(first[0]), self.layer(second[0]))
        if function is None or not (output == result or self.is_dead(result, number + 1)):
            return False
        value = _call("product_and_activation", _read(first[1]), _attribute(first[0]), _attribute(second[0]))
        self.replace(number, number + 1, [_assign(output, value)])
        self.gain(function, first[0], second[0])
        return True

    def try_cast(self, number: int) -> bool:
        """if <whatever>: x = x.to(self.layer.weight.dtype), in front of self.layer(x)."""
        branch = self.body[number]
        if not isinstance(branch, ast.If) or branch.orelse or len(branch.body) != 1 or number + 1 >= len(self.body):
            return False
        name, cast = _assigned(branch.body[0]), getattr(branch.body[0], "value", None)
        following = _of_one(getattr(self.body[number + 1], "value", None))
        if name is None or following is None or following[1] != name or self.layer(following[0]) is None:
            return False
        if not (_stores(self.body[number + 1], name) or self.is_dead(name, number + 1)):
            return False
        wanted = ast.parse(f"{name}.to(self.{following[0]}.weight.dtype)", mode="eval").body
        if ast.dump(wanted) != ast.dump(cast):
            return False
        stays = _call("is_lowered_again", _read(name), _attribute(following[0]))
        branch.test = ast.BoolOp(ast.And(), [ast.UnaryOp(ast.Not(), stays), branch.test])
        return True

    def try_rotation(self, number: int) -> bool:
        """q, k = f(q, k, cos, sin), f being transformers' function of that name."""
        statement = self.body[number]
        value = getattr(statement, "value", None)
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not isinstance(value, ast.Call):
            return False
        function, target = _name(value.func), statement.targets[0]
        if function is None or value.keywords or len(value.args) != 4 or not all(_name(a) for a in value.args):
            return False
        if not isinstance(target, ast.Tuple) or len(target.elts) != 2 or not all(_name(e) for e in target.elts):
            return False
        if not is_rotation(self.space.get(function)):
            return False
        lower = self.reach_attention_alone([_name(e) for e in target.elts], number)
        statement.value = _call("rotation", value.func, *value.args, lower)
        self.gain("rotary_embedding", f"{function}()")
        return True

    def reach_attention_alone(self, names: list[str], number: int):
        """An expression: whether the values go nowhere but to scaled_dot_product_attention, which lowers them."""
        caches = []
        for statement in self.body[number + 1 :]:
            used = [name for name in names if _loads(statement, name)]
            if not used:
                continue
            if isinstance(statement, ast.If) and not statement.orelse:
                asked = _asks_none(statement.test)
                if asked is None or not isinstance(statement.test.ops[0], ast.IsNot) or asked in names:
                    return ast.Constant(False)
                caches.append(asked)
                continue
            call = getattr(statement, "value", None)
            interface = _name(call.func) if isinstance(call, ast.Call) else None
            if interface != "attention_interface" or any(_loads(call, name) != 1 for name in used):
                return ast.Constant(False)
            if not all(any(_name(argument) == name for argument in call.args) for name in used):
                return ast.Constant(False)
        if any(_stores(statement, cache) for cache in caches for statement in self.body):
            return ast.Constant(False)
        if not any(isinstance(n, ast.Attribute) and n.attr == "_attn_implementation" for n in ast.walk(self.tree)):
            return ast.Constant(False)
        none = [f"{cache} is None" for cache in dict.fromkeys(caches)]
        text = " and ".join([*none, "self.config._attn_implementation == 'sdpa'"])
        return ast.parse(text, mode="eval").body
