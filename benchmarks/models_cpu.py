"""python -m cuda_ops bench models-cpu --device cpu: every classification model of torchvision's on the CPU, ours beside
PyTorch's, in training and in inference, on one thread and on two, in both formats.

    python benchmarks/models_cpu.py --models resnet18 vit_b_16 --threads 1 --mode training    # some of it

Eight images of 64x64 (inception_v3 96x96; maxvit_t, which takes no other size, two of 224x224). A training step is
forward, cross_entropy, backward and SGD with momentum. Four contestants, PyTorch eager and ours (cuda_ops.convert),
each in the contiguous and in the channels_last format, take turns step by step in one process; the least time of each
is kept. Ratios are the time of PyTorch's faster format over ours: above 1 ours is faster.

Models are measured side by side, each by a process that has one core for each thread to itself: caches of a core are
its own, memory is everyone's. What is small comes first; at the end of the time what is not measured is listed.

Writes <out>/<device>/models.csv and models.md.
"""

import argparse
import copy
import csv
import dataclasses
import gc
import io
import json
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from cuda_ops import _library
from cuda_ops._errors import UserError
from cuda_ops._files import write_files

MODES = ("training", "inference")
PRECISIONS = ("fp32", "bf16")
THREADS = (1, 2)
BATCH, SIZE = 8, 64
SIZES = {"inception_v3": (8, 96), "maxvit_t": (2, 224)}  # batch and size of models that do not take 64x64
LEFT_OUT = {
    "regnet_y_128gf": "645 million parameters; regnet_y_32gf stands for it",
    "vit_h_14": "633 million parameters; vit_l_16 stands for it",
}
FORMATS = ("contiguous", "channels_last")
NAMES = tuple(f"{side}, {layout}" for side in ("PyTorch", "ours") for layout in FORMATS)

STEP_SECONDS = 0.01  # of steps that are timed together, at least
LEAST_ROUNDS, MOST_ROUNDS = 3, 40
ROW_SECONDS = 1.5  # of turns, once there are LEAST_ROUNDS
COPIES = 12  # of the parameters that a process holds: weights of four contestants, momenta, gradients, the original


@dataclass(frozen=True)
class Job:
    """A model, on so many threads, in these modes: a row each."""

    model: str
    precision: str
    threads: int
    modes: tuple[str, ...]
    batch: int
    size: int
    quick: bool = False


@dataclass
class Row:
    model: str
    precision: str
    threads: int
    mode: str
    sizes: str = ""
    milliseconds: dict[str, float] = field(default_factory=dict)
    """{contestant: the least of a step}."""
    medians: dict[str, float] = field(default_factory=dict)
    rounds: int = 0
    problem: str = ""

    @property
    def key(self):
        return self.model, self.precision, self.threads, self.mode

    def ratio(self, layout: str | None = None) -> float | None:
        """PyTorch's faster format over ours in that one, or over ours in its faster one."""
        theirs = [self.milliseconds.get(f"PyTorch, {each}") for each in FORMATS]
        ours = [self.milliseconds.get(f"ours, {each}") for each in ([layout] if layout else FORMATS)]
        return min(theirs) / min(ours) if all(theirs) and all(ours) else None


# A process that measures.


def serve():
    """Jobs from standard input, a line each; rows to standard output, a line each, and an empty one after each job."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no row
    for line in sys.stdin:
        job = json.loads(line)
        job = Job(**job | {"modes": tuple(job["modes"])})
        for row in rows_of(job):
            out.write(json.dumps(asdict(row)) + "\n")
        out.write("\n")
        gc.collect()


def rows_of(job: Job):
    from cuda_ops.training.race.subject import find

    torch.set_num_threads(job.threads)
    rows = [Row(job.model, job.precision, job.threads, mode) for mode in job.modes]
    try:
        subject = find(job.model, "cpu", job.batch, job.size)
    except UserError as error:
        for row in rows:
            yield dataclasses.replace(row, problem=str(error))
        return
    subjects = {"contiguous": subject, "channels_last": copy.deepcopy(subject).in_channels_last()}
    for row in rows:
        row.sizes = subject.note
        try:
            measure(row, subjects, job.quick)
        except Exception as error:  # a row says why it has no times
            row.problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        yield row
        gc.collect()


def measure(row: Row, subjects, quick: bool):
    from cuda_ops.training.race.measure import Conditions, Contestant, milliseconds, prepared

    device = torch.device("cpu")
    autocast = torch.bfloat16 if row.precision == "bf16" else None
    conditions = Conditions(device, autocast, 1, 1, row.mode == "training")
    steps, blocks, times = {}, {}, {}
    for layout, subject in subjects.items():
        for side in ("PyTorch", "ours"):
            name = f"{side}, {layout}"
            steps[name] = prepared(subject, Contestant(name, side == "ours"), conditions, subject.batch, steps=2)
            once = milliseconds(steps[name], subject.batch, device, 1)
            blocks[name] = max(1, min(100, round(STEP_SECONDS * 1e3 / once)))
            times[name] = []
    begin = time.perf_counter()
    for number in range(1 if quick else MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() - begin > ROW_SECONDS:
            break
        for name in NAMES if number % 2 == 0 else reversed(NAMES):
            batch = subjects[name.partition(", ")[2]].batch
            times[name].append(milliseconds(steps[name], batch, device, blocks[name]))
    row.rounds = len(times[NAMES[0]])
    row.milliseconds = {name: min(found) for name, found in times.items()}
    row.medians = {name: statistics.median(found) for name, found in times.items()}


# The process that gives them jobs.


def catalogue() -> dict[str, tuple[int, float]]:
    """{model: (parameters, GFLOPs of an image as it is measured here)}, what is small first."""
    import torchvision

    models, found = torchvision.models, {}
    for name in models.list_models(module=models):
        weights = models.get_model_weights(name).DEFAULT
        size = SIZES.get(name, (BATCH, SIZE))[1]
        found[name] = weights.meta["num_params"], weights.meta["_ops"] * (size / weights.transforms().crop_size[0]) ** 2
    return dict(sorted(found.items(), key=lambda item: item[1][1]))


def planned(names, precisions, threads, modes, batch, size, quick) -> list[Job]:
    jobs = []
    for count in sorted(threads, reverse=True):
        for name in names:
            for precision in precisions:
                own = SIZES.get(name, (BATCH, SIZE))
                jobs.append(Job(name, precision, count, modes, batch or own[0], size or own[1], quick))
    return jobs


def cores() -> list[int]:
    """CPUs that this process may use, one of each core: the other threads of a core would share its arithmetic."""
    chosen, seen = [], set()
    for cpu in sorted(os.sched_getaffinity(0)):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings = path.read_text().strip()
        except OSError:
            siblings = str(cpu)
        if siblings not in seen:
            seen.add(siblings)
            chosen.append(cpu)
    return chosen


class Worker:
    """A process on CPUs of its own, and the job that it has."""

    def __init__(self, cpus: list[int]):
        paths = os.pathsep.join(filter(None, (str(_library.FOLDER.parent), os.environ.get("PYTHONPATH"))))
        count = str(len(cpus))
        environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
        self.cpus, self.job, self.rows, self.began = cpus, None, [], 0.0
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve"],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a row says what went wrong
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        os.sched_setaffinity(self.process.pid, cpus)

    def give(self, job: Job):
        self.job, self.rows, self.began = job, [], time.monotonic()
        self.process.stdin.write(json.dumps(asdict(job)) + "\n")
        self.process.stdin.flush()

    def stop(self):
        self.process.kill()
        self.process.wait()


def measure_all(jobs: list[Job], until: float, parameters: dict[str, int], announce) -> list[Row]:
    """Rows of these jobs, all of one number of threads, by as many processes as there are cores for."""
    own = cores()
    threads = jobs[0].threads if jobs else 1
    places = [own[i : i + threads] for i in range(0, len(own) - threads + 1, threads)]
    if not places:
        return [Row(j.model, j.precision, j.threads, mode, problem="too few cores") for j in jobs for mode in j.modes]
    budget = 0.7 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    waiting, rows, selector, used = list(jobs), [], selectors.DefaultSelector(), 0.0

    def bytes_of(job):
        return 4.0 * COPIES * parameters.get(job.model, 0)

    def take(row):
        rows.append(row)
        announce(row)

    def begin(worker):
        nonlocal used
        for job in waiting:
            if used == 0 or used + bytes_of(job) <= budget:
                waiting.remove(job)
                used += bytes_of(job)
                worker.give(job)
                return
        worker.job = None

    workers = [Worker(place) for place in places[: max(1, len(jobs))]]
    for worker in workers:
        selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
    for worker in workers:
        begin(worker)
    try:
        while any(worker.job for worker in workers) and time.monotonic() < until:
            for key, _ in selector.select(timeout=1):
                worker = key.data
                if worker.job is None:
                    continue
                line = worker.process.stdout.readline()
                if line.strip():
                    worker.rows.append(Row(**json.loads(line)))
                    take(worker.rows[-1])
                    continue
                used -= bytes_of(worker.job)
                if not line:  # it has ended
                    done = {row.mode for row in worker.rows}
                    for mode in (mode for mode in worker.job.modes if mode not in done):
                        j, status = worker.job, worker.process.wait()
                        take(Row(j.model, j.precision, j.threads, mode, problem=f"ended with status {status}"))
                    selector.unregister(worker.process.stdout)
                    workers.remove(worker)
                    worker = Worker(worker.cpus)
                    workers.append(worker)
                    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
                begin(worker)
                for idle in (each for each in workers if each.job is None):
                    begin(idle)
    finally:
        for worker in workers:
            worker.stop()
    done = {row.key for row in rows}
    for job in jobs:
        for mode in job.modes:
            if (job.model, job.precision, job.threads, mode) not in done:
                rows.append(Row(job.model, job.precision, job.threads, mode, problem="no time left"))
    return rows


# What is written.


def columns_of(row: Row) -> dict[str, str]:
    def number(value, digits):
        return "" if value is None else f"{value:.{digits}f}"

    found = {"model": row.model, "precision": row.precision, "threads": row.threads, "mode": row.mode}
    found |= {"sizes": row.sizes, "rounds": row.rounds}
    found |= {f"{name}, least ms": number(row.milliseconds.get(name), 4) for name in NAMES}
    found |= {f"{name}, median ms": number(row.medians.get(name), 4) for name in NAMES}
    found |= {"best / best": number(row.ratio(), 3)}
    found |= {f"best / {layout}": number(row.ratio(layout), 3) for layout in FORMATS}
    return found | {"problem": row.problem}


def csv_text(rows: list[Row], facts: dict[str, str]) -> str:
    buffer = io.StringIO()
    buffer.writelines(f"# {name}: {value}\n" for name, value in facts.items())
    writer = csv.DictWriter(buffer, list(columns_of(Row("", "", 0, ""))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(columns_of(row) for row in rows)
    return buffer.getvalue()


def summary_lines(rows: list[Row]) -> list[list[str]]:
    """A line for each precision, number of threads and mode."""
    groups = defaultdict(list)
    for row in rows:
        if row.milliseconds:
            groups[row.precision, row.threads, row.mode].append(row)
    lines = []
    for (precision, threads, mode), found in groups.items():
        best = [row.ratio() for row in found]
        cells = [precision, str(threads), mode, str(len(found)), f"{statistics.geometric_mean(best):.3f}"]
        cells += [f"{min(best):.3f}", str(sum(ratio >= 1 for ratio in best))]
        for layout in FORMATS:
            own = [row.ratio(layout) for row in found]
            cells += [f"{statistics.geometric_mean(own):.3f}", f"{min(own):.3f}", str(sum(r >= 1 for r in own))]
        lines.append(cells)
    return lines


def markdown(rows: list[Row], facts: dict[str, str]) -> str:
    from mnist_report import table

    parts = ["# torchvision's classification models on the CPU, PyTorch's against ours"]
    parts.append(" ".join(" ".join(__doc__.split("\n\n")[2:4]).split()))
    header = ["precision", "threads", "mode", "models", "best over best: geometric mean", "least", "at 1.0 or more"]
    for layout in FORMATS:
        header += [f"PyTorch's best over ours, {layout}: geometric mean", "least", "at 1.0 or more"]
    parts.append(table(header, summary_lines(rows)))
    names = list(dict.fromkeys(row.model for row in rows))
    found = {row.key: row for row in rows}
    for precision in dict.fromkeys(row.precision for row in rows):
        for mode in MODES:
            counts = sorted({row.threads for row in rows if row.mode == mode and row.precision == precision})
            header, lines = ["model"], []
            for count in counts:
                header += [f"{name}, {count}" for name in NAMES] + [f"{layout}, {count}" for layout in FORMATS]
            for name in names:
                cells = [name]
                for count in counts:
                    row = found.get((name, precision, count, mode), Row(name, precision, count, mode))
                    cells += [f"{row.milliseconds[n]:.2f}" if n in row.milliseconds else "–" for n in NAMES]
                    ratios = [row.ratio(layout) for layout in FORMATS]
                    cells += ["–" if r is None else f"{r:.2f}" if r >= 1 else f"**{r:.2f}**" for r in ratios]
                lines.append(cells)
            if any("–" not in line[1:] for line in lines) or counts:
                parts += [
                    f"## {mode}, {precision}",
                    "Milliseconds (the least), PyTorch's and ours, and PyTorch's better format over ours in each, by "
                    "the number of threads:",
                    table(header, lines),
                ]
    problems = defaultdict(list)
    for row in rows:
        if row.problem:
            problems[row.problem].append(f"{row.model} ({row.precision}, {row.threads}, {row.mode})")
    left = [f"- {name}: {why}" for name, why in LEFT_OUT.items() if name not in names]
    if problems or left:
        parts += ["## What has no times, and why"]
        parts.append("\n".join([f"- {why}: {', '.join(where)}" for why, where in problems.items()] + left))
    parts.append("\n".join(f"- {name}: {value}" for name, value in facts.items()))
    return "\n\n".join(parts) + "\n"


def announce(row: Row):
    head = f"{row.model} {row.precision} {row.threads} {row.mode}"
    if row.problem:
        print(f"{head}: {row.problem}", flush=True)
        return
    times = " ".join(f"{row.milliseconds[name]:.2f}" for name in NAMES)
    ratios = " ".join(f"{row.ratio(layout):.2f}" for layout in FORMATS)
    print(f"{head}: {times} ms ({row.rounds}), {ratios}", flush=True)


def run(
    device,
    out: Path,
    seconds: float,
    quick: bool,
    with_compile: bool = False,
    batches=None,
    precisions=None,
    names=None,
    threads=THREADS,
    modes=MODES,
    size=None,
) -> list[Row]:
    """Measures the table, and writes models.csv and .md into <out>/<device>."""
    import harness

    if device.type != "cpu":
        raise ValueError("models-cpu is of the CPU alone: add --device cpu")
    for precision in precisions or ():
        if precision not in PRECISIONS:
            raise ValueError(f"--precision {precision}: on the CPU models are timed in {', '.join(PRECISIONS)}")
    if batches and len(batches) > 1:
        raise ValueError("models-cpu takes one --batch")
    try:
        known = catalogue()
    except ImportError as error:
        raise ValueError('torchvision is missing: run `pip install "cuda_ops[app]"`') from error
    chosen = names or [name for name in known if name not in LEFT_OUT]
    chosen = chosen[:2] if quick and not names else chosen
    facts = harness.environment(device)
    facts.pop("threads")
    facts |= {"seconds": f"at most {seconds:g}", "cores": str(len(cores()))}
    begin = time.monotonic()
    jobs = planned(chosen, precisions or PRECISIONS[:1], threads, tuple(modes), batches and batches[0], size, quick)
    counts, rows = sorted(threads, reverse=True), []
    for i, count in enumerate(counts):
        left = begin + seconds - time.monotonic()
        mine = [job for job in jobs if job.threads == count]
        until = time.monotonic() + left / (len(counts) - i)
        rows += measure_all(mine, until, {name: known[name][0] for name in known}, announce)
        facts["seconds"] = f"{time.monotonic() - begin:.0f} of at most {seconds:g}"
        facts["load average at the end"] = f"{os.getloadavg()[0]:.1f}"
        order = sorted(rows, key=lambda row: (chosen.index(row.model), row.precision, row.threads, row.mode))
        folder = out / harness.slug(facts["device"])
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"models.csv": csv_text(order, facts), "models.md": markdown(order, facts)}
        write_files({folder / name: text.encode() for name, text in texts.items()})
    print(f"models-cpu: {folder / 'models.csv'}, {folder / 'models.md'}")
    for cells in summary_lines(rows):
        print("  ".join(cells))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="*", help="these alone")
    parser.add_argument("--threads", type=int, nargs="*", default=list(THREADS))
    parser.add_argument("--mode", choices=MODES, nargs="*", default=list(MODES))
    parser.add_argument("--precision", choices=PRECISIONS, nargs="*", default=["fp32"])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--quick", action="store_true", help="one turn each, of two models")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    batches = [args.batch] if args.batch else None
    options = {"names": args.models, "threads": args.threads, "modes": args.mode, "size": args.size}
    run(torch.device("cpu"), args.out, args.seconds, args.quick, False, batches, args.precision, **options)


if __name__ == "__main__":
    main()
