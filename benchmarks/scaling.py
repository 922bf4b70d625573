"""Training on one GPU against several: tokens/s, losses, the bits of gradients, and how much of NCCL is hidden.

    python benchmarks/scaling.py [--processes N] [--model gpt2-124m] [--device cpu] [--quick] [--graphs]
                                 [--limit SECONDS] [--within SECONDS] [--out FOLDER]

The same training in one process and in N, which are started as torchrun does: GPT by cuda_ops.training.gpt's own step,
the MNIST CNN by GraphedStep. Compared are

same batch    N processes share the batch of one: losses have to be its own but for rounding, and gradients (in graphs
              weights, which gradients made) the same in all processes bit by bit
batch each    each process has a batch as large as that of one: tokens/s against N times those of one
hidden        the share of the time of NCCL's kernels in which another kernel ran, by torch.profiler

The kernels of one step of rank 0, stream by stream, are the time line: a CSV file, and a picture where matplotlib is.

Times are medians of the host's clock over blocks of steps, with a synchronisation before and after; of the processes
the slowest counts. Nothing is profiled before all of a stage's times are taken, since CUPTI slows down what follows.

Stages are processes of their own, which share no communicator: one process; N by CUDA graphs; N by fsdp2; N by
DistributedDataParallel without graphs. Each has --limit seconds, and all of them --within. One that fails or takes
longer is ended and named as a problem, and what it had found until then counts; a process that stands still says where
before. Results go to <out>/<gpu>-xN/scaling.json and .md, and scaling_timeline.csv and .png, anew after each stage.
With fewer than two GPUs it stops, unless --device cpu asks for two processes over gloo on the CPU: that tests the same
code, but for graphs, and measures nothing of NCCL.

exit status: 0; 1 losses, gradients or weights are not what they should be, or a stage has failed; 2 it cannot run
"""

import argparse
import contextlib
import csv
import ctypes
import faulthandler
import functools
import gc
import hashlib
import importlib.util
import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import harness
import numpy as np
import torch
from torch import Tensor

from cuda_ops.__main__ import leave
from cuda_ops._errors import UserError
from cuda_ops._files import write_file, write_files
from cuda_ops.bench import RUNS
from cuda_ops.data import Batches, Characters, Windows, mnist, shakespeare
from cuda_ops.gpt import add_arguments
from cuda_ops.models import MnistCNN
from cuda_ops.optim import SGD
from cuda_ops.training import GraphedStep
from cuda_ops.training.distributed import World, whole
from cuda_ops.training.gpt.learner import Learner
from cuda_ops.training.gpt.run import initial_state
from cuda_ops.training.gpt.settings import RECIPES, Settings, resolve
from cuda_ops.training.gradient_buckets import GradientBuckets
from cuda_ops.training.parity import EARLY_STEPS, LIMITS

MODELS = {"cuda": "gpt2-124m", "cpu": "cpu-char"}
MNIST_BATCH = {"cuda": 1024, "cpu": 32}
# Steps whose losses are compared, and of these the first ones whose gradients are, where they can be seen.
COMPARED, DIGESTED = 12, 3
# Steps that are profiled, after as many as it takes to have captured a graph and replayed it.
PROFILED, BEFORE_PROFILE = 3, 4
BLOCKS = {False: (9, 5), True: (3, 2)}
"""By --quick: how many blocks are timed, of how many steps."""


@dataclass(frozen=True)
class Variant:
    name: str
    graph: bool = False
    parallel: str = "ddp"
    bf16_reduce: bool = False
    each: bool = False
    """Whether each process has as large a batch as one process has alone."""

    @property
    def label(self) -> str:
        return self.name + ", batch each" * self.each


@dataclass(frozen=True)
class Stage:
    """What processes of their own do."""

    name: str
    processes: int
    variants: list[Variant]
    mnist: bool = False


def stages(device: str, size: int, graphs: bool) -> list[Stage]:
    """In order: what is used most first.

    Args:
        device: "cuda" or "cpu".
        size: processes.
        graphs: whether steps in CUDA graphs are all that is wanted.
    """

    def variants(name, **options):
        return [Variant(name, each=each, **options) for each in (False, True)]

    graphed, eager = Variant("graph", graph=True), Variant("eager")
    alone = [graphed] if graphs else [graphed, eager] if device == "cuda" else [eager]
    of_graphs = []
    if device == "cuda":
        pairs = zip(
            variants("ddp graph", graph=True),
            variants("ddp graph, bf16 sums", graph=True, bf16_reduce=True),
            strict=True,
        )
        of_graphs = [variant for pair in pairs for variant in pair]
    found = [
        Stage("one process", 1, alone, mnist=True),
        Stage("graphs", size, of_graphs, mnist=True),
        Stage("fsdp2", size, variants("fsdp2", parallel="fsdp2")),
        Stage("ddp", size, [*variants("ddp eager"), *variants("ddp eager, bf16 sums", bf16_reduce=True)]),
    ]
    return found[:2] if graphs else found


# --- a process ------------------------------------------------------------------------------------------------------


def gpt_settings(plan: dict, world: World) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = ["--model", plan["model"], "--device", plan["device"], "--dropout", "0"]
    options += ["--batch", str(plan["batch"])] if plan["batch"] else []
    settings = resolve(parser.parse_args(options), world)
    # The rate rises as in a run of 100 steps; what is compared are its first ones.
    return replace(settings, recipe=replace(settings.recipe, steps=100, warmup=10))


@functools.cache
def tokens() -> np.ndarray:
    text = shakespeare()
    return np.array(Characters.of(text).encode(text))


@functools.cache
def digits() -> tuple:
    return mnist()


CHUNK = 1 << 22


@functools.cache
def odd_numbers(device: torch.device) -> Tensor:
    """CHUNK of them, from all of 64 bits."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=generator) | 1).to(device)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Of the bits of all of them, in order, by sums that are taken where they lie: to copy gigabytes and to hash them
    takes seconds. Bits are integers, and sums those of integers modulo 2^64, exact in any order. Each element has an
    odd factor of its own: of two tensors of which one element differs sums do as well, and where more differ they are
    equal by a chance of 2^-64."""
    sums = []
    for tensor in tensors:
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        bits = tensor.detach().contiguous().reshape(-1).view(integer)
        for part in bits.split(CHUNK):
            sums.append((part.long() * odd_numbers(part.device)[: len(part)]).sum())
    return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()


def prepared(
    settings: Settings, variant: Variant, state: dict[str, Tensor]
) -> tuple[Learner, Callable[[], Tensor], int]:
    """A variant's learner, the function that takes a step of it and returns its loss, and sequences of all processes'
    batch."""
    device = settings.device
    batch = settings.recipe.batch * (settings.world.size if variant.each else 1)
    world = replace(settings.world, parallel=variant.parallel, bf16_reduce=variant.bf16_reduce)
    settings = replace(settings, world=world, graph=variant.graph)
    windows = Windows(tokens(), settings.recipe.length, device)
    generator = torch.Generator().manual_seed(0)
    learner = Learner(settings, "fused", state)

    def step():
        begins = world.share(torch.randint(len(windows), (batch,), generator=generator))
        return (learner.graphed_step if variant.graph else learner.step)(lambda: windows(begins))

    return learner, step, batch


def train_gpt(settings: Settings, variant: Variant, state: dict[str, Tensor], blocks: tuple[int, int]) -> dict:
    """Losses of the first steps, fingerprints of their gradients and of the weights, milliseconds of a step."""
    learner, step, batch = prepared(settings, variant, state)
    update_only, gradients = learner.update, []

    def update():
        gradients.append(fingerprint(whole(p.grad) for p in learner.parameters))
        return update_only()

    losses = []
    for number in range(COMPARED):
        if not variant.graph:  # in which nothing can be read
            learner.update = update if number < DIGESTED else update_only
        losses.append(step())
    return {
        "sequences": batch,
        "losses": settings.world.mean(torch.stack(losses).double()).tolist(),
        "gradients": gradients,
        "weights": fingerprint(whole(p.detach()) for p in learner.parameters),
        "milliseconds": [milliseconds(step, settings.device, blocks[1]) for _ in range(blocks[0])],
        "tokens": batch * settings.recipe.length,
    }


def prepared_mnist(world: World, device: torch.device, batch: int, shares: int) -> tuple[MnistCNN, GraphedStep, Tensor]:
    """The fused CNN; its step, a graph around forward, backward, the sums over processes and the update, to be called
    with this process's rows; and the rows of all batches. One process takes a batch as so many shares, with batch norms
    of their own, as that many processes do."""
    torch.manual_seed(0)
    model = MnistCNN("fused").to(device)
    batches = Batches(*digits(), device, keep_on_device=True)
    buckets = GradientBuckets(model.parameters(), world) if world.size > 1 else None

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        parts = [model(images[i::shares], labels[i::shares]) for i in range(shares)]
        return torch.stack(parts).mean() if shares > 1 else parts[0]

    step = GraphedStep(
        model,
        loss,
        SGD(model.parameters(), lr=0.02),
        source=batches.gather,
        on_gradients=buckets.finish if buckets else None,
    )
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(0))
    return model, step, order[: len(order) // batch * batch].view(-1, batch).to(device)


def train_mnist(world: World, device: torch.device, batch: int, shares: int, blocks: tuple[int, int]) -> dict:
    """The same of the CNN, whose gradients live in its graph."""
    model, step, rows = prepared_mnist(world, device, batch, shares)
    losses = torch.stack([step(world.share(rows[number % len(rows)])).clone() for number in range(COMPARED)])
    share = world.share(rows[0]).contiguous()
    return {
        "sequences": batch,
        "losses": world.mean(losses.double()).tolist(),
        "gradients": [],
        "weights": fingerprint(p.detach() for p in model.parameters()),
        "milliseconds": [milliseconds(lambda: step(share), device, 10 * blocks[1]) for _ in range(blocks[0])],
        "tokens": batch,
    }


def profiled(step: Callable[[], object], device: torch.device, in_graph: bool) -> dict:
    """What torch.profiler tells of some steps, for a row. All processes have to ask, since a step waits for all."""
    for _ in range(BEFORE_PROFILE):
        step()
    kernels = kernels_of(step, device, PROFILED)
    return {"nccl": overlap(kernels), "timeline": timeline(kernels) if in_graph else None}


def profile_mnist(world: World, device: torch.device, batch: int) -> dict:
    _, step, rows = prepared_mnist(world, device, batch, 1)
    share = world.share(rows[0]).contiguous()
    return profiled(lambda: step(share), device, True)


def milliseconds(step, device: torch.device, steps: int) -> float:
    harness.synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    harness.synchronize(device)
    return 1e3 * (time.perf_counter() - begin) / steps


def kernels_of(step, device: torch.device, steps: int) -> list[dict]:
    """The kernels of so many steps, as torch.profiler's trace has them."""
    harness.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        harness.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    return [event for event in events if event.get("cat") == "kernel"]


def is_nccl(name: str) -> bool:
    return "nccl" in name.lower()


def timeline(kernels: list[dict]) -> list[tuple[int, str, float, float]]:
    """The first step's kernels in order: stream, name, when it began and how long it took, in microseconds. All
    replays of a graph have the same kernels, and the last one of a step waits for all others."""
    kernels = sorted(kernels, key=lambda event: event["ts"])[: len(kernels) // PROFILED]
    begin = kernels[0]["ts"] if kernels else 0.0
    # A kernel's arguments and return type are longer than its name, and say no more.
    short = (event["name"].removeprefix("void ").split("(")[0][:80] for event in kernels)
    return [
        (event["tid"], name, round(event["ts"] - begin, 2), round(event["dur"], 2))
        for event, name in zip(kernels, short, strict=True)
    ]


def overlap(kernels: list[dict]) -> dict | None:
    """Of a step: microseconds of NCCL's kernels, and of those in which another kernel ran. None where there are
    none of NCCL's."""
    sides = {True: [], False: []}
    for event in kernels:
        sides[is_nccl(event["name"])].append((event["ts"], event["ts"] + event["dur"]))
    nccl, others = (merged(sides[side]) for side in (True, False))
    total = sum(end - begin for begin, end in nccl)
    return {"us": total / PROFILED, "hidden_us": common(nccl, others) / PROFILED} if total else None


def merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The intervals' union, in order and apart."""
    found = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """How long two unions run at the same time."""
    total, i = 0.0, 0
    for begin, end in some:
        while i < len(others) and others[i][1] <= begin:
            i += 1
        k = i
        while k < len(others) and others[k][0] < end:
            total += min(end, others[k][1]) - max(begin, others[k][0])
            k += 1
    return total


def other_device(settings: Settings, state: dict[str, Tensor]) -> bool | None:
    """Whether a GPU that is not the current one trains GPT and the CNN as the current one does, bit by bit; None where
    there is one GPU."""
    if settings.device.type != "cuda" or torch.cuda.device_count() < 2:
        return None
    found = []
    for index in (0, 1):
        device = torch.device("cuda", index)
        own = replace(settings, device=device, recipe=replace(settings.recipe, batch=2))
        for graph in (False, True):
            found.append(train_gpt(own, Variant("", graph), state, (0, 1)))
        found.append(train_mnist(World(), device, 64, 1, (0, 1)))
    keys = ("losses", "gradients", "weights")
    first, second = found[: len(found) // 2], found[len(found) // 2 :]
    return all(a[key] == b[key] for a, b in zip(first, second, strict=True) for key in keys)


class Watch:
    """Tells when something begins, and where this process stands if that takes until shortly before the stage is ended,
    or half as long as one may take."""

    def __init__(self, plan: dict, world: World, device: torch.device):
        self.plan, self.world, self.device, self._timer = plan, world, device, None

    def begin(self, what: str):
        now, stage = time.time(), self.plan["stage"]
        if self.world.is_first:
            print(f"{now - self.plan['began']:6.1f} s  {self.plan['name']}: {what}", flush=True)
        seconds = max(1.0, min(stage["limit"] / 2, stage["ends"] - now - 5))
        # Of all threads, and whoever has the GIL; once where the end is near.
        faulthandler.dump_traceback_later(seconds, repeat=seconds > 5)
        if self.world.size > 1 and self.device.type == "cuda":
            self._cancel()
            self._timer = threading.Timer(seconds, self._say_what_nccl_does, [what])
            self._timer.daemon = True
            self._timer.start()

    def end(self):
        faulthandler.cancel_dump_traceback_later()
        self._cancel()

    def _cancel(self):
        if self._timer:
            self._timer.cancel()

    def _say_what_nccl_does(self, what: str):
        """Collectives that are not done, by PyTorch's flight recorder."""
        trace = json.loads(torch._C._distributed_c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=True))
        keys = ("collective_seq_id", "profiling_name", "state", "input_sizes")
        waiting = [[entry.get(key) for key in keys] for entry in trace.get("entries", [])]
        print(f"rank {self.world.rank}, {what}: not done are {waiting}", file=sys.stderr, flush=True)


def work(plan: dict, out: Path):
    """What each process of a stage does, one after the other; each result is in the process's file when it is there."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the one that has started it
    world = World.from_environment()
    settings = gpt_settings(plan, world)
    device, blocks = settings.device, BLOCKS[plan["quick"]]
    watch = Watch(plan, world, device)
    watch.begin("starts")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    world.join(device)
    state = initial_state(settings)  # once: to draw it takes longer than many steps
    found = {"precision": settings.recipe.precision, "length": settings.recipe.length, "rows": {}}
    if world.is_first:
        found["facts"] = harness.environment(device)

    def keep(key, value):
        found[key] = value
        write_file(Path(f"{out}.{world.rank}"), json.dumps(found).encode())
        gc.collect()  # graphs, which hold memory and the communicator
        if device.type == "cuda":
            torch.cuda.empty_cache()

    try:
        variants = [Variant(**variant) for variant in plan["stage"]["variants"]]
        batch = MNIST_BATCH[device.type]
        if plan["stage"]["mnist"]:
            watch.begin("MNIST CNN")
            keep("mnist", {"nccl": None, "timeline": None, **train_mnist(world, device, batch, 1, blocks)})
        for variant in variants:
            watch.begin(variant.label)
            row = {**asdict(variant), "nccl": None, "timeline": None, **train_gpt(settings, variant, state, blocks)}
            keep("rows", {**found["rows"], variant.label: row})
        if world.size == 1:
            # Whose losses those of several processes have to be, and not to be timed.
            watch.begin("MNIST CNN in shares")
            keep("shares", train_mnist(world, device, batch, plan["processes"], (0, 1)))
            watch.begin("a GPU that is not the current one")
            keep("other_device", other_device(settings, state))
        for variant in variants if device.type == "cuda" else []:
            if variant.graph or world.size > 1:
                watch.begin(f"{variant.label}, profiled")
                kernels = profiled(prepared(settings, variant, state)[1], device, variant.graph)
                keep("rows", {**found["rows"], variant.label: {**found["rows"][variant.label], **kernels}})
        if plan["stage"]["mnist"] and device.type == "cuda":
            watch.begin("MNIST CNN, profiled")
            keep("mnist", {**found["mnist"], **profile_mnist(world, device, batch)})
        watch.begin("ends")
    finally:
        world.leave()
    watch.end()


# --- the comparison -------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launch(command: list[str], processes: int, seconds: float, environment: dict[str, str]) -> str | None:
    """Runs a command in so many processes with what torchrun sets, and says what went wrong. Each is the first of a
    session, which is ended whole as soon as one has failed (the others have a moment to say why they do) or the time
    is over."""
    port = str(free_port())
    started, problem = [], None
    ends = time.monotonic() + seconds
    try:
        for rank in range(processes):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            own = {name: str(value) for name, value in own.items()}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            started.append(subprocess.Popen(command, env={**environment, **own}, start_new_session=True))
        while any(process.poll() is None for process in started) and time.monotonic() < ends:
            failed = [rank for rank, process in enumerate(started) if process.poll()]
            if failed and not problem:
                problem = f"process {failed[0]} has failed with status {started[failed[0]].returncode}"
                ends = min(ends, time.monotonic() + 3)
            time.sleep(0.05)
        for rank, process in enumerate(started):
            if not problem and process.poll() is None:
                problem = f"it was ended after {seconds:.0f} s"
            elif not problem and process.returncode:
                problem = f"process {rank} has failed with status {process.returncode}"
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may hold on to it
                process.wait(10)
    return problem


def start(plan: dict, stage: Stage, seconds: float, folder: Path) -> tuple[list[dict], str | None]:
    """What the processes of a stage have found, and what went wrong."""
    path = folder / f"{stage.name}.json"
    limits = {"limit": seconds, "ends": time.time() + seconds}
    path.write_text(json.dumps({**plan, "name": stage.name, "stage": asdict(stage) | limits}))
    root = Path(__file__).resolve().parents[1]
    python_path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": python_path}
    environment.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that are remembered
    environment.setdefault("TEARDOWN_CUPTI", "0")  # which would wait for some thread's next call of CUDA
    if stage.processes > 1 or plan["device"] == "cpu":
        environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(path)]
    problem = launch(command, stage.processes, seconds, environment)
    files = [Path(f"{path}.{rank}") for rank in range(stage.processes)]
    if not all(file.exists() for file in files):
        return [], problem or "no result"
    return [json.loads(file.read_text()) for file in files], problem


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def joined(ranks: list[dict]) -> dict:
    """One row of all ranks': the slowest's times, and whether gradients and weights are the same bit by bit."""
    slowest = max(ranks, key=lambda row: median(row["milliseconds"]))
    row = {
        key: value for key, value in slowest.items() if key not in ("gradients", "weights", "milliseconds", "tokens")
    }
    step = median(slowest["milliseconds"])
    per_second = slowest["tokens"] / step * 1e3
    alike = all(rank[key] == ranks[0][key] for rank in ranks for key in ("gradients", "weights"))
    first = {key: ranks[0].get(key) for key in ("nccl", "timeline")}
    return {**row, "processes": len(ranks), "median_ms": step, "per_second": per_second, "alike": alike, **first}


def distance(losses: list[float], expected: list[float], steps: int) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses[:steps], expected[:steps], strict=True))


def compare(size: int, alone: dict, found_in: list[list[dict]]) -> dict:
    """The results of one process and of several, and what is wrong with them.

    Args:
        size: several are.
        alone: what one process has found, as far as it came.
        found_in: of each stage of several processes, as far as it came, what each process has found.
    """
    first = next(found for found in [alone, *(ranks[0] for ranks in found_in)] if found)
    precision = first["precision"]
    dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
    rows, digits, problems = [joined([row]) for row in alone.get("rows", {}).values()], [], []
    base = {row["graph"]: row for row in rows}

    def add(row, expected, against, limit):
        if against:
            row["efficiency"] = row["per_second"] / (size * against["per_second"])
        if not row["alike"]:
            problems.append(f"{row['name']}: gradients or weights differ between processes")
        if expected:
            row["loss_distance"] = distance(row["losses"], expected, COMPARED)
            early = distance(row["losses"], expected, EARLY_STEPS)
            if not early <= limit:
                problems.append(
                    f"{row['name']}: losses are {early:.1e} from one process's, and rounding explains {limit}"
                )
        elif not all(math.isfinite(loss) for loss in row["losses"]):
            problems.append(f"{row['name']}: losses are not finite")

    if "mnist" in alone:
        digits.append({**joined([alone["mnist"]]), "name": "MNIST CNN"})
    for ranks in found_in:
        for label in ranks[0]["rows"]:
            if all(label in rank["rows"] for rank in ranks):
                row = joined([rank["rows"][label] for rank in ranks])
                against = base.get(row["graph"])
                rounded = torch.bfloat16 if row["bf16_reduce"] else dtype
                expected = against["losses"] if against and not row["each"] else None
                add(row, expected, against, LIMITS[rounded].early_loss)
                rows.append(row)
        if all("mnist" in rank for rank in ranks):
            row = {**joined([rank["mnist"] for rank in ranks]), "name": "MNIST CNN"}
            expected = alone["shares"]["losses"] if "shares" in alone else None
            add(row, expected, digits[0] if digits else None, LIMITS[torch.float32].early_loss)
            digits.append(row)
    found = {"facts": first["facts"], "processes": size, "precision": precision, "length": first["length"]}
    found |= {"rows": rows, "mnist": digits, "other_device": alone.get("other_device")}
    if found["other_device"] is False:
        problems.append("a GPU that is not the current one computes something else")
    return {**found, "problems": problems}


def table(found: dict) -> list[list[str]]:
    """The header, and a row for each variant."""
    header = [
        "",
        "processes",
        "batch",
        "ms",
        "per second",
        "efficiency",
        "loss from one's",
        "same bits",
        "NCCL, ms",
        "hidden",
    ]
    lines = [header]

    def line(name, row):
        nccl, size = row["nccl"], row["processes"]
        lines.append(
            [
                name,
                str(size),
                f"{row['sequences']:,}",
                f"{row['median_ms']:.2f}",
                f"{row['per_second']:,.0f}",
                f"{row['efficiency']:.0%}" if "efficiency" in row else "",
                f"{row['loss_distance']:.1e}" if "loss_distance" in row else "",
                "" if size == 1 else "yes" if row["alike"] else "NO",
                f"{nccl['us'] / 1e3:.2f}" if nccl else "–" if size > 1 else "",
                f"{nccl['hidden_us'] / nccl['us']:.0%}" if nccl else "–" if size > 1 else "",
            ]
        )

    for row in found["rows"]:
        line(f"GPT {row['name']}", row)
    for row in found["mnist"]:
        line("MNIST CNN, one graph" if found["backend"] == "nccl" else "MNIST CNN", row)
    return lines


def markdown(found: dict) -> str:
    lines = found["table"]
    rows = ["| " + " | ".join(cells) + " |" for cells in (lines[0], ["---"] * len(lines[0]), *lines[1:])]
    facts, size = found["facts"], found["processes"]
    parts = [
        f"# One process against {size}",
        f"`{found['command']}`, {facts['device']}, PyTorch {facts['torch']}, commit `{facts['commit']}`, "
        f"{facts['date']}.",
        f"GPT {found['model']} (fused), {found['precision']}, {found['length']} tokens a sequence: tokens per second. "
        f"The MNIST CNN (fused), float32: images per second. Over {found['backend']}. Of a batch as large as one "
        "process's each process has a share, and losses have to be one process's but for rounding; of a larger one "
        "each has as much as one process.",
        "\n".join(rows),
    ]
    if found["note"]:
        parts.append(found["note"])
    if found["other_device"] is not None:
        parts.append(
            "A GPU that is not the current one: " + ("the same bits." if found["other_device"] else "OTHER BITS.")
        )
    parts += [f"**{problem}**" for problem in found["problems"]]
    return "\n\n".join(parts) + "\n"


def take_time_lines(found: dict) -> dict[str, list]:
    """Those of a comparison's rows by what they are of; they are no longer in the rows then."""
    lines = {}
    for row in [*found["rows"], *found["mnist"]]:
        line, size = row.pop("timeline"), row["processes"]
        if line:
            name = f"{row['name']}, {row['sequences']} in {size} process{'es' * (size > 1)}"
            lines[name] = line
    return lines


def timeline_csv(lines: dict[str, list]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["variant", "stream", "kernel", "begin_us", "us"])
    writer.writerows([variant, *event] for variant, line in lines.items() for event in line)
    return out.getvalue().encode()


def timeline_png(lines: dict[str, list]) -> bytes:
    """A row for each variant: what a step's streams do, NCCL's kernels above the others."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, every = pyplot.subplots(len(lines), 1, figsize=(12, 1.2 * len(lines) + 0.8), sharex=True, squeeze=False)
    for axes, (variant, line) in zip(every[:, 0], lines.items(), strict=True):
        for place, (nccl, colour) in enumerate([(False, "tab:blue"), (True, "tab:orange")]):
            bars = [(begin / 1e3, us / 1e3) for _, name, begin, us in line if is_nccl(name) == nccl]
            axes.broken_barh(bars, (place, 0.8), facecolors=colour)
        axes.set_yticks([0.4, 1.4], ["kernels", "NCCL"])
        axes.set_title(variant, fontsize=9, loc="left")
    every[-1, 0].set_xlabel("ms since the step's first kernel")
    figure.tight_layout()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return out.getvalue()


def run(arguments) -> int:
    device, gpus, note = arguments.device or "cuda", torch.cuda.device_count(), None
    if device == "cpu":
        size = arguments.processes or 2
        note = f"Measured are {size} processes over gloo on the CPU, nothing of NCCL."
    elif gpus < 2:
        here = "one GPU, which NCCL gives to one process alone" if gpus else "no GPU"
        raise ValueError(f"--device cuda: this machine has {here}; --device cpu has processes over gloo on the CPU")
    else:
        size = arguments.processes or gpus
        if size > gpus:
            raise ValueError(f"--processes {size}: there are {gpus} GPUs, and each process takes one")
    if size < 2:
        raise ValueError(f"--processes {size}: expected at least 2, which are compared with one")
    if not 1 <= arguments.limit < math.inf:
        raise ValueError(f"--limit {arguments.limit}: expected at least a second")
    model = arguments.model or MODELS[device]
    batch = arguments.batch or RECIPES[model].batch
    for what, sequences in (("--batch", batch), ("the MNIST CNN's batch", MNIST_BATCH[device])):
        if sequences % size:
            raise ValueError(f"{what} {sequences} does not divide among {size} processes")
    if note:
        print(note)
    plan = {"model": model, "device": device, "batch": batch, "quick": arguments.quick, "processes": size}
    plan["graphs"] = arguments.graphs
    if arguments.graphs and device == "cpu":
        raise ValueError("--graphs: there are CUDA graphs on GPUs alone")
    plan["began"], results, problems, found = time.time(), {}, [], None
    about = {"model": model, "backend": "nccl" if device == "cuda" else "gloo", "note": note}
    about["command"] = " ".join(["python benchmarks/scaling.py", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as folder:
        for stage in stages(device, size, arguments.graphs):
            seconds = min(arguments.limit, plan["began"] + arguments.within - time.time())
            if seconds < 1:
                problems.append(f"stage {stage.name}: not begun, the {arguments.within:.0f} s of --within were over")
            else:
                results[stage.name], problem = start(plan, stage, seconds, Path(folder))
                problems += [f"stage {stage.name}: {problem}"] if problem else []
            if any(results.values()):
                found = compared(size, results, problems) | about
                write(found, arguments.out)
    if found is None:
        raise ValueError(f"no stage has found anything ({'; '.join(problems)}); see above")
    print(markdown(found))
    return 1 if found["problems"] else 0


def compared(size: int, results: dict[str, list[dict]], problems: list[str]) -> dict:
    """The comparison of what stages have found so far, with their problems."""
    (alone,) = results.get("one process") or [{}]
    found = compare(size, alone, [ranks for name, ranks in results.items() if name != "one process" and ranks])
    return {**found, "problems": problems + found["problems"]}


def write(found: dict, out: Path):
    """Writes a comparison, with its table, and the time lines, which are no longer in its rows then."""
    found["table"] = table(found)
    folder = out / f"{harness.slug(found['facts']['device'])}-x{found['processes']}"
    lines = take_time_lines(found)
    files = {"scaling.json": (json.dumps(found, indent=1) + "\n").encode(), "scaling.md": markdown(found).encode()}
    if lines:
        files["scaling_timeline.csv"] = timeline_csv(lines)
        if importlib.util.find_spec("matplotlib") is not None:
            files["scaling_timeline.png"] = timeline_png(lines)
    folder.mkdir(parents=True, exist_ok=True)
    write_files({folder / name: content for name, content in files.items()})
    print(f"written: {folder}/{', '.join(files)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, metavar="N", help="default: one for each GPU, 2 on the CPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda, which takes two GPUs or more")
    parser.add_argument("--model", choices=list(RECIPES), help="default: gpt2-124m on GPUs, cpu-char on the CPU")
    parser.add_argument("--batch", type=int, metavar="N", help="sequences of one process (default: the model's)")
    parser.add_argument("--quick", action="store_true", help="few samples")
    parser.add_argument(
        "--graphs", action="store_true", help="steps in CUDA graphs alone, without eager ones and FSDP2"
    )
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="of a stage (default: %(default)s)")
    parser.add_argument(
        "--within", type=float, default=math.inf, metavar="SECONDS", help="of all stages (default: no limit)"
    )
    parser.add_argument("--out", type=Path, default=RUNS, metavar="DIR", help=f"default: {RUNS}")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        status = 1
        try:
            work(json.loads(arguments.worker.read_text()), arguments.worker)
            status = 0
        except Exception:
            traceback.print_exc()
        leave(status)  # without waiting for anybody
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # processes are ended on the way out
    try:
        return run(arguments)
    except (UserError, ValueError, OSError) as error:
        print(f"scaling: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
