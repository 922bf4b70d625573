"""Other modules' own forward: traced by torch.fx, one module at a time, its submodules being calls.

straight.py tells of which forwards a trace stands for every call, and notes what it depends on. Of the trace, runs of
layers become calls of fusing.py, and functions of torch.nn.functional become ours (graphs.py). What comes of it is a
text that calls the same submodules by name (recipes.py).
"""

import inspect

import torch
from torch.fx import Graph

from . import fusing
from .graphs import rewrite
from .recipes import Recipe
from .straight import NotTraced, Trace, check_straight


def recipe_of(module: torch.nn.Module) -> tuple[Recipe | None, list[tuple[str, tuple[str, ...]]]]:
    """The recipe for this module's class, and what it fuses or replaces: (what, names of layers); None where there is
    nothing to gain. Raises NotTraced with the reason."""
    arguments = _required(module)
    check_straight(inspect.unwrap(type(module).forward))
    variants, blocks, gains, was_training = [], [], [], module.training
    try:
        for training in (was_training, not was_training):
            module.training = training
            try:
                trace = Trace(module, arguments, inline=True)
            except NotTraced:
                trace = Trace(module, arguments, inline=False)
            found = rewrite(trace.graph, module)
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
