"""The tables of a run."""

from ..compare import BLOCK
from ..parity import EARLY_STEPS
from ..tables import Table, number, processes, ratio
from ..timing import PHASES, WHOLE_STEP


def backend_table(results: dict) -> Table:
    """A column for each backend, and one for the ratio of native to the first where there are both."""
    backends = results["backends"]
    names = list(backends)
    ours = next((name for name in names if name not in ("native", "compiled")), None)
    compared = "native" in names and ours is not None
    rows = []

    def add(label, values, pattern, compared_by=None):
        cells = [number(values[name], pattern) for name in names]
        if compared:
            cells.append(compared_by(values["native"], values[ours]) if compared_by else "")
        rows.append([label, *cells])

    eager = " (eager)" if results["settings"]["graph"] else ""
    for phase in (*PHASES, WHOLE_STEP):
        medians = {name: backends[name]["milliseconds"].get(phase, {}).get("median") for name in names}
        add(f"{phase}{eager}, ms", medians, ".3f", ratio)
    if results["settings"]["graph"]:
        graphs = {name: backends[name]["step_milliseconds"].get("median") for name in names}
        add("as a CUDA graph, ms", graphs, ".3f", ratio)

    def column(key, factor=1.0):
        values = {name: backends[name][key] for name in names}
        return {name: None if value is None else value * factor for name, value in values.items()}

    add("tokens/s", column("tokens_per_second"), ",.0f", lambda native, mine: ratio(mine, native))
    add("share of the peak, %", column("share_of_peak", 100), ".1f")
    add("peak memory, MB", column("peak_memory_bytes", 1e-6), ",.1f", ratio)
    add("steps", column("steps"), ",.0f")
    add("train loss", column("train_loss"), ".4f")
    add("validation loss", column("validation_loss"), ".4f")
    add("best validation loss", column("best_validation_loss"), ".4f")
    header = ["", *names, *([f"{ours} is faster by"] if compared else [])]
    return header, rows


def parity_table(results: dict, name: str) -> Table:
    """A row for each parameter's gradient, and for the update."""
    header = ["tensor", "norm (native)", f"{name} – native", f"{name} – float64", "native – float64", "ok"]
    rows = [
        [
            row["name"] if row["kind"] == "gradient" else f"{row['kind']} {row['name']}",
            f"{row['scale']:.2e}",
            f"{row['distance']:.1e}",
            number(row["from_exact"], ".1e").replace("n/a", ""),
            number(row["native_from_exact"], ".1e").replace("n/a", ""),
            "yes" if row["ok"] else "NO",
        ]
        for row in results["parity"][name]["rows"]
    ]
    return header, rows


def parity_lines(results: dict, name: str) -> list[str]:
    """The table of parity in sentences."""
    parity = results["parity"][name]
    worst = max((r for r in parity["rows"] if r["kind"] == "gradient"), key=lambda row: row["distance"])
    update = next(row for row in parity["rows"] if row["kind"] == "update")
    exact = ""
    if worst["from_exact"] is not None:
        exact = f"; from float64 {worst['from_exact']:.1e}, native {worst['native_from_exact']:.1e}"
    lines = [
        f"Gradients of the first batch, without dropout: largest ‖{name} – native‖ / ‖native‖ is "
        f"{worst['distance']:.1e} ({worst['name']}{exact}); update {update['distance']:.1e} of the weights."
    ]
    if parity["largest_loss_distance"] is not None:
        early = f"over the first {EARLY_STEPS} steps {parity['early_loss_relative_distance']:.1e} of the loss"
        if results["settings"]["config"]["dropout"]:
            early = "with other dropped elements in each"
        lines.append(
            f"Loss curves over {results['steps_done']} steps: largest distance {parity['largest_loss_distance']:.1e}, "
            f"{early}."
        )
    lines.append("Parity: within rounding." if parity["ok"] else "Parity: BEYOND ROUNDING.")
    return lines


def notes(results: dict) -> list[str]:
    """How the numbers were measured, and their limits."""
    timing, settings = results["timing"], results["settings"]
    taking_turns = len(results["backends"]) > 1 and not settings["graph"]
    order = f", the backends interleaved in blocks of {BLOCK} steps" if taking_turns else ""
    lines = [
        f"Times are medians over {timing['phases_of']}, {settings['batch']} × {settings['length']} tokens each{order}; "
        f"measured by {timing['measured_by']}."
    ]
    if settings["graph"]:
        lines.append(
            "The training itself, and tokens/s, are of whole steps as one CUDA graph (training.GraphedStep), on all "
            "sides."
        )
    if results["peak_flops"]:
        lines.append(
            f"The peak is torch.mm's in this run, {results['peak_flops'] / 1e12:.3g} TFLOP/s; a token's training takes "
            f"{results['flops_per_token'] / 1e6:,.1f} million operations (6 a parameter, and attention's)."
        )
    if results["device"]["type"] == "cpu":
        megabytes = results["process_peak_memory_bytes"] / 1e6
        lines.append(
            f"Peak memory of one backend is not known on the CPU; the whole process took {megabytes:,.0f} MB at most."
        )
    if settings["processes"] > 1:
        lines.append(
            f"{processes(settings)}: times and memory are those of the first, tokens/s and losses of all together."
        )
    if settings.get("parallel") == "fsdp2" and "fused" in results["backends"]:
        lines.append("fully_shard gathers a block's parameters for its own forward, so that fused goes layer by layer.")
    lines.append(f"Validation loss is over {results['validation_tokens']:,} tokens of {settings['data']}.")
    if results["interrupted"]:
        lines.append(f"Interrupted after {results['steps_done']} of {results['steps_planned']} steps.")
    return lines
