"""Time until a GPT of characters has learnt tiny Shakespeare as well as nanoGPT says of its own: a validation loss of
1.4697, over the whole validation text.

The model is nanoGPT's (6 layers, 6 heads, 384 features, contexts of 256 characters), trained by AdamW in bf16 under
autocast, each step one CUDA graph, the same recipe for all (on the CPU a smaller one in fp32, to try it out). Timed, by
the host's clock between two synchronisations: the order of the sequences (drawn on the device), the learning rates, and
every step of the training. Not timed: the first weights, the text's way to the device, what a process does once
(compilation, the capture of graphs; `ready` is all of that), and the evaluation, for which contexts follow each other
without a gap and the last one is as long as is left.

The recipe was found by --sweep, on the last tenth of the training text after training on the rest; the validation text
had no part in it (notes/gpt.md).

python -m cuda_ops bench gpt-char                         10 seeds, of each variant [--seeds 10] [--seconds 240]
python benchmarks/gpt_char.py --search 60                 seconds of random search around the recipe
python benchmarks/gpt_char.py --sweep lr=2e-3 lr=3e-3,steps=900     these recipes, each as it differs from the recipe
"""

import argparse
import dataclasses
import json
import math
import random
import statistics
import time
from pathlib import Path

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
    steps: int = 1100
    lr: float = 3e-3
    """Highest."""
    last_lr: float = 0.0
    """What the learning rate has fallen to after the last step, as a share of the highest."""
    warmup: int = 60
    """Steps in which it rises."""
    schedule: str = "cosine"
    """How it falls: "cosine", along half a one, or "linear"."""
    dropout: float = 0.0
    weight_decay: float = 0.1
    beta2: float = 0.99
    clip: float = 1.0
    short: int = 0
    """Length of the first sequences, of which a batch has as many as take its tokens; 0: all are of `length`."""
    short_share: float = 0.0
    """Share of the steps that are of them."""

    def __post_init__(self):
        if self.schedule not in ("cosine", "linear"):
            raise ValueError(f"schedule={self.schedule}: expected cosine or linear")
        if self.short_share and not 0 < self.short <= self.length:
            raise ValueError(f"short={self.short}: expected a length from 1 to {self.length}")

    def learning_rates(self) -> torch.Tensor:
        """[steps]"""
        step = torch.arange(self.steps, dtype=torch.float64)
        rising = (step + 1) / (self.warmup + 1)
        share = ((step - self.warmup) / max(1, self.steps - self.warmup)).clamp(0, 1)
        falling = 0.5 * (1 + torch.cos(math.pi * share)) if self.schedule == "cosine" else 1 - share
        falling = self.last_lr + (1 - self.last_lr) * falling
        return (self.lr * torch.where(step < self.warmup, rising, falling)).float()

    def stages(self) -> list[tuple[int, int, int]]:
        """(steps, sequences of a batch, their length), one after the other."""
        first = round(self.short_share * self.steps)
        stages = [(first, self.batch * self.length // self.short, self.short)] if first else []
        return [*stages, (self.steps - first, self.batch, self.length)] if self.steps > first else stages

    @property
    def tokens(self) -> int:
        return sum(steps * batch * length for steps, batch, length in self.stages())

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
        self.step = gpt2_step.make_step(VARIANTS[variant], self.settings, precision, device, self._batch)
        self.rates = recipe.learning_rates().to(device)
        # What a sequence is gathered by: the length of the row tells a graph of short ones from the other's.
        self.offsets = {length: torch.arange(length + 1, device=device) for _, _, length in recipe.stages()}

    def _batch(self, begins, offsets):
        """Inputs and targets, gathered in the graph."""
        rows = self.tokens[begins[:, None] + offsets]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    @property
    def model(self) -> torch.nn.Module:
        return self.step.model

    def start(self, seed: int):
        """The first weights of a seed; an optimizer that has seen nothing."""
        torch.manual_seed(seed)
        self.model.load_state_dict(GPT("native", self.settings.config).state_dict())
        self.model.train()
        with torch.no_grad():  # where the graphs have them
            for state in self.step.optimizer.state.values():
                for tensor in state.values():
                    if isinstance(tensor, torch.Tensor):
                        tensor.zero_()

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
        losses, done = [], 0
        for steps, batch, length in self.recipe.stages():
            begins = self.order(steps * batch, length, generator).view(steps, batch)
            for step in range(steps):
                losses.append(self.step(begins[step], self.offsets[length], lr=self.rates[done + step]).clone())
            done += steps
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
        for _, batch, length in self.recipe.stages():
            begins = torch.zeros(batch, dtype=torch.int64, device=self.device)
            for _ in range(3):
                self.step(begins, self.offsets[length], lr=self.rates[0])
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
        recipe = dataclasses.replace(recipe, length=settings.RECIPES[MODELS["cpu"]].length, short_share=0.0)
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
