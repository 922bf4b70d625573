"""Trains GPTs of several backends side by side: same initial weights, same batches in the same order."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..._errors import UserError
from ..._grad_mode import without_grad
from ...models import GPT
from ...models.gpt_files import read_safetensors
from ..compare import BLOCK, WARMUP
from ..distributed import World
from ..parity import Parity
from ..timing import product_flops
from .corpus import Corpus
from .learner import Learner
from .settings import Settings

# The validation loss is over so many batches, and tokens, at most: all of tiny Shakespeare's, some of a large file's.
EVALUATED_BATCHES, EVALUATED_TOKENS = 150, 1 << 17
# Steps of each backend in which the phases are timed, where the training itself is of graphs.
PROBED_STEPS = 20


@dataclass
class Run:
    """The state of a run, from which its report is made."""

    settings: Settings
    corpus: Corpus
    backends: dict[str, Learner]
    initial_state: dict[str, Tensor]
    begins: Tensor
    """Where in the training data each sequence of each step begins: [steps, batch]."""
    parity: dict[str, Parity] = field(default_factory=dict)
    peak_flops: float | None = None
    seconds: float = 0.0
    interrupted: bool = False
    processes_agree: bool = True
    """Whether all processes have come to the same weights, bit by bit."""
    saved_at: int = 0
    sample: str | None = None

    @property
    def steps_planned(self) -> int:
        return self.settings.recipe.steps

    @property
    def steps_done(self) -> int:
        """Steps that every backend has taken."""
        return min(learner.steps_taken for learner in self.backends.values())

    @property
    def evaluated_tokens(self) -> int:
        """Tokens of the validation data that its loss is the mean over."""
        recipe = self.settings.recipe
        most = min(EVALUATED_TOKENS, EVALUATED_BATCHES * recipe.batch * recipe.length)
        return min(most, len(self.corpus.validation))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The whole batch of a step."""
        return self.corpus.train(self.begins[step])

    def share(self, step: int) -> tuple[Tensor, Tensor]:
        """This process's part of it."""
        return self.corpus.train(self.settings.world.share(self.begins[step]))


def initial_state(settings: Settings) -> dict[str, Tensor]:
    """The weights that all backends begin with: of a file, or drawn by the seed."""
    if settings.init is None:
        torch.manual_seed(settings.recipe.seed)
        model = GPT("native", settings.recipe.config)
    else:
        model = load_model(settings.init)
    return model.to(settings.parameter_dtype).state_dict()


def load_model(path: Path) -> GPT:
    """The model of a file: llm.c's checkpoint (.bin), or a state_dict of Hugging Face's, as .safetensors or as
    torch.save writes it.

    Raises:
        UserError: it cannot be read, or is neither.
    """
    try:
        if path.suffix == ".safetensors":
            return GPT.from_hugging_face(read_safetensors(path), "native")
        if path.suffix == ".bin" and not _is_archive(path):
            return GPT.from_llmc(path, "native")
        return GPT.from_hugging_face(load_archive(path, "state_dict"), "native")
    except OSError as error:
        raise UserError(f"--init {path} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UserError(f"--init: {error}") from error


def _is_archive(path: Path) -> bool:
    """Whether it is what torch.save writes: Hugging Face has named such files .bin too."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def load_archive(path: Path, what: str) -> dict:
    """What torch.save has written, without running code of it."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever a damaged archive comes up with
        raise ValueError(f"{path} is no {what}, or is damaged ({_first_line(error)})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no {what}: it holds a {type(content).__name__}")
    return content


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]


def prepare(settings: Settings, corpus: Corpus) -> Run:
    """Makes the models of all backends, with the same weights, and draws the batches of all steps."""
    recipe, state = settings.recipe, initial_state(settings)
    generator = torch.Generator().manual_seed(recipe.seed)
    begins = [torch.randint(len(corpus.train), (recipe.batch,), generator=generator) for _ in range(recipe.steps)]
    pool = torch.cuda.graph_pool_handle() if settings.graph else None
    learners = {name: Learner(settings, name, state, pool) for name in settings.backends}
    return Run(settings, corpus, learners, state, torch.stack(begins))


def train(run: Run, stop: Callable[[], bool], on_progress: Callable[[Run], None], save: Callable[[Run], None]):
    """Trains all backends of `run`, interleaved in blocks of steps; the order of the backends alternates.

    Args:
        run: from `prepare`, or taken up again.
        stop: asked after every step (with several processes: every block) whether to end early.
        on_progress: called after every block.
        save: called every `save_every` steps.
    """
    settings = run.settings
    begin = time.perf_counter() - run.seconds
    number = 0
    while run.steps_done < run.steps_planned:
        # Up to where something is to be done, so that a run that was resumed does it at the same steps.
        end = (run.steps_done // BLOCK + 1) * BLOCK
        for every in (settings.eval_every, settings.save_every):
            if every:
                end = min(end, (run.steps_done // every + 1) * every)
        end = min(end, run.steps_planned)
        learners = list(run.backends.values())
        for learner in learners if number % 2 == 0 else reversed(learners):
            _train_block(run, learner, end, stop)
            run.seconds = time.perf_counter() - begin
            on_progress(run)
        number += 1
        if settings.world.any(stop(), settings.device):
            run.interrupted = True
            break
        if end % settings.eval_every == 0 or end == run.steps_planned:
            for learner in learners:
                if not learner.validation or learner.validation[-1][0] < end:
                    learner.validation.append((end, evaluate(run, learner)))
        if settings.save_every and end % settings.save_every == 0 and end < run.steps_planned:
            save(run)
            run.saved_at = end
    run.seconds = time.perf_counter() - begin
    run.processes_agree = all(settings.world.alike(learner.parameters) for learner in run.backends.values())


def _train_block(run: Run, learner: Learner, end: int, stop: Callable[[], bool]):
    losses, device, world = [], run.settings.device, run.settings.world
    step = learner.step if learner.graph is None else learner.graphed_step
    begin = time.perf_counter()
    with learner.memory, learner:
        # Several processes must end at the same step, or one waits for the others for ever.
        while learner.steps_taken < end and not (world.size == 1 and stop()):
            losses.append(step(lambda: run.share(learner.steps_taken)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    learner.timer.collect()
    if losses:
        milliseconds = 1e3 * (time.perf_counter() - begin) / len(losses)
        learner.losses += world.mean(torch.stack(losses).double()).tolist()
        learner.blocks.append(milliseconds)


@without_grad
def evaluate(run: Run, learner: Learner) -> float:
    """The mean loss over the first part of the validation data, in evaluation mode."""
    model, device, world = learner.model, run.settings.device, run.settings.world
    batches = run.corpus.validation.begins_in_order(run.settings.recipe.batch, run.evaluated_tokens)
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    try:
        # In turn, a batch for each process; one that has none left takes the first, without counting it, since a
        # sharded model has to be called by all.
        for begin in range(world.rank, len(batches) + world.rank, world.size):
            begins = batches[begin if begin < len(batches) else 0]
            with torch.autocast(device.type, torch.bfloat16, enabled=run.settings.autocast is not None):
                loss = model(*run.corpus.validation(begins)).double() * len(begins)
            total += loss if begin < len(batches) else 0.0
    finally:
        model.train(was_training)
    return world.mean(total).item() * world.size / sum(map(len, batches))


def probe(run: Run):
    """Times the phases of eager steps, where the training is of graphs: on models of their own, which are dropped."""
    for name in run.backends:
        learner = Learner(without_graph(run.settings), name, run.initial_state)
        with learner:
            for step in range(PROBED_STEPS):
                learner.step(lambda step=step: run.share(step % len(run.begins)))
        learner.timer.collect()
        run.backends[name].timer.steps = learner.timer.steps
        del learner
        torch.cuda.empty_cache()


def without_graph(settings: Settings) -> Settings:
    return dataclasses.replace(settings, graph=False)


def alone(settings: Settings) -> Settings:
    """Of one process, and without graphs."""
    return dataclasses.replace(without_graph(settings), world=World())


def warmup(count: int) -> int:
    """How many of `count` timed steps are not counted."""
    return min(WARMUP, count // 2)


def measure_peak(run: Run):
    """What a share of the peak is a share of: torch.mm in the precision of the run."""
    dtype = run.settings.autocast or run.settings.parameter_dtype
    run.peak_flops = product_flops(run.settings.device, dtype)


def generate_sample(run: Run, model: GPT) -> str | None:
    """A text by a model of the run, or None where nothing turns tokens into text, or training diverged: from weights
    that are not finite nothing can be drawn."""
    tokenizer, settings = run.corpus.tokenizer, run.settings
    if tokenizer is None or not settings.sample or not all(weight.isfinite().all() for weight in model.parameters()):
        return None
    prompt = torch.tensor([tokenizer.encode(settings.prompt)], device=settings.device)
    generator = torch.Generator().manual_seed(settings.recipe.seed)
    with torch.autocast(settings.device.type, torch.bfloat16, enabled=settings.autocast is not None):
        tokens = model.generate(prompt, settings.sample, temperature=0.8, top_k=200, generator=generator)
    return tokenizer.decode(tokens[0].tolist())
