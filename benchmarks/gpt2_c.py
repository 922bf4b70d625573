"""Times GPT-2 in plain C (csrc/apps/gpt2) beside GPT in Python: whole training steps, in turns, so that all meet the
same load. On the CPU of the character model, on a GPU of GPT-2 124M with tokens by chance, by CUDA events.

    make gpt2-c ARGS=--help && python benchmarks/gpt2_c.py --threads 2
    make gpt2-c ARGS=--help && python benchmarks/gpt2_c.py --device cuda --precision bf16
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from cuda_ops import nn_utils
from cuda_ops.data.text import Characters, Windows, shakespeare, write_tokens
from cuda_ops.models import GPT, get_backend
from cuda_ops.training.gpt.learner import parameter_groups
from cuda_ops.training.gpt.settings import GPT2_TOKENS, RECIPES

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "build" / "apps" / "gpt2"
MODELS = {"cpu": "cpu-char", "cuda": "gpt2-124m"}
BACKENDS = {"cpu": ("native", "fused"), "cuda": ("fused",)}


class InPython:
    """A backend's model in training."""

    def __init__(self, name, windows, recipe, options):
        backend = get_backend(name)
        torch.manual_seed(0)
        self.model, self.windows = GPT(name, recipe.config).to(options.device), windows
        self.recipe, self.device, self.autocast = recipe, options.device, options.precision == "bf16"
        self.parameters = list(self.model.parameters())
        groups = parameter_groups(self.model, recipe)
        self.optimizer = backend.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, recipe.beta2), fused=True)
        self.clip = nn_utils.clip_grad_norm_ if backend.needs_extension else torch.nn.utils.clip_grad_norm_

    def step(self):
        batch = self.windows(torch.randint(len(self.windows), (self.recipe.batch,)))
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            loss = self.model(*(tokens.to(self.device) for tokens in batch))
        loss.backward()
        self.clip(self.parameters, self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __call__(self, steps):
        """Milliseconds of each step."""
        if self.device == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
            events[0].record()
            for event in events[1:]:
                self.step()
                event.record()
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.step()
            times.append(1e3 * (time.perf_counter() - begin))
        return times


def in_c(tokens, recipe, options):
    """The median of the program's steps, in milliseconds; it leaves out some of the first."""
    environment = {"GOMP_SPINCOUNT": "10000", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        train, validation = Path(folder) / "train.bin", Path(folder) / "validation.bin"
        write_tokens(train, tokens)
        write_tokens(validation, tokens[: recipe.length + 1])  # of which nothing is timed
        command = [PROGRAM, "--tokens", train, "--val-tokens", validation, "--model", MODELS[options.device]]
        command += ["--steps", options.steps, "--eval-every", options.steps, "--device", options.device]
        command += ["--precision", options.precision, "--threads", options.threads, "--out", folder]
        subprocess.run(list(map(str, command)), check=True, env=environment, stdout=subprocess.DEVNULL)
        report = json.loads((Path(folder) / "report.json").read_text())
    return [report["backends"]["plain C"]["milliseconds"]["whole step"]["median"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="of each in a round")
    parser.add_argument("--device", choices=MODELS, default="cpu")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], help="default: fp32, on a GPU bf16")
    options = parser.parse_args()
    options.precision = options.precision or ("bf16" if options.device == "cuda" else "fp32")
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = options.precision == "tf32"
    recipe = RECIPES[MODELS[options.device]]
    if options.device == "cuda":
        count = 2 * recipe.batch * recipe.length
        tokens = np.random.default_rng(0).integers(GPT2_TOKENS, size=count).astype("<u2")
        windows = Windows(tokens, recipe.length)
    else:
        text = shakespeare()
        tokens = np.array(Characters.of(text).encode(text), dtype="<u2")
        windows = Windows(tokens[: int(0.9 * len(tokens))], recipe.length)
    runs = {name: InPython(name, windows, recipe, options) for name in BACKENDS[options.device]}
    for run in runs.values():
        run(options.steps)
    runs["plain C"] = lambda steps: in_c(windows.tokens, recipe, options)
    times = {name: [] for name in runs}
    for number in range(options.rounds):
        for name in list(runs) if number % 2 == 0 else reversed(runs):
            times[name].append(statistics.median(runs[name](options.steps)))
    for name, medians in times.items():
        first = next(iter(times))
        ratio = statistics.median(a / b for a, b in zip(times[first], medians, strict=True))
        print(
            f"{name:8} {statistics.median(medians):7.2f} ms a step (rounds {min(medians):.2f} to {max(medians):.2f}), "
            f"{first} / {name}: {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
