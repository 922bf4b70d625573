"""Training on one GPU against several: tokens/s, losses, the bits of gradients, and how much of NCCL is hidden.

    python benchmarks/scaling.py [--processes N] [--model gpt2-124m] [--device cpu] [--quick] [--graphs] [--out FOLDER]

One run starts the same training in one process and, by torchrun, in N: GPT by cuda_ops.training.gpt's own step, the
MNIST CNN by GraphedStep. Compared are

same batch    N processes share the batch of one: losses have to be its own but for rounding, and gradients (in graphs
              weights, which gradients made) the same in all processes bit by bit
batch each    each process has a batch as large as that of one: tokens/s against N times those of one
hidden        the share of the time of NCCL's kernels in which another kernel ran, by torch.profiler

The kernels of one step of rank 0, stream by stream, are the time line: a CSV file, and a picture where matplotlib is.

Times are medians of the host's clock over blocks of steps, with a synchronisation before and after; of the processes
the slowest counts. Results go to <out>/<gpu>-xN/scaling.json and .md, and
scaling_timeline.csv and .png. With fewer than two GPUs it runs two processes
over gloo on the CPU, and says so: that tests the same code, but for graphs, and measures nothing of NCCL.

exit status: 0; 1 losses, gradients or weights are not what they should be; 2 it cannot run
"""

import argparse
import contextlib
import csv
import gc
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import harness
import numpy as np
import torch
from torch import Tensor

from cuda_ops._errors import UserError
from cuda_ops._files import write_files
from cuda_ops.bench import RUNS
from cuda_ops.data import Batches, Characters, Windows, mnist, shakespeare
from cuda_ops.gpt import add_arguments
from cuda_ops.models import MnistCNN
from cuda_ops.optim import SGD
from cuda_ops.training import GraphedStep
from cuda_ops.training.distributed import World, digest, whole
from cuda_ops.training.gpt.learner import Learner
from cuda_ops.training.gpt.run import initial_state
from cuda_ops.training.gpt.settings import RECIPES, Settings, resolve
from cuda_ops.training.gradient_buckets import GradientBuckets
from cuda_ops.training.parity import EARLY_STEPS, LIMITS

MODELS = {"cuda": "gpt2-124m", "cpu": "cpu-char"}
MNIST_BATCH = {"cuda": 1024, "cpu": 32}
# Steps whose losses are compared, and of these the first ones whose gradients are, where they can be seen.
COMPARED, DIGESTED = 12, 3
PROFILED = 3
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


def variants(device: str, size: int) -> list[Variant]:
    """What is timed in so many processes."""
    ways = [True, False] if device == "cuda" else [False]
    names = {True: "graph", False: "eager"}
    if size == 1:
        return [Variant(names[graph], graph) for graph in ways]
    found = []
    for each in (False, True):
        for graph in ways:
            found.append(Variant(f"ddp {names[graph]}", graph, each=each))
            found.append(Variant(f"ddp {names[graph]}, bf16 sums", graph, bf16_reduce=True, each=each))
        found.append(Variant("fsdp2", parallel="fsdp2", each=each))
    return found


# --- a process ------------------------------------------------------------------------------------------------------


def gpt_settings(plan: dict, world: World) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = ["--model", plan["model"], "--device", plan["device"], "--dropout", "0"]
    options += ["--batch", str(plan["batch"])] if plan["batch"] else []
    settings = resolve(parser.parse_args(options), world)
    # The rate rises as in a run of 100 steps; what is compared are its first ones.
    return replace(settings, recipe=replace(settings.recipe, steps=100, warmup=10))


def train_gpt(settings: Settings, variant: Variant, blocks: tuple[int, int]) -> dict:
    """Losses of the first steps, digests of their gradients and of the weights, milliseconds of a step."""
    world, device = settings.world, settings.device
    batch = settings.recipe.batch * (world.size if variant.each else 1)
    world = replace(world, parallel=variant.parallel, bf16_reduce=variant.bf16_reduce)
    settings = replace(settings, world=world, graph=variant.graph)
    text = shakespeare()
    windows = Windows(np.array(Characters.of(text).encode(text)), settings.recipe.length, device)
    generator = torch.Generator().manual_seed(0)
    learner = Learner(settings, "fused", initial_state(settings))
    update_only, gradients = learner.update, []

    def step():
        begins = world.share(torch.randint(len(windows), (batch,), generator=generator))
        return (learner.graphed_step if variant.graph else learner.step)(lambda: windows(begins))

    def update():
        gradients.append(digest(whole(p.grad) for p in learner.parameters))
        return update_only()

    losses = []
    for number in range(COMPARED):
        if not variant.graph:  # in which nothing can be read
            learner.update = update if number < DIGESTED else update_only
        losses.append(step())
    weights = digest(whole(p.detach()) for p in learner.parameters)
    losses = world.mean(torch.stack(losses).double()).tolist()
    times = [milliseconds(step, device, blocks[1]) for _ in range(blocks[0])]
    learner.timer.collect()
    hidden = overlap(step, device) if world.size > 1 else None
    line = timeline(step, device) if variant.graph else None
    tokens = batch * settings.recipe.length
    return {
        "sequences": batch,
        "losses": losses,
        "gradients": gradients,
        "weights": weights,
        "milliseconds": times,
        "tokens": tokens,
        "nccl": hidden,
        "timeline": line,
    }


def train_mnist(world: World, device: torch.device, batch: int, shares: int, blocks: tuple[int, int]) -> dict:
    """The fused CNN: a graph around forward, backward, the sums over processes and the update. One process takes a
    batch as so many shares, with batch norms of their own, as that many processes do."""
    torch.manual_seed(0)
    model = MnistCNN("fused").to(device)
    batches = Batches(*mnist(), device, keep_on_device=True)
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
    rows = order[: len(order) // batch * batch].view(-1, batch).to(device)
    losses = torch.stack([step(world.share(rows[number % len(rows)])).clone() for number in range(COMPARED)])
    weights = digest(p.detach() for p in model.parameters())
    share = world.share(rows[0]).contiguous()
    return {
        "sequences": batch,
        "losses": world.mean(losses.double()).tolist(),
        "gradients": [],
        "weights": weights,
        "milliseconds": [milliseconds(lambda: step(share), device, 10 * blocks[1]) for _ in range(blocks[0])],
        "tokens": batch,
        "nccl": overlap(lambda: step(share), device) if world.size > 1 else None,
        "timeline": timeline(lambda: step(share), device),
    }


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


def timeline(step, device: torch.device) -> list[tuple[int, str, float, float]] | None:
    """One step's kernels in order: stream, name, when it began and how long it took, in microseconds. None on the
    CPU. All processes have to ask, since a step waits for all."""
    if device.type != "cuda":
        return None
    kernels = sorted(kernels_of(step, device, 1), key=lambda event: event["ts"])
    begin = kernels[0]["ts"] if kernels else 0.0
    # A kernel's arguments and return type are longer than its name, and say no more.
    short = (event["name"].removeprefix("void ").split("(")[0][:80] for event in kernels)
    return [
        (event["tid"], name, round(event["ts"] - begin, 2), round(event["dur"], 2))
        for event, name in zip(kernels, short, strict=True)
    ]


def overlap(step, device: torch.device) -> dict | None:
    """Of a step: microseconds of NCCL's kernels, and of those in which another kernel ran. None on the CPU."""
    if device.type != "cuda":
        return None
    sides = {True: [], False: []}
    for event in kernels_of(step, device, PROFILED):
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


def other_device(settings: Settings) -> bool | None:
    """Whether a GPU that is not the current one trains GPT and the CNN as the current one does, bit by bit; None where
    there is one GPU."""
    if settings.device.type != "cuda" or torch.cuda.device_count() < 2:
        return None
    found = []
    for index in (0, 1):
        device = torch.device("cuda", index)
        own = replace(settings, device=device, recipe=replace(settings.recipe, batch=2))
        for graph in (False, True):
            found.append(train_gpt(own, Variant("", graph), (0, 1)))
        found.append(train_mnist(World(), device, 64, 1, (0, 1)))
    keys = ("losses", "gradients", "weights")
    first, second = found[: len(found) // 2], found[len(found) // 2 :]
    return all(a[key] == b[key] for a, b in zip(first, second, strict=True) for key in keys)


def work(plan: dict, out: Path):
    """What each process does: the plan's variants one after the other, into a file of its own."""
    world = World.from_environment()
    settings = gpt_settings(plan, world)
    device, blocks = settings.device, BLOCKS[plan["quick"]]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    world.join(device)
    found = {"rows": [], "mnist": None}
    try:
        for variant in variants(device.type, world.size):
            if variant.graph < plan["graphs"]:
                continue
            if world.is_first:
                print(f"{world.size} process(es), {variant.name}{', batch each' * variant.each}", flush=True)
            found["rows"].append({**variant.__dict__, **train_gpt(settings, variant, blocks)})
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        found["mnist"] = train_mnist(world, device, MNIST_BATCH[device.type], 1, blocks)
        if world.size == 1:
            # Whose losses those of several processes have to be, and not to be timed.
            found["shares"] = train_mnist(world, device, MNIST_BATCH[device.type], plan["processes"], (0, 1))
            found["other_device"] = other_device(settings)
        if world.is_first:
            found["facts"] = harness.environment(device)
            found["precision"] = settings.recipe.precision
            found["length"] = settings.recipe.length
    finally:
        world.leave()
    Path(f"{out}.{world.size}.{world.rank}").write_text(json.dumps(found))


# --- the comparison -------------------------------------------------------------------------------------------------


def start(plan: dict, processes: int, folder: Path) -> list[dict]:
    """What each of so many processes has found."""
    (folder / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(Path(__file__).resolve()), "--worker", str(folder / "plan.json")]
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    if plan["device"] == "cpu":
        environment.setdefault("OMP_NUM_THREADS", "1")
    result = subprocess.run(command, env=environment, check=False)
    if result.returncode:
        raise ValueError(f"{processes} process(es) have failed with status {result.returncode}; see above")
    return [json.loads((folder / f"plan.json.{processes}.{rank}").read_text()) for rank in range(processes)]


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
    return {**row, "median_ms": step, "per_second": per_second, "alike": alike, **first}


def distance(losses: list[float], expected: list[float], steps: int) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses[:steps], expected[:steps], strict=True))


def compare(alone: dict, ranks: list[dict]) -> dict:
    """The results of one process and of several, and what is wrong with them."""
    size, precision = len(ranks), alone["precision"]
    dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
    found = {"facts": alone["facts"], "processes": size, "precision": precision, "length": alone["length"]}
    found["rows"], problems = [joined([row]) for row in alone["rows"]], []
    base = {row["graph"]: row for row in found["rows"]}

    def add(row, expected, against, limit):
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

    for number, row in enumerate(ranks[0]["rows"]):
        row = joined([rank["rows"][number] for rank in ranks])
        against = base[row["graph"]]
        rounded = torch.bfloat16 if row["bf16_reduce"] else dtype
        add(row, None if row["each"] else against["losses"], against, LIMITS[rounded].early_loss)
        found["rows"].append(row)
    mnist_alone, mnist_row = joined([alone["mnist"]]), joined([rank["mnist"] for rank in ranks])
    mnist_row["name"] = "MNIST CNN"
    add(mnist_row, alone["shares"]["losses"], mnist_alone, LIMITS[torch.float32].early_loss)
    found["mnist"] = [mnist_alone, mnist_row]
    found["other_device"] = alone["other_device"]
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

    def line(name, size, row):
        nccl = row["nccl"]
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
        line(f"GPT {row['name']}", 1 if "efficiency" not in row else found["processes"], row)
    for size, row in zip((1, found["processes"]), found["mnist"], strict=True):
        line("MNIST CNN, one graph" if found["backend"] == "nccl" else "MNIST CNN", size, row)
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
        line, size = row.pop("timeline"), found["processes"] if "efficiency" in row else 1
        if line:
            name = f"{row.get('name', 'MNIST CNN')}, {row['sequences']} in {size} process{'es' * (size > 1)}"
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
    gpus = torch.cuda.device_count() if arguments.device != "cpu" else 0
    note = None
    if gpus < 2:
        device, size = "cpu", arguments.processes or 2
        if arguments.device != "cpu":
            here = "one GPU, which NCCL gives to one process alone" if gpus else "no GPU"
            note = f"This machine has {here}: measured are {size} processes over gloo on the CPU, nothing of NCCL."
    else:
        device, size = "cuda", arguments.processes or gpus
        if size > gpus:
            raise ValueError(f"--processes {size}: there are {gpus} GPUs, and each process takes one")
    if size < 2:
        raise ValueError(f"--processes {size}: expected at least 2, which are compared with one")
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
    with tempfile.TemporaryDirectory() as folder:
        alone = start(plan, 1, Path(folder))[0]
        found = compare(alone, start(plan, size, Path(folder)))
    found |= {"model": model, "backend": "nccl" if device == "cuda" else "gloo", "note": note}
    found["command"] = " ".join(["python benchmarks/scaling.py", *sys.argv[1:]])
    found["table"] = table(found)
    folder = arguments.out / f"{harness.slug(found['facts']['device'])}-x{size}"
    lines = take_time_lines(found)
    files = {"scaling.json": (json.dumps(found, indent=1) + "\n").encode(), "scaling.md": markdown(found).encode()}
    if lines:
        files["scaling_timeline.csv"] = timeline_csv(lines)
        if importlib.util.find_spec("matplotlib") is not None:
            files["scaling_timeline.png"] = timeline_png(lines)
    folder.mkdir(parents=True, exist_ok=True)
    write_files({folder / name: content for name, content in files.items()})
    print(markdown(found))
    print(f"written: {folder}/{', '.join(files)}")
    return 1 if found["problems"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, metavar="N", help="default: one for each GPU, 2 on the CPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda with two GPUs or more")
    parser.add_argument("--model", choices=list(RECIPES), help="default: gpt2-124m on GPUs, cpu-char on the CPU")
    parser.add_argument("--batch", type=int, metavar="N", help="sequences of one process (default: the model's)")
    parser.add_argument("--quick", action="store_true", help="few samples")
    parser.add_argument(
        "--graphs", action="store_true", help="steps in CUDA graphs alone, without eager ones and FSDP2"
    )
    parser.add_argument("--out", type=Path, default=RUNS, metavar="DIR", help=f"default: {RUNS}")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(json.loads(arguments.worker.read_text()), arguments.worker)
        return 0
    try:
        return run(arguments)
    except (UserError, ValueError, OSError) as error:
        print(f"scaling: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
