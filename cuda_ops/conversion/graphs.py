"""What is found in a trace: runs of layers and functions that one op of ours computes, which become calls of fusing.py,
and functions of torch.nn.functional, which become ours."""

import operator

import torch
from torch.fx import Graph
from torch.fx.graph import inplace_methods

from . import fusing
from .attention import NATIVE
from .fusing import ACTIVATIONS, GATES, LETTER_OF, is_simple_window
from .layers import FUNCTIONS, Functions


def over_all(graph: Graph, passes):
    """Each pass over all nodes that those before it have left."""
    for attempt in passes:
        for node in list(graph.nodes):
            attempt(node)


def rewrite(graph: Graph, module) -> list[tuple[str, tuple[str, ...]]]:
    """Fuses and replaces; returns what, and the layers by name."""
    found = _Finder(graph, module)
    passes = [
        found.try_norm,
        found.try_pool,
        found.try_batch_norm,
        found.try_fold,
        found.try_activation,
        found.try_gated,
        found.try_excitation,
        found.try_layer_scale,
        found.try_function,
    ]
    over_all(graph, passes)
    if found.gains:  # not worth a forward of its own
        over_all(graph, [found.try_norm_before, found.try_sum, found.try_sequences])
    return found.gains


IN_PLACE = {getattr(operator, name) for name in inplace_methods}


def is_layer(module) -> bool:
    """Whether a module is one of PyTorch's or torchvision's layers, or a container of them."""
    kind = getattr(type(module), "cuda_ops_native", type(module))
    return kind.__module__.startswith(("torch.nn.", "torchvision.ops."))


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

    def crosses(self, *nodes) -> bool:
        """Whether something between these nodes, which are to become one, may write into what they read."""
        nodes = {node for node in nodes if node is not None}
        read = {*nodes, *(argument for node in nodes for argument in node.all_input_nodes)}
        met = 0
        for node in self.graph.nodes:
            if node in nodes:
                met += 1
                if met == len(nodes):
                    break
            elif met > 0 and self.writes(node, read):
                return True
        return False

    def is_called_between(self, norm, *nodes) -> bool:
        """Whether something between these nodes calls their norm too, whose running statistics go by the order of its
        calls."""
        nodes = {norm, *nodes}
        met = 0
        for node in self.graph.nodes:
            if node in nodes:
                met += 1
                if met == len(nodes):
                    break
            elif met > 0 and node.op in ("call_module", "get_attr") and node.target == norm.target:
                return True
        return False

    def writes(self, node, read) -> bool:
        """Whether a node may write into its arguments: of modules that are no layers, of which nobody knows, where it
        takes one of `read`."""
        if node in self.done:
            return False  # each writes into nothing but what it has made
        if node.op == "call_module":
            module = self.module.get_submodule(node.target)
            if any(getattr(part, "inplace", False) for part in module.modules()):
                return True
            known = all(is_layer(part) for part in module.modules())
            return not known and not read.isdisjoint(node.all_input_nodes)
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if node.op == "call_function":
            by_argument = node.kwargs.get("inplace", False) is not False or any(each is True for each in node.args)
            if by_argument or "out" in node.kwargs or node.target in IN_PLACE:
                return True
        elif node.op != "call_method":
            return False
        return name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))

    def is_alone(self, node) -> bool:
        """Whether a node has made its result itself, for one user, so that nobody else knows of it."""
        if not isinstance(node, torch.fx.Node) or len(node.users) != 1:
            return False
        if node.op == "call_function" and node.target in (operator.add, operator.mul, torch.add, torch.mul):
            return True
        if node.op != "call_module":
            return False
        module = self.module.get_submodule(node.target)
        while self.is_a_sequence(module) and module._modules:
            module = list(module._modules.values())[-1]
        return LETTER_OF.get(type(module), "-") in "cbln"

    def try_pool(self, pool):
        if self.letter(pool) != "p":
            return
        relu = self.before(pool, "r")
        norm = relu and self.before(relu, "b")
        conv = norm and self.before(norm, "c")
        if not conv or conv.op != "call_module" or norm.op != "call_module":
            return
        if self.is_called_between(norm, conv, pool):
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
        if residual is not None and (self.crosses(norm, total, node) or self.is_called_between(norm, node)):
            return
        conv = self.before(norm, "c") if residual is None else None
        folds = conv is not None and conv.op == "call_module" and not self.is_called_between(norm, conv)
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
        if conv is None or conv.op != "call_module" or self.is_called_between(norm, conv):
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
        if self.crosses(activation, product):
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
        if self.crosses(drop, total, norm):
            return
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
        in_place = isinstance(total, torch.fx.Node) and total.target is operator.iadd
        if total in self.done or not (in_place or self.is_sum(total)):
            return
        for dropped, residual in (total.args, total.args[::-1])[: 1 if in_place else 2]:
            depth = self.depth(dropped)
            if depth is None or dropped is residual or len(dropped.users) != 1 or self.crosses(dropped, total):
                continue
            if in_place and not (isinstance(residual, torch.fx.Node) and self.is_alone(dropped.args[0])):
                continue
            with self.graph.inserting_before(total):
                depth = self.layer(dropped) if dropped.op == "call_module" else depth
                new = self.call(total, fusing.residual_sum_of_rows, dropped.args[0], residual, depth, in_place)
            self.replace((dropped, total), new)
            return
        if in_place:
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
        if len(chain) > 1 and not self.crosses(*chain):
            with self.graph.inserting_before(chain[-1]):
                layers = [self.layer(each) for each in chain]
                new = self.call(chain[-1], fusing.run_sequences, node.args[0], *layers)
            self.replace(chain, new)

    def is_sequence(self, node) -> bool:
        if not isinstance(node, torch.fx.Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return False
        return self.is_a_sequence(self.module.get_submodule(node.target))

    @staticmethod
    def is_a_sequence(module) -> bool:
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
        if self.crosses(product, None if depth is None else scaled, total):
            return
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
