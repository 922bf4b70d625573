"""Times GPT-2 in plain C (csrc/apps/gpt2) beside GPT("fused") in Python, and compares their losses.

Both train the same model from the same checkpoint: on a GPU, in bf16, GPT-2 124M and nanoGPT's model of characters
without dropout, which the program has not; on the CPU nanoGPT's smallest, in float32. They take turns of some steps,
after a few that do not count, so that all meet the same load. Shown are the medians over the turns of each turn's
median step, by CUDA events on a GPU and by the host's clock on the CPU, and the memory that Python's allocator, or the
program, held at most. Losses are those of the first steps, on the same batches.

    make gpt2-c ARGS=--help && python benchmarks/gpt2_c.py --out benchmarks/results
    python benchmarks/gpt2_c.py --device cpu --threads 2 --rounds 5 --steps 8
"""

import argparse
import dataclasses
import gc
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import harness
import numpy as np
import torch
from gpt2_step import Variant, make_step, set_precision
from mnist_report import table

from cuda_ops._files import write_files
from cuda_ops.data.text import Windows, write_tokens
from cuda_ops.models import GPT
from cuda_ops.training.gpt.learner import learning_rate
from cuda_ops.training.gpt.settings import RECIPES, Recipe

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "build" / "apps" / "gpt2"
MODELS = {"cpu": ("cpu-char",), "cuda": ("gpt2-124m", "char")}
PYTHON = {
    "cpu": (Variant("PyTorch", "native"), Variant("Python", "fused")),
    "cuda": (Variant("Python, eager", "fused"), Variant("Python, graph", "fused", graph=True)),
}
IN_C = {"cpu": {"plain C": []}, "cuda": {"plain C, no graph": ["--no-graph"], "plain C, graphs": []}}
SKIPPED = 10
"""Steps of a turn that do not count; the program leaves out as many."""
COMPARED = 5
"""Steps whose losses are compared."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What all train: `state`, which is a checkpoint in `folder` too, beside the file of tokens."""

    name: str
    recipe: Recipe
    state: dict[str, torch.Tensor]
    precision: str
    folder: Path
    windows: Windows
    program: Path

    @classmethod
    def of(cls, name: str, options, folder: Path) -> "Job":
        recipe = RECIPES[name]
        config = dataclasses.replace(recipe.config, dropout=0.0)
        recipe = dataclasses.replace(recipe, config=config, batch=options.batch or recipe.batch)
        # Each token tells something of the next.
        steps = np.random.default_rng(0).integers(1, 4, COMPARED * recipe.batch * recipe.length + 1)
        tokens = (np.cumsum(steps) % min(config.vocab_size, 50257)).astype("<u2")
        torch.manual_seed(0)
        model = GPT("fused", config)
        model.save_llmc(folder / "first.bin")
        write_tokens(folder / "train.bin", tokens)
        write_tokens(folder / "validation.bin", tokens[: recipe.length + 1])  # of which nothing is timed
        windows = Windows(tokens, recipe.length)
        return cls(name, recipe, model.state_dict(), options.precision, folder, windows, options.program)

    def batch(self, step: int, device) -> list[torch.Tensor]:
        begins = (step * self.recipe.batch + torch.arange(self.recipe.batch)) * self.recipe.length
        return [tokens.to(device) for tokens in self.windows(begins)]


class InPython:
    def __init__(self, variant: Variant, job: Job, device):
        self.job, self.device = job, device
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.step = make_step(variant, job.recipe, job.precision, device)
        self.step.model.load_state_dict(job.state, strict=True)
        # The losses that are compared; in a graph the second step captures one.
        recipe = dataclasses.replace(job.recipe, steps=COMPARED, warmup=min(job.recipe.warmup, COMPARED // 2))
        self.losses = [
            self.step(*job.batch(number, device), lr=learning_rate(number, recipe)).item() for number in range(COMPARED)
        ]
        self.memory = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
        self.batch = job.batch(0, device)

    def __call__(self, steps: int) -> float:
        """The median of a turn's steps, in milliseconds."""
        for _ in range(SKIPPED):
            self.step(*self.batch)
        if self.device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
            events[0].record()
            for event in events[1:]:
                self.step(*self.batch)
                event.record()
            torch.cuda.synchronize(self.device)
            return statistics.median(begin.elapsed_time(end) for begin, end in itertools.pairwise(events))
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.step(*self.batch)
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)


class InC:
    def __init__(self, arguments: list[str], job: Job, device, threads: int):
        self.arguments, self.job, self.device, self.threads = arguments, job, device, threads
        report = self.report(COMPARED)
        self.losses, self.memory = report["losses"], report["peak_memory_bytes"]

    def report(self, steps: int) -> dict:
        job, recipe = self.job, self.job.recipe
        command = [job.program, "--init", job.folder / "first.bin", "--tokens", job.folder / "train.bin"]
        command += ["--val-tokens", job.folder / "validation.bin", "--in-order", "--out", job.folder]
        command += ["--batch", recipe.batch, "--length", recipe.length, "--lr", recipe.lr, "--min-lr", recipe.min_lr]
        command += ["--warmup", min(recipe.warmup, steps // 2), "--weight-decay", recipe.weight_decay]
        command += ["--clip", recipe.clip, "--recompute", recipe.recomputed_blocks, "--threads", self.threads]
        command += ["--steps", steps, "--eval-every", steps, "--device", self.device.type]
        command += ["--model", "gpt2-124m" if recipe.config.bias else "cpu-char", "--precision", job.precision]
        command += [*([] if recipe.config.bias else ["--no-bias"]), *self.arguments]
        environment = {"GOMP_SPINCOUNT": "10000", **os.environ}
        subprocess.run(list(map(str, command)), check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads((job.folder / "report.json").read_text())["backends"]["plain C"]

    def __call__(self, steps: int) -> float:
        return self.report(SKIPPED + steps)["milliseconds"]["whole step"]["median"]


def race(job: Job, device, options) -> list[dict]:
    contenders = {variant.name: InPython(variant, job, device) for variant in PYTHON[device.type]}
    for name, arguments in IN_C[device.type].items():
        contenders[name] = InC(arguments, job, device, options.threads)
    times = {name: [] for name in contenders}
    for number in range(options.rounds):
        for name in list(contenders) if number % 2 == 0 else reversed(contenders):
            times[name].append(contenders[name](options.steps))
            print(f"{job.name}: {name} {times[name][-1]:.3f} ms a step", flush=True)
    best = list(PYTHON[device.type])[-1].name
    return [
        {
            "model": job.name,
            "variant": name,
            "batch": job.recipe.batch,
            "length": job.recipe.length,
            "median_ms": statistics.median(times[name]),
            "turns_ms": times[name],
            "tokens_per_second": 1e3 * job.recipe.batch * job.recipe.length / statistics.median(times[name]),
            "memory_bytes": contender.memory,
            "ratio": statistics.median(a / b for a, b in zip(times[best], times[name], strict=True)),
            "losses": contender.losses,
        }
        for name, contender in contenders.items()
    ]


def markdown(rows: list[dict], facts: dict[str, str]) -> str:
    parts = ["# GPT-2 in plain C", " ".join(" ".join(__doc__.split("\n\n")[:2]).split())]
    for model in dict.fromkeys(row["model"] for row in rows):
        found = [row for row in rows if row["model"] == model]
        yardstick = next(row for row in reversed(found) if "C" not in row["variant"])
        lines = [
            [
                row["variant"],
                f"{row['median_ms']:.3f}",
                f"{min(row['turns_ms']):.3f} – {max(row['turns_ms']):.3f}",
                f"{row['tokens_per_second']:,.0f}",
                "–" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e9:.3f}",
                f"{row['ratio']:.3f}",
                f"{max(abs(a / b - 1) for a, b in zip(row['losses'], yardstick['losses'], strict=True)):.1e}",
            ]
            for row in found
        ]
        header = ["", "ms", "turns", "tokens/s", "GB", f"{yardstick['variant']} / this", "losses differ by"]
        parts += [f"## {model}, {found[0]['batch']} × {found[0]['length']} tokens", table(header, lines)]
        losses = ", ".join(f"{loss:.6f}" for loss in yardstick["losses"])
        parts.append(f"Losses of {yardstick['variant']}: {losses}.")
    parts.append("\n".join(f"- {name}: {value}" for name, value in facts.items()))
    return "\n\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=MODELS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=sorted({name for names in MODELS.values() for name in names}), nargs="+")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], help="default: fp32, on a GPU bf16")
    parser.add_argument("--batch", type=int, help="default: the recipe's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="of each in a turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--program", type=Path, default=PROGRAM)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench", help="writes <device>/gpt2_c.*")
    options = parser.parse_args()
    options.precision = options.precision or ("bf16" if options.device == "cuda" else "fp32")
    device = torch.device(options.device)
    if options.threads != torch.get_num_threads():
        torch.set_num_threads(options.threads)
    set_precision(options.precision)
    begin, rows = time.perf_counter(), []
    facts = {**harness.environment(device), "precision": options.precision}
    facts["turns"] = f"{options.rounds}, of {options.steps} steps after {SKIPPED}"
    for name in options.model or MODELS[options.device]:
        with tempfile.TemporaryDirectory() as folder:
            rows += race(Job.of(name, options, Path(folder)), device, options)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    facts["seconds"] = f"{time.perf_counter() - begin:.0f}"
    text = markdown(rows, facts)
    folder = options.out / harness.slug(facts["device"])
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n"
    write_files({folder / "gpt2_c.json": content.encode(), folder / "gpt2_c.md": text.encode()})
    print(text)
    print(f"written: {folder}/gpt2_c.json, .md")


if __name__ == "__main__":
    main()
