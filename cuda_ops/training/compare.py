"""Trains a model of several backends side by side: same initial weights, same batches in the same order."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._grad_mode import without_grad
from ..data import Batches
from ..models import MnistCNN, get_backend
from .distributed import World, whole
from .gradient_buckets import GradientBuckets
from .graph import GraphedStep
from .loop import Evaluation, Trainer, autocast, evaluate, learning_rate
from .parity import EARLY_STEPS, Snapshot, early_losses_agree
from .timing import MemoryMeter

# Steps that one backend takes before the next one takes the same: long enough that a GPU is not left waiting at every
# step, short enough that a machine that slows down slows all of them.
BLOCK = 10
# Steps of each backend that are not timed: allocators, libraries' choices of algorithm and caches settle in them.
WARMUP = 10
# The step as a CUDA graph is timed in so many blocks of so many steps.
GRAPH_BLOCK, GRAPH_BLOCKS = 32, 15
# The train loss of the table is the mean over this many steps, the last ones.
LAST_STEPS = 50


HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RunSettings:
    """What a run needs to know; a command's own settings derive from it."""

    backends: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    epochs: int
    batch_size: int
    lr: float
    seed: int

    @property
    def autocast(self) -> torch.dtype | None:
        """fp16 and bf16 are reached by autocast."""
        return self.dtype if self.dtype in HALVES else None

    @property
    def tensor_dtype(self) -> torch.dtype:
        """Of parameters and inputs: under autocast float32."""
        return torch.float32 if self.autocast else self.dtype


@dataclass
class BackendRun:
    """One backend's side of a run."""

    name: str
    model: torch.nn.Module
    trainer: Trainer
    memory: MemoryMeter
    graph_steps: list[float] = field(default_factory=list)
    """Milliseconds of the whole step as a CUDA graph, one number for each block."""
    losses: list[float] = field(default_factory=list)
    first_step: Snapshot | None = None
    evaluation: Evaluation | None = None
    logits: Tensor | None = None
    """Of some test images, in evaluation mode, from the last weights of the reference backend."""

    @property
    def train_loss(self) -> float | None:
        last = self.losses[-LAST_STEPS:]
        return sum(last) / len(last) if last else None


@dataclass
class Run:
    """The state of a run, from which its report is made."""

    settings: RunSettings
    world: World
    steps_planned: int
    backends: dict[str, BackendRun]
    initial_state: dict[str, Tensor]
    make_model: Callable[[str], torch.nn.Module]
    zero_gradients: tuple[str, ...] = ()
    """Parameters whose gradient is zero but for rounding."""
    exact_gradients: dict[str, Tensor] | None = None
    """Of the first step, by native layers in float64."""
    exact_losses: list[float] | None = None
    """Of the first EARLY_STEPS steps, likewise; only where a backend's are not native's within a narrow limit."""
    first_lr: float = 0.0
    seconds: float = 0.0
    interrupted: bool = False
    processes_agree: bool = True
    """Whether all processes have come to the same weights, bit by bit."""

    @property
    def steps_done(self) -> int:
        """Steps that every backend has taken."""
        return min(len(b.losses) for b in self.backends.values())

    @property
    def warmup(self) -> int:
        return min(WARMUP, self.steps_done // 2)


def prepare(
    settings: RunSettings,
    world: World,
    batches: Batches,
    make_model: Callable[[str], torch.nn.Module] = MnistCNN,
) -> Run:
    """Makes the models of all backends, with the same weights, and their trainers.

    Args:
        settings: of the run.
        world: its processes.
        batches: the training set.
        make_model: makes the model of a backend, given the backend's name. Called with inputs and labels the model
            returns its loss, called with inputs alone one logit a class; a state_dict of one fits all. Its attribute
            `zero_gradients`, if it has one, names the parameters whose gradient is zero but for rounding.
    """
    torch.manual_seed(settings.seed)
    reference = make_model("native")
    initial_state = reference.to(settings.tensor_dtype).state_dict()
    backends = {}
    for name in settings.backends:
        memory = MemoryMeter(settings.device)
        before = _allocated(settings.device)
        model = make_model(name).to(settings.device, settings.tensor_dtype)
        model.load_state_dict(initial_state, strict=True)
        world.shard(model, settings.device)
        trainer = Trainer(
            world.wrap(model, settings.device), batches, get_backend(name), settings.lr, settings.autocast
        )
        memory.resident = _allocated(settings.device) - before
        backends[name] = BackendRun(name, model, trainer, memory)
    steps = settings.epochs * (len(batches) // settings.batch_size)
    zero_gradients = tuple(getattr(reference, "zero_gradients", ()))
    return Run(settings, world, steps, backends, initial_state, make_model, zero_gradients)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def batch_order(count: int, batch_size: int, epochs: int, seed: int):
    """The indices of every batch of a run, each epoch shuffled anew; a last incomplete batch is dropped."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator)[: count // batch_size * batch_size].split(batch_size)


def exact_start(run: Run, batches: Batches, order: list[Tensor]):
    """The first steps with native layers in float64, to tell an error from rounding: the gradients of the first and
    the losses of all of them. (None, None) where the device's memory is too small for it."""
    settings = run.settings
    keep_on_device = batches.home == batches.device
    double = Batches(batches.images, batches.labels, batches.device, torch.float64, keep_on_device)
    model = run.make_model("native")
    model.load_state_dict(run.initial_state)
    model.to(settings.device, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients, losses = None, []
    try:
        for step, indices in enumerate(order):
            images, labels = double(indices)
            loss = model(images, labels)
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = run.world.mean(parameter.grad)
            gradients = gradients or {name: p.grad.cpu() for name, p in model.named_parameters()}
            losses.append(run.world.mean(loss.detach()).item())
            optimizer.param_groups[0]["lr"] = learning_rate(step, run.steps_planned, settings.lr)
            optimizer.step()
            optimizer.zero_grad()
    except torch.OutOfMemoryError:
        return None, None
    return gradients, losses


def train(run: Run, batches: Batches, stop: Callable[[], bool], on_progress: Callable[[Run], None]):
    """Trains all backends of `run`, interleaved in blocks of steps; the order of the backends alternates.

    Args:
        run: from `prepare`.
        batches: the training set.
        stop: asked after every step (with several processes: every block) whether to end early.
        on_progress: called after every block.
    """
    settings, world = run.settings, run.world
    order = list(batch_order(len(batches), settings.batch_size, settings.epochs, settings.seed))
    order = [batches.place(world.share(batch)) for batch in order]
    if len(run.backends) > 1:
        run.exact_gradients, _ = exact_start(run, batches, order[:1])
    begin = time.perf_counter()
    for number, first in enumerate(range(0, run.steps_planned, BLOCK)):
        steps = range(first, min(first + BLOCK, run.steps_planned))
        backends = list(run.backends.values())
        for backend in backends if number % 2 == 0 else reversed(backends):
            # Several processes must end at the same step, or one waits for the others for ever.
            stop_here = stop if world.size == 1 else lambda: False
            _train_block(run, backend, steps, order, stop_here)
            run.seconds = time.perf_counter() - begin
            on_progress(run)
        # These steps in float64 take a while on a CPU, and most runs do without.
        if number == 0 and not all(early_losses_agree(run, name) for name in run.backends):
            _, run.exact_losses = exact_start(run, batches, order[:EARLY_STEPS])
        if world.any(stop(), settings.device):
            run.interrupted = True
            break
    run.processes_agree = all(world.alike(backend.model.parameters()) for backend in run.backends.values())


def _train_block(run: Run, backend: BackendRun, steps: range, order: list[Tensor], stop: Callable[[], bool]):
    losses = []
    with backend.memory:
        for step in steps:
            if stop():
                break
            lr = learning_rate(step, run.steps_planned, run.settings.lr)
            if step == 0:
                losses.append(_first_step(run, backend, order[0], lr))
            else:
                losses.append(backend.trainer.step(order[step], lr))
        backend.trainer.timer.collect()
    if losses:
        backend.losses += run.world.mean(torch.stack(losses).double()).tolist()


def _first_step(run: Run, backend: BackendRun, indices: Tensor, lr: float) -> Tensor:
    """The step whose gradients are compared."""
    gradients = {}

    def keep():
        scale = backend.trainer.scaler.get_scale()
        for name, parameter in backend.model.named_parameters():
            gradients[name] = whole(parameter.grad.detach()).cpu().double() / scale

    run.first_lr = lr
    loss = backend.trainer.step(indices, lr, keep)
    state = {name: whole(tensor.detach()).cpu().clone() for name, tensor in backend.model.state_dict().items()}
    backend.first_step = Snapshot(gradients, state)
    return loss


def time_graphs(run: Run, train_set: tuple[Tensor, Tensor]):
    """Times each backend's whole step as one CUDA graph, the batch's gather included, and between processes the sums of
    the gradients, interleaved by GRAPH_BLOCK steps.

    Args:
        run: after `train`; its models are left alone.
        train_set: images and labels, which are copied to the device: a graph gathers its batches there.
    """
    settings = run.settings
    batches = Batches(*train_set, settings.device, settings.tensor_dtype, keep_on_device=True)
    share = settings.batch_size // run.world.size
    indices = torch.randint(len(batches), (GRAPH_BLOCK, share), device=settings.device)
    steps = {}
    for name in run.backends:
        model = run.make_model(name).to(settings.device, settings.tensor_dtype)
        model.load_state_dict(run.initial_state, strict=True)
        options = {"fused": True} if name == "native" else {}
        optimizer = get_backend(name).optim.SGD(model.parameters(), lr=1e-3, **options)
        source = batches.gather if get_backend(name).needs_extension else batches
        buckets = GradientBuckets(model.parameters(), run.world) if run.world.size > 1 else None
        steps[name] = GraphedStep(
            model,
            model,
            optimizer,
            source=source,
            autocast=settings.autocast,
            on_gradients=buckets.finish if buckets else None,
        )
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for block in range(GRAPH_BLOCKS + 1):
        for name, step in steps.items():
            begin.record()
            step.run(indices)
            end.record()
            end.synchronize()
            if block > 0:  # the first one captures
                run.backends[name].graph_steps.append(begin.elapsed_time(end) / GRAPH_BLOCK)


def make_whole(run: Run):
    """Gives the first process whole models, where they are sharded: it tests and saves them alone."""
    if not run.world.is_sharded:
        return
    for name, backend in run.backends.items():
        state = {key: whole(tensor.detach()) for key, tensor in backend.model.state_dict().items()}
        if run.world.is_first:
            backend.model = run.make_model(name).to(run.settings.device, run.settings.tensor_dtype)
            backend.model.load_state_dict(state, strict=True)


def test(run: Run, batches: Batches):
    """Evaluates every backend on the test set, and the reference's weights in every backend on some of its images.

    Args:
        run: after `train`.
        batches: the test set.
    """
    precision = run.settings.autocast
    reference = run.backends.get("native")
    some = Batches(batches.images[:500], batches.labels[:500], batches.device, batches.dtype, keep_on_device=True)
    for backend in run.backends.values():
        backend.evaluation = evaluate(backend.model, batches, autocast_dtype=precision)
        if reference:
            model = copy.deepcopy(backend.model)
            model.load_state_dict(reference.model.state_dict(), strict=True)
            backend.logits = _logits(model, some, precision)


@without_grad
def _logits(model: torch.nn.Module, batches: Batches, precision: torch.dtype | None) -> Tensor:
    model.eval()
    images, _ = batches(batches.place(torch.arange(len(batches))))
    with autocast(batches.device, precision):
        return model(images).cpu().double()
