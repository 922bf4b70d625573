"""python -m cuda_ops bench sweep: ours against PyTorch at shapes that nobody tuned for.

A draw takes one of the calls that real models make (sweep_calls.csv), the oftener the oftener they make it, gives it a
batch, and at random other sizes of images or other numbers of channels; a dtype; and times forward and each gradient,
ours in the better of its layouts against PyTorch in the better of its own. The same seed draws the same calls,
everywhere. What is too large for the device is drawn with a smaller batch.

Writes <out>/<device>/sweep.csv, sweep.md and sweep.json: the geometric mean, the 5th percentile and the worst of
PyTorch's time over ours, by op, dtype and pass, and the losses by the path that took them.
"""

import csv
import gc
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import sweep_calls
import torch
from harness.runner import AGREE
from harness.spec import DTYPES, Make
from harness.timing import (
    cache_bytes,
    graph_sampler,
    interleaved,
    memory_budget,
    sets_needed,
    summarize,
    tf32,
    wall_sampler,
)

import cuda_ops

# How many of a hundred draws are of each kind: products decide a model's time, and there are more ways to lose one.
SHARES = {"conv2d": 45, "linear": 20, "norm": 20, "pool": 15}
KINDS = {
    "conv2d": ("conv2d",),
    "linear": ("linear",),
    "norm": ("batch_norm", "group_norm", "layer_norm", "rms_norm"),
    "pool": ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"),
}
CUDA_DTYPES, CPU_DTYPES = ("bfloat16", "float16", "tf32", "float32"), ("float32",)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
# Elements that all tensors of a draw have at the most, and multiply-adds.
LIMITS = {"cuda": (1 << 28, 2e12), "cpu": (1 << 23, 1e9)}
LOSS = 0.97  # below it a row is among the losses
ROUNDS = 7


@dataclass(frozen=True)
class Draw:
    op: str
    batch: int
    call: dict
    dtype: str

    def __str__(self):
        c = self.call
        if self.op == "conv2d":
            kernel, (channels, *plane) = c["kernel"], c["input"]
            text = f"{self.batch}x{channels}x{plane[0]}x{plane[1]} to {c['out']}, {kernel[0]}x{kernel[1]}"
            for name, usual in (("stride", [1, 1]), ("padding", [0, 0]), ("dilation", [1, 1]), ("groups", 1)):
                if c[name] != usual:
                    text += f", {name} {c[name][0] if isinstance(c[name], list) else c[name]}"
            return text
        if self.op == "linear":
            return f"{self.batch * c['rows']}x{c['in']} to {c['out']}"
        if "rows" in c:
            return f"{self.batch * c['rows']}x{c['size']}"
        return "x".join(map(str, [self.batch, *c["input"]])) + "".join(
            f", {name} {c[name][0]}" for name in ("kernel", "stride", "padding", "output") if name in c
        )

    def plane(self) -> list[int]:
        """Height and width of a convolution's output."""
        c = self.call
        return [
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, k, s, p, d in zip(
                c["input"][1:], c["kernel"], c["stride"], c["padding"], c["dilation"], strict=True
            )
        ]

    def cost(self) -> tuple[int, float]:
        """Elements of the tensors, and multiply-adds."""
        c, n = self.call, self.batch
        if self.op == "conv2d":
            depth = c["input"][0] // c["groups"] * math.prod(c["kernel"])
            output = n * c["out"] * math.prod(self.plane())
            return n * math.prod(c["input"]) + output + c["out"] * depth, output * depth
        if self.op == "linear":
            rows = n * c["rows"]
            return rows * (c["in"] + c["out"]) + c["in"] * c["out"], rows * c["in"] * c["out"]
        return 2 * n * (c["rows"] * c["size"] if "rows" in c else math.prod(c["input"])), 0.0


def known_calls(path: Path = sweep_calls.CALLS) -> dict[str, list[tuple[str, int, dict]]]:
    """{kind: [(op, how often, sizes)]}"""
    kind_of = {op: kind for kind, ops in KINDS.items() for op in ops}
    found = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file, delimiter=";"):
            call = sweep_calls.call_of(row["op"], row["call"])
            found[kind_of[row["op"]]].append((row["op"], int(row["count"]), call))
    return dict(found)


def draws(seed: int, count: int, dtypes: tuple[str, ...], device: str, calls=None) -> list[Draw]:
    """The same for the same arguments."""
    rng = random.Random(seed)
    calls = known_calls() if calls is None else calls
    kinds = [kind for kind in SHARES if kind in calls]
    found = []
    while len(found) < count:
        kind = rng.choices(kinds, [SHARES[kind] for kind in kinds])[0]
        # By the square root of how often: else three calls in four were of a few large families of models.
        op, _, call = rng.choices(calls[kind], [math.sqrt(n) for _, n, _ in calls[kind]])[0]
        draw = Draw(op, _batch(rng), _perturbed(rng, op, call), rng.choice(dtypes))
        draw = _fitted(draw, *LIMITS[device])
        if draw is not None:
            found.append(draw)
    return found


def _batch(rng) -> int:
    batch = rng.choice(BATCHES)
    return max(1, round(batch * rng.uniform(0.7, 1.3))) if rng.random() < 0.25 else batch


def _perturbed(rng, op, call: dict) -> dict:
    call = dict(call)
    if "input" in call:
        channels, *plane = call["input"]
        if rng.random() < 0.25:
            factor = rng.uniform(0.7, 1.4)
            least = [k * d for k, d in zip(call.get("kernel", (1, 1)), call.get("dilation", (1, 1)), strict=True)]
            plane = [max(k, round(size * factor)) for k, size in zip(least, plane, strict=True)]
        if rng.random() < 0.25 and channels > 4:
            groups, whole = call.get("groups", 1), rng.choice((1, 2, 4, 8))
            if op == "conv2d" and groups == channels:  # depthwise
                multiplier = call["out"] // groups
                channels = _near(rng, channels, whole)
                call |= {"groups": channels, "out": channels * multiplier}
            else:
                channels = groups * _near(rng, channels // groups, whole)
                if op == "conv2d":
                    call["out"] = groups * _near(rng, call["out"] // groups, whole)
        call["input"] = [channels, *plane]
    elif rng.random() < 0.25:
        whole = rng.choice((1, 2, 4, 8))
        for name in ("in", "out", "size"):
            if name in call:
                call[name] = _near(rng, call[name], whole)
    return call


def _near(rng, number: int, whole: int) -> int:
    """A number near `number`, a multiple of `whole`."""
    return max(1, round(number * rng.uniform(0.7, 1.3) / whole)) * whole


def _fitted(draw: Draw, most_elements: int, most_products: float) -> Draw | None:
    """With half the batch, again and again, until it fits; None where one image does not."""
    batch = draw.batch
    while batch >= 1:
        draw = Draw(draw.op, batch, draw.call, draw.dtype)
        elements, products = draw.cost()
        # Norms in training want more than one value a channel.
        small = draw.op == "batch_norm" and batch * math.prod(draw.call["input"][1:]) < 2
        if small or (draw.op == "conv2d" and min(draw.plane()) < 1):
            return None
        if elements <= most_elements and products <= most_products:
            return draw
        batch //= 2
    return None


def arguments_of(draw: Draw, make: Make) -> tuple[tuple, dict]:
    """Of functions of torch.nn.functional, and of ours by the same name."""
    c, n = draw.call, draw.batch
    if draw.op == "conv2d":
        channels = c["input"][0]
        weight = make(c["out"], channels // c["groups"], *c["kernel"])
        bias = make(c["out"]) if c["bias"] else None
        return (make(n, *c["input"]), weight, bias, c["stride"], c["padding"], c["dilation"], c["groups"]), {}
    if draw.op == "linear":
        bias = make(c["out"]) if c["bias"] else None
        return (make(n * c["rows"], c["in"]), make(c["out"], c["in"]), bias), {}
    if draw.op == "batch_norm":
        channels = c["input"][0]
        mean, var = make(channels, requires_grad=False), make(channels, requires_grad=False).square()
        return (make(n, *c["input"]), mean, var, make(channels), make(channels), True), {}
    if draw.op == "group_norm":
        channels = c["input"][0]
        return (make(n, *c["input"]), c["groups"], make(channels), make(channels)), {}
    if draw.op == "layer_norm":
        return (make(n * c["rows"], c["size"]), (c["size"],), make(c["size"]), make(c["size"])), {}
    if draw.op == "rms_norm":
        return (make(n * c["rows"], c["size"]), (c["size"],), make(c["size"])), {}
    if draw.op == "adaptive_avg_pool2d":
        return (make(n, *c["input"]), tuple(c["output"])), {}
    return (make(n, *c["input"]), tuple(c["kernel"]), tuple(c["stride"]), tuple(c["padding"])), {}


def relaid(arguments: tuple, layout: str) -> tuple:
    """Images, and the weight of a convolution, in that layout; all tensors are copies."""
    formats = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}

    def copy(tensor):
        if not isinstance(tensor, torch.Tensor):
            return tensor
        format = formats[layout] if tensor.dim() == 4 else torch.contiguous_format
        return tensor.detach().clone(memory_format=format).requires_grad_(tensor.requires_grad)

    return tuple(copy(argument) for argument in arguments)


def passes_of(draw: Draw) -> dict[str, tuple[int, ...]]:
    """{pass: the arguments whose gradients it computes}, none for forward."""
    if draw.op in ("conv2d", "linear"):
        return {"forward": (), "gradient of input": (0,), "gradient of weight": (1,)}
    return {"forward": (), "gradients": (0, 1, 2, 3, 4)}


def call_of(function: Callable, arguments: tuple, wanted: tuple[int, ...]) -> Callable:
    if not wanted:
        return lambda: function(*arguments)
    inputs = [
        arguments[i]
        for i in wanted
        if i < len(arguments) and isinstance(arguments[i], torch.Tensor) and arguments[i].requires_grad
    ]
    output = function(*arguments)
    grad = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


def distance(ours, native) -> float:
    """The largest relative norm between results of two calls."""
    ours, native = ([value] if isinstance(value, torch.Tensor) else value for value in (ours, native))
    return max(
        float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm().clamp_min(1e-30))
        for a, b in zip(ours, native, strict=True)
    )


@dataclass
class Row:
    op: str
    call: str
    dtype: str
    direction: str
    ours_us: float
    native_us: float
    ours_layout: str
    native_layout: str
    path: str
    distance: float

    @property
    def ratio(self) -> float:
        return self.native_us / self.ours_us


def measure(draw: Draw, device, rounds: int = ROUNDS, least_seconds: float = 0.001) -> list[Row]:
    """A row for each pass."""
    functions = {
        "ours": getattr(cuda_ops.functional, draw.op),
        "native": getattr(torch.nn.functional, draw.op),
    }
    images = "input" in draw.call
    layouts = ("contiguous", "channels_last") if images else ("contiguous",)
    rows = []
    with tf32(draw.dtype == "tf32"):
        dtype = DTYPES[draw.dtype]
        elements = draw.cost()[0]
        count, _ = sets_needed(elements * dtype.itemsize, cache_bytes(device), min(memory_budget(device), 1 << 30))
        for direction, wanted in passes_of(draw).items():
            arguments, _ = arguments_of(draw, Make(device, dtype))
            kinds = {(side, layout): [] for side in functions for layout in layouts}
            for (side, layout), calls in kinds.items():
                for _ in range(count):
                    calls.append(call_of(functions[side], relaid(arguments, layout), wanted))
            torch.manual_seed(0)
            checked = {side: relaid(arguments, "contiguous") for side in functions}
            results = {}
            for side, function in functions.items():
                torch.manual_seed(1)
                results[side] = call_of(function, checked[side], wanted)()
            apart = distance(results["ours"], results["native"])
            samplers = {}
            for key, calls in kinds.items():
                if device.type == "cuda":
                    samplers[key] = graph_sampler(calls, device, torch.cuda.current_stream(), least_seconds)
                else:
                    samplers[key] = wall_sampler(calls, device, least_seconds)
            times = {key: summarize(found).median for key, found in interleaved(samplers, rounds).items()}
            best = {
                side: min((layout for layout in layouts), key=lambda layout, side=side: times[side, layout])
                for side in functions
            }
            path = path_of(draw, functions["ours"], relaid(arguments, best["ours"]), direction, device)
            rows.append(
                Row(
                    draw.op,
                    str(draw),
                    draw.dtype,
                    direction,
                    1e6 * times["ours", best["ours"]],
                    1e6 * times["native", best["native"]],
                    best["ours"],
                    best["native"],
                    path,
                    apart,
                )
            )
            del kinds, samplers
    return rows


def path_of(draw, function, arguments, direction, device) -> str:
    """The path of the table that takes this pass."""
    if device.type != "cuda":
        return "cpu"
    try:
        tables = cuda_ops.explain(function, *arguments, show=False)
    except (RuntimeError, NotImplementedError, cuda_ops._errors.UserError):
        return "?"
    for product in tables.products:
        if product.name == direction or (direction == "gradients" and product.name.startswith("grad")):
            return product.chosen.name if product.chosen else "?"
    return "?"


def summary_of(ratios: list[float]) -> dict[str, float]:
    ordered = sorted(ratios)
    return {
        "rows": len(ordered),
        "geometric mean": statistics.geometric_mean(ordered),
        "5th percentile": ordered[math.floor(0.05 * (len(ordered) - 1))],
        "worst": ordered[0],
        "losses": sum(ratio < LOSS for ratio in ordered),
    }


def grouped(rows: list, groups: dict[str, Callable], value: str, summary: Callable) -> dict[str, dict[str, dict]]:
    """{by what: {its value: summary}}, of the rows' attribute `value`. groups: {by what: what a row's is}."""
    tables = {}
    for name, key in groups.items():
        found = defaultdict(list)
        for row in rows:
            found[key(row)].append(getattr(row, value))
        tables[name] = {group: summary(values) for group, values in sorted(found.items())}
    return tables


def tables_of(rows: list[Row]) -> dict[str, dict[str, dict[str, float]]]:
    groups = {"all": lambda row: "all", "op": lambda row: row.op, "dtype": lambda row: row.dtype}
    groups |= {"pass": lambda row: f"{row.op}, {row.direction}", "path": lambda row: f"{row.op}: {row.path}"}
    return grouped(rows, groups, "ratio", summary_of)


def markdown(rows: list[Row], facts: dict[str, str]) -> str:
    lines = ["# A sweep of shapes nobody tuned for", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["PyTorch's time over ours, each in the better of its layouts.", ""]
    for name, table in tables_of(rows).items():
        lines += [f"| {name} | rows | geometric mean | 5th percentile | worst | below {LOSS} |"]
        lines += ["|---|---|---|---|---|---|"]
        for value, s in table.items():
            figures = " | ".join(f"{s[key]:.3f}" for key in ("geometric mean", "5th percentile", "worst"))
            lines.append(f"| {value} | {s['rows']} | {figures} | {s['losses']} |")
        lines.append("")
    losers = sorted((row for row in rows if row.ratio < LOSS), key=lambda row: row.ratio)
    lines += ["## The losses, worst first", "", "| op | call | dtype | pass | path | ours, µs | PyTorch, µs | ratio |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in losers:
        path, native = f"{row.path} ({row.ours_layout})", f"{row.native_us:.1f} ({row.native_layout})"
        values = [row.op, row.call, row.dtype, row.direction, path, f"{row.ours_us:.1f}", native, f"{row.ratio:.2f}"]
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def write_report(
    name: str,
    kind: type,
    rows: list,
    facts: dict[str, str],
    value: tuple[str, int],
    text: str,
    data: dict,
    folder: Path,
) -> list[Path]:
    """<name>.csv, .md and .json. A line of the first has a row's fields, which are those of `kind`, and the attribute
    that `value` names, with so many digits."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{ending}" for ending in ("csv", "md", "json")]
    column, digits = value
    with paths[0].open("w", newline="") as file:
        file.writelines(f"# {fact}: {said}\n" for fact, said in facts.items())
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*kind.__dataclass_fields__, column])
        for row in rows:
            fields = [f"{v:.{digits}g}" if isinstance(v, float) else v for v in asdict(row).values()]
            writer.writerow([*fields, f"{getattr(row, column):.{digits}f}"])
    paths[1].write_text(text)
    paths[2].write_text(json.dumps({"facts": facts, **data}, indent=1) + "\n")
    return paths


def write(rows: list[Row], facts: dict[str, str], folder: Path) -> list[Path]:
    data = {"tables": tables_of(rows), "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}
    return write_report("sweep", Row, rows, facts, ("ratio", 3), markdown(rows, facts), data, folder)


def run(device, out: Path, seed: int, count: int, dtypes: list[str] | None, seconds: float | None, quick: bool) -> int:
    """Returns how many results differ by more than rounding."""
    every = CUDA_DTYPES if device.type == "cuda" else CPU_DTYPES
    chosen = tuple(dtype for dtype in every if not dtypes or dtype in dtypes or "all" in dtypes)
    if not chosen:
        raise ValueError(f"the sweep has {', '.join(every)} on this device, and no {', '.join(dtypes)}")
    facts = harness.environment(device) | {"seed": str(seed), "count": str(count), "dtypes": ", ".join(chosen)}
    start, rows, differing = time.perf_counter(), [], []
    interrupted = False
    found = draws(seed, count, chosen, device.type)
    rounds, least = (3, 2e-4) if quick else (ROUNDS, 1e-3)
    stream = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else None
    if stream is not None:
        stream.__enter__()
    try:
        for number, draw in enumerate(found):
            if seconds is not None and time.perf_counter() - start > seconds:
                facts["count"] = f"{number} of {count}, as many as {seconds:g} seconds sufficed for"
                break
            new = measure(draw, device, rounds, least)
            differing += [row for row in new if not row.distance <= AGREE[DTYPES[row.dtype]] * 2]
            rows += new
            gc.collect()
            if sys.stderr.isatty():
                print(f"\r\033[K{number + 1}/{count} {draw.op} {draw}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        if not rows:
            raise
        facts["count"] = f"{number} of {count}, then interrupted"
        interrupted = True
    finally:
        if stream is not None:
            stream.__exit__(None, None, None)
    if not rows:
        raise ValueError("no time for a single draw: give more --seconds")
    paths = write(rows, facts, out / harness.slug(facts["device"]))
    for name in ("all", "op", "dtype"):
        for value, s in tables_of(rows)[name].items():
            print(
                f"{value}: {s['rows']} rows, geometric mean {s['geometric mean']:.3f}, 5th percentile "
                f"{s['5th percentile']:.3f}, worst {s['worst']:.3f}, {s['losses']} below {LOSS}"
            )
    for row in differing:
        print(f"DIFFERS: {row.op} {row.call} {row.dtype} {row.direction}: by {row.distance:.2g}")
    print(f"sweep: {', '.join(map(str, paths))}")
    if interrupted:  # what was measured is kept, and the exit status is that of Ctrl-C
        raise KeyboardInterrupt
    return len(differing)
