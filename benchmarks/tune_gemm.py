"""Measures the tiles of the GEMM's kernels on this GPU and writes csrc/cuda/gemm/times.h, on which the choice is based.

    python benchmarks/tune_gemm.py              all tiles; writes the file. Then rebuild.
    python benchmarks/tune_gemm.py --quick      fewer samples, some 15 s
    python benchmarks/tune_gemm.py --print      does not write

For each tile it times products whose D is one wave of blocks, and two, of several depths k; a line through the times
gives what a call, a wave and 1024 of k cost. Calls are graph replays on operands that stay in the L2 cache: what bytes
of device memory cost is another part of the model, in gemm.cu. Rows of 16 bits, TF32 and sm90_3xtf32 are left as they
are: they are fitted to the times of random products (benchmarks/notes/gemm.md).
"""

import argparse
import re
import statistics
import sys
from pathlib import Path

import torch

from cuda_ops._library import ops

FILE = Path(__file__).parents[1] / "csrc" / "cuda" / "gemm" / "times.h"
ROW = re.compile(r"^    \{(.*)\},$")
# dtype and storage order that a table's times are measured with. fp16 and bf16 take all orders in about the same time.
TABLES = {
    "HALVES_TIMES": (torch.bfloat16, "NT"),
    "HALVES_LONG_TIMES": (torch.bfloat16, "NT"),
    "TF32_NT_TIMES": (torch.float32, "NT"),
    "TF32_TIMES": (torch.float32, "NN"),
    "TF32_TN_TIMES": (torch.float32, "TN"),
    "FLOAT32_TIMES": (torch.float32, "NN"),
    "FLOAT64_TIMES": (torch.float64, "NN"),
}
FIELDS = ("path", "tile", "m", "n", "cluster_m", "cluster_n", "blocks", "splits", "start", "sum", "rest", "split")


def seconds(call, samples):
    """A call's time in a graph of twenty, the median of some replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(20):
                call()
        times = []
        for _ in range(samples):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) / 20e3)
    return statistics.median(times)


def grid(tiles, m, n, tall=False):
    """`tiles` tiles of m x n as a rectangle that is about square; tall: no wider than it is high."""
    side = max(1, round((tiles * n / m) ** 0.5))
    choices = [r for r in range(1, tiles + 1) if not tall or r * m >= tiles // r * n]
    rows = min(choices, key=lambda r: (abs(r - side) + 4 * side * (tiles % r != 0)))
    return rows * m, tiles // rows * n


def operands(m, n, k, dtype, order):
    """A (m x k) and B (k x n); where `order` has a T, it is the transposed matrix that lies in memory."""
    shapes = zip(((m, k), (k, n)), order, strict=True)
    return [
        torch.randn(*shape, device="cuda").to(dtype).contiguous()
        if way == "N"
        else torch.randn(*shape[::-1], device="cuda").to(dtype).T
        for shape, way in shapes
    ]


def measure(row, dtype, order, cores, shared, samples):
    """The row with its measured times: several lengths of k in one and two waves, of sm90 a short one in four.
    cores: not by TF32, and shorter lengths, which is what direct is for. shared: the tile has rows for blocks that
    have an SM to themselves and for others that share one."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    tile_m, tile_n = row["m"] * row["cluster_m"], row["n"] * row["cluster_n"]
    if row["path"] == 13 and dtype == torch.float32 and order == "NN":
        tile_m, tile_n = tile_n, tile_m  # it makes D transposed
    room = processors * row["blocks"] // (row["cluster_m"] * row["cluster_n"])

    # sm90's tile of 80 columns: a block makes one, and it is chosen for D of one cluster tile's rows alone.
    flat = row["path"] == 13 and row["n"] == 80

    def time(tiles, k, splits):
        m, n = (tile_m, tiles * tile_n) if flat else grid(tiles, tile_m, tile_n, order == "TN")
        a, b = operands(m, n, k, dtype, order)
        plan = (row["path"], row["tile"], splits, 0)
        return 1e6 * seconds(lambda: ops.gemm_planned(a, b, plan, allow_tf32=not cores), samples)

    clustered = row["path"] == 15  # k is cut among the blocks of a cluster
    # Twice the blocks of a row for blocks alone on their SM are no second wave: they share it.
    alone = flat or (row["blocks"] == 1 and (clustered or shared))
    waves = (1,) if alone else (1, 2)
    pairs = [(wave, k) for wave in waves for k in ((64, 256, 1024) if cores else (256, 1024, 2048))]
    if row["path"] == 13 and not alone:  # later waves begin while D is written
        pairs.append((4, pairs[0][1]))
    points = [(wave, k, time(wave * room, k, 1)) for wave, k in pairs]
    equations = torch.tensor([[1.0, wave * k / 1024, wave] for wave, k, _ in points], dtype=torch.float64)
    wanted = torch.tensor([[t] for *_, t in points], dtype=torch.float64)
    # Of one wave start and rest cannot be told apart: the least solution makes them equal.
    start, total, rest = (torch.linalg.pinv(equations) @ wanted).flatten().tolist()
    row |= {"start": max(start, 1.0), "sum": total, "rest": max(rest, 0.0)}
    # What the second kernel costs, without the bytes of the splits (which the model in gemm.cu counts apart).
    if (row["path"] == 13 and row["splits"] > 1) or (row["path"] == 11 and dtype == torch.float64):
        tiles = max(1, room // 4)
        m, n = (tile_m, tiles * tile_n) if flat else grid(tiles, tile_m, tile_n, order == "TN")
        split_bytes = 2 * 2 * (8 if dtype == torch.float64 else 4) * m * n
        cut = time(tiles, 2048, 2) - split_bytes / 3e6
        row["split"] = max(1.0, cut - row["start"] - row["sum"] - row["rest"])
    if clustered:  # what a second split costs that another block of the cluster makes
        row["split"] = max(0.1, time(room // 2, 2048, 2) - row["start"] - row["sum"] - row["rest"])
    return row


def row_of(match):
    return dict(zip(FIELDS, (float(x) if "." in x else int(x) for x in match[1].split(",")), strict=True))


def is_fitted(kind, row):
    """Whether the row is of another making: those of 16 bits and TF32 but mma's, sm90_3xtf32's, and direct's but in
    float64."""
    by_products = row["path"] == 18 or (row["path"] == 15 and kind != "FLOAT64_TIMES")
    return by_products or (not kind.startswith("FLOAT") and row["path"] != 11)


def shared_tiles():
    """The tiles that have a row for several blocks an SM: table, path, tile."""
    found, kind = set(), None
    for line in FILE.read_text().splitlines():
        if match := re.match(r"static const GemmTime (\w+)\[\]", line):
            kind = match[1]
        if match := ROW.match(line):
            row = row_of(match)
            if row["blocks"] > 1:
                found.add((kind, row["path"], row["tile"]))
    return found


def tuned(samples):
    """The file's lines, with the times of this GPU."""
    lines, kind, shared = [], None, shared_tiles()
    for line in FILE.read_text().splitlines():
        if match := re.match(r"static const GemmTime (\w+)\[\]", line):
            kind = match[1]
        if match := ROW.match(line):
            row = row_of(match)
            if is_fitted(kind, row):
                lines.append(line)
                continue
            dtype, order = TABLES[kind]
            is_shared = (kind, row["path"], row["tile"]) in shared
            row = measure(row, dtype, order, kind.startswith("FLOAT"), is_shared, samples)
            line = "    {" + ", ".join(
                f"{row[f]:5.2f}" if isinstance(row[f], float) else f"{row[f]:3d}" for f in FIELDS
            )
            line += "},"
            print(kind, line, flush=True)
        if line.startswith("// `python benchmarks/tune_gemm.py` on"):
            name = torch.cuda.get_device_name()
            line = f"// `python benchmarks/tune_gemm.py` on an {name}; not to be edited by hand."
        lines.append(line)
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--print", action="store_true", help="do not write the file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune_gemm: PyTorch sees no GPU here; `python -m cuda_ops doctor` says why")
    text = tuned(3 if options.quick else 9)
    if not options.print:
        FILE.write_text(text)
        print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
