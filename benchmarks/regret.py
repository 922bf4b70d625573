"""python -m cuda_ops bench regret: what the choice of a path costs, at shapes that nobody tuned for.

A draw is one product of matrices or one pass of a convolution: half of them calls that real models make, perturbed as
the sweep's (sweep.py), half of log-uniform random sizes. Each is timed as the library chooses, and by all that the
library can be made to take instead: every plan of gemm's tables (csrc/cuda/gemm/times.h) that takes it, by tile, splits
of k and order of the operands; every path of conv2d's table that supports it. The regret is the time of the choice over
that of the best, less one. First all are timed with few samples; then the choice and the best few again, interleaved,
by which the regret is told. The same seed draws the same, everywhere.

Writes <out>/<device>/regret.csv, regret.md and regret.json: mean, 95th percentile and worst regret, by op, dtype and
path, and the losers.
"""

import contextlib
import gc
import math
import os
import random
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import sweep
import torch
import tune_gemm
from harness.spec import DTYPES, Make
from harness.timing import cache_bytes, graph_sampler, interleaved, memory_budget, sets_needed, summarize, tf32

import cuda_ops
from cuda_ops._library import ops

MEAN, WORST = 0.03, 0.15  # what the choice aims at
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LEAST_K = 64  # of a split
NARROW_SPLITS, NARROW_COLUMNS, NARROW_SHORT_K = (16, 33, 66, 132, 264), 256, 16  # 4 in 16 bits
SIZES = {"m": (1, 8192), "n": (1, 8192), "k": (8, 8192), "channels": (3, 1024), "plane": (4, 112)}
MOST_ELEMENTS, MOST_PRODUCTS = 1 << 26, 5e10  # of a draw
FINALISTS = 3  # of which, and of the choice, the regret is told
HOPELESS, HOST = 3, 3e-4  # times the choice's time, and seconds that an eager call's host part may take beside
SIMT, MMA, SM90, SM90_SKINNY, DIRECT, PADDED, NARROW = 10, 11, 13, 14, 15, 16, 17  # csrc/cuda/gemm/paths.h
SM90_3XTF32 = 18
SM90_UNALIGNED, UNALIGNED_TILES = 19, ((128, 128, 1), (128, 64, 2), (128, 256, 1))  # m, n, blocks of an SM
PADDED_SKINNY = 32
NAMES = {SIMT: "simt", MMA: "mma", SM90: "sm90", SM90_SKINNY: "sm90_skinny", DIRECT: "direct", PADDED: "padded"}
NAMES |= {NARROW: "narrow", SM90_3XTF32: "sm90_3xtf32", SM90_UNALIGNED: "sm90_unaligned"}
CONV_PATHS = ("simt", "mma", "sm90", "sm90_halo", "gemm_1x1", "few_channels", "depthwise", "winograd", "padded")
CONV_PATHS += ("im2col", "grouped", "patches")
PASSES = {"forward": (), "gradient of input": (0,), "gradient of weight": (1,)}


@dataclass(frozen=True)
class Gemm:
    m: int
    n: int
    k: int
    batch: int
    order: str  # N or T for a and b; T: the transposed matrix lies in memory
    dtype: str

    op = "gemm"

    def __str__(self):
        batch = f"{self.batch}x" if self.batch > 1 else ""
        return f"{batch}{self.m}x{self.n}x{self.k} {self.order}"

    def cost(self) -> tuple[int, float]:
        """Elements of the tensors, and multiply-adds."""
        m, n, k, batch = self.m, self.n, self.k, self.batch
        return batch * (m * k + k * n + m * n), float(batch * m * n * k)


@dataclass(frozen=True)
class Conv:
    draw: sweep.Draw
    direction: str
    layout: str

    op = "conv2d"

    @property
    def dtype(self):
        return self.draw.dtype

    def __str__(self):
        return f"{self.draw}, {self.direction}, {self.layout}"

    def cost(self) -> tuple[int, float]:
        return self.draw.cost()


def _log_uniform(rng, least: int, most: int) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def _size(rng, name: str) -> int:
    """Of which half are multiples of eight, and rows of them of 16 bytes."""
    size = _log_uniform(rng, *SIZES[name])
    return max(8, size // 8 * 8) if rng.random() < 0.5 else size


def _random_gemm(rng, dtype: str) -> Gemm:
    batch = _log_uniform(rng, 2, 256) if rng.random() < 0.15 else 1
    order = rng.choice("NT") + rng.choice("NT")
    return Gemm(*(_size(rng, name) for name in "mnk"), batch, order, dtype)


def _gemm_of_linear(rng, draw: sweep.Draw) -> Gemm:
    """Forward or a gradient of the layer."""
    rows, inputs, outputs = draw.batch * draw.call["rows"], draw.call["in"], draw.call["out"]
    direction = rng.choice(list(PASSES))
    if direction == "forward":
        return Gemm(rows, outputs, inputs, 1, "NT", draw.dtype)
    if direction == "gradient of input":
        return Gemm(rows, inputs, outputs, 1, "NN", draw.dtype)
    return Gemm(outputs, inputs, rows, 1, "TN", draw.dtype)


def _random_conv(rng, dtype: str) -> sweep.Draw:
    kernel, groups = rng.choice((1, 1, 3, 3, 3, 5, 7)), 1
    channels, out = (_size(rng, "channels") for _ in range(2))
    if rng.random() < 0.15:
        groups = out = channels
    plane = _log_uniform(rng, max(kernel, SIZES["plane"][0]), SIZES["plane"][1])
    call = {"input": [channels, plane, plane], "out": out, "kernel": [kernel] * 2, "bias": False}
    call |= {"stride": [rng.choice((1, 1, 1, 2))] * 2, "padding": [rng.choice((0, kernel // 2))] * 2}
    return sweep.Draw("conv2d", rng.choice(sweep.BATCHES), call | {"dilation": [1, 1], "groups": groups}, dtype)


def draws(seed: int, count: int, dtypes: tuple[str, ...], calls=None) -> list[Gemm | Conv]:
    """The same for the same arguments, in turns: products of layers, random ones, convolutions of models, random."""
    rng = random.Random(seed)
    calls = sweep.known_calls() if calls is None else calls
    found = []
    while len(found) < count:
        turn, dtype = len(found) % 4, rng.choice(dtypes)
        if turn == 1:
            draw = _random_gemm(rng, dtype)
        elif turn == 3:
            draw = sweep._fitted(_random_conv(rng, dtype), MOST_ELEMENTS, MOST_PRODUCTS)
        else:
            kind = "linear" if turn == 0 else "conv2d"
            draw = sweep.draws(rng.randrange(1 << 30), 1, (dtype,), "cuda", {kind: calls[kind]})[0]
            draw = sweep._fitted(draw, MOST_ELEMENTS, MOST_PRODUCTS)
        if draw is None:
            continue
        if turn == 0:
            draw = _gemm_of_linear(rng, draw)
        elif turn != 1:
            draw = Conv(draw, rng.choice(list(PASSES)), rng.choice(("channels_last", "contiguous")))
        elements, products = draw.cost()
        if elements <= MOST_ELEMENTS and products <= MOST_PRODUCTS:
            found.append(draw)
    return found


# ---- What the library can be made to take ----------------------------------------------------------------------------


def tables() -> dict[str, list[dict]]:
    """{table of csrc/cuda/gemm/times.h: its rows}"""
    found, kind = defaultdict(list), None
    for line in tune_gemm.FILE.read_text().splitlines():
        if match := re.match(r"static const GemmTime (\w+)\[\]", line):
            kind = match[1]
        if match := tune_gemm.ROW.match(line):
            found[kind].append(tune_gemm.row_of(match))
    return dict(found)


def rows_for(draw: Gemm, known: dict[str, list[dict]]) -> list[dict]:
    if draw.dtype in ("bfloat16", "float16"):
        return known["HALVES_TIMES"]
    if draw.dtype == "float32":
        return known["FLOAT32_TIMES"]
    # Copied operands are K-major, however they were stored, so that padded has the tiles of all orders.
    return known["TF32_NT_TIMES"] + known["TF32_TIMES"] + known["TF32_TN_TIMES"]


def plans(draw: Gemm, known: dict[str, list[dict]], multiprocessors: int) -> list[tuple[int, int, int, int]]:
    """Path, tile, splits of k and whether the operands are exchanged, of all that may take the product: which do, a
    call tells. Splits as far as they fill the GPU twice."""
    found = {(SIMT, 0, 1, 0): None} if DTYPES[draw.dtype] == torch.float32 else {}
    if draw.batch == 1 and (draw.order[0] == "N" or (draw.k <= NARROW_SHORT_K and draw.n > NARROW_COLUMNS)):
        found[NARROW, 0, 1, 0] = None
    elif draw.batch == 1 and draw.order == "TN" and max(draw.m, draw.n) <= NARROW_COLUMNS:
        found |= {(NARROW, 0, splits, 0): None for splits in NARROW_SPLITS if draw.k >= splits * LEAST_K}
    rows = (draw.m if draw.order[0] == "T" else draw.k, draw.k if draw.order[1] == "T" else draw.n, draw.n)
    if draw.dtype in ("bfloat16", "float16") and any(row % 8 for row in rows):
        for tile, (m, n, sharing) in enumerate(UNALIGNED_TILES):
            blocks = -(-draw.m // m) * -(-draw.n // n) * draw.batch
            for splits in SPLITS:
                few = blocks * splits <= 2 * multiprocessors * sharing and draw.k >= splits * LEAST_K
                if splits == 1 or few:
                    found[SM90_UNALIGNED, tile, splits, 0] = None
    for row in rows_for(draw, known):
        path, tile = row["path"], row["tile"]
        for swapped in (0, 1) if path in (SM90, SM90_SKINNY) else (0,):
            # sm90_3xtf32 exchanges the operands by itself.
            m, n = (draw.n, draw.m) if swapped or (path == SM90_3XTF32 and draw.m < draw.n) else (draw.m, draw.n)
            tall, wide = row["m"] * row["cluster_m"], row["n"] * row["cluster_n"]
            blocks = -(-m // tall) * -(-n // wide) * row["cluster_m"] * row["cluster_n"] * draw.batch
            for splits in SPLITS:
                clustered = path in (SM90_SKINNY, DIRECT)
                if splits > row["splits"] or (path == MMA and splits > 1) or (clustered and splits & (splits - 1)):
                    continue
                if splits > 1 and (blocks * splits > 2 * multiprocessors * row["blocks"] or draw.k < splits * LEAST_K):
                    continue
                found[path, tile, splits, swapped] = None
                if path in (SM90, SM90_SKINNY):
                    found[PADDED, tile + (PADDED_SKINNY if path == SM90_SKINNY else 0), splits, swapped] = None
    return list(found)


def plan_name(plan: tuple[int, int, int, int]) -> str:
    path, tile, splits, swapped = plan
    return f"{NAMES.get(path, path)} {tile}" + (f" s{splits}" if splits > 1 else "") + (" w" if swapped else "")


@contextlib.contextmanager
def environment(name: str, value: str | None):
    before = os.environ.get(name)
    try:
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def forced(name: str, value: str | None, call: Callable) -> Callable:
    """The call with that variable in the environment; None: without it."""

    def run():
        with environment(name, value):
            return call()

    return run


@dataclass
class Contest:
    """Calls for the choice, and by name for each alternative, of the same operands; a list for each, to go round."""

    chosen: str  # the name of the choice
    own: list[Callable]
    others: dict[str, list[Callable]]


def gemm_contest(draw: Gemm, device, sets: int) -> Contest:
    make = Make(device, DTYPES[draw.dtype])

    def operand(rows, columns, way):
        batch = (draw.batch,) if draw.batch > 1 else ()
        if way == "N":
            return make(*batch, rows, columns, requires_grad=False)
        return make(*batch, columns, rows, requires_grad=False).mT

    pairs = [
        (operand(draw.m, draw.k, draw.order[0]), operand(draw.k, draw.n, draw.order[1])) for _ in range(max(1, sets))
    ]
    allow_tf32 = draw.dtype == "tf32"
    chosen = tuple(ops.gemm_plan(*pairs[0], allow_tf32=allow_tf32))
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def planned(plan):
        return [lambda a=a, b=b: ops.gemm_planned(a, b, plan, allow_tf32=allow_tf32) for a, b in pairs]

    own = [forced("CUDA_OPS_GEMM_PATH", None, lambda a=a, b=b: ops.matmul_forward(a, b)) for a, b in pairs]
    others = {plan_name(plan): planned(plan) for plan in plans(draw, tables(), multiprocessors) if plan != chosen}
    return Contest(plan_name(chosen), own, others)


def conv_contest(conv: Conv, device, sets: int) -> Contest:
    arguments, _ = sweep.arguments_of(conv.draw, Make(device, DTYPES[conv.dtype]))
    copies = [sweep.relaid(arguments, conv.layout) for _ in range(max(1, sets))]
    function = cuda_ops.functional.conv2d
    name = "CUDA_OPS_CONV2D_PATH"
    with environment(name, None):
        calls = [sweep.call_of(function, copy, PASSES[conv.direction]) for copy in copies]
        chosen = sweep.path_of(conv.draw, function, copies[0], conv.direction, device)
    others = {path: [forced(name, path, call) for call in calls] for path in CONV_PATHS if path != chosen}
    return Contest(chosen, [forced(name, None, call) for call in calls], others)


# ---- Times -----------------------------------------------------------------------------------------------------------


def finalists(first: dict[str, float], count: int = FINALISTS) -> list[str]:
    """Those with the least time."""
    return sorted(first, key=first.__getitem__)[:count]


def contend(contest: Contest, sampler_of: Callable, rounds: int) -> tuple[float, str, float, int]:
    """Seconds of the choice, the name and the seconds of the best (the choice, if nothing is faster), and how many
    contended. sampler_of(calls, limit) raises NotImplementedError where the library refuses the calls, and returns None
    where one takes longer than the limit."""
    usual, first = sampler_of(contest.own, math.inf)(), {}
    for name, calls in contest.others.items():
        # One at a time: a sampler holds all that its calls return.
        try:
            sample = sampler_of(calls, HOPELESS * usual)
        except NotImplementedError:
            continue
        first[name] = math.inf if sample is None else min(sample(), sample())
    chosen, best = contest.chosen, finalists({name: time for name, time in first.items() if time < math.inf})
    samplers = {name: sampler_of(contest.others[name], math.inf) for name in best}
    samplers[chosen] = sampler_of(contest.own, math.inf)
    times = {name: summarize(found).median for name, found in interleaved(samplers, rounds).items()}
    winner = min(times, key=lambda name: (times[name], name != chosen))
    return times[chosen], winner, times[winner], len(first) + 1


@dataclass
class Row:
    op: str
    call: str
    dtype: str
    chosen: str
    chosen_us: float
    best: str
    best_us: float
    contenders: int

    @property
    def regret(self) -> float:
        return self.chosen_us / self.best_us - 1

    @property
    def path(self) -> str:
        return f"{self.op}: {self.chosen.split()[0]}"


def measure(draw: Gemm | Conv, device, rounds: int, least_seconds: float) -> Row:
    size = draw.cost()[0] * DTYPES[draw.dtype].itemsize
    sets, _ = sets_needed(size, cache_bytes(device), min(memory_budget(device), 1 << 30))
    with tf32(draw.dtype == "tf32"):
        contest = (gemm_contest if draw.op == "gemm" else conv_contest)(draw, device, sets)

        def sampler_of(calls, limit):
            calls[0]()  # refused here, and not during the capture of a graph
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            calls[0]()
            torch.cuda.synchronize(device)
            if time.perf_counter() - start > limit + HOST:
                return None
            return graph_sampler(calls, device, torch.cuda.current_stream(), least_seconds)

        own, best, least, contenders = contend(contest, sampler_of, rounds)
    return Row(draw.op, str(draw), draw.dtype, contest.chosen, 1e6 * own, best, 1e6 * least, contenders)


# ---- Report ----------------------------------------------------------------------------------------------------------


def summary_of(regrets: list[float]) -> dict[str, float]:
    ordered = sorted(regrets)
    return {
        "rows": len(ordered),
        "mean": statistics.fmean(ordered),
        "95th percentile": ordered[math.ceil(0.95 * (len(ordered) - 1))],
        "worst": ordered[-1],
        "losers": sum(regret > WORST for regret in ordered),
    }


def summaries(rows: list[Row]) -> dict[str, dict[str, dict[str, float]]]:
    groups = {"all": lambda row: "all", "op": lambda row: row.op, "dtype": lambda row: row.dtype}
    groups |= {"path": lambda row: row.path}
    return sweep.grouped(rows, groups, "regret", summary_of)


def losers(rows: list[Row]) -> list[Row]:
    """Worst first."""
    return sorted((row for row in rows if row.regret > WORST), key=lambda row: -row.regret)


def markdown(rows: list[Row], facts: dict[str, str]) -> str:
    lines = ["# What the choice of a path costs", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += [f"Time of the choice over that of the best, less one. Aims: {MEAN:.0%} mean, {WORST:.0%} at worst.", ""]
    for name, table in summaries(rows).items():
        lines += [f"| {name} | rows | mean | 95th percentile | worst | above {WORST:.0%} |", f"|{'---|' * 6}"]
        for value, s in table.items():
            figures = " | ".join(f"{s[key]:.1%}" for key in ("mean", "95th percentile", "worst"))
            lines.append(f"| {value} | {s['rows']} | {figures} | {s['losers']} |")
        lines.append("")
    lines += ["## The losers, worst first", "", "| op | call | dtype | chosen | µs | best | µs | regret |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in losers(rows):
        values = [row.op, row.call, row.dtype, row.chosen, f"{row.chosen_us:.1f}", row.best, f"{row.best_us:.1f}"]
        lines.append(f"| {' | '.join([*values, f'{row.regret:.1%}'])} |")
    return "\n".join(lines) + "\n"


def write(rows: list[Row], facts: dict[str, str], folder: Path) -> list[Path]:
    data = {"aims": {"mean": MEAN, "worst": WORST}, "tables": summaries(rows)}
    data["losers"] = [asdict(row) | {"regret": row.regret} for row in losers(rows)]
    return sweep.write_report("regret", Row, rows, facts, ("regret", 4), markdown(rows, facts), data, folder)


def run(device, out: Path, seed: int, count: int, dtypes: list[str] | None, seconds: float | None, quick: bool):
    """Nothing to return: no result is checked here, which is the sweep's part."""
    if device.type != "cuda":
        raise ValueError("regret is of the choice among CUDA's paths: it needs --device cuda")
    chosen = tuple(dtype for dtype in sweep.CUDA_DTYPES if not dtypes or dtype in dtypes or "all" in dtypes)
    if not chosen:
        raise ValueError(f"regret has {', '.join(sweep.CUDA_DTYPES)}, and no {', '.join(dtypes)}")
    facts = harness.environment(device) | {"seed": str(seed), "count": str(count), "dtypes": ", ".join(chosen)}
    rounds, least = (3, 1e-4) if quick else (9, 3e-4)
    start, rows = time.perf_counter(), []
    with torch.cuda.stream(torch.cuda.Stream()):
        for number, draw in enumerate(draws(seed, count, chosen)):
            if seconds is not None and time.perf_counter() - start > seconds:
                facts["count"] = f"{number} of {count}, as many as {seconds:g} seconds sufficed for"
                break
            rows.append(measure(draw, device, rounds, least))
            if number % 16 == 15:
                gc.collect()
            if sys.stderr.isatty():
                print(f"\r\033[K{number + 1}/{count} {draw.op} {draw}", end="", file=sys.stderr, flush=True)
    if not rows:
        raise ValueError("no time for a single draw: give more --seconds")
    paths = write(rows, facts, out / harness.slug(facts["device"]))
    for table in summaries(rows).values():
        for value, s in table.items():
            print(
                f"{value}: {s['rows']} rows, regret {s['mean']:.1%} in the mean, 95th percentile "
                f"{s['95th percentile']:.1%}, worst {s['worst']:.1%}, {s['losers']} above {WORST:.0%}"
            )
    for row in losers(rows):
        times = f"{row.chosen} {row.chosen_us:.1f} µs, {row.best} {row.best_us:.1f}"
        print(f"{row.regret:6.1%} {row.op} {row.call} {row.dtype}: {times}")
    print(f"regret: {', '.join(map(str, paths))}")
