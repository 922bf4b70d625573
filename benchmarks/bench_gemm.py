"""The ladder of matrix multiplication: every rung, cuBLAS (or MKL) through torch.mm, and what other tools reach.

`ours` is the kernel that the library chooses. Slow rungs are left out where one call would take too long. Peers:
cuBLASLt with a bias in its epilogue, and kernels of Triton, CUTLASS and Numba where those packages are installed (`pip
install -e .[peers]`; peers/cutlass_gemm.py says how its kernels are compiled). Beside gemm.csv a plot is written,
gemm.png; `python benchmarks/bench_gemm.py a.csv` draws that of a file, also of one that a run left unfinished.
"""

import functools
import importlib.util
import math
import sys
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
# Rungs without TF32: where it is allowed they compute what they do in float32's rows, and are not timed again. Rung 10,
# the fastest of them, is, for comparison.
WITHOUT_TF32 = range(4, 10)


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
    """The function of benchmarks/peers/<name>_gemm.py, or None, said once, where what it needs is not here."""
    try:
        return importlib.import_module(f"peers.{name.lower()}_gemm").gemm
    except ModuleNotFoundError as error:
        print(f"gemm: peer {name} is left out, the package {error.name} is not installed")
    except Exception as error:  # a package that is there and does not run, as of another version than one it needs
        print(f"gemm: peer {name} is left out: {error}")
    return None


@functools.cache
def no_bias(n, dtype, device):
    return torch.zeros(n, dtype=dtype, device=device)


def cublaslt_epilogue(a, b):
    """With a vector of bias torch.addmm goes through cuBLASLt, which adds it in its epilogue."""
    return torch.addmm(no_bias(b.shape[1], b.dtype, b.device), a, b)


def peers(device, dtype, m, n, k):
    if device.type != "cuda":
        return []
    wanted = ["CUTLASS"]
    if dtype != torch.float64:
        wanted.insert(0, "Triton")
    if dtype == torch.float64 or (dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32):
        wanted += ["Numba"] if m * n * k <= SLOWEST_CALL * NAIVE else []
    found = [Implementation(f"peer {name}", function) for name in wanted if (function := peer(name))]
    return [Implementation("peer cuBLASLt with bias", cublaslt_epilogue), *found]


def beside(device, dtype, case):
    m, n, k = map(int, case.name.split("x"))
    a, b = torch.empty(m, k, device=device, dtype=dtype), torch.empty(k, n, device=device, dtype=dtype)
    found = []
    for rung in rungs.values():
        if rung.number in WITHOUT_TF32 and torch.backends.cuda.matmul.allow_tf32:
            continue
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


def rate_of(row, clock):
    """In TFLOP/s, on the CPU in GFLOP/s. From the times: the CSV's column is rounded for a GPU."""
    sides = map(int, row["case"].split("x"))
    return 2 * math.prod(sides) / float(row["median_us"]) / (1e6 if clock == "kernel" else 1e3)


def unit_of(clock):
    return "TFLOP/s" if clock == "kernel" else "GFLOP/s"


def table(rows):
    """A line for each case, dtype and implementation, from slow to fast as the ladder goes."""
    clock, lines = clock_of(rows), []
    rows = [row for row in rows if row["clock"] == clock]
    mm = {(r["case"], r["dtype"]): float(r["median_us"]) for r in rows if r["implementation"] == "torch.mm"}
    for row in rows:
        ratio = 100 * mm[row["case"], row["dtype"]] / float(row["median_us"])
        shown = [row[c] for c in ("case", "dtype", "implementation", "median_us")]
        lines.append([*shown, f"{rate_of(row, clock):.4g}", f"{ratio:.1f}", row["percent_of_ceiling"]])
    return lines


def styles(names):
    """How each implementation is drawn, the same in all panels: rungs from red to blue as they go up, peers dashed."""
    from matplotlib import pyplot

    rungs_shown = [name for name in names if name.startswith("rung ")]
    found = {"ours": {"color": "black", "linewidth": 2.2}, "torch.mm": {"color": "red", "linewidth": 2.2}}
    for name in names:
        if name in rungs_shown:
            height = rungs_shown.index(name) / max(1, len(rungs_shown) - 1)
            found[name] = {"color": pyplot.cm.turbo(0.05 + 0.9 * height), "linewidth": 1.1}
        elif name not in found:
            color = ["tab:blue", "tab:green", "tab:purple", "tab:brown"][len(found) % 4]
            found[name] = {"color": color, "linewidth": 1.6, "linestyle": "--"}
    return found


def plot(rows, path):
    """The rate over the side of square matrices: a panel for each dtype, a line for each implementation, one legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    clock = clock_of(rows)
    square = [row for row in rows if row["clock"] == clock and len(set(row["case"].split("x"))) == 1]
    dtypes = list(dict.fromkeys(row["dtype"] for row in square))
    if not dtypes:
        print("gemm: no plot, there is no square product in these rows")
        return
    names = sorted({row["implementation"] for row in square}, key=legend_order)
    style = styles(names)
    columns = min(3, len(dtypes) + 1)  # the legend has a panel of its own
    height = -(-(len(dtypes) + 1) // columns)
    shape = {"figsize": (6 * columns, 5.2 * height), "layout": "constrained", "squeeze": False}
    figure, axes = pyplot.subplots(height, columns, **shape)
    for axis in axes.flat[len(dtypes) :]:
        axis.axis("off")
    handles = {}
    for axis, dtype in zip(axes.flat, dtypes, strict=False):
        sides = set()
        for name in names:
            points = sorted(
                (int(row["case"].split("x")[0]), rate_of(row, clock))
                for row in square
                if row["dtype"] == dtype and row["implementation"] == name
            )
            if points:
                over = 3 if name in ("ours", "torch.mm") else 2
                (handles[name],) = axis.plot(*zip(*points, strict=True), marker=".", zorder=over, **style[name])
                sides |= {x for x, _ in points}
        axis.set(title=dtype, xlabel="m = n = k", ylabel=unit_of(clock), xscale="log", yscale="log")
        axis.set_xticks(ticks := sorted(sides), map(str, ticks))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes.flat[len(dtypes)].legend([handles[name] for name in names], names, loc="center left", fontsize=10)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def legend_order(name):
    """Where a name stands in the legend: ours, cuBLAS, its peers, then the rungs by number, highest first."""
    if name.startswith("rung "):
        return 3, -int(name.split()[1]), name
    return 0 if name == "ours" else 1 if name == "torch.mm" else 2, 0, name


def report(rows, csv_path: Path):
    clock = clock_of(rows)
    columns = ["case", "dtype", "implementation", "µs", unit_of(clock), "% of torch.mm", "% of ceiling"]
    print_table(f"the ladder, {clock} time", columns, table(rows))
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

if __name__ == "__main__":
    for name in sys.argv[1:]:
        report(read_csv(Path(name)), Path(name))
