"""Time from initial weights to 99 % of MNIST's test set: plain SGD without momentum, the same recipe for all.

Timed, by the host's clock between two synchronisations: the order of the images (drawn on the device), the learning
rates, and every step of the training. Not timed: the first weights, the data set's way to the device (as bytes), what a
process does once (compilation, the capture of graphs), and the evaluation. `cold` is the whole of it: a fresh process
from its start to its trained weights, import, data set, compilation and capture included.

The recipe was found by --search, on the last 6,000 images of a shuffled training set after training on the other
54,000; the test set had no part in it. Its learning rates are one schedule (linear rise, linear fall to zero) times a
factor for the convolutions and batch norms.

python -m cuda_ops bench mnist-99                     30 seeds, of each variant
python benchmarks/mnist_99.py --search 60             seconds of random search around the recipe
"""

import argparse
import dataclasses
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import mnist_report
import mnist_step
import torch

from cuda_ops._files import write_files
from cuda_ops.data import Batches, mnist
from cuda_ops.models import MnistCNN
from cuda_ops.training import evaluate

SEEDS = 30
GOAL = 0.99


@dataclasses.dataclass(frozen=True)
class Recipe:
    batch: int = 64
    steps: int = 1100
    lr: float = 0.2
    """Highest, of the linear layers."""
    conv: float = 6.0
    """Factor for the convolutions and the batch norms."""
    warmup: float = 0.25
    """Share of the steps in which the learning rate rises."""
    label_smoothing: float = 0.1

    def learning_rates(self) -> torch.Tensor:
        """[steps, groups], in the order of parameter_groups."""
        step = torch.arange(self.steps, dtype=torch.float64)
        rising = (step + 1) / max(1.0, self.warmup * self.steps)
        falling = (self.steps - step) / (self.steps - self.warmup * self.steps)
        schedule = self.lr * torch.minimum(rising, falling).clamp(max=1)
        return (schedule[:, None] * torch.tensor([self.conv, 1.0])).float()


CUDA_VARIANTS = (
    ("one kernel", "bf16"),
    ("fused", "bf16"),
    ("fused", "fp32"),
    ("PyTorch graph", "bf16"),
    ("PyTorch compiled, graph", "bf16"),
)
VARIANTS = {
    "one kernel": mnist_step.Variant("one kernel", "fused", graph=True, one_kernel=True),
    "fused": mnist_step.Variant("fused", "fused", graph=True),
    "custom": mnist_step.Variant("custom", "custom", graph=True),
    "PyTorch graph": mnist_step.Variant("PyTorch graph", "native", graph=True),
    "PyTorch compiled, graph": mnist_step.Variant("PyTorch compiled", "native", graph=True, compile_mode="default"),
}


def parameter_groups(model):
    """The convolutions with their batch norms, and the linear layers."""
    linear = [*model.linear1.parameters(), *model.linear2.parameters()]
    others = [p for p in model.parameters() if all(p is not q for q in linear)]
    return [{"params": others}, {"params": linear}]


class Training:
    """One variant's training by one recipe, again and again from new weights."""

    def __init__(self, variant: str, precision: str, recipe: Recipe, data, device, steps_per_graph: int = 128):
        self.precision, self.recipe, self.device = precision, recipe, device
        self.count = len(data[1])
        mnist_step.set_precision(precision)
        self.step = mnist_step.make_step(
            VARIANTS[variant], precision, data, device, steps_per_graph, recipe.label_smoothing, parameter_groups
        )
        self.rates = recipe.learning_rates().to(device)

    @property
    def model(self) -> torch.nn.Module:
        return self.step.model

    def start(self, seed: int):
        """The first weights of a seed."""
        torch.manual_seed(seed)
        self.model.load_state_dict(MnistCNN("native").state_dict())
        self.model.train()

    def train(self, seed: int) -> torch.Tensor:
        """All steps; the loss of each."""
        generator = torch.Generator(self.device).manual_seed(seed)
        whole = self.count // self.recipe.batch
        epochs = math.ceil(self.recipe.steps / whole)
        order = torch.cat(
            [
                torch.randperm(self.count, generator=generator, device=self.device)[: whole * self.recipe.batch]
                for _ in range(epochs)
            ]
        )
        order = order.view(-1, self.recipe.batch)[: self.recipe.steps]
        return self.step.run(order, lr=self.rates)

    def timed(self, seed: int) -> float:
        """Seconds of `train`, from the first weights of the seed."""
        mnist_step.set_precision(self.precision)
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
        """The first run of every graph is not one yet, the second is captured."""
        for _ in range(3):
            self.timed(0)

    def accuracy(self, batches: Batches) -> float:
        return evaluate(self.model, batches, batch_size=2000).accuracy


def statistics_of(values: list[float]) -> dict[str, float]:
    values = torch.tensor(values, dtype=torch.float64)
    p10, median, p90 = values.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    spread = values.std().item() if len(values) > 1 else 0.0
    return {"mean": values.mean().item(), "std": spread, "min": values.min().item(), "p10": p10, "median": median} | {
        "p90": p90
    }


def cold_seconds(variant: str, precision: str, device) -> float | None:
    """Of a fresh process with an empty compiler cache, from its start until it has trained."""
    command = [sys.executable, str(Path(__file__).resolve()), "--once", variant, precision, str(device)]
    with tempfile.TemporaryDirectory() as cache:
        begin = time.perf_counter()
        environment = mnist_step.fresh_environment(cache)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        line = process.stdout.readline()
        seconds = time.perf_counter() - begin
        process.communicate()
    return seconds if line == "trained\n" else None


def once(variant: str, precision: str, device: str):
    """Trains one time and says so."""
    device = torch.device(device)
    training = Training(variant, precision, Recipe(), mnist(train=True), device)
    training.start(0)
    training.train(0).cpu()
    print("trained", flush=True)


def run(
    device,
    out: Path,
    seconds: float,
    quick: bool,
    with_compile: bool,
    batches=None,
    precisions=None,
    seeds: int = SEEDS,
):
    """Trains every variant from so many seeds, interleaved, and writes mnist_99.json and .md into <out>/<device>."""
    begin = time.perf_counter()
    recipe = Recipe(steps=20) if quick else Recipe()
    recipe = dataclasses.replace(recipe, batch=batches[0]) if batches else recipe
    cuda = device.type == "cuda"
    variants = CUDA_VARIANTS if cuda else (("fused", "fp32"), ("PyTorch graph", "fp32"))
    for precision in precisions or ():
        if precision not in [v[1] for v in variants]:
            known = ", ".join(dict.fromkeys(v[1] for v in variants))
            raise ValueError(f"--precision {precision}: the {device.type.upper()} races to 99 % in {known}")
    if batches and len(batches) > 1:
        raise ValueError("the recipe of mnist-99 is for one batch size: give --batch once")
    variants = [v for v in variants if with_compile or "compiled" not in v[0]]
    variants = [v for v in variants if VARIANTS[v[0]].races(v[1], recipe.batch, device)]
    variants = [v for v in variants if not precisions or v[1] in precisions]
    data, test = mnist(train=True), Batches(*mnist(train=False), device, keep_on_device=True)
    trainings = {f"{v} {p}": Training(v, p, recipe, data, device) for v, p in variants}
    times, accuracies = ({name: [] for name in trainings} for _ in range(2))
    if cuda:
        for training in trainings.values():
            training.warm_up()
    for seed in range(2 if quick else seeds):
        if seed > 1 and time.perf_counter() - begin > 0.7 * seconds:
            break
        for name, training in trainings.items():
            times[name].append(training.timed(seed))
            accuracies[name].append(training.accuracy(test))
        print(f"seed {seed}: " + ", ".join(f"{n} {1e3 * t[-1]:.1f} ms" for n, t in times.items()), flush=True)
    cold = {}
    for (variant, precision), name in zip(variants, trainings, strict=True):
        # A fresh process trains by the recipe as it is.
        if time.perf_counter() - begin < seconds and recipe == Recipe():
            cold[name] = cold_seconds(variant, precision, device)
    found = {
        "facts": harness.environment(device),
        "recipe": dataclasses.asdict(recipe),
        "pictures": recipe.batch * recipe.steps,
        "variants": {
            name: {
                "seeds": len(times[name]),
                "milliseconds": statistics_of([1e3 * t for t in times[name]]),
                "accuracy": statistics_of(accuracies[name]),
                "seeds_at_goal": sum(a >= GOAL for a in accuracies[name]),
                "cold_seconds": cold.get(name),
            }
            for name in trainings
        },
    }
    folder = out / harness.slug(found["facts"]["device"])
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"mnist_99.json": json.dumps(found, indent=1) + "\n", "mnist_99.md": markdown(found)}
    write_files({folder / name: text.encode() for name, text in contents.items()})
    print(markdown(found))


def markdown(found: dict) -> str:
    rows = []
    for name, result in found["variants"].items():
        ms, accuracy, cold = result["milliseconds"], result["accuracy"], result["cold_seconds"]
        rows.append(
            [
                name,
                f"{ms['mean']:.1f} ± {ms['std']:.1f}",
                f"{100 * accuracy['mean']:.3f} ± {100 * accuracy['std']:.3f}",
                f"{100 * accuracy['min']:.2f}",
                f"{result['seeds_at_goal']} of {result['seeds']}",
                "–" if cold is None else f"{cold:.1f}",
            ]
        )
    header = ["", "training, ms", "test accuracy, %", "lowest", "seeds at 99 %", "cold, s"]
    recipe = ", ".join(f"{name} {value:g}" for name, value in found["recipe"].items())
    parts = [
        "# Time to 99 % of MNIST's test set",
        "Mean ± standard deviation over the seeds. " + " ".join(__doc__.split("\n\n")[1].split()),
        mnist_report.table(header, rows),
        f"Recipe: {recipe}; {found['pictures']:,} images.",
        "\n".join(f"- {name}: {value}" for name, value in found["facts"].items()),
    ]
    return "\n\n".join(parts) + "\n"


# --- how the recipe was found ---------------------------------------------------------------------------------------


def near(recipe: Recipe, generator: random.Random) -> Recipe:
    """The recipe with everything but batch and steps changed a little."""

    def factor(width):
        return 2 ** generator.uniform(-width, width)

    return dataclasses.replace(
        recipe,
        lr=recipe.lr * factor(0.7),
        conv=recipe.conv * factor(1.0),
        warmup=min(0.6, recipe.warmup * factor(0.7)),
        label_smoothing=generator.choice([0.0, 0.03, 0.07, 0.12]),
    )


def search(seconds: float, variant: str, precision: str, recipe: Recipe, device):
    """Prints the accuracies of recipes near `recipe` on the part of the training set that was held out."""
    images, labels = mnist(train=True)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1234))
    train, held_out = shuffled[:54000], shuffled[54000:]
    batches = Batches(images[held_out], labels[held_out], device, keep_on_device=True)
    generator, begin, tried = random.Random(0), time.perf_counter(), []
    while time.perf_counter() - begin < seconds:
        candidate = near(recipe, generator) if tried else recipe
        training = Training(variant, precision, candidate, (images[train], labels[train]), device)
        accuracies = []
        for seed in range(3):
            training.timed(seed)
            accuracies.append(training.accuracy(batches))
        tried.append((sum(accuracies) / 3, candidate))
    for accuracy, candidate in sorted(tried, key=lambda pair: -pair[0]):
        print(f"{100 * accuracy:.3f} % {candidate}")


def main():
    parser = argparse.ArgumentParser(description="The search for the recipe; the race is `bench mnist-99`.")
    parser.add_argument("--search", type=float, metavar="SECONDS")
    parser.add_argument("--once", nargs=3, metavar=("VARIANT", "PRECISION", "DEVICE"))
    parser.add_argument("--variant", choices=VARIANTS, default="fused")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="bf16")
    parser.add_argument("--device", default="cuda")
    for field in dataclasses.fields(Recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    args = parser.parse_args()
    if args.once:
        once(*args.once)
        return
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Recipe)})
    search(args.search or 60, args.variant, args.precision, recipe, torch.device(args.device))


if __name__ == "__main__":
    main()
