"""The ladder of matrix multiplication: every rung, cuBLAS (or MKL) through torch.mm, and what other tools reach.

`ours` is the rung that the library picks by itself. Slow rungs are left out where one call would take too long. Peers:
cuBLASLt with a bias in its epilogue, a Triton and a Numba kernel, where those packages are installed.
Beside gemm.csv a plot is written, gemm.png.
"""

import functools
import importlib.util
from pathlib import Path

import torch
from harness import Bench, Case, Implementation, read_csv

from cuda_ops import _library
from cuda_ops._table import print_table
from cuda_ops.ladder.gemm import rungs

# Multiply-adds a second, roughly and at best: what a rung is expected to do, so that a call of it takes SLOWEST_CALL at
# the most. From the naive kernels on all sizes are fit.
RATES = {"python": 1e7, "c naive": 5e8, "c loop order": 1e10, "c blocked": 1e10, "c packed": 3e10}
SIMULATED = 3e5
NAIVE = 3e11
SLOWEST_CALL = 0.25


def case(m, n, k, devices=("cpu", "cuda")):
    return Case(
        f"{m}x{n}x{k}",
        lambda make: (make(m, k, requires_grad=False), make(k, n, requires_grad=False)),
        elements=(m * k + k * n + m * n, 0),
        flops=(2 * m * n * k, 0),
        devices=devices,
    )


@functools.cache
def peer(name):
    """The module benchmarks/peers/<name>_gemm.py, or None, said once, where its package is not installed, or fails (as
    Numba does with a NumPy that is newer than itself)."""
    if importlib.util.find_spec(name) is None:
        print(f"gemm: peer {name} is left out, the package is not installed")
        return None
    try:
        return importlib.import_module(f"peers.{name}_gemm")
    except Exception as error:
        print(f"gemm: peer {name} is left out, its import fails: {error}")
        return None


@functools.cache
def no_bias(n, dtype, device):
    return torch.zeros(n, dtype=dtype, device=device)


def cublaslt_epilogue(a, b):
    """With a vector of bias torch.addmm goes through cuBLASLt, which adds it in its epilogue."""
    return torch.addmm(no_bias(b.shape[1], b.dtype, b.device), a, b)


def peers(device, dtype, m, n, k):
    found = []
    if device.type != "cuda":
        return found
    found.append(Implementation("peer cuBLASLt with bias", cublaslt_epilogue))
    if dtype != torch.float64 and (module := peer("triton")):
        found.append(Implementation("peer Triton", module.gemm))
    if dtype in (torch.float32, torch.float64) and m * n * k < SLOWEST_CALL * 1e12 and (module := peer("numba")):
        found.append(Implementation("peer Numba", module.gemm))
    return found


def beside(device, dtype, case):
    m, n, k = map(int, case.name.split("x"))
    a, b = torch.empty(m, k, device=device, dtype=dtype), torch.empty(k, n, device=device, dtype=dtype)
    found = []
    for rung in rungs.values():
        rate = SIMULATED if rung.number == 2 else RATES.get(rung.name, NAIVE if rung.number in (4, 5) else float("inf"))
        if m * n * k <= SLOWEST_CALL * rate and rung.runs(a, b):
            found.append(Implementation(f"rung {rung.number} {rung.name}", rung.function))
    return found + peers(device, dtype, m, n, k)


def ours(a, b):
    return _library.ops.gemm_rung(a, b, 0, allow_tf32=torch.backends.cuda.matmul.allow_tf32)


# --- the table and the plot ------------------------------------------------------------------------------------------


def clock_of(rows):
    """Kernel time where there is a GPU."""
    return "kernel" if any(row["clock"] == "kernel" for row in rows) else "wall"


def table(rows):
    """A line for each case, dtype and implementation, from slow to fast as the ladder goes."""
    clock, lines = clock_of(rows), []
    mm = {(r["case"], r["dtype"]): float(r["median_us"]) for r in rows if r["implementation"] == "torch.mm"}
    for row in rows:
        if row["clock"] != clock:
            continue
        ratio = 100 * mm[row["case"], row["dtype"]] / float(row["median_us"])
        shown = [row[c] for c in ("case", "dtype", "implementation", "median_us", "tflop_per_s")]
        lines.append([*shown, f"{ratio:.1f}", row["percent_of_ceiling"]])
    return lines


def plot(rows, path):
    """TFLOP/s over the side of square matrices, a line for each implementation and a picture for each dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    clock = clock_of(rows)
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, axes = pyplot.subplots(1, len(dtypes), figsize=(7.5 * len(dtypes), 6), layout="constrained", squeeze=False)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        curves = {}
        for row in rows:
            sides = row["case"].split("x")
            if row["clock"] == clock and row["dtype"] == dtype and len(set(sides)) == 1:
                curves.setdefault(row["implementation"], []).append((int(sides[0]), float(row["tflop_per_s"])))
        for i, (name, points) in enumerate(curves.items()):
            style = {"ours": "k-", "torch.mm": "r--"}.get(name)
            options = {"linewidth": 2} if style else {"linewidth": 1.2, "color": pyplot.cm.tab20(i % 20)}
            options |= {"linestyle": ":"} if name.startswith("peer ") else {}
            axis.plot(
                *zip(*sorted(points), strict=True), *([style] if style else []), marker=".", label=name, **options
            )
        axis.set(title=dtype, xlabel="m = n = k", ylabel="TFLOP/s", xscale="log", yscale="log")
        axis.set_xticks(ticks := sorted({x for points in curves.values() for x, _ in points}), map(str, ticks))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def report(rows, csv_path: Path):
    columns = ["case", "dtype", "implementation", "µs", "TFLOP/s", "% of torch.mm", "% of ceiling"]
    print_table(f"the ladder, {clock_of(rows)} time", columns, table(rows))
    if importlib.util.find_spec("matplotlib") is None:
        print("gemm: no plot, matplotlib is not installed")
        return
    plot(read_csv(csv_path), csv_path.with_suffix(".png"))


GPU = ("cuda",)
BENCH = Bench(
    op="gemm",
    ours=Implementation("ours", ours),
    native=[Implementation("torch.mm", torch.mm)],
    cases=[
        case(13, 17, 5),  # what --quick runs, on which the simulator's rungs take milliseconds
        case(35, 79, 19),
        *(case(size, size, size) for size in (64, 256, 512, 1024, 2048)),
        *(case(size, size, size, GPU) for size in (4096, 8192)),
        case(5120, 5120, 256, GPU),
        case(5120, 256, 5120, GPU),
        case(64, 128, 3136),
        case(64, 10, 128),
        case(16, 4096, 4096, GPU),
    ],
    backward=False,
    beside=beside,
    report=report,
)
