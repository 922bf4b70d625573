"""Writes benchmarks/RESULTS.md, RESULTS_H100.md, and the table of results in README.md, from the committed results.

    python benchmarks/update_results.py [--check]

README's table lies between `<!-- begin: results -->` and `<!-- end: results -->`. With --check nothing is written, and
the exit status is 1 if a file is not what the results make of it (a test does that).
"""

import argparse
import csv
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GPU, CPU = "nvidia-h200", "cpu-amd-epyc"
"""The folder of the GPU whose page is written, and of the processor."""
DEVICES = {"nvidia-h200": "NVIDIA H200", "nvidia-h100-80gb-hbm3": "NVIDIA H100"}
PAGES = {"nvidia-h200": "RESULTS.md", "nvidia-h100-80gb-hbm3": "RESULTS_H100.md"}
NOT_YET = "Not measured yet: "
YARDSTICKS = {"attention": "peer cuDNN"}  # cuda_ops.ladder's
PRODUCTS = ["gemm", "matmul", "linear", "linear_gelu", "conv2d"]


def load(name):
    """The JSON of that name among the results, or None where it has not been committed yet."""
    path = RESULTS / GPU / name
    return json.loads(path.read_text()) if path.is_file() else None


def nothing_yet(command):
    return [f"{NOT_YET}`{command} --out benchmarks/results` does it."]


def device():
    return DEVICES[GPU]


def table(header, lines):
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)]


def rows(op):
    lines = [line for line in (RESULTS / GPU / f"{op}.csv").read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def mnist():
    report = load("mnist/report.json")
    if report is None:
        return [f"{NOT_YET}`python -m cuda_ops mnist --epochs 3 --out benchmarks/results/{GPU}/mnist` does it."]
    settings, native = report["settings"], report["backends"]["native"]
    ours = {name: result for name, result in report["backends"].items() if name != "native"}
    commit = ((load("check.json") or {}).get("mnist") or {}).get("commit") or report["versions"]["commit"]

    def line(what, number, value):
        theirs = value(native)
        return [what, *(number.format(value(r)) for r in ours.values()), number.format(theirs)] + [
            f"{theirs / value(r):.2f}" for r in ours.values()
        ]

    def milliseconds(phase):
        return lambda result: result["milliseconds"][phase]["median"]

    lines = [
        line(f"{phase}, ms (median)", "{:.3f}", milliseconds(phase))
        for phase in ("batch load", "forward", "backward", "update", "zero_grad", "whole step")
    ]
    if all((result.get("graph_milliseconds") or {}).get("median") for result in report["backends"].values()):
        name = "whole step as one CUDA graph, ms (median)"
        lines.append(line(name, "{:.3f}", lambda result: result["graph_milliseconds"]["median"]))
    lines.append(line("peak memory, MB", "{:.0f}", lambda result: result["peak_memory_bytes"] / 1e6))
    accuracy = [f"{r['test_accuracy']:.2%}" for r in (*ours.values(), native)]
    lines.append(["test accuracy", *accuracy, *[""] * len(ours)])
    names = list(ours) if len(ours) > 1 else ["cuda_ops"]
    return [
        f"![MNIST with cuda_ops and with PyTorch, side by side](results/{GPU}/mnist/report.png)",
        "",
        f"On one {report['device']['name']}, eager, {settings['dtype']} without TF32, {settings['epochs']} epochs of "
        f"batches of {settings['batch_size']} (`{report['command']}`, commit `{commit[:7]}`):",
        "",
        *table(["", *names, "PyTorch", *(f"PyTorch / {name}" for name in names)], lines),
    ]


def race():
    """The whole step: PyTorch as most use it, the fastest of PyTorch, the fastest of ours."""
    report = load("mnist_step.json")
    if report is None:
        return nothing_yet("python -m cuda_ops bench mnist")
    facts, lines = report["facts"], []

    def cell(row):
        return f"{row['median_us']:,.{1 if row['median_us'] < 1000 else 0}f}"

    for precision in dict.fromkeys(row["precision"] for row in report["rows"]):
        for batch in sorted({row["batch"] for row in report["rows"] if row["precision"] == precision}):
            found = {r["variant"]: r for r in report["rows"] if (r["precision"], r["batch"]) == (precision, batch)}
            theirs, ours = (
                min((r for r in found.values() if r["ours"] == mine), key=lambda r: r["median_us"], default=None)
                for mine in (False, True)
            )
            if theirs is None or ours is None:
                continue
            floor = report["floors"].get(precision, {}).get(str(batch))
            eager = [found.get(name) for name in ("PyTorch eager NCHW", "fused eager")]
            lines.append(
                [
                    f"{precision}, {batch:,}",
                    *("–" if row is None else cell(row) for row in eager),
                    f"{cell(theirs)} ({theirs['variant'].removeprefix('PyTorch ')})",
                    f"{cell(ours)} ({ours['variant']})",
                    f"**{theirs['median_us'] / ours['median_us']:.2f}**",
                    "–" if floor is None else f"{floor:,.1f}",
                ]
            )
    header = ["precision, batch", "PyTorch eager, µs", "fused eager, µs", "fastest PyTorch, µs", "fastest ours, µs"]
    doubts = ["A quick run, of few samples."] if facts.get("quick") else []
    if not any("compiled" in row["variant"] for row in report["rows"]):
        doubts.append("torch.compile, which may be faster than the PyTorch shown, had no part in this run.")
    for name, run in facts.items():
        if name.startswith("of "):  # mnist_step.keep_other_precisions
            doubts.append(f"The rows {name} are of {run}.")
    if report["left_out"]:
        kinds = {line.split(",")[0] for line in report["left_out"]}
        count = len(report["left_out"])
        missing = "1 time of {} is missing" if count == 1 else f"{count} times of {{}} are missing"
        doubts.append(f"{missing.format(', '.join(sorted(kinds)))} (see `mnist_step.md`).")
    return [
        f"![microseconds a step against the batch size](results/{GPU}/mnist_step.png)",
        "",
        f"One training step on one {facts['device']} (PyTorch {facts['torch']}), wall time, medians "
        f"(`python -m cuda_ops bench mnist`, commit `{facts['commit']}`, {facts['date']}). The floor is the time "
        "that a copy and torch.mm of this run would need for the bytes and operations that no step can avoid. All: "
        f"[mnist_step.md](results/{GPU}/mnist_step.md).",
        "",
        *table([*header, "PyTorch / ours", "floor, µs"], lines),
        *(["", *(f"- {line}" for line in doubts)] if doubts else []),
    ]


def gpt():
    """A whole training step of GPT-2 and of models of characters."""
    report = load("gpt2_step.json")
    if report is None:
        return nothing_yet("python -m cuda_ops bench gpt")
    facts, lines = report["facts"], []
    for row in report["rows"]:
        theirs = [r["median_ms"] for r in report["rows"] if r["model"] == row["model"] and not r["ours"]]
        memory = "–" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e9:.1f}"
        ratio = f"**{min(theirs) / row['median_ms']:.2f}**" if row["ours"] and theirs else ""
        lines.append(
            [
                f"{row['model']}, {row['batch']} × {row['length']}",
                row["variant"],
                f"{row['median_ms']:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{100 * row['share_of_peak']:.0f}",
                memory,
                ratio,
            ]
        )
    header = ["model, tokens", "", "ms", "tokens/s", "% of torch.mm", "GB", "fastest PyTorch / ours"]
    return [
        f"One training step on one {facts['device']} (PyTorch {facts['torch']}), {facts['precision']}: forward, "
        "backward, clipping and AdamW; wall time, medians (`python -m cuda_ops bench gpt`, commit "
        f"`{facts['commit']}`, {facts['date']}). The kernels of a step: [gpt2_step.md](results/{GPU}/gpt2_step.md).",
        "",
        *table(header, lines),
        *(["", *(f"- {line}" for line in report["left_out"])] if report["left_out"] else []),
        *gpt_in_c(),
    ]


def gpt_in_c():
    """The program of csrc/apps/gpt2 beside the same model in Python."""
    report = load("gpt2_c.json")
    if report is None:
        return []
    facts, lines = report["facts"], []
    for row in report["rows"]:
        memory = "–" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e9:.2f}"
        shape = f"{row['model']}, {row['batch']} × {row['length']}"
        lines.append([shape, row["variant"], f"{row['median_ms']:.2f}", memory, f"{row['ratio']:.3f}"])
    return [
        "",
        f"The same step in plain C (`make gpt2-c`), in turns with Python's, {facts['precision']}, without dropout, on "
        f"one {facts['device']} (`benchmarks/gpt2_c.py`, commit `{facts['commit']}`, {facts['date']}): "
        f"[gpt2_c.md](results/{GPU}/gpt2_c.md).",
        "",
        *table(["model, tokens", "", "ms", "GB", "Python, graph / this"], lines),
    ]


def several_gpus():
    """One GPU against several, of every machine that scaling.py was run on."""
    parts = []
    for path in sorted(RESULTS.glob(f"{GPU}-x*/scaling.json"), key=lambda path: int(path.parent.name.split("-x")[-1])):
        found = json.loads(path.read_text())
        header, *lines = found["table"]
        facts = found["facts"]
        parts += [
            f"{found['processes']} × {facts['device']} (PyTorch {facts['torch']}): GPT {found['model']}, "
            f"{found['precision']}, in tokens/s, and the MNIST CNN, in images/s (`{found['command']}`, commit "
            f"`{facts['commit']}`, {facts['date']}). What the columns are: "
            f"[scaling.md](results/{path.parent.name}/scaling.md).",
            "",
            *table(header, lines),
            *(f"- {problem}" for problem in found["problems"]),
            "",
        ]
        if (path.parent / "scaling_timeline.png").exists():
            parts += [f"![a step's kernels and NCCL's](results/{path.parent.name}/scaling_timeline.png)", ""]
    return parts[:-1] or nothing_yet("python benchmarks/scaling.py")


def goal():
    """Time to 99 % of the test set."""
    report = load("mnist_99.json")
    if report is None:
        return nothing_yet("python -m cuda_ops bench mnist-99")
    facts, lines = report["facts"], []
    for name, result in report["variants"].items():
        ms, accuracy, cold = result["milliseconds"], result["accuracy"], result["cold_seconds"]
        lines.append(
            [
                name,
                f"{ms['mean']:.1f} ± {ms['std']:.1f}",
                f"{100 * accuracy['mean']:.2f} ± {100 * accuracy['std']:.2f}",
                f"{100 * accuracy['min']:.2f}",
                f"{result['seeds_at_goal']} of {result['seeds']}",
                "–" if cold is None else f"{cold:.1f}",
            ]
        )
    return [
        f"From initial weights to 99 % of the test set, by plain SGD over {report['pictures']:,} images on one "
        f"{facts['device']}, mean ± standard deviation over seeds; cold counts from the start of the process "
        f"(`python -m cuda_ops bench mnist-99`, commit `{facts['commit']}`, {facts['date']}):",
        "",
        *table(["", "training, ms", "test accuracy, %", "lowest, %", "seeds at 99 %", "cold, s"], lines),
    ]


def characters():
    """Time to nanoGPT's validation loss."""
    report = load("gpt_char.json")
    if report is None:
        return nothing_yet("python -m cuda_ops bench gpt-char")
    facts, lines = report["facts"], []
    for name, result in report["variants"].items():
        seconds, loss = result["seconds"], result["loss"]
        lines.append(
            [
                name,
                f"{seconds['mean']:.2f} ± {seconds['std']:.2f}",
                f"{loss['mean']:.4f} ± {loss['std']:.4f}",
                f"{loss['max']:.4f}",
                f"{result['seeds_at_goal']} of {result['seeds']}",
                f"{result['ready_seconds']:.1f}",
            ]
        )
    return [
        f"From initial weights to nanoGPT's loss of {report['goal']}, over the whole validation text, by "
        f"{report['tokens']:,} characters of training on one {facts['device']}, mean ± standard deviation over seeds; "
        f"ready counts compilation and capture (`python -m cuda_ops bench gpt-char`, commit `{facts['commit']}`, "
        f"{facts['date']}):",
        "",
        *table(["", "training, s", "validation loss", "highest", "seeds at the goal", "ready in, s"], lines),
    ]


def check():
    """What check_gpu.py has written: each step may name a commit of its own, where steps were run at several."""
    report = load("check.json")
    if report is None:
        return [f"{NOT_YET}`make check-gpu` does it."]

    def at(step):
        commit = step.get("commit")
        return f" (commit `{commit[:7]}`)" if commit else ""

    whole = f" at commit `{report['commit'][:7]}`" if report.get("commit") else ""
    lines = [
        f"Checked on {report['gpu']}{whole} (PyTorch {report['torch']}, CUDA {report['cuda']}; `make check-gpu`, "
        f"written to [check.json](results/{GPU}/check.json)):",
        "",
    ]
    for name, what in (("tests", "tests"), ("large", "tests of more than 2³¹ elements")):
        step = report.get(name) or {}
        if "passed" in step:
            counts = f"{step['passed']} passed, {step['failed']} failed, {step['skipped']} skipped"
            chosen = f" (`pytest {step['arguments']}`)" if "-m " in step.get("arguments", "") else ""
            lines.append(f"- {what}{chosen}: {counts}{at(step)}")
        failures = step.get("failures", {})
        reasons = failures.items() if isinstance(failures, dict) else ((test, "failed") for test in failures)
        lines += [f"  - {test}: {why}" for test, why in reasons]
    sanitizer = report.get("sanitizer") or {}
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        if tool in sanitizer:
            found = sanitizer[tool]
            if not isinstance(found, str):
                found = "; ".join(f"{ops}: {what.splitlines()[0]}" for ops, what in found.items()) + "; clean elsewhere"
            version = f" {sanitizer['version']}" if sanitizer.get("version") else ""
            lines.append(f"- compute-sanitizer{version} {tool}: {found}{at(sanitizer)}")
    fuzz = report.get("fuzz") or {}
    for name, what in (
        ("support.fuzz", "random cases beside PyTorch (`make fuzz`)"),
        ("support.fuzz_raw", "hostile calls (`make fuzz-raw`)"),
    ):
        for device in ("cuda", "cpu"):
            if figures := fuzz.get(f"{name} {device}"):
                lines.append(
                    f"- {what} on {device}: {figures['cases']:,} in {fuzz['seconds']:g} s of {figures['processes']} "
                    f"processes, {figures['failures']} failed; seeds {', '.join(map(str, figures['seeds']))}{at(fuzz)}"
                )
                lines += [f"  - {failed['case']}: {failed['what']}" for failed in figures["failed"]]
    return lines


def fuzzers():
    """What both fuzzers said at their last runs on the CPU: a file a seed, as `--out` writes it."""
    lines = []
    for name, what in (
        ("fuzz", "random cases beside PyTorch (`make fuzz`)"),
        ("fuzz_raw", "hostile calls (`make fuzz-raw`)"),
    ):
        runs = [json.loads(path.read_text()) for path in sorted((RESULTS / CPU / name).glob("*.json"))]
        if not runs:
            continue
        runs.sort(key=lambda run: run["seed"])
        cases, failures, seconds = (sum(run[key] for run in runs) for key in ("cases", "failures", "seconds"))
        commits = ", ".join(sorted({f"`{run['commit'][:7]}`" for run in runs}))
        seeds = ", ".join(str(run["seed"]) for run in runs)
        lines.append(
            f"- {what}: {cases:,} in {seconds:,} s of one thread, {failures} failed; seeds {seeds}; PyTorch "
            f"{runs[0]['torch']}, commit {commits}"
        )
        lines += [f"  - {failed['case']}: {failed['what']}" for run in runs for failed in run["failed"]]
    if not lines:
        return [f"{NOT_YET}`make fuzz SEED=1 ARGS='--out benchmarks/results/{CPU}/fuzz/1.json'` does it."]
    return lines


def ratios(op):
    """{(case, direction): {dtype: (fastest of ours, of PyTorch's variants)}}, in microseconds of GPU time."""
    cases = {}
    for row in rows(op):
        if row["clock"] == "kernel" and not row["implementation"].startswith(("rung ", "peer ")):
            times = cases.setdefault((row["case"], row["direction"]), {}).setdefault(row["dtype"], {})
            times[row["implementation"]] = float(row["median_us"])
    return {
        key: {
            dtype: tuple(
                min(time for name, time in times.items() if name.startswith("ours") == mine) for mine in (True, False)
            )
            for dtype, times in by_dtype.items()
        }
        for key, by_dtype in cases.items()
    }


def runs_of(names):
    """The facts of each op's run, as one line an op."""
    lines = []
    for op in names:
        facts = dict(re.findall(r"^# (\w+): (.*)$", (RESULTS / GPU / f"{op}.csv").read_text(), re.MULTILINE))
        lines.append(f"{op}: `{facts['commit'][:7]}`, {facts['date']}")
    return "; ".join(lines)


def products():
    """What tensor cores multiply, in all precisions."""
    names, lines = ["bfloat16", "float16", "tf32", "float32", "float64"], []
    measured = [op for op in PRODUCTS if (RESULTS / GPU / f"{op}.csv").is_file()]
    for op in measured:
        for (case, direction), by_dtype in ratios(op).items():
            cells = [f"{by_dtype[name][1] / by_dtype[name][0]:.2f}" if name in by_dtype else "–" for name in names]
            lines.append([f"{op}, {case}", direction, *cells])
    if not lines:
        return nothing_yet("python -m cuda_ops bench matmul conv2d")
    return [
        f"PyTorch's time (cuBLAS; of cuDNN the faster of NCHW and channels_last) over ours on one {device()}: GPU time "
        "of one call, from replays of a CUDA graph over inputs that are cold in the L2. Above 1 ours is faster. "
        f"`python -m cuda_ops bench {' '.join(PRODUCTS)} --dtype bfloat16 --dtype tf32 …`; commits and dates: "
        f"{runs_of(measured)}.",
        "",
        *table(["op, case", "direction", *names], lines),
    ]


def regret():
    """What the choice among paths costs at shapes nobody tuned for."""
    report = load("regret.json")
    if report is None:
        return nothing_yet("python -m cuda_ops bench regret")
    facts, aims, shapes = report["facts"], report["aims"], report["tables"]["all"]["all"]["rows"]
    lines = [
        [name, str(s["rows"]), *(f"{s[key]:.1%}" for key in ("mean", "95th percentile", "worst")), str(s["losers"])]
        for group in ("all", "op", "dtype", "path")
        for name, s in report["tables"][group].items()
    ]
    return [
        f"Time of what the library chooses over that of the best that it could choose, less one, at {shapes} "
        f"random shapes of products and convolutions (seed {facts['seed']}) on one {facts['device']} "
        f"(`python -m cuda_ops bench regret`, commit `{facts['commit']}`, {facts['date']}). Aims: {aims['mean']:.0%} "
        f"in the mean, {aims['worst']:.0%} at worst. The losers: [regret.md](results/{GPU}/regret.md).",
        "",
        *table(["", "shapes", "mean", "95th percentile", "worst", f"above {aims['worst']:.0%}"], lines),
    ]


def models():
    """Whole models: a line for each that has times of both sides."""
    report = load("models.json")
    if report is None:
        return nothing_yet("python -m cuda_ops bench models")
    facts, lines, commits = report["facts"], [], {}
    names = ("PyTorch", "PyTorch, graph", "PyTorch, compiled, graph", "ours", "ours, graph")
    for row in report["rows"]:
        eager, graph, compiled, ours_eager, ours = (row["milliseconds"].get(name, {}).get("median") for name in names)
        if ours is None:
            continue
        commits[row["commit"]] = row["date"]
        ratios = [(compiled, ours), (graph, ours), (eager, ours_eager)]
        lines.append(
            [
                f"{row['mode']}, {row['precision']}",
                row["model"],
                *("–" if ms is None else f"{ms:.2f}" for ms in (eager, graph, compiled, ours_eager, ours)),
                *("–" if theirs is None or mine is None else f"**{theirs / mine:.2f}**" for theirs, mine in ratios),
                "–" if row["compile_seconds"] is None else f"{row['compile_seconds']:.0f}",
            ]
        )
    runs = ", ".join(f"commit `{commit}`, {date}" for commit, date in commits.items())
    header = ["", "model, ms", "PyTorch", "graph", "compiled, graph", "ours", "graph"]
    header += ["compiled / ours", "graphs", "eager", "compiling, s"]
    sizes = report["rows"][0]["sizes"]
    return [
        f"torchvision's classification models on one {facts['device']} a row, {sizes}, training by SGD with momentum, "
        f"or inference, medians (`python -m cuda_ops bench models`, {runs}). Ratios are PyTorch's time over ours, of "
        "graphs and of eager steps. Cold starts, and kernels where ours loses: "
        f"[models.md](results/{GPU}/models.md).",
        "",
        *table(header, lines),
    ]


def ops():
    lines, measured = [], []
    for path in sorted((RESULTS / GPU).glob("*.csv")):
        if not (ROOT / "benchmarks" / f"bench_{path.stem}.py").is_file() or path.stem in PRODUCTS:
            continue  # a race, of columns of its own
        measured.append(path.stem)
        for (case, direction), by_dtype in ratios(path.stem).items():
            # Of an op that was measured in halves alone, these.
            dtype = next((name for name in ("float32", "bfloat16") if name in by_dtype), None)
            if dtype:
                ours, theirs = by_dtype[dtype]
                figures = [f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}"]
                lines.append([f"{path.stem}, {case}", dtype, direction, *figures])
    if not lines:
        return nothing_yet("python -m cuda_ops bench")
    return [
        f"GPU time of one call on one {device()} (float32 without TF32), from replays of a CUDA graph over inputs that "
        "are cold in the L2. PyTorch's side is the fastest of its variants; below 1 it is ahead. The CSV files hold "
        "all cases and dtypes, the 10th and 90th percentiles and the wall time of eager calls. "
        f"`python -m cuda_ops bench`; commits and dates: {runs_of(measured)}.",
        "",
        *table(["op, case", "dtype", "direction", "cuda_ops, µs", "PyTorch, µs", "PyTorch / cuda_ops"], lines),
    ]


def ladder(path):
    """A line for each rung, PyTorch and peer; a column for each case and dtype: time, and share of a copy's speed or of
    the ladder's yardstick."""
    found = [row for row in rows(path.stem) if row["clock"] == "kernel"]
    columns = list(dict.fromkeys((row["dtype"], row["case"]) for row in found))
    columns.sort(key=lambda column: [row["dtype"] for row in found].index(column[0]))  # stable: cases stay in order
    at = {(row["dtype"], row["case"], row["implementation"]): row for row in found}
    names = dict.fromkeys(row["implementation"] for row in found)
    names = sorted(names, key=lambda name: (not name.startswith("rung "), name))
    name = path.stem.removeprefix("ladder_")
    yardstick = YARDSTICKS.get(name)

    def cell(row):
        if not row:
            return "–"
        if yardstick is None:
            return f"{float(row['median_us']):,.1f} ({float(row['percent_of_ceiling']):.0f})"
        speed, yard = f"{float(row['tflop_per_s']):,.3g}", at.get((row["dtype"], row["case"], yardstick))
        return f"{speed} ({100 * float(yard['median_us']) / float(row['median_us']):.0f})" if yard else speed

    lines = [[name, *(cell(at.get((*column, name))) for column in columns)] for name in names]
    shown = f"TFLOP/s (% of {yardstick.removeprefix('peer ')}'s)" if yardstick else "µs (% of a copy)"
    return [
        f"**{name}** (`python -m cuda_ops bench ladder {name}`; {runs_of([path.stem])}; "
        f"[plot](results/{GPU}/{path.stem}.png), [notebook](../notebooks/{name}.ipynb)), {shown}:",
        "",
        *table(["", *(f"{dtype}, {case}" for dtype, case in columns)], lines),
    ]


def ladders():
    paths = sorted((RESULTS / GPU).glob("ladder_*.csv"))
    if not paths:
        return nothing_yet("python -m cuda_ops bench ladder")
    lines = [
        "Ops from a naive kernel up, a rung a file in `csrc/cuda/<name>/ladder/`: GPU time of one call on one "
        f"{device()}, from replays of a CUDA graph over inputs that are cold in the L2, and the share of a copy's "
        "bytes per second (of 1 GB; an op that only reads can be above 100), or, of attention, which arithmetic "
        "bounds, of cuDNN's speed. `ours` is the library's own op, or the top rung where there is none. (The ladder "
        "of matrix multiplication: `bench gemm`.)",
    ]
    for path in paths:
        lines += ["", *ladder(path)]
    return lines


def formats():
    """conv2d by memory format: in which one a model should keep its images."""
    path = RESULTS / GPU / "conv2d.csv"
    if not path.is_file():
        return nothing_yet("python -m cuda_ops bench conv2d --dtype bfloat16 --dtype tf32")
    cases = {}
    for row in rows("conv2d"):
        key = row["case"], row["dtype"], row["direction"], row["clock"]
        cases.setdefault(key, {})[row["implementation"]] = float(row["median_us"])
    lines = []
    for clock in ("kernel", "wall"):
        chosen = [times for key, times in cases.items() if key[3] == clock and len(times) == 4]
        if not chosen:
            continue
        for name, ours, theirs in (
            ("NCHW", ["ours"], ["eager"]),
            ("channels_last", ["ours channels_last"], ["channels_last"]),
            ("the faster on each side", ["ours", "ours channels_last"], ["eager", "channels_last"]),
        ):
            found = sorted(min(times[n] for n in theirs) / min(times[n] for n in ours) for times in chosen)
            losses = sum(ratio < 1 for ratio in found)
            what = "GPU time" if clock == "kernel" else "wall time of eager calls"
            lines.append(
                [
                    f"{what}, {name}",
                    f"{losses} of {len(found)}",
                    *(f"{r:.2f}" for r in (found[0], found[len(found) // 2], found[-1])),
                ]
            )
    return [
        f"PyTorch's time over ours on one {device()}, over all cases, dtypes and directions of conv2d's benchmark "
        f"(`python -m cuda_ops bench conv2d --dtype bfloat16 --dtype tf32`; commit and date: {runs_of(['conv2d'])}). "
        "Each row compares the two sides in the same memory format, the last of each clock in the format that suits "
        "each side best.",
        "",
        *table(["", "rows below 1", "lowest", "median", "highest"], lines),
    ]


# --- README's table ---------------------------------------------------------------------------------------------------


@dataclass
class Headline:
    """A row of README's table: one measurement of an op's CSV."""

    what: str
    op: str
    case: str
    dtype: str
    direction: str
    ours: tuple[str, ...] = ("ours",)
    theirs: tuple[str, ...] = ("eager",)
    clock: str = "kernel"


LAST = ("ours channels_last",), ("channels_last",)
HEADLINES = [
    Headline(
        "conv2d 64→64, 56×56, 3×3, bf16, channels_last",
        "conv2d",
        "64x64x56x56 to 64, 3x3",
        "bfloat16",
        "forward",
        *LAST,
    ),
    Headline(
        "attention, 16384 tokens, 32 heads of 64, causal, bf16",
        "attention",
        "1×32×16384×64 causal",
        "bfloat16",
        "forward",
    ),
    Headline("dropout 8192×4096, bf16, backward", "dropout", "8192x4096", "bfloat16", "backward"),
    Headline(
        "conv2d 256→512, 56×56, 1×1 stride 2, bf16, NCHW",
        "conv2d",
        "64x256x56x56 to 512, 1x1, stride 2",
        "bfloat16",
        "forward",
    ),
    Headline(
        "conv2d 1→32, 28×28, 3×3, bf16, as one eager call (wall)",
        "conv2d",
        "64x1x28x28 to 32, 3x3",
        "bfloat16",
        "forward",
        clock="wall",
    ),
]
RACES = [("bf16", 64), ("fp32", 1024)]
MODELS = [("gpt2-124m", "GPT-2 124M"), ("char", "GPT of characters")]


def duration(microseconds):
    if microseconds >= 10_000:
        return f"{microseconds / 1000:.1f} ms"
    return f"{microseconds:,.0f} µs" if microseconds >= 1000 else f"{microseconds:.1f} µs"


def headline_rows():
    """What, ours, PyTorch's, their ratio, and the command, of what has been measured."""
    lines = []
    report = load("mnist_step.json") or {"rows": []}
    for precision, batch in RACES:
        found = [row for row in report["rows"] if (row["precision"], row["batch"]) == (precision, batch)]
        sides = [[row for row in found if row["ours"] == mine] for mine in (True, False)]
        if all(sides):
            ours, theirs = (min(side, key=lambda row: row["median_us"]) for side in sides)
            names = ours["variant"], theirs["variant"].removeprefix("PyTorch ")
            what = f"MNIST training step, {precision}, batch {batch} ({names[0]}; {names[1]})"
            lines.append((what, ours["median_us"], theirs["median_us"], "bench mnist"))
    report = load("mnist_99.json")
    if report:
        means = {name: 1000 * result["milliseconds"]["mean"] for name, result in report["variants"].items()}
        ours, theirs = (
            min((m for name, m in means.items() if name.startswith("PyTorch") != mine), default=None)
            for mine in (True, False)
        )
        if ours and theirs:
            lines.append(("MNIST CNN trained to 99 %, bf16", ours, theirs, "bench mnist-99"))
    report = load("gpt2_step.json") or {"rows": []}
    for model, name in MODELS:
        found = [row for row in report["rows"] if row["model"] == model]
        sides = [[row for row in found if row["ours"] == mine] for mine in (True, False)]
        if all(sides):
            ours, theirs = (min(side, key=lambda row: row["median_ms"]) for side in sides)
            names = ours["variant"], theirs["variant"].removeprefix("PyTorch ")
            what = f"{name} training step, bf16, {ours['batch']} × {ours['length']} tokens ({names[0]}; {names[1]})"
            lines.append((what, 1000 * ours["median_ms"], 1000 * theirs["median_ms"], "bench gpt"))
    for line in HEADLINES:
        if not (RESULTS / GPU / f"{line.op}.csv").is_file():
            continue
        key = line.case, line.dtype, line.direction, line.clock
        found = {
            row["implementation"]: float(row["median_us"])
            for row in rows(line.op)
            if (row["case"], row["dtype"], row["direction"], row["clock"]) == key
        }
        ours, theirs = ([found[name] for name in names if name in found] for names in (line.ours, line.theirs))
        if ours and theirs:
            lines.append((line.what, min(ours), min(theirs), f"bench {line.op} --dtype {line.dtype}"))
    return lines


def headlines():
    lines = [
        [what, duration(ours), duration(theirs), f"**{theirs / ours:.2f}**", f"`{command}`"]
        for what, ours, theirs, command in headline_rows()
    ]
    if not lines:
        return nothing_yet("python -m cuda_ops bench")
    return table([f"one {device()}", "cuda_ops", "PyTorch", "PyTorch / cuda_ops", "`python -m cuda_ops …`"], lines)


# --- the files --------------------------------------------------------------------------------------------------------


def roofline():
    if not (RESULTS / GPU / "roofline.png").is_file():
        return nothing_yet("python -m cuda_ops bench all --roofline")
    return [
        f"![ops against the speed of memory and of arithmetic](results/{GPU}/roofline.png)",
        "",
        f"All results in [results/{GPU}](results/{GPU}/), by GPU time, beside what a copy and torch.mm reached in the",
        "same runs (`python -m cuda_ops bench --roofline`). Runs and commits are those of the tables.",
    ]


PARTS = {
    "A training step of the MNIST CNN": race,
    "To 99 % of MNIST's test set": goal,
    "MNIST side by side, by phase": mnist,
    "A training step of GPT-2": gpt,
    "A GPT of characters to nanoGPT's loss": characters,
    "Several GPUs": several_gpus,
    "Matrix products and convolutions": products,
    "conv2d by memory format": formats,
    "Whole models": models,
    "What the choice of a path costs": regret,
    "The other ops": ops,
    "Teaching ladders": ladders,
    "All ops under one roof": roofline,
    "Checks on the GPU": check,
    "Fuzzing on the CPU": fuzzers,
}
INTRODUCTION = """# Results on {device}

Written from the files in [results/](results/) by `python benchmarks/update_results.py`; not edited by hand. Each number
stands beside the command that measures it, the commit and the device. `bench` writes into `runs/bench`; with `--out
benchmarks/results` into the folder that this page is made from. What was tried on the way, with its effect, is in
[notes/](notes/).

How it is measured: both sides in one process on the same inputs, interleaved, after their results have been compared;
medians, with the 10th and 90th percentile in the CSV files; PyTorch in the fastest of its variants. GPU time is that of
replayed CUDA graphs, wall time that of eager calls with the host's part ([harness](harness/__init__.py)).{links}"""


def results_page(gpu):
    """All parts of the first GPU's page, regret and models once they were measured; of another's those that were
    measured on it."""
    global GPU
    first, before = next(iter(PAGES)), GPU
    others = [other for other in PAGES if other != gpu and (RESULTS / other).is_dir()]
    links = ", ".join(f"[{DEVICES[other]}]({PAGES[other]})" for other in others)
    parts = [INTRODUCTION.format(device=DEVICES[gpu], links=f" Measured on others: {links}." if links else "")]
    GPU = gpu
    try:
        for title, part in PARTS.items():
            lines = part()
            missing = lines[0].startswith(NOT_YET)
            if (gpu == first and not (missing and part in (regret, models))) or not (missing or part is fuzzers):
                parts.append("\n".join([f"## {title}", "", *lines]))
    finally:
        GPU = before
    return "\n\n".join(parts) + "\n"


def readme(text):
    pattern = re.compile(r"(<!-- begin: results -->\n).*?(<!-- end: results -->)", re.DOTALL)
    body = "\n".join(headlines()) + "\n"
    text, count = pattern.subn(lambda match: match.group(1) + body + match.group(2), text)
    if count != 1:
        sys.exit(f"README.md: expected one pair of <!-- begin: results --> and <!-- end: results -->, got {count}")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    arguments = parser.parse_args()
    front = ROOT / "README.md"
    new = {front: readme(front.read_text())}
    for gpu, page in PAGES.items():
        if (RESULTS / gpu).is_dir():
            new[ROOT / "benchmarks" / page] = results_page(gpu)
    for path, text in new.items():
        if arguments.check and (not path.is_file() or path.read_text() != text):
            sys.exit(f"{path.relative_to(ROOT)} is out of date: run python benchmarks/update_results.py")
        if not arguments.check:
            path.write_text(text)


if __name__ == "__main__":
    main()
