"""One backend's side of a run: its model, optimizer, step and clocks."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ... import nn_utils
from ...models import GPT, get_backend
from ..distributed import sharded_like, whole
from ..gradient_buckets import GradientBuckets
from ..graph import GraphedStep
from ..loop import autocast
from ..timing import MemoryMeter, PhaseTimer
from .settings import COMPILED, Recipe, Settings, layers_of

# The train loss of the table is the mean over this many steps, the last ones.
LAST_STEPS = 50


def learning_rate(step: int, recipe: Recipe) -> float:
    """Rises linearly to the recipe's rate over its first `warmup` steps, then falls along half a cosine to its last."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / (recipe.warmup + 1)
    share = min(1.0, (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup))
    return recipe.min_lr + 0.5 * (1.0 + math.cos(math.pi * share)) * (recipe.lr - recipe.min_lr)


def parameter_groups(model: torch.nn.Module, recipe: Recipe) -> list[dict]:
    """Matrices shrink by weight decay, vectors do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


class Learner:
    """A backend's model in training.

    Args:
        settings: of the run.
        name: of the backend, or COMPILED.
        state: the weights to begin with.
        pool: the memory of its graph, in common with those of other backends, which take turns.
    """

    def __init__(self, settings: Settings, name: str, state: dict[str, Tensor], pool: tuple | None = None):
        recipe, device, world = settings.recipe, settings.device, settings.world
        self.name, self.settings, self.device = name, settings, device
        backend = get_backend(layers_of(name))
        self.memory = MemoryMeter(device)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        with device:  # which draws the numbers that `state` takes the place of in less time than the CPU
            model = GPT(backend.name, recipe.config, min(recipe.recomputed_blocks, recipe.config.n_layer))
        self.model = model.to(device, settings.parameter_dtype)
        self.model.load_state_dict(state, strict=True)
        world.shard(self.model, device)
        self.parameters = list(self.model.parameters())
        # On a GPU ours clips in its step, which spares a pass over all gradients; not what is sharded.
        self._clips_in_step = backend.needs_extension and device.type == "cuda" and not world.is_sharded
        # One kernel for a list of parameters on both sides.
        self.optimizer = backend.optim.AdamW(
            parameter_groups(self.model, recipe),
            lr=recipe.lr,
            betas=(0.9, recipe.beta2),
            fused=True,
            capturable=settings.graph,
            **({"max_grad_norm": recipe.clip} if self._clips_in_step else {}),
        )
        clips = nn_utils if backend.needs_extension else torch.nn.utils
        self._clip_grad_norm = clips.clip_grad_norm_
        self.loss = torch.compile(self.model, dynamic=False) if name == COMPILED else self.model
        self._buckets = None
        if settings.graph and world.size > 1:
            self._buckets = GradientBuckets(self.parameters, world)
        else:
            self.loss = world.wrap(self.loss, device)
        self.memory.resident = (torch.cuda.memory_allocated(device) if device.type == "cuda" else 0) - before
        self.graph = None
        if settings.graph:
            self.graph = GraphedStep(
                self.model,
                self.loss,
                self.optimizer,
                autocast=settings.autocast,
                on_gradients=self._before_update,
                pool=pool,
            )
        self.steps_taken = 0
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        """(steps taken, loss of the validation data)."""
        self.timer = PhaseTimer(device)
        self.blocks: list[float] = []
        """Milliseconds of a step, one number for each block of steps."""
        # Random numbers of its own: what a backend draws does not depend on when it takes its turn, nor on the others.
        # And each process draws other numbers, for its share of the batch.
        torch.manual_seed((recipe.seed + world.rank) % 2**63)
        self.random_state = self._random_state()

    def _clip(self) -> Tensor | None:
        """The norm of all gradients, which are scaled to the recipe's limit; None where the optimizer does both."""
        if self._clips_in_step:
            return None
        return self._clip_grad_norm(self.parameters, self.settings.recipe.clip)

    def _before_update(self):
        """In a graph, between backward and the update."""
        if self._buckets:
            self._buckets.finish()
        self._clip()

    def update(self) -> Tensor:
        """Clips and takes the optimizer's step; the norm of all gradients before, on the device."""
        norm = self._clip()
        self.optimizer.step()
        return self.optimizer.grad_norm if norm is None else norm

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss, in the precision of the run."""
        with autocast(self.device, self.settings.autocast):
            return self.loss(inputs, targets)

    def step(self, batch: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        """One step, its phases timed; the loss, detached, on the device."""
        self.set_rate()
        self.timer.begin()
        inputs, targets = batch()
        self.timer.lap()
        loss = self.forward(inputs, targets)
        self.timer.lap()
        loss.backward()
        self.timer.lap()
        self.update()
        self.timer.lap()
        self.optimizer.zero_grad()
        self.timer.lap()
        self.steps_taken += 1
        return loss.detach()

    def graphed_step(self, batch: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        """The same as one CUDA graph."""
        loss = self.graph(*batch(), lr=learning_rate(self.steps_taken, self.settings.recipe))
        self.steps_taken += 1
        return loss.clone()  # the next step writes it anew

    def set_rate(self):
        """That of the next step."""
        rate = learning_rate(self.steps_taken, self.settings.recipe)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @property
    def train_loss(self) -> float | None:
        last = self.losses[-LAST_STEPS:]
        return sum(last) / len(last) if last else None

    # The state of PyTorch's random numbers, its own while it has its turn.

    def __enter__(self):
        self._before = self._random_state()
        self._set_random_state(self.random_state)
        return self

    def __exit__(self, *exception):
        self.random_state = self._random_state()
        self._set_random_state(self._before)

    def _random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set_random_state(self, state: Tensor):
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    # Of a checkpoint.

    def whole_model(self) -> GPT:
        """The model; where it is sharded, a copy with whole weights, for which all processes have to ask, of use in the
        first one alone."""
        world = self.settings.world
        if not world.is_sharded:
            return self.model
        state = {name: whole(tensor.detach()) for name, tensor in self.model.state_dict().items()}
        model = GPT(self.model.backend, self.settings.recipe.config)
        if world.is_first:
            model.to(self.device, self.settings.parameter_dtype).load_state_dict(state, strict=True)
        return model

    def state_dict(self) -> dict:
        """All that its further steps depend on, on the CPU, and what it has measured of its losses; whole tensors, also
        where they are sharded. All processes have to ask; in all but the first there are no tensors in it."""
        world = self.settings.world

        def on_cpu(value):
            if isinstance(value, Tensor):
                tensor = whole(value.detach())
                return tensor.cpu() if world.is_first else None
            if isinstance(value, dict):
                return {key: on_cpu(item) for key, item in value.items()}
            return [on_cpu(item) for item in value] if isinstance(value, (list, tuple)) else value

        random_states = world.gather(self.random_state)
        optimizer = on_cpu(self.optimizer.state_dict())
        for group in optimizer["param_groups"]:
            group["lr"] = float(group["lr"])
        return {
            "model": on_cpu(self.model.state_dict()),
            "optimizer": optimizer,
            "random_state": random_states[0],
            "other_random_states": random_states[1:],
            "steps_taken": self.steps_taken,
            "losses": list(self.losses),
            "validation": [list(pair) for pair in self.validation],
        }

    def load_state_dict(self, state: dict):
        like = self.model.state_dict()
        model = {name: sharded_like(tensor, like.get(name, tensor)) for name, tensor in state["model"].items()}
        self.model.load_state_dict(model, strict=True)
        if state["optimizer"]["state"]:
            self.optimizer.load_state_dict(self._sharded(state["optimizer"]))
            for group in self.optimizer.param_groups:
                group["capturable"] = self.settings.graph
        # Processes that there were not go on from the beginning of numbers of their own.
        random_states = [state["random_state"], *state.get("other_random_states", ())]
        if self.settings.world.rank < len(random_states):
            self.random_state = random_states[self.settings.world.rank]
        self.steps_taken = int(state["steps_taken"])
        self.losses = [float(loss) for loss in state["losses"]]
        self.validation = [(int(step), float(loss)) for step, loss in state["validation"]]

    def _sharded(self, optimizer: dict) -> dict:
        """A state_dict of whole tensors with this process's shards in their place, where parameters are sharded."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = {
            number: {key: sharded_like(value, parameters[number]) for key, value in values.items()}
            for number, values in optimizer["state"].items()
        }
        return {**optimizer, "state": state}
