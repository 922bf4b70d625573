"""report.md, report.json and report.png of a race."""

import contextlib
import io
import json
import math

from .measure import Contestant
from .parity import Row

Table = tuple[list[str], list[list[str]]]
COLD_START = (
    "The last column is the time until the first was done, in the order of the rows: of each side the first row also "
    "loads libraries and kernels and chooses algorithms, and PyTorch's first compiled row compiles, unless the "
    "compiler's cache on disk had the model."
)


def results(subject, settings: dict, found: list[Contestant], rows: list[Row], layers: dict, report) -> dict:
    """Everything that was measured, as data."""
    return {
        "model": subject.name,
        "sizes": subject.note,
        "settings": settings,
        "steps": [
            {
                "name": one.name,
                "milliseconds": one.summary,
                "blocks": one.milliseconds,
                "first_seconds": one.first_seconds,
                "cached": one.cached,
                "problem": one.problem,
            }
            for one in found
        ],
        "layers": layers,
        "parity": [{**vars(row), "ok": row.ok} for row in rows],
        "ok": all(row.ok for row in rows),
        "conversion": report.as_dict(),
        "conversion_text": str(report),
    }


def is_training(outcome: dict) -> bool:
    return outcome["settings"]["mode"] == "training"


def step_name(outcome: dict) -> str:
    return "training step" if is_training(outcome) else "forward pass"


def step_table(outcome: dict) -> Table:
    first = outcome["steps"][0]["milliseconds"].get("median")
    rows = []
    for step in outcome["steps"]:
        times = step["milliseconds"]
        if not times:
            rows.append([step["name"], "n/a", "", "", step["problem"] or "not run", ""])
            continue
        faster = f"{first / times['median']:.2f}×" if first else ""
        cells = [f"{times[name]:.3f}" for name in ("median", "p10", "p90")]
        start = f"{step['first_seconds']:.2f}" + " (compiler's cache)" * step["cached"]
        rows.append([step["name"], *cells, faster, start])
    return [f"{step_name(outcome)}, ms", "median", "p10", "p90", "PyTorch / this", "first after, s"], rows


def layer_table(outcome: dict) -> Table:
    """By class, what takes the most of PyTorch's step first."""
    native, ours = outcome["layers"]["native"], outcome["layers"]["ours"]
    whole = sum(times["forward"] + times["backward"] for times in native.values())
    none = {"forward": 0.0, "backward": 0.0}
    phases = ("forward", "backward") if is_training(outcome) else ("forward",)
    rows = []
    for kind in sorted({*native, *ours}, key=lambda kind: -sum(native.get(kind, none).values())):
        theirs, mine = native.get(kind, none), ours.get(kind, none)
        share = f"{100 * sum(theirs.values()) / whole:.1f}" if whole else ""
        cells = [f"{times[phase]:.3f}" for phase in phases for times in (theirs, mine)]
        ratio = f"{sum(theirs.values()) / sum(mine.values()):.2f}×" if sum(mine.values()) > 0 else ""
        rows.append([kind, share, *cells, ratio])
    columns = [name for phase in phases for name in (f"{phase}, ms", "ours")]
    return ["class", "share, %", *columns, "PyTorch / ours"], rows


def parity_table(outcome: dict) -> Table:
    def number(value):
        return "n/a" if value is None else f"{value:.1e}"

    rows = [
        [
            row["name"],
            number(row["distance"]),
            number(row["ours_from_exact"]),
            number(row["native_from_exact"]),
            row["farthest"],
            "yes" if row["ok"] else "NO",
        ]
        for row in outcome["parity"]
    ]
    return ["parity", "ours – PyTorch", "ours – float64", "PyTorch – float64", "farthest tensor", "ok"], rows


def contents(outcome: dict) -> dict[str, bytes]:
    """{file name: content}; without matplotlib there is no plot."""
    files = {
        "report.json": (json.dumps(_finite(outcome), indent=1, allow_nan=False) + "\n").encode(),
        "report.md": as_markdown(outcome).encode(),
    }
    with contextlib.suppress(ImportError):
        files["report.png"] = plot(outcome)
    return files


def as_markdown(outcome: dict) -> str:
    settings = outcome["settings"]
    title = f"# {outcome['model']}, side by side"
    where = f"On {settings['device_name']}; {settings['precision']}" + (
        f"; {outcome['sizes']}" if outcome["sizes"] else ""
    )
    if is_training(outcome):
        what, of, parity = (
            "SGD with momentum",
            "steps",
            "One step of both, from the same weights; distances as relative norms:",
        )
    else:
        what, of = "inference: eval(), torch.inference_mode()", "forward passes"
        parity = "The output of both; the distance as a relative norm:"
    parts = [
        title,
        f"`{settings['command']}`",
        f"{where}; {what}; PyTorch {settings['torch']}. Medians of {settings['blocks']} blocks of {settings['block']} "
        f"{of}, interleaved.",
        _markdown(step_table(outcome)),
        COLD_START,
        "By class of layers, timed one by one (nothing is fused, and nothing is in a graph):",
        _markdown(layer_table(outcome)),
        parity,
        _markdown(parity_table(outcome)),
        "What `cuda_ops.convert` did:",
        f"```\n{outcome['conversion_text']}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def plot(outcome: dict) -> bytes:
    """The steps, and the classes that take the most of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    settings = outcome["settings"]
    figure.suptitle(f"{outcome['model']} on {settings['device_name']}, {settings['precision']}, {outcome['sizes']}")
    steps = [step for step in outcome["steps"] if step["milliseconds"]]
    colors = ["tab:blue" if step["name"].startswith("cuda_ops") else "tab:orange" for step in steps]
    bars = left.barh([s["name"] for s in steps], [s["milliseconds"]["median"] for s in steps], color=colors)
    left.bar_label(bars, fmt="%.3g", padding=3)
    left.invert_yaxis()
    left.set(title=step_name(outcome), xlabel="milliseconds")
    kinds = [row[0] for row in layer_table(outcome)[1]][:8]
    for offset, side, color in ((-0.2, "native", "tab:orange"), (0.2, "ours", "tab:blue")):
        times = [sum(outcome["layers"][side].get(kind, {}).values()) for kind in kinds]
        positions = [index + offset for index in range(len(kinds))]
        right.barh(positions, times, 0.4, color=color, label="PyTorch" if side == "native" else "cuda_ops")
    right.set_yticks(range(len(kinds)), kinds)
    right.invert_yaxis()
    right.set(title="by class of layers, one by one", xlabel="milliseconds")
    right.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()


def _markdown(table: Table) -> str:
    header, rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _finite(value):
    """`value` with NaN and infinities as strings, since JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
