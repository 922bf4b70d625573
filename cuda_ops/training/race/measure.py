"""How long a training step or a forward pass takes, as a whole and by class of layers, and how long until the first."""

import contextlib
import copy
import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ... import functional, optim
from ...conversion import convert
from ...conversion.layers import native_class
from ..graph import GraphedStep
from ..timing import summarize_blocks
from .forward import GraphedForward
from .subject import Subject

OUTSIDE = "outside of layers"


@dataclass(frozen=True)
class Conditions:
    """Where a race takes place."""

    device: torch.device
    autocast: torch.dtype | None
    blocks: int
    block: int
    """Steps that are timed together."""
    training: bool = True
    """False for inference: the forward pass alone, in evaluation and without gradients."""

    @property
    def context(self):
        return torch.autocast(self.device.type, self.autocast) if self.autocast else contextlib.nullcontext()


@dataclass
class Contestant:
    """A way of taking the same step, or of making the same forward pass."""

    name: str
    ours: bool
    compiled: bool = False
    graph: bool = False
    milliseconds: list[float] = field(default_factory=list)
    """Of a step, a number for each block."""
    first_seconds: float | None = None
    """From PyTorch's model on the CPU until the first step was done: conversion, compilation, choice of algorithms."""
    cached: bool = False
    """Whether the compiler found the model in its cache."""
    problem: str | None = None

    @property
    def summary(self) -> dict[str, float]:
        return summarize_blocks(self.milliseconds)


def contestants(on_cuda: bool, compiled: bool) -> list[Contestant]:
    found = [Contestant("PyTorch", False)]
    if compiled:
        found.append(Contestant("PyTorch, compiled", False, compiled=True))
    if on_cuda:
        found.append(Contestant("PyTorch, graph", False, graph=True))
        if compiled:
            found.append(Contestant("PyTorch, compiled, graph", False, compiled=True, graph=True))
    found.append(Contestant("cuda_ops", True))
    if on_cuda:
        found.append(Contestant("cuda_ops, graph", True, graph=True))
    return found


def race(subject: Subject, found: list[Contestant], conditions: Conditions, progress: Callable[[str], None]):
    """Times them, interleaved by blocks, so that a machine that slows down slows all of them. One that cannot run says
    why in `problem`, but for the first: where PyTorch's own does not run there is no race, and its error is raised."""
    batch = batch_on(subject, conditions.device)
    pool = pool_for(conditions.device)
    steps = {}
    for one in found:
        progress(f"{one.name}: first steps")
        try:
            steps[one.name] = prepared(subject, one, conditions, batch, pool=pool)
        except (RuntimeError, NotImplementedError) as error:  # of memory, too
            if one is found[0]:
                raise
            one.problem = problem_of(error)
    for number in range(conditions.blocks):
        order = [one for one in found if one.name in steps]
        for one in order if number % 2 == 0 else reversed(order):
            progress(f"{one.name}: {number + 1} of {conditions.blocks}")
            one.milliseconds.append(milliseconds(steps[one.name], batch, conditions.device, conditions.block))


def batch_on(subject: Subject, device: torch.device) -> list[Tensor]:
    return [tensor.to(device) for tensor in subject.batch]


def pool_for(device: torch.device):
    """Memory that the graphs of a race have in common, of which no two run at the same time; None on the CPU."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def problem_of(error: BaseException) -> str:
    """In one line."""
    return (str(error) or type(error).__name__).splitlines()[0]


def prepared(
    subject: Subject,
    contestant: Contestant,
    conditions: Conditions,
    batch: list[Tensor],
    compiler: Callable[[torch.nn.Module], Callable] = torch.compile,
    pool=None,
    steps: int = 3,
) -> Callable:
    """The function that takes a step of that contestant, after so many of them: the first settles libraries, the second
    is captured. Writes down how long the first took."""
    begin = time.perf_counter()
    hits = _cache_hits() if contestant.compiled else 0
    step = (_step if conditions.training else _forward)(subject, contestant, conditions, compiler, pool)
    for number in range(steps):
        step(*batch)
        if number == 0:
            if conditions.device.type == "cuda":
                torch.cuda.synchronize()
            contestant.first_seconds = time.perf_counter() - begin
            contestant.cached = contestant.compiled and _cache_hits() > hits
            if contestant.graph and conditions.device.type == "cuda":
                torch.cuda.empty_cache()  # memory of the step before the capture is of no use to the graph
    return step


def _cache_hits() -> int:
    from torch._dynamo.utils import counters  # seconds, of which only a compiled contestant has need

    return counters["inductor"]["fxgraph_cache_hit"]


def _step(subject, contestant, conditions, compiler, pool) -> GraphedStep:
    model = copy.deepcopy(subject.model).to(conditions.device).train()
    if contestant.ours:
        convert(model)
    called = compiler(model) if contestant.compiled else model
    functions = functional if contestant.ours else torch.nn.functional
    fused = {} if contestant.ours or not contestant.graph else {"fused": True}
    namespace = optim if contestant.ours else torch.optim
    optimizer = namespace.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4, momentum=0.9, **fused)

    def loss(*batch):
        return subject.loss(functions, subject.call(called, *batch), *batch)

    return GraphedStep(model, loss, optimizer, autocast=conditions.autocast, graph=contestant.graph, pool=pool)


def _forward(subject, contestant, conditions, compiler, pool) -> GraphedForward:
    model = copy.deepcopy(subject.model).to(conditions.device).eval()
    if contestant.ours:
        convert(model)
    called = compiler(model) if contestant.compiled else model
    call = functools.partial(subject.call, called)
    return GraphedForward(call, conditions.device, conditions.autocast, contestant.graph, pool)


def milliseconds(step: Callable, batch: list[Tensor], device: torch.device, steps: int) -> float:
    """Of one step, over so many of them."""
    with _Clock(device) as clock:
        begin = clock.mark()
        for _ in range(steps):
            step(*batch)
        end = clock.mark()
    return clock.between(begin, end) / steps


class _Clock:
    """The device's clock: events on the stream on CUDA, the host's on the CPU. Marks can be read once it is left."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"

    def __enter__(self):
        if self.cuda:
            torch.cuda.synchronize()
        return self

    def __exit__(self, *exception):
        if self.cuda:
            torch.cuda.synchronize()

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin, end) -> float:
        return begin.elapsed_time(end) if self.cuda else (end - begin) * 1e3


def layer_times(subject: Subject, ours: bool, conditions: Conditions, steps: int = 3) -> dict[str, dict[str, float]]:
    """{class: {forward, backward: milliseconds of a step}} of the modules without submodules, and of what is outside of
    them. With hooks on them layers run one by one: what is fused in a race is not fused here. Backward is 0 in
    inference.

    Forward is from a module's call to its return. Backward is from where the gradient of its output is there to where
    that of another module's is: what lies between two modules counts to the later one in forward order.
    """
    model = copy.deepcopy(subject.model).to(conditions.device).train(conditions.training)
    if ours:
        convert(model)
    batch = batch_on(subject, conditions.device)
    functions = functional if ours else torch.nn.functional
    times: dict[str, dict[str, float]] = defaultdict(lambda: {"forward": 0.0, "backward": 0.0})
    clock = _Clock(conditions.device)
    calls, returns, begun = [], [], {}

    def before(module, args):
        begun[id(module)] = clock.mark()

    def after(module, args, output):
        kind = (native_class(module) or type(module)).__name__
        calls.append((kind, begun.pop(id(module)), clock.mark()))
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        if node is not None:
            node.register_prehook(lambda gradients: returns.append((kind, clock.mark())))

    for module in model.modules():
        if not module._modules:
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
    for step in range(steps + 1):
        calls.clear(), returns.clear()
        with clock:
            marks = [clock.mark()]
            with torch.inference_mode(not conditions.training), conditions.context:
                output = subject.call(model, *batch)
                loss = subject.loss(functions, output, *batch) if conditions.training else None
            marks.append(clock.mark())
            if loss is not None:
                loss.backward()
                returns.append(("", clock.mark()))
            else:
                returns.append(("", marks[-1]))
            marks.append(marks[-1] if len(returns) == 1 else returns[0][1])
        model.zero_grad()
        if step == 0:  # libraries choose their algorithms
            continue
        for kind, begin, end in calls:
            times[kind]["forward"] += clock.between(begin, end) / steps
        for (kind, begin), (_, end) in itertools.pairwise(returns):
            times[kind]["backward"] += clock.between(begin, end) / steps
        inside = sum(clock.between(begin, end) for _, begin, end in calls)
        times[OUTSIDE]["forward"] += (clock.between(marks[0], marks[1]) - inside) / steps
        times[OUTSIDE]["backward"] += clock.between(marks[1], marks[2]) / steps
    return dict(times)
