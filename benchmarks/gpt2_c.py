"""Times GPT-2 in plain C (csrc/apps/gpt2) beside GPT in Python on the CPU: whole training steps of the character model,
in turns, so that all meet the same load.

    make gpt2-c ARGS=--help && python benchmarks/gpt2_c.py --threads 2
"""

import argparse
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
from cuda_ops.training.gpt.settings import RECIPES

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "build" / "apps" / "gpt2"
RECIPE = RECIPES["cpu-char"]


class InPython:
    """A backend's model in training."""

    def __init__(self, name, windows):
        backend = get_backend(name)
        torch.manual_seed(0)
        self.model, self.windows = GPT(name, RECIPE.config), windows
        self.parameters = list(self.model.parameters())
        groups = parameter_groups(self.model, RECIPE)
        self.optimizer = backend.optim.AdamW(groups, lr=RECIPE.lr, betas=(0.9, RECIPE.beta2), fused=True)
        self.clip = nn_utils.clip_grad_norm_ if backend.needs_extension else torch.nn.utils.clip_grad_norm_

    def __call__(self, steps):
        """Milliseconds of each step."""
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            loss = self.model(*self.windows(torch.randint(len(self.windows), (RECIPE.batch,))))
            loss.backward()
            self.clip(self.parameters, RECIPE.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            times.append(1e3 * (time.perf_counter() - begin))
        return times


def in_c(tokens, steps, threads):
    """The median of the program's steps, in milliseconds; it leaves out some of the first."""
    environment = {"GOMP_SPINCOUNT": "10000", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        train, validation = Path(folder) / "train.bin", Path(folder) / "validation.bin"
        write_tokens(train, tokens)
        write_tokens(validation, tokens[: RECIPE.length + 1])  # of which nothing is timed
        command = [PROGRAM, "--tokens", train, "--val-tokens", validation, "--steps", steps, "--eval-every", steps]
        command += ["--threads", threads, "--out", folder]
        subprocess.run(list(map(str, command)), check=True, env=environment, stdout=subprocess.DEVNULL)
        report = json.loads((Path(folder) / "report.json").read_text())
    return [report["backends"]["plain C"]["milliseconds"]["whole step"]["median"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="of each in a round")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = shakespeare()
    tokens = np.array(Characters.of(text).encode(text), dtype="<u2")
    windows = Windows(tokens[: int(0.9 * len(tokens))], RECIPE.length)
    runs = {name: InPython(name, windows) for name in ("native", "fused")}
    for run in runs.values():
        run(options.steps)
    runs["plain C"] = lambda steps: in_c(windows.tokens, steps, options.threads)
    times = {name: [] for name in runs}
    for number in range(options.rounds):
        for name in list(runs) if number % 2 == 0 else reversed(runs):
            times[name].append(statistics.median(runs[name](options.steps)))
    for name, medians in times.items():
        ratio = statistics.median(a / b for a, b in zip(times["native"], medians, strict=True))
        print(
            f"{name:8} {statistics.median(medians):7.2f} ms a step (rounds {min(medians):.2f} to {max(medians):.2f}), "
            f"native / {name}: {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
