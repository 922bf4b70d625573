"""The tables of a run, once as rows of text, and from them for the terminal and for report.md."""

from ..compare import BLOCK
from ..parity import EARLY_STEPS
from ..tables import Table, number, processes, ratio
from ..timing import PHASES, WHOLE_STEP


def backend_table(results: dict) -> Table:
    """A column for each backend, and one for the ratio of native to the first where there are both."""
    backends = results["backends"]
    names = list(backends)
    ours = next((name for name in names if name != "native"), None)
    compared = "native" in names and ours is not None
    rows = []

    def add(label, values, pattern, compared_by=None):
        cells = [number(values[name], pattern) for name in names]
        if compared:
            cells.append(compared_by(values["native"], values[ours]) if compared_by else "")
        rows.append([label, *cells])

    for phase in (*PHASES, WHOLE_STEP):
        means = {name: backends[name]["milliseconds"].get(phase, {}).get("mean") for name in names}
        add(f"{phase}, ms", means, ".3f", ratio)

    graphs = {name: backends[name]["graph_milliseconds"].get("median") for name in names}
    if any(graphs.values()):
        add("as a CUDA graph, ms", graphs, ".3f", ratio)

    def column(key, factor=1.0):
        values = {name: backends[name][key] for name in names}
        return {name: None if value is None else value * factor for name, value in values.items()}

    add("samples/s", column("samples_per_second"), ",.0f", lambda native, custom: ratio(custom, native))
    add("peak memory, MB", column("peak_memory_bytes", 1e-6), ",.1f", ratio)
    add("train loss", column("train_loss"), ".4f")
    add("test accuracy, %", column("test_accuracy", 100), ".2f")
    header = ["", *names, *([f"{ours} is faster by"] if compared else [])]
    return header, rows


def parity_table(results: dict, name: str) -> Table:
    """A row for each parameter's gradient at the first step, and for each running statistic."""
    header = ["tensor", "norm (native)", f"{name} – native", f"{name} – float64", "native – float64", "ok"]
    rows = [
        [
            f"{row['name']} {row['kind']}" if row["kind"] != "gradient" else row["name"],
            f"{row['scale']:.2e}",
            f"{row['relative_distance']:.1e}",
            number(row["distance_from_float64"], ".1e").replace("n/a", ""),
            number(row["native_distance_from_float64"], ".1e").replace("n/a", ""),
            "yes" if row["ok"] else "NO",
        ]
        for row in results["parity"][name]["rows"]
        if row["kind"] in ("gradient", "logits") or not row["ok"]
    ]
    return header, rows


def parity_lines(results: dict, name: str) -> list[str]:
    """The table of parity in sentences."""
    parity = results["parity"][name]
    gradients = [row for row in parity["rows"] if row["kind"] == "gradient"]
    worst = max(gradients, key=lambda row: row["relative_distance"])
    statistics = max(row["relative_distance"] for row in parity["rows"] if row["kind"] == "statistic")
    updates = max(row["relative_distance"] for row in parity["rows"] if row["kind"] == "update")
    lines = [
        f"Gradients at step 1: largest ‖{name} – native‖ / ‖native‖ is {worst['relative_distance']:.1e} "
        f"({worst['name']}); running statistics {statistics:.1e}; update {updates:.1e} of the weights."
    ]
    if parity["largest_loss_distance"] is not None:
        lines.append(
            f"Loss curves over {results['steps_done']} steps: largest distance {parity['largest_loss_distance']:.1e}, "
            f"over the first {EARLY_STEPS} steps {parity['early_loss_relative_distance']:.1e} of the loss."
        )
    lines.append("Parity: within rounding." if parity["ok"] else "Parity: BEYOND ROUNDING.")
    return lines


def notes(results: dict) -> list[str]:
    """How the numbers were measured, and their limits."""
    timing, settings = results["timing"], results["settings"]
    order = f", the backends interleaved in blocks of {BLOCK} steps" if len(results["backends"]) > 1 else ""
    lines = [
        f"Times are means over {timing['measured_steps']} steps after {timing['warmup_steps']} of warm-up, of "
        f"{settings['batch_size']} images each{order}; measured by {timing['measured_by']}."
    ]
    if timing["measured_steps"] < 100:
        lines.append("Fewer than 100 steps were timed: take more --epochs or a smaller --batch-size for steady times.")
    if settings["dtype"] == "float32" and results["device"]["type"] == "cuda":
        lines.append(
            "TF32 is off on both sides: float32 is float32. cuDNN chooses its algorithms by trial (benchmark)."
        )
    if any(backend["graph_milliseconds"] for backend in results["backends"].values()):
        lines.append(
            "As a CUDA graph: the whole step, gather of the batch from data on the GPU included, in one launch "
            "(training.GraphedStep); median over blocks of steps after the training, the backends interleaved."
        )
    if results["device"]["type"] == "cpu":
        megabytes = results["process_peak_memory_bytes"] / 1e6
        lines.append(
            f"Peak memory of one backend is not known on the CPU; the whole process took {megabytes:,.0f} MB at most."
        )
    else:
        lines.append(
            "Peak memory is what model and optimizer hold plus the most that a step took on top, without the data set."
        )
    if settings["processes"] > 1:
        lines.append(
            f"{processes(settings)}: times and memory are those of the first, samples/s and losses of all together."
        )
    if results["interrupted"]:
        lines.append(f"Interrupted after {results['steps_done']} of {results['steps_planned']} steps.")
    return lines
