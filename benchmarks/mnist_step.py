"""The race: one training step of the MNIST CNN, by every variant of PyTorch's and by ours, in one run.

A step gathers a shuffled batch from bytes on the device, normalises it, goes forward and backward, updates by plain SGD
and drops the gradients. All variants of a cell (batch size and precision) are interleaved in blocks of steps; shown are
medians over the rounds, 10th and 90th percentile in the CSV. The clock is the host's around a block, with a
synchronisation before and after it, so that launching counts where it is what takes the time.

precisions   fp32: TF32 off on both sides; tf32: allowed on both; bf16: torch.autocast for PyTorch, which normalises in
             float32, and for ours
graph        training.GraphedStep, for PyTorch's side as for ours, several steps in a graph
one kernel   training.MnistStep, as many steps in a launch; in bf16, up to 1024 images
floor        the least time in which a copy could move the bytes that no step can do without, or torch.mm do its
             operations, both timed in this run; on the CPU the operations alone, Winograd's in float32

python -m cuda_ops bench mnist [--seconds 600] [--quick] [--no-compile] [--device cpu]
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import harness
import torch

from cuda_ops.data import Batches, mnist
from cuda_ops.models import MnistCNN, get_backend
from cuda_ops.training import GraphedStep, MnistStep

BATCHES = {"cuda": (64, 256, 1024, 4096, 16384), "cpu": (64, 256, 1024)}
PRECISIONS = {"cuda": ("fp32", "tf32", "bf16"), "cpu": ("fp32", "bf16")}
ROUNDS = (3, 25)
# Seconds that a variant's first compilation is expected to take; one that takes longer leaves none for what follows.
FIRST_COMPILATION = {"default": 10, "max-autotune-no-cudagraphs": 100}
# The whole network's multiply-adds forward; backward takes twice as many, but for the image's gradient.
MACS = {"conv1": 28 * 28 * 32 * 9, "conv2": 14 * 14 * 64 * 288, "linear1": 3136 * 128, "linear2": 1280}
PARAMETERS = 421_834


@dataclass(frozen=True)
class Variant:
    name: str
    backend: str
    graph: bool = False
    channels_last: bool = True
    compile_mode: str | None = None
    one_kernel: bool = False

    def races(self, precision: str, batch: int, device) -> bool:
        """Whether there is such a step."""
        return not self.one_kernel or (precision == "bf16" and MnistStep.why_not(device, batch) is None)

    @property
    def ours(self) -> bool:
        return self.backend != "native"


CUDA_VARIANTS = (
    Variant("PyTorch eager NCHW", "native", channels_last=False),
    Variant("PyTorch eager", "native"),
    Variant("PyTorch graph", "native", graph=True),
    Variant("PyTorch compiled, graph", "native", graph=True, compile_mode="default"),
    Variant("PyTorch max-autotune, graph", "native", graph=True, compile_mode="max-autotune-no-cudagraphs"),
    Variant("custom eager", "custom"),
    Variant("custom graph", "custom", graph=True),
    Variant("fused eager", "fused"),
    Variant("fused graph", "fused", graph=True),
    Variant("one kernel", "fused", graph=True, one_kernel=True),
)
CPU_VARIANTS = (
    Variant("PyTorch eager NCHW", "native", channels_last=False),
    Variant("PyTorch eager", "native"),
    Variant("PyTorch compiled NCHW", "native", channels_last=False, compile_mode="default"),
    Variant("PyTorch compiled", "native", compile_mode="default"),
    Variant("custom", "custom"),
    Variant("fused", "fused"),
)


def set_precision(precision: str):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True


# --- a step ---------------------------------------------------------------------------------------------------------


def make_step(
    variant: Variant,
    precision: str,
    data,
    device,
    steps_per_graph: int = 1,
    label_smoothing: float = 0.0,
    groups=lambda model: model.parameters(),
) -> GraphedStep | MnistStep:
    """The step of a variant, of the same initial weights for all. `groups`: what its optimizer is given."""
    torch.manual_seed(0)
    model = MnistCNN(variant.backend).to(device)
    if variant.one_kernel:
        optimizer = get_backend(variant.backend).optim.SGD(groups(model), lr=0.01)
        images, labels = (tensor.to(device) for tensor in data)
        return MnistStep(model, optimizer, images, labels, label_smoothing=label_smoothing)
    if not variant.ours and variant.channels_last:
        model = model.to(memory_format=torch.channels_last)
    half = precision == "bf16"
    batches = Batches(*data, device, torch.bfloat16 if half and variant.ours else torch.float32, keep_on_device=True)
    options = {"fused": True} if not variant.ours and device.type == "cuda" else {}
    optimizer = get_backend(variant.backend).optim.SGD(groups(model), lr=0.01, **options)
    load = batches.gather if variant.ours else batches

    def loss(indices):
        images, labels = load(indices)
        if not variant.ours and variant.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return model.loss(images, labels, label_smoothing)

    if variant.compile_mode:
        loss = torch.compile(loss, mode=variant.compile_mode, dynamic=False)
    return GraphedStep(
        model,
        loss,
        optimizer,
        autocast=torch.bfloat16 if half else None,
        steps_per_graph=steps_per_graph if variant.graph else 1,
        graph=variant.graph,
    )


def prepared(variant: Variant, precision: str, batch: int, data, device):
    """A function that takes n steps, ready to be timed; compiled, captured, warm."""
    block = 1 if not variant.graph else 16 if batch <= 1024 else 4
    step = make_step(variant, precision, data, device, block)
    order = torch.randint(len(data[1]), (block, batch), device=device)
    indices = order if block > 1 else order[0]
    for _ in range(3):
        losses = step(indices)
    if not losses.isfinite().all():
        raise RuntimeError("the loss is not finite")

    def steps(count):
        """Takes at least `count` steps and says how many."""
        calls = -(-count // block)
        for _ in range(calls):
            step(indices)
        return calls * block

    return steps


def sampler(steps, device, least_seconds: float):
    """A function that times a block of steps; seconds for one step."""

    def run(count):
        harness.synchronize(device)
        start = time.perf_counter()
        count = steps(count)
        harness.synchronize(device)
        return (time.perf_counter() - start) / count

    count = max(1, int(least_seconds / run(1)))
    return lambda: run(count)


# --- the floor ------------------------------------------------------------------------------------------------------


def floor_seconds(batch: int, precision: str, ceiling: harness.Ceiling, kind: str) -> float:
    """What no implementation that stores activations once per use can beat. Elements an image: the output of block 1,
    written and read, and read again for conv2's weight gradient, its gradient written and read; conv2's output, written
    before its statistics are known and read, read twice more for the two passes of batch norm's gradient, the gradient
    written and read; the output of block 2 and its gradient, each written and read. The image's bytes, three times.
    conv1's output is recomputed. Parameters: read three times, their gradients written and read, the update.

    On the CPU (`kind`) the operations alone: a copy's rate is no bound for what stays in caches. In float32 they are
    conv2's by Winograd's F(2x2, 3x3) there, which the step takes: the sums as they stand, which are what a GPU's floor
    has, are 2.25 times as many."""
    itemsize = 2 if precision == "bf16" else 4
    elements = 5 * 32 * 14 * 14 + 6 * 64 * 14 * 14 + 4 * 3136
    moved = batch * (elements * itemsize + 3 * 784) + 7 * 4 * PARAMETERS
    winograd = kind == "cpu" and precision == "fp32"
    macs = MACS | ({"conv2": MACS["conv2"] * 16 / 36} if winograd else {})
    seconds = 2 * batch * (3 * sum(macs.values()) - macs["conv1"]) / ceiling.flops_per_second
    return seconds if kind == "cpu" else max(moved / ceiling.bytes_per_second, seconds)


def ceiling_of(precision: str, device) -> harness.Ceiling:
    """Large ceilings in a quick run too: a small torch.mm leaves most of a GPU idle, and its floor would lie above what
    is measured."""
    set_precision(precision)
    return harness.measure_ceiling(device, {"bf16": "bfloat16", "fp32": "float32", "tf32": "tf32"}[precision], False)


# --- the time line --------------------------------------------------------------------------------------------------


# What a kernel cannot do without, as far as its name tells: elements of activations and further bytes an image, bytes
# of parameters, multiply-adds an image. Outputs of the first block, of conv2 and of the second block:
FIRST, CONV2, SECOND = 32 * 14 * 14, 64 * 14 * 14, 64 * 7 * 7
KNOWN = {
    "gather_normalize_kernel": (784, 784, 0, 0),
    "one_moments_kernel": (784, 0, 0, 0),
    "one_forward_kernel": (784 + FIRST, FIRST, 0, MACS["conv1"]),
    "one_forward_tensor_kernel": (784 + FIRST, FIRST, 0, MACS["conv1"]),
    "one_forward_tf32_kernel": (784 + FIRST, FIRST, 0, MACS["conv1"]),
    "one_sums_kernel": (784 + FIRST, FIRST, 0, 2 * MACS["conv1"]),
    "one_sums_tensor_kernel": (784 + FIRST, FIRST, 0, 2 * MACS["conv1"]),
    "one_sums_tf32_kernel": (784 + FIRST, FIRST, 0, 2 * MACS["conv1"]),
    "forward_kernel": (FIRST + CONV2, 0, 4 * 64 * 288, MACS["conv2"]),
    "pool_kernel": (CONV2 + 2 * SECOND, SECOND, 0, 0),
    "activate_kernel": (2 * SECOND, 2 * SECOND, 0, 0),
    "sums_kernel": (2 * SECOND, SECOND, 0, 0),
    "backward_kernel": (2 * FIRST + CONV2 + SECOND, SECOND, 8 * 64 * 288, 2 * MACS["conv2"]),
    "wgmma_convolve_kernel": (FIRST + CONV2 + SECOND, SECOND, 4 * 64 * 288, MACS["conv2"]),
    "wgmma_backward_kernel": (2 * FIRST + CONV2 + SECOND, SECOND, 8 * 64 * 288, 2 * MACS["conv2"]),
    "skinny_gemm_kernel": (SECOND + 128, 0, 4 * MACS["linear1"], MACS["linear1"]),
    "linear_relu_backward_kernel": (2 * SECOND + 2 * 128, 0, 8 * MACS["linear1"], 2 * MACS["linear1"]),
    "linear_cross_entropy_kernel": (2 * 128, 8, 0, 3 * MACS["linear2"]),
    "sgd_kernel": (0, 0, 12 * PARAMETERS, 0),
}


def known_of(name: str, batch: int, precision: str, ceiling: harness.Ceiling) -> dict[str, float]:
    """{bytes, flops, floor_us} of a kernel, or nothing."""
    if name not in KNOWN:
        return {}
    elements, further, parameters, macs = KNOWN[name]
    moved = batch * (elements * (2 if precision == "bf16" else 4) + further) + parameters
    flops = 2 * batch * macs
    floor = max(moved / ceiling.bytes_per_second, flops / ceiling.flops_per_second)
    return {"bytes": moved, "flops": flops, "floor_us": 1e6 * floor}


def timeline(precision: str, batch: int, data, device, ceiling: harness.Ceiling, replays: int = 20) -> list[dict]:
    """The kernels of one fused step, in order: median microseconds of each and when it starts after the first. Kernels
    that were launched ahead of their predecessor's end overlap it, so that durations add up to more than the step."""
    set_precision(precision)
    step = make_step(Variant("fused graph", "fused", graph=True), precision, data, device)
    indices = torch.randint(len(data[1]), (batch,), device=device)
    for _ in range(3):
        step(indices)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(replays):
            step(indices)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])
    if len(kernels) % replays:
        return []  # the tracer lost some
    size = len(kernels) // replays
    runs = [kernels[i * size : (i + 1) * size] for i in range(replays)]
    lines = []
    for same in zip(*runs, strict=True):
        starts = [e["ts"] - run[0]["ts"] for e, run in zip(same, runs, strict=True)]
        name = same[0]["name"].split("(")[0].removeprefix("void ").split("<")[0].split("::")[-1]
        lines.append(
            {
                "kernel": name,
                "start_us": harness.summarize(starts).median,
                "us": harness.summarize([e["dur"] for e in same]).median,
                "grid": same[0].get("args", {}).get("grid"),
                **known_of(name, batch, precision, ceiling),
            }
        )
    return lines


# --- cold start -----------------------------------------------------------------------------------------------------

COLD = """
import json, sys, time
times = [time.perf_counter()]
def lap(): times.append(time.perf_counter())
import torch
lap()
import cuda_ops
from cuda_ops.models import MnistCNN, get_backend
lap()
backend, device, compiled = sys.argv[1], torch.device(sys.argv[2]), sys.argv[3] == "compiled"
torch.zeros(1, device=device) + 1
sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
sync(); lap()
model = MnistCNN(backend).to(device)
if compiled:
    model.compile()
optimizer = get_backend(backend).optim.SGD(model.parameters(), lr=0.01)
images, labels = torch.rand(64, 1, 28, 28, device=device), torch.randint(10, (64,), device=device)
for _ in range(2):
    model(images, labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    sync(); lap()
print(json.dumps([b - a for a, b in zip(times, times[1:])]))
"""
COLD_PARTS = ("import torch", "import cuda_ops", "device", "first step", "second step")


def fresh_environment(cache: str = "") -> dict[str, str]:
    """For a process of its own: where cuda_ops is, and where the compiler keeps what it has compiled."""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache} if cache else {}
    return {**os.environ, **caches, "PYTHONPATH": path}


def cold_start(device, with_compile: bool, repeats: int, deadline: float) -> dict[str, dict[str, float]]:
    """Seconds of each part, in a fresh process each time; the median of some. The compiler's cache is empty."""
    variants = {"PyTorch": ("native", "eager"), "custom": ("custom", "eager"), "fused": ("fused", "eager")}
    if with_compile:
        variants["PyTorch compiled"] = ("native", "compiled")
    found = {}
    for name, (backend, mode) in variants.items():
        runs = []
        for _ in range(1 if mode == "compiled" else repeats):
            if time.perf_counter() > deadline:
                break
            with tempfile.TemporaryDirectory() as cache:
                environment = fresh_environment(cache)
                command = [sys.executable, "-c", COLD, backend, str(device), mode]
                options = {"capture_output": True, "text": True, "env": environment, "check": False}
                try:
                    result = subprocess.run(command, **options, timeout=max(0.1, deadline - time.perf_counter()))
                except subprocess.TimeoutExpired:
                    print(f"cold start of {name}: no time left for it")
                    break
            if result.returncode:
                print(f"cold start of {name} failed: {result.stderr.strip().splitlines()[-1]}")
                break
            runs.append(json.loads(result.stdout.splitlines()[-1]))
        if runs:
            columns = zip(*runs, strict=True)
            parts = {part: harness.summarize(list(s)).median for part, s in zip(COLD_PARTS, columns, strict=True)}
            found[name] = {**parts, "to the first step": sum(list(parts.values())[:-1])}
    return found


# --- the run --------------------------------------------------------------------------------------------------------


@dataclass
class Race:
    facts: dict[str, str]
    rows: list[dict] = field(default_factory=list)
    floors: dict[str, dict[int, float]] = field(default_factory=dict)
    """Microseconds by precision and batch size."""
    preparation: dict[str, float] = field(default_factory=dict)
    """Seconds until a variant was ready (compiled and captured), the longest over all cells."""
    timelines: dict[str, list[dict]] = field(default_factory=dict)
    cold: dict[str, dict[str, float]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def time_cell(race: Race, variants, precision: str, batch: int, data, device, until: float, quick: bool):
    """All variants of one batch size and precision, interleaved, until the time `until`."""
    set_precision(precision)
    samplers = {}
    for variant in variants:
        what = f"{variant.name}, {precision}, batch {batch}"
        if not variant.races(precision, batch, device):
            continue
        start = time.perf_counter()
        # A compilation takes as long as the longest one so far, or more.
        expected = max(FIRST_COMPILATION.get(variant.compile_mode, 0), race.preparation.get(variant.name, 0))
        if variant.compile_mode and start + expected > until:
            race.left_out.append(f"{what}: no time left to compile it")
            continue
        try:
            steps = prepared(variant, precision, batch, data, device)
        except Exception as error:
            race.left_out.append(f"{what}: {str(error).splitlines()[0]}")
            print(race.left_out[-1], flush=True)
            continue
        seconds = time.perf_counter() - start
        race.preparation[variant.name] = max(race.preparation.get(variant.name, 0), seconds)
        samplers[variant.name] = sampler(steps, device, 0.01)
    samples = {name: [] for name in samplers}
    for number in range(ROUNDS[1]):
        if number >= ROUNDS[0] and (quick or time.perf_counter() > until):
            break
        for name, seconds in harness.interleaved(samplers, 1).items():
            samples[name] += seconds
    by_name = {variant.name: variant for variant in variants}
    for name, seconds in samples.items():
        summary = harness.summarize(seconds)
        race.rows.append(
            {
                "precision": precision,
                "batch": batch,
                "variant": name,
                "ours": by_name[name].ours,
                "median_us": 1e6 * summary.median,
                "p10_us": 1e6 * summary.p10,
                "p90_us": 1e6 * summary.p90,
                "samples": summary.samples,
            }
        )
        print(f"{precision} batch {batch}: {name} {1e6 * summary.median:.1f} µs a step", flush=True)


def keep_other_precisions(race: Race, folder: Path):
    """Takes from an earlier run's files the precisions that this one did not race, and says of which run they are."""
    try:
        earlier = Race(**json.loads((folder / "mnist_step.json").read_text()))
    except (OSError, ValueError, TypeError):
        return
    # JSON's keys are text.
    earlier.floors = {p: {int(batch): us for batch, us in floors.items()} for p, floors in earlier.floors.items()}
    raced = {row["precision"] for row in race.rows}
    kept = dict.fromkeys(row["precision"] for row in earlier.rows if row["precision"] not in raced)
    race.rows = [row for row in earlier.rows if row["precision"] in kept] + race.rows
    race.floors = {p: floors for p, floors in earlier.floors.items() if p in kept} | race.floors
    race.timelines |= {name: lines for name, lines in earlier.timelines.items() if name.split(",")[0] in kept}
    race.left_out += [line for line in earlier.left_out if any(f", {p}, batch" in line for p in kept)]
    race.cold = race.cold or earlier.cold
    for name, seconds in earlier.preparation.items():
        race.preparation[name] = max(seconds, race.preparation.get(name, 0))
    for precision in kept:
        run = f"another run than the rest: commit {earlier.facts.get('commit')}, {earlier.facts.get('date')}"
        race.facts[f"of {precision}"] = earlier.facts.get(f"of {precision}", run)


def measure(race: Race, cells, variants, data, device, begin: float, seconds: float, quick: bool):
    """Races the cells, each in its share of the `seconds` since `begin`, and traces our step's kernels."""
    kind = device.type
    with contextlib.ExitStack() as stack:
        if kind == "cuda":
            stack.enter_context(torch.cuda.device(device))
        ceilings = {precision: ceiling_of(precision, device) for precision in dict(cells)}
        # A fifth of the time is for what comes after the cells.
        for number, (precision, batch) in enumerate(cells):
            left = begin + 0.8 * seconds - time.perf_counter()
            until = time.perf_counter() + left / (len(cells) - number)
            time_cell(race, variants, precision, batch, data, device, until, quick)
            floor = 1e6 * floor_seconds(batch, precision, ceilings[precision], kind)
            race.floors.setdefault(precision, {})[batch] = floor
            gc.collect()
            torch._dynamo.reset()
            if kind == "cuda":
                torch.cuda.empty_cache()
        if kind == "cuda":
            precision = cells[-1][0]
            for batch in dict.fromkeys(batch for _, batch in cells if batch <= 1024):
                with contextlib.suppress(RuntimeError):
                    lines = timeline(precision, batch, data, device, ceilings[precision])
                    race.timelines[f"{precision}, batch {batch}"] = lines


def run(device, out: Path, seconds: float, quick: bool, with_compile: bool, batches=None, precisions=None) -> Race:
    """Races, and writes mnist_step.csv, .json, .md and .png into <out>/<device>. Of an earlier run's precisions those
    that are not among `precisions` stay there."""
    import mnist_report

    begin = time.perf_counter()
    deadline = begin + seconds
    data = mnist(train=True)
    kind = device.type
    variants = CUDA_VARIANTS if kind == "cuda" else CPU_VARIANTS
    variants = [v for v in variants if with_compile or not v.compile_mode]
    wrong = [p for p in precisions or () if p not in PRECISIONS[kind]]
    if wrong:
        known = ", ".join(PRECISIONS[kind])
        raise ValueError(f"--precision {wrong[0]}: the {kind.upper()} races in {known}")
    batches = batches or (BATCHES[kind][:1] if quick else BATCHES[kind])
    cells = [(p, b) for b in batches for p in (precisions or PRECISIONS[kind])]
    race = Race({**harness.environment(device), "tf32": "by precision", **({"quick": "yes"} if quick else {})})
    if kind == "cpu" and harness.keep_freed_memory():
        race.facts["freed memory"] = "kept by the process, for all variants"
    interrupted = False
    try:
        measure(race, cells, variants, data, device, begin, seconds, quick)
        if not quick:
            race.cold = cold_start(device, with_compile, 3, deadline)
    except KeyboardInterrupt:
        if not race.rows:
            raise
        interrupted = True
        race.facts["interrupted"] = "cells that were raced until then are kept"
    race.facts["seconds"] = f"{time.perf_counter() - begin:.0f}"
    folder = out / harness.slug(race.facts["device"])
    if precisions:
        keep_other_precisions(race, folder)
    mnist_report.write(race, folder)
    print(mnist_report.markdown(race))
    if quick and race.rows:
        print(harness.noise(race.rows))
    print(f"written: {folder}/mnist_step.csv, .json, .md, .png")
    if interrupted:  # the exit status is that of Ctrl-C
        raise KeyboardInterrupt
    return race
