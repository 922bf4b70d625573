"""A whole training step of GPT-2 124M and of small models of characters, by PyTorch's variants and by ours.

A step goes forward and backward, clips the gradients and updates by AdamW, the fused one on both sides. On a GPU in
bf16 (torch.autocast over float32 parameters, for all) GPT-2 124M, whose variants are timed one after the other, each
with the memory to itself, and nanoGPT's model of characters, whose variants are interleaved; on the CPU nanoGPT's
smallest, in fp32. Shown are medians of the host's clock around a step, or a block of steps, with a synchronisation
before and after it, and the memory that PyTorch's allocator held at most.

graph        training.GraphedStep: forward, backward, clipping and update in one launch, for PyTorch's side as for ours
less memory  a quarter of the blocks makes gelu's output again in backward instead of keeping it
time line    the kernels of one step in the graph, by torch.profiler: ours, and PyTorch's fastest

python -m cuda_ops bench gpt [--seconds 150] [--quick] [--no-compile] [--device cpu] [--batch 32]
"""

import contextlib
import gc
import json
import re
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import harness
import torch

from cuda_ops._files import write_files
from cuda_ops.models import GPT, get_backend
from cuda_ops.training import GraphedStep
from cuda_ops.training.gpt.learner import parameter_groups
from cuda_ops.training.gpt.settings import RECIPES, Recipe

MODELS = {"cuda": ("char", "gpt2-124m"), "cpu": ("cpu-char",)}
PRECISIONS = {"bf16": torch.bfloat16, "tf32": None, "fp32": None}
# Seconds that a first compilation is expected to take.
COMPILATION = {"char": 25, "gpt2-124m": 45, "cpu-char": 60}
SECONDS = 150
ROUNDS = 15
STEPS = {"char": 10, "gpt2-124m": 1, "cpu-char": 1}
"""Of a sample."""


@dataclass(frozen=True)
class Variant:
    name: str
    backend: str
    graph: bool = False
    compiled: bool = False
    recomputed: float = 0.0
    """Share of the blocks that make gelu's output again in backward, where it is more than the recipe's."""

    @property
    def ours(self) -> bool:
        return self.backend != "native"


VARIANTS = {
    "cuda": (
        Variant("PyTorch eager", "native"),
        Variant("PyTorch graph", "native", graph=True),
        Variant("PyTorch compiled", "native", compiled=True),
        Variant("PyTorch compiled, graph", "native", graph=True, compiled=True),
        Variant("custom graph", "custom", graph=True),
        Variant("fused eager", "fused"),
        Variant("fused graph", "fused", graph=True),
        Variant("fused graph, less memory", "fused", graph=True, recomputed=0.25),
    ),
    "cpu": (
        Variant("PyTorch eager", "native"),
        Variant("PyTorch compiled", "native", compiled=True),
        Variant("custom", "custom"),
        Variant("fused", "fused"),
    ),
}


@dataclass
class Race:
    facts: dict[str, str]
    rows: list[dict] = field(default_factory=list)
    timelines: dict[str, list[dict]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def make_step(variant: Variant, recipe: Recipe, precision: str, device, source=None) -> GraphedStep:
    """A variant's model and optimizer as a step; `source` makes its batch, where it is not handed over."""
    backend = get_backend(variant.backend)
    recomputed = max(int(variant.recomputed * recipe.config.n_layer), recipe.recomputed_blocks)
    model = GPT(variant.backend, recipe.config, recomputed_blocks=recomputed).to(device)
    parameters = list(model.parameters())
    optimizer = backend.optim.AdamW(
        parameter_groups(model, recipe),
        lr=recipe.lr,
        betas=(0.9, recipe.beta2),
        fused=True,
        capturable=variant.graph and device.type == "cuda",
        # Ours clips in the step.
        **({"max_grad_norm": recipe.clip} if variant.ours else {}),
    )
    clip = torch.nn.utils.clip_grad_norm_
    return GraphedStep(
        model,
        torch.compile(model, dynamic=False) if variant.compiled else model,
        optimizer,
        source=source,
        autocast=PRECISIONS[precision],
        graph=variant.graph,
        on_gradients=None if variant.ours else lambda: clip(parameters, recipe.clip),
    )


class Contender:
    """A variant's model and optimizer, ready to take steps."""

    def __init__(self, variant: Variant, recipe: Recipe, precision: str, device):
        torch.manual_seed(0)
        self.step = make_step(variant, recipe, precision, device)
        shape = recipe.batch, recipe.length
        self.batch = [torch.randint(recipe.config.vocab_size, shape, device=device) for _ in range(2)]
        self.device = device

    def warm_up(self, steps: int = 3):
        """Compiles, captures, and takes some steps more."""
        for _ in range(steps):
            loss = self.step(*self.batch)
        if not loss.isfinite():
            raise RuntimeError("the loss is not finite")

    def seconds(self, steps: int) -> float:
        """Of one step, over a block of them."""
        harness.synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(steps):
            self.step(*self.batch)
        harness.synchronize(self.device)
        return (time.perf_counter() - begin) / steps


def set_precision(precision: str):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"


def free(device):
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def prepared(race: Race, variant: Variant, model: str, recipe: Recipe, precision: str, device, until: float):
    """(a contender that is warm, seconds that took), or None where it cannot be, and why is written down."""
    what = f"{variant.name}, {model}"
    begin = time.perf_counter()
    # A model that was compiled before, for the variant without a graph, is found in the compiler's cache.
    first = not any("compiled" in row["variant"] for row in race.rows if row["model"] == model)
    if variant.compiled and first and begin + COMPILATION[model] > until:
        race.left_out.append(f"{what}: no time left to compile it")
        return None
    try:
        contender = Contender(variant, recipe, precision, device)
        contender.warm_up()
        return contender, time.perf_counter() - begin
    except Exception as error:
        race.left_out.append(f"{what}: {(str(error).splitlines() or [type(error).__name__])[0]}")
        print(race.left_out[-1], flush=True)
        return None


def record(race: Race, variant: Variant, model: str, recipe: Recipe, samples, prepared_in, memory, peak_flops):
    summary = harness.summarize(samples)
    tokens = recipe.batch * recipe.length / summary.median
    race.rows.append(
        {
            "model": model,
            "variant": variant.name,
            "ours": variant.ours,
            "batch": recipe.batch,
            "length": recipe.length,
            "median_ms": 1e3 * summary.median,
            "p10_ms": 1e3 * summary.p10,
            "p90_ms": 1e3 * summary.p90,
            "samples": summary.samples,
            "tokens_per_second": tokens,
            "share_of_peak": tokens * recipe.config.flops_per_token(recipe.length) / peak_flops,
            "memory_bytes": memory,
            "prepared_in_s": prepared_in,
        }
    )
    print(f"{model}: {variant.name} {1e3 * summary.median:.2f} ms a step, {tokens:,.0f} tokens/s", flush=True)


def one_by_one(race: Race, variants, model: str, recipe: Recipe, precision: str, device, until: float, peak: float):
    """Each variant with the memory to itself."""
    for number, variant in enumerate(variants):
        free(device)
        found = prepared(race, variant, model, recipe, precision, device, until)
        if found is None:
            continue
        contender, seconds = found
        share = time.perf_counter() + max(0.5, (until - time.perf_counter()) / (2 * (len(variants) - number)))
        samples = []
        while len(samples) < 3 or (len(samples) < ROUNDS and time.perf_counter() < min(share, until)):
            samples.append(contender.seconds(STEPS[model]))
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        record(race, variant, model, recipe, samples, seconds, memory, peak)
        if variant.name in ("fused graph", "PyTorch compiled, graph"):
            with contextlib.suppress(RuntimeError):
                race.timelines[f"{model}, {variant.name}"] = timeline(contender)
        del contender, found


def interleaved(race: Race, variants, model: str, recipe: Recipe, precision: str, device, until: float, peak: float):
    """All variants side by side, sample by sample."""
    contenders, memory = {}, {}
    free(device)
    for variant in variants:
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        found = prepared(race, variant, model, recipe, precision, device, until)
        if found is not None:
            contenders[variant] = found
            memory[variant] = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    samples = {variant: [] for variant in contenders}
    for number in range(ROUNDS):
        if number >= 3 and time.perf_counter() > until:
            break
        for variant, (contender, _) in contenders.items():
            samples[variant].append(contender.seconds(STEPS[model]))
    for variant, (contender, seconds) in contenders.items():
        record(race, variant, model, recipe, samples[variant], seconds, memory[variant], peak)
        if variant.name in ("fused graph", "PyTorch compiled, graph"):
            with contextlib.suppress(RuntimeError):
                race.timelines[f"{model}, {variant.name}"] = timeline(contender)


# --- the time line --------------------------------------------------------------------------------------------------


def kernel_name(name: str) -> str:
    """A kernel's name with what tells its instances apart, without its arguments and namespaces."""
    name = re.sub(r"\(anonymous namespace\)::|^void ", "", name)
    name = re.sub(r"\b\w+::", "", name.split("(")[0])
    return name if len(name) <= 90 else name[:87] + "…"


def timeline(contender: Contender, replays: int = 3) -> list[dict]:
    """The kernels of a step in their order: name, grid, microseconds, and when each starts after the first; the medians
    over some steps. Empty where the tracer lost some."""
    harness.synchronize(contender.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(replays):
            contender.step(*contender.batch)
        harness.synchronize(contender.device)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])
    if not kernels or len(kernels) % replays:
        return []
    size = len(kernels) // replays
    steps = [kernels[i * size : (i + 1) * size] for i in range(replays)]
    lines = []
    for same in zip(*steps, strict=True):
        starts = [e["ts"] - step[0]["ts"] for e, step in zip(same, steps, strict=True)]
        lines.append(
            {
                "kernel": kernel_name(same[0]["name"]),
                "grid": same[0].get("args", {}).get("grid"),
                "start_us": harness.summarize(starts).median,
                "us": harness.summarize([e["dur"] for e in same]).median,
            }
        )
    return lines


def by_kernel(lines: list[dict]) -> list[list[str]]:
    """A row for each kernel and grid: how often, how long together, how long each, which share; the longest first."""
    groups = {}
    for line in lines:
        groups.setdefault((line["kernel"], str(line["grid"])), []).append(line["us"])
    total = sum(map(sum, groups.values()))
    ordered = sorted(groups.items(), key=lambda item: -sum(item[1]))
    return [
        [name, grid, str(len(us)), f"{sum(us):,.0f}", f"{sum(us) / len(us):,.1f}", f"{100 * sum(us) / total:.1f}"]
        for (name, grid), us in ordered[:40]
    ]


# --- the run --------------------------------------------------------------------------------------------------------


def markdown(race: Race) -> str:
    import mnist_report

    parts = ["# A training step of GPT-2", " ".join(__doc__.split("\n\n")[1].split())]
    for model in dict.fromkeys(row["model"] for row in race.rows):
        found = [row for row in race.rows if row["model"] == model]
        best = min((row["median_ms"] for row in found if not row["ours"]), default=None)
        rows = [
            [
                row["variant"],
                f"{row['median_ms']:.2f}",
                f"{row['p10_ms']:.2f} – {row['p90_ms']:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{100 * row['share_of_peak']:.1f}",
                "–" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e9:.2f}",
                f"{row['prepared_in_s']:.1f}",
                "–" if best is None else f"{best / row['median_ms']:.2f}",
            ]
            for row in found
        ]
        header = ["", "ms", "10 – 90 %", "tokens/s", "% of torch.mm", "GB", "ready in, s", "fastest PyTorch / this"]
        shape = f"{found[0]['batch']} × {found[0]['length']} tokens"
        parts += [f"## {model}, {shape}", mnist_report.table(header, rows)]
    parts += [f"- {line}" for line in race.left_out]
    for name, lines in race.timelines.items():
        if lines:
            end = max(line["start_us"] + line["us"] for line in lines)
            busy = sum(line["us"] for line in lines)
            parts += [
                f"## Kernels of {name}",
                f"{len(lines)} kernels in {end:,.0f} µs, of which they take {busy:,.0f}. By kernel and grid:",
                mnist_report.table(["kernel", "grid", "times", "µs a step", "µs each", "%"], by_kernel(lines)),
            ]
    parts.append("\n".join(f"- {name}: {value}" for name, value in race.facts.items()))
    return "\n\n".join(parts) + "\n"


def run(device, out: Path, seconds: float, quick: bool, with_compile: bool, batches=None, precisions=None) -> Race:
    """Races, and writes gpt2_step.json and .md into <out>/<device>. `batches`: one, of GPT-2's sequences."""
    begin, kind = time.perf_counter(), device.type
    if batches and len(batches) > 1:
        raise ValueError("gpt takes one --batch, of GPT-2's sequences")
    if precisions and len(precisions) > 1:
        raise ValueError("gpt takes one --precision")
    precision = precisions[0] if precisions else "bf16" if kind == "cuda" else "fp32"
    if kind == "cpu" and precision != "fp32":
        raise ValueError(f"--precision {precision}: the CPU races in fp32")
    race = Race({**harness.environment(device), "precision": precision, **({"quick": "yes"} if quick else {})})
    if kind == "cpu" and harness.keep_freed_memory():
        race.facts["freed memory"] = "kept by the process, for all variants"
    variants = [v for v in VARIANTS[kind] if with_compile or not v.compiled]
    models = MODELS[kind][:1] if quick else MODELS[kind]
    set_precision(precision)
    with contextlib.ExitStack() as stack:
        if kind == "cuda":
            stack.enter_context(torch.cuda.device(device))
        name = {"bf16": "bfloat16", "fp32": "float32", "tf32": "tf32"}[precision]
        peak = harness.measure_ceiling(device, name, quick).flops_per_second
        race.facts["torch.mm"] = f"{peak / 1e12:.4g} TFLOP/s"
        for number, model in enumerate(models):
            recipe = RECIPES[model]
            if batches and model != "char":
                recipe = replace(recipe, batch=batches[0])
            # GPT-2's steps and compilation take the larger part.
            until = begin + seconds * (0.35 if number + 1 < len(models) else 0.9)
            together = one_by_one if model == "gpt2-124m" else interleaved
            together(race, variants, model, recipe, precision, device, until, peak)
            free(device)
    race.facts["seconds"] = f"{time.perf_counter() - begin:.0f}"
    folder = out / harness.slug(race.facts["device"])
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(race.__dict__, indent=1) + "\n"
    text = markdown(race)
    write_files({folder / "gpt2_step.json": content.encode(), folder / "gpt2_step.md": text.encode()})
    print(text)
    print(f"written: {folder}/gpt2_step.json, .md")
    return race
