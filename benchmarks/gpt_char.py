"""Time until a GPT of characters has learnt tiny Shakespeare as well as nanoGPT says of its own: a validation loss of
1.4697, over the whole validation text.

The model is nanoGPT's (6 layers, 6 heads, 384 features, contexts of 256 characters), trained by AdamW in bf16 under
autocast, each step one CUDA graph, the same recipe for all (on the CPU a smaller one in fp32, to try it out): it begins
with half of the layers, each of which becomes two, and with short contexts; a few of the characters that it sees are
wrong; and its weights are in the end an average over the last steps. Timed, by the host's clock between two
synchronisations: the order of the sequences (drawn on the device), the learning rates, every step of the training, the
growth and the averages. Not timed: the first weights, the text's way to the device, what a process does once
(compilation, the capture of graphs; `ready` is all of that), and the evaluation, for which contexts follow each other
without a gap and the last one is as long as is left.

The recipe was found by sweeps, on the last tenth of the training text after training on the rest; the
validation text had no part in it (notes/gpt.md).

python -m cuda_ops bench gpt-char                         10 seeds, of each variant [--seeds 10] [--seconds 240]
python benchmarks/gpt_char.py --search 60                 seconds of random search around the recipe
python benchmarks/gpt_char.py --sweep lr=2e-3 lr=3e-3,steps=900     these recipes, each as it differs from the recipe
"""

import argparse
import dataclasses
import itertools
import json
import math
import random
import re
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import gpt2_step
import harness
import mnist_report
import numpy as np
import torch

from cuda_ops._files import write_files
from cuda_ops._grad_mode import without_grad
from cuda_ops.data.text import TRAIN_SHARE, Characters, shakespeare
from cuda_ops.models import GPT
from cuda_ops.training.gpt import settings
from cuda_ops.training.loop import autocast

SEEDS = 10
SECONDS = 240
GOAL = 1.4697
QUICK_TOKENS = 1 << 12
"""Of the validation text, with --quick."""
EVALUATED_TOGETHER = 64
"""Contexts."""
AVERAGED_EVERY = 4
"""Steps: of so many the last one's weights have a part in the average."""
LAYER = re.compile(r"(?<=\.h\.)\d+")
"""In a parameter's name."""
MODELS = {"cuda": "char", "cpu": "cpu-char"}
VARIANTS = {
    "fused": gpt2_step.Variant("fused", "fused", graph=True),
    "custom": gpt2_step.Variant("custom", "custom", graph=True),
    "PyTorch graph": gpt2_step.Variant("PyTorch graph", "native", graph=True),
    "PyTorch compiled, graph": gpt2_step.Variant("PyTorch compiled, graph", "native", graph=True, compiled=True),
}
RACERS = {"cuda": ("fused", "PyTorch graph", "PyTorch compiled, graph"), "cpu": ("fused", "PyTorch graph")}
PRECISION = {"cuda": "bf16", "cpu": "fp32"}


@dataclasses.dataclass(frozen=True)
class Recipe:
    batch: int = 32
    """Sequences of `length`."""
    length: int = 256
    steps: int = 1371
    lr: float = 2e-3
    """Highest."""
    last_lr: float = 0.15
    """What the learning rate has fallen to after the last step, as a share of the highest."""
    warmup: int = 120
    """Steps in which it rises."""
    hold: float = 0.3
    """Share of the steps, warm-up included, after which it falls."""
    schedule: str = "linear"
    """How it falls: "cosine", along half a one, or "linear"."""
    dropout: float = 0.05
    """Behind the embeddings and of what each half of a block adds."""
    attention_dropout: float = 0.0
    """Of attention's weights."""
    noise: float = 0.05
    """Share of a sequence's characters that the model sees as others: those of another sequence of the batch."""
    weight_decay: float = 0.5
    beta2: float = 0.99
    clip: float = 1.0
    short: int = 64
    """Length of the first sequences, of which a batch has as many as take its tokens; 0: all are of `length`."""
    short_share: float = 0.33
    """Share of the steps that are of them."""
    shallow: int = 3
    """Layers that the model begins with. Each of them then stands for as many of the whole model's as there are."""
    shallow_share: float = 0.4
    """Share of the steps with them."""
    average: int = 64
    """Steps over which the weights are averaged, exponentially; the average is what has been trained. 0: the last
    weights are."""
    average_share: float = 0.4
    """Share of the steps, the last ones, in which they are."""

    def __post_init__(self):
        if self.schedule not in ("cosine", "linear"):
            raise ValueError(f"schedule={self.schedule}: expected cosine or linear")
        if self.short_share and not 0 < self.short <= self.length:
            raise ValueError(f"short={self.short}: expected a length from 1 to {self.length}")
        if self.shallow < 1 or not 0 <= self.shallow_share < 1:
            raise ValueError(
                f"shallow={self.shallow}, shallow_share={self.shallow_share}: expected at least 1 layer, and a share "
                "from 0 to less than 1"
            )
        if self.average and not (self.average >= AVERAGED_EVERY and self.shallow_share + self.average_share <= 1):
            raise ValueError(
                f"average={self.average}: expected at least {AVERAGED_EVERY} steps, of those of the whole model alone"
            )

    def learning_rates(self) -> torch.Tensor:
        """[steps]"""
        step = torch.arange(self.steps, dtype=torch.float64)
        rising = (step + 1) / (self.warmup + 1)
        begin = max(self.warmup, self.hold * self.steps)
        share = ((step - begin) / max(1, self.steps - begin)).clamp(0, 1)
        falling = 0.5 * (1 + torch.cos(math.pi * share)) if self.schedule == "cosine" else 1 - share
        falling = self.last_lr + (1 - self.last_lr) * falling
        return (self.lr * torch.where(step < self.warmup, rising, falling)).float()

    def stages(self) -> list["Stage"]:
        """One after the other."""
        short, shallow = (round(share * self.steps) for share in (self.short_share, self.shallow_share))
        ends, stages = sorted({0, short, shallow, self.steps}), []
        for begin, end in itertools.pairwise(ends):
            length = self.short if begin < short else self.length
            layers = self.shallow if begin < shallow else None
            stages.append(Stage(end - begin, self.batch * self.length // length, length, layers))
        return stages

    @property
    def tokens(self) -> int:
        return sum(stage.steps * stage.batch * stage.length for stage in self.stages())

    def changed(self, changes: str) -> "Recipe":
        """By "lr=2e-3,steps=900".

        Raises:
            ValueError: a name or a value is none of a recipe's.
        """
        types = {field.name: field.type for field in dataclasses.fields(self)}
        given = {}
        for change in filter(None, changes.split(",")):
            name, _, value = change.partition("=")
            if name not in types:
                raise ValueError(f"{change}: expected one of {', '.join(types)}, as name=value")
            given[name] = types[name](value)
        return dataclasses.replace(self, **given)

    def for_optimizer(self, model: str) -> settings.Recipe:
        """As the training of `python -m cuda_ops gpt` has it."""
        recipe = settings.RECIPES[model]
        config = dataclasses.replace(recipe.config, dropout=self.dropout)
        ours = {name: getattr(self, name) for name in ("batch", "length", "steps", "lr", "warmup")}
        others = {name: getattr(self, name) for name in ("weight_decay", "beta2", "clip")}
        return dataclasses.replace(recipe, config=config, min_lr=self.lr * self.last_lr, **ours, **others)


class Stage(NamedTuple):
    steps: int
    batch: int
    length: int
    layers: int | None
    """None: all of the model's."""


def texts(held_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens to train on and those to measure the loss by: the validation text, or with `held_out` the last tenth
    of the training text, which is then not trained on."""
    text = shakespeare()
    tokens = torch.from_numpy(np.array(Characters.of(text).encode(text), dtype=np.int64))
    middle = int(TRAIN_SHARE * len(tokens))
    train, validation = tokens[:middle], tokens[middle:]
    if held_out:
        middle = int(0.9 * len(train))
        train, validation = train[:middle], train[middle:]
    return train, validation


class Training:
    """One variant's training by one recipe, again and again from new weights."""

    def __init__(self, variant: str, precision: str, recipe: Recipe, tokens: torch.Tensor, device):
        self.precision, self.recipe, self.device = precision, recipe, device
        gpt2_step.set_precision(precision)
        self.settings = recipe.for_optimizer(MODELS[device.type])
        self.tokens = tokens.to(device)
        self.stages = recipe.stages()
        whole = self.settings.config.n_layer
        self.steps = {layers: self._step(VARIANTS[variant], layers or whole) for *_, layers in self.stages}
        self.step = self.steps[None]
        self.average = [torch.empty_like(p) for p in self.model.parameters()] if recipe.average else []
        self.rates = recipe.learning_rates().to(device)
        # What a sequence is gathered by: the length of the row tells a graph of short ones from the other's.
        self.offsets = {stage.length: torch.arange(stage.length + 1, device=device) for stage in self.stages}

    def _step(self, variant, layers: int):
        """The step of a model of so many layers."""
        recipe = dataclasses.replace(self.settings, config=dataclasses.replace(self.settings.config, n_layer=layers))
        step = gpt2_step.make_step(variant, recipe, self.precision, self.device, self._batch)
        for block in step.model.transformer["h"]:
            block.attn.dropout = self.recipe.attention_dropout
        return step

    def _batch(self, begins, offsets):
        """Inputs and targets, gathered in the graph."""
        rows = self.tokens[begins[:, None] + offsets]
        inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if self.recipe.noise:
            is_noise = torch.rand(inputs.shape, device=inputs.device) < self.recipe.noise
            inputs = torch.where(is_noise, inputs.flip(0), inputs)
        return inputs, targets

    @property
    def model(self) -> torch.nn.Module:
        return self.step.model

    def start(self, seed: int):
        """The first weights of a seed; an optimizer that has seen nothing."""
        torch.manual_seed(seed)
        for step in self.steps.values():
            step.model.load_state_dict(GPT("native", step.model.config).state_dict())
            step.model.train()
            with torch.no_grad():  # where the graphs have them
                for state in step.optimizer.state.values():
                    for tensor in state.values():
                        if isinstance(tensor, torch.Tensor):
                            tensor.zero_()

    @without_grad
    def grow(self):
        """The whole model, and its optimizer's state, from the one with fewer layers."""
        shallow, whole = self.steps[self.stages[0].layers], self.step
        few, many = shallow.model.config.n_layer, whole.model.config.n_layer
        sources, mine, theirs = dict(shallow.model.named_parameters()), [], []
        for name, parameter in whole.model.named_parameters():
            source = sources[LAYER.sub(lambda layer: str(int(layer[0]) * few // many), name)]
            states = whole.optimizer.state[parameter], shallow.optimizer.state[source]
            mine += [parameter, *states[0].values()]
            theirs += [source, *states[1].values()]
        torch._foreach_copy_(mine, theirs)

    @without_grad
    def take_average(self, step: int):
        """Of the weights after that step, of those that are averaged."""
        first = self.recipe.steps - round(self.recipe.average_share * self.recipe.steps)
        if not self.average or step < first or (step - first) % AVERAGED_EVERY:
            return
        weights = list(self.model.parameters())
        if step == first:
            torch._foreach_copy_(self.average, weights)
        else:
            torch._foreach_lerp_(self.average, weights, AVERAGED_EVERY / self.recipe.average)

    def order(self, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Where `count` sequences begin: those that cut the text into pieces, in random order, and then those of
        another cut."""
        parts, left = [], count
        while left > 0:
            begin = torch.randint(length, (1,), generator=generator, device=self.device)
            pieces = (len(self.tokens) - 1 - length) // length  # wherever the first one begins
            parts.append((begin + length * torch.randperm(pieces, generator=generator, device=self.device))[:left])
            left -= len(parts[-1])
        return torch.cat(parts)

    def train(self, seed: int) -> torch.Tensor:
        """All steps; the loss of each."""
        generator = torch.Generator(self.device).manual_seed(seed)
        losses, done, before = [], 0, None
        for steps, batch, length, layers in self.stages:
            if before is not None and layers is None:
                self.grow()
            before, step = layers, self.steps[layers]
            begins = self.order(steps * batch, length, generator).view(steps, batch)
            for i in range(steps):
                losses.append(step(begins[i], self.offsets[length], lr=self.rates[done + i]).clone())
                self.take_average(done + i)
            done += steps
        if self.average:
            with torch.no_grad():
                torch._foreach_copy_(list(self.model.parameters()), self.average)
        return torch.stack(losses)

    def timed(self, seed: int) -> float:
        """Seconds of `train`, from the first weights of the seed."""
        gpt2_step.set_precision(self.precision)
        self.start(seed)
        harness.synchronize(self.device)
        begin = time.perf_counter()
        losses = self.train(seed)
        harness.synchronize(self.device)
        seconds = time.perf_counter() - begin
        if not losses[-1].isfinite():
            print(f"seed {seed}: the loss is not finite")
        return seconds

    def warm_up(self):
        """The first step like it is not yet a graph, the second is captured."""
        self.start(0)
        for _, batch, length, layers in self.stages:
            begins = torch.zeros(batch, dtype=torch.int64, device=self.device)
            for _ in range(3):
                self.steps[layers](begins, self.offsets[length], lr=self.rates[0])
        harness.synchronize(self.device)

    @without_grad
    def loss(self, tokens: torch.Tensor) -> float:
        """Mean over all tokens but the first, which nothing precedes."""
        model, length = self.model, self.settings.config.block_size
        targets = len(tokens) - 1
        whole = targets // length
        model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        pieces = list(tokens[: whole * length + 1].unfold(0, length + 1, length).split(EVALUATED_TOGETHER))
        if targets % length:
            pieces.append(tokens[None, whole * length :])
        for rows in pieces:
            rows = rows.to(self.device)
            inputs, following = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            with autocast(self.device, gpt2_step.PRECISIONS[self.precision]):
                total += model(inputs, following).double() * following.numel()
        model.train()
        return total.item() / targets


def statistics_of(values: list[float]) -> dict[str, float]:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": spread, "min": min(values), "max": max(values)}


def prepared(variant: str, precision: str, recipe: Recipe, tokens, device) -> tuple[Training, float]:
    """Ready to be timed, and the seconds that took."""
    begin = time.perf_counter()
    training = Training(variant, precision, recipe, tokens, device)
    training.warm_up()
    return training, time.perf_counter() - begin


def run(
    device,
    out: Path,
    seconds: float,
    quick: bool,
    with_compile: bool,
    batches=None,
    precisions=None,
    seeds: int | None = None,
    recipe: Recipe | None = None,
):
    """Trains every variant from the seeds, and writes gpt_char.json and .md into <out>/<device>."""
    begin = time.perf_counter()
    own = PRECISION[device.type]
    if precisions and precisions != [own]:
        raise ValueError(f"--precision {precisions[0]}: gpt-char on {device.type} is for {own}")
    if batches and len(batches) > 1:
        raise ValueError("the recipe of gpt-char is for one batch size: give --batch once")
    recipe = recipe or Recipe()
    if batches:
        recipe = dataclasses.replace(recipe, batch=batches[0])
    if device.type == "cpu":
        length = settings.RECIPES[MODELS["cpu"]].length
        recipe = dataclasses.replace(recipe, length=length, short=min(recipe.short, length // 4))
    train, validation = texts(held_out=False)
    if quick:
        recipe = dataclasses.replace(recipe, steps=20, warmup=5)
        validation = validation[:QUICK_TOKENS]
    names = [name for name in RACERS[device.type] if with_compile or "compiled" not in name]
    wanted = 2 if quick else seeds or SEEDS
    variants = {}
    for number, name in enumerate(names):
        # Each with the device to itself; what is left of the time is shared.
        until = time.perf_counter() + (begin + seconds - time.perf_counter()) / (len(names) - number)
        gpt2_step.free(device)
        training, ready = prepared(name, own, recipe, train, device)
        times, losses = [], []
        for seed in range(wanted):
            if seed > 1 and time.perf_counter() + times[-1] > until:
                break
            times.append(training.timed(seed))
            losses.append(training.loss(validation))
            print(f"{name} {own}, seed {seed}: {times[-1]:.3f} s, validation loss {losses[-1]:.4f}", flush=True)
        variants[f"{name} {own}"] = {
            "seeds": len(times),
            "seconds": statistics_of(times),
            "loss": statistics_of(losses),
            "losses": losses,
            "seeds_at_goal": sum(loss <= GOAL for loss in losses),
            "ready_seconds": ready,
        }
        del training
    found = {
        "facts": harness.environment(device),
        "model": MODELS[device.type],
        "goal": GOAL,
        "recipe": dataclasses.asdict(recipe),
        "tokens": recipe.tokens,
        "validation_tokens": len(validation) - 1,
        "variants": variants,
    }
    folder = out / harness.slug(found["facts"]["device"])
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"gpt_char.json": json.dumps(found, indent=1) + "\n", "gpt_char.md": markdown(found)}
    write_files({folder / name: text.encode() for name, text in contents.items()})
    print(markdown(found))


def recipe_text(recipe: dict) -> str:
    return ", ".join(f"{name} {value if isinstance(value, str) else f'{value:g}'}" for name, value in recipe.items())


def markdown(found: dict) -> str:
    rows = []
    for name, result in found["variants"].items():
        seconds, loss = result["seconds"], result["loss"]
        rows.append(
            [
                name,
                f"{seconds['mean']:.2f} ± {seconds['std']:.2f}",
                f"{loss['mean']:.4f} ± {loss['std']:.4f}",
                f"{loss['max']:.4f}",
                f"{result['seeds_at_goal']} of {result['seeds']}",
                f"{result['ready_seconds']:.1f}",
            ]
        )
    header = ["", "training, s", "validation loss", "highest", "seeds at the goal", "ready in, s"]
    parts = [
        f"# Time to a validation loss of {found['goal']} on tiny Shakespeare, by characters",
        f"Model `{found['model']}`, mean ± standard deviation over the seeds. "
        + " ".join(" ".join(__doc__.split("\n\n")[1:3]).split()),
        mnist_report.table(header, rows),
        f"Recipe: {recipe_text(found['recipe'])}; {found['tokens']:,} tokens. Validation: "
        f"{found['validation_tokens']:,} tokens.",
        "\n".join(f"- {name}: {value}" for name, value in found["facts"].items()),
    ]
    return "\n\n".join(parts) + "\n"


# --- how the recipe was found ---------------------------------------------------------------------------------------


def near(recipe: Recipe, generator: random.Random) -> Recipe:
    """The recipe with everything but its tokens changed a little."""

    def factor(width):
        return 2 ** generator.uniform(-width, width)

    return dataclasses.replace(
        recipe,
        lr=recipe.lr * factor(0.7),
        warmup=max(1, round(recipe.warmup * factor(0.7))),
        schedule=generator.choice(["cosine", "linear"]),
        dropout=generator.choice([0.0, 0.05, 0.1, 0.15, 0.2]),
        attention_dropout=generator.choice([0.0, 0.1]),
        noise=generator.choice([0.0, 0.03, 0.05, 0.08]),
        weight_decay=recipe.weight_decay * factor(2),
        beta2=generator.choice([0.95, 0.98, 0.99, 0.995]),
        clip=generator.choice([0.5, 1.0, 2.0]),
    )


def try_recipe(variant: str, precision: str, recipe: Recipe, seeds: int, device) -> tuple[float, float]:
    """(mean loss of the held-out tenth of the training text, mean seconds)."""
    train, held_out = texts(held_out=True)
    gpt2_step.free(device)
    training, _ = prepared(variant, precision, recipe, train, device)
    times, losses = [], []
    for seed in range(seeds):
        times.append(training.timed(seed))
        losses.append(training.loss(held_out))
    return statistics.fmean(losses), statistics.fmean(times)


def tell(tried: list[tuple[float, float, str]]):
    print("loss of the held-out tenth, seconds, recipe")
    for loss, seconds, what in sorted(tried):
        print(f"{loss:.4f}  {seconds:6.3f}  {what}", flush=True)


def sweep(changes: list[str], variant: str, precision: str, recipe: Recipe, seeds: int, device):
    """Prints the losses of the recipes that differ from `recipe` so, on the part of the training text held out."""
    recipes = [recipe.changed(change) for change in changes]  # all are checked before the first one is tried
    tried = []
    for change, candidate in zip(changes, recipes, strict=True):
        tried.append((*try_recipe(variant, precision, candidate, seeds, device), change or "the recipe"))
        tell(tried[-1:])
    tell(tried)


def search(seconds: float, variant: str, precision: str, recipe: Recipe, seeds: int, device):
    """Likewise of recipes near `recipe`."""
    generator, begin, tried = random.Random(0), time.perf_counter(), []
    while time.perf_counter() - begin < seconds:
        candidate = near(recipe, generator) if tried else recipe
        found = try_recipe(variant, precision, candidate, seeds, device)
        tried.append((*found, recipe_text(dataclasses.asdict(candidate))))
        tell(tried[-1:])
    tell(tried)


def main():
    parser = argparse.ArgumentParser(description="How the recipe was found; the race is `bench gpt-char`.")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--search", type=float, metavar="SECONDS")
    how.add_argument("--sweep", nargs="+", metavar="CHANGES", help='"lr=2e-3,steps=900"; "" is the recipe as it is')
    how.add_argument("--race", action="store_true", help="the race by the recipe that the options make")
    parser.add_argument("--variant", choices=VARIANTS, default="fused")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=int, help=f"default: 1, and of --race {SEEDS}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of --race")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="of --race")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="of --race")
    for field in dataclasses.fields(Recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    args = parser.parse_args()
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Recipe)})
    device = torch.device(args.device)
    if args.race:
        run(device, args.out, args.seconds, False, args.compile, seeds=args.seeds, recipe=recipe)
        return
    precision, seeds = PRECISION[device.type], args.seeds or 1
    if args.search is not None:
        search(args.search, args.variant, precision, recipe, seeds, device)
    else:
        sweep(args.sweep, args.variant, precision, recipe, seeds, device)


if __name__ == "__main__":
    main()
