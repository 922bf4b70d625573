"""The output of a run: its facts, CSV files, and the comparison on the terminal."""

import csv
import datetime
import io
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

import cuda_ops
from cuda_ops import _library
from cuda_ops._files import write_file
from cuda_ops._table import print_table

from .spec import BESIDE, OURS

HERE = Path(__file__).resolve().parent
COLUMNS = ["op", "case", "dtype", "direction", "clock", "implementation", "median_us", "p10_us", "p90_us", "samples"]
COLUMNS += ["cache", "gb_per_s", "tflop_per_s", "percent_of_ceiling"]


def command_output(*command) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, cwd=HERE).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def device_name(device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    return f"CPU {model.group(1) if model else platform.machine()}"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def environment(device: torch.device) -> dict[str, str]:
    """What a reader needs to judge or repeat the run."""
    changed = " with changes" if command_output("git", "status", "--porcelain", "-uno") else ""
    found = {
        "device": device_name(device),
        "torch": torch.__version__,
        "cuda_ops": cuda_ops.__version__,
        "commit": (command_output("git", "rev-parse", "--short", "HEAD") or "unknown") + changed,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "tf32": "allowed on both sides in rows of dtype tf32, off in the others",
    }
    if device.type == "cuda":
        query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
        found["cuda"], found["cudnn"] = torch.version.cuda, str(torch.backends.cudnn.version())
        index = device.index or 0
        found[query] = command_output("nvidia-smi", f"--id={index}", f"--query-gpu={query}", "--format=csv,noheader")
        found["built for"] = _library.build_info()["architectures"]
    else:
        found["threads"] = str(torch.get_num_threads())
        found["load average"] = f"{os.getloadavg()[0]:.1f}"
    return found


def write_csv(path: Path, rows: list[dict], facts: dict[str, str]):
    """The facts as lines with a # in front (pandas: comment="#"), then a row for each measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    text.writelines(f"# {name}: {value}\n" for name, value in facts.items())
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue().encode())


def read_csv(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def spread(row: dict) -> float:
    """From the 10th to the 90th percentile, in percent of the median."""
    return 100 * (float(row["p90_us"]) - float(row["p10_us"])) / float(row["median_us"])


def noise(rows: list[dict]) -> str:
    """How far a run of few samples can be trusted, from the samples themselves."""
    spreads = sorted(map(spread, rows))
    fewest = min(int(row["samples"]) for row in rows)
    middle, most = spreads[len(spreads) // 2], spreads[-1]
    return (
        f"quick: as few as {fewest} samples of a measurement; from the 10th to the 90th percentile they spread by "
        f"{middle:.0f} % of the median (in the middle of all measurements), by {most:.0f} % at most. A ratio nearer "
        "to 1 than that says nothing, and what slows all samples alike does not show. For figures to keep, leave out "
        "--quick."
    )


def competition(device: torch.device) -> str | None:
    """Says so where other programs keep the CPUs busy: a parallel call then waits for whole time slices, which no
    spread shows. The load average is of the last minute, this process's own part included."""
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if device.type == "cuda" or load <= 1.5 * cpus:
        return None
    return (
        f"load average {load:.1f} on {cpus} CPUs: other programs run beside this one, times may be many times too long"
    )


def comparison(rows: list[dict]) -> list[list[str]]:
    """The fastest of ours beside the fastest of PyTorch's variants, a line for each measurement; the last column is the
    ratio, the one before it the larger spread of the two."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[c] for c in COLUMNS[:5]), {})[row["implementation"]] = row
    lines = []
    for key, by_name in groups.items():
        mine, theirs = {}, {}
        for name, row in by_name.items():
            if not name.startswith(BESIDE):
                (mine if name.startswith(OURS) else theirs)[name] = row
        if not mine or not theirs:
            continue
        ours = min(mine.values(), key=lambda row: float(row["median_us"]))
        name, best = min(theirs.items(), key=lambda item: float(item[1]["median_us"]))
        ratio = float(best["median_us"]) / float(ours["median_us"])
        rate = ours["gb_per_s"] if float(ours["tflop_per_s"]) == 0 else f"{ours['tflop_per_s']} TF"
        lines.append(
            [
                *key,
                ours["cache"],
                ours["median_us"],
                best["median_us"],
                name,
                rate,
                ours["percent_of_ceiling"],
                f"{max(spread(ours), spread(best)):.0f}",
                f"{ratio:.2f}",
            ]
        )
    return lines


def print_comparison(rows: list[dict]):
    lines = comparison(rows)
    columns = [*COLUMNS[:5], "cache", "ours µs", "PyTorch µs", "variant", "GB/s", "% ceiling", "spread, %"]
    columns += ["PyTorch / ours"]
    styles = ["green" if float(line[-1]) >= 1 else "red" for line in lines]
    print_table("ours against PyTorch (above 1: ours is faster)", columns, lines, styles)
    print(f"{sum(float(line[-1]) >= 1 for line in lines)} of {len(lines)} measurements are wins.")
