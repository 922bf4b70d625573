"""A run as plain numbers: what report.json holds, and what the tables and plots are made from."""

import math
import resource

from ..compare import LAST_STEPS, Run
from ..distributed import DISAGREEMENT
from ..facts import MEASURED_BY, command_line, describe_device, versions
from ..parity import Parity, judge
from ..timing import PHASES, WHOLE_STEP, summarize, summarize_blocks


def _backend_results(run: Run, name: str) -> dict:
    backend = run.backends[name]
    times = summarize(backend.trainer.timer.steps, run.warmup)
    step = times.get(WHOLE_STEP, {}).get("mean")
    evaluation = backend.evaluation
    return {
        "milliseconds": times,
        "graph_milliseconds": summarize_blocks(backend.graph_steps),
        "samples_per_second": run.settings.batch_size / step * 1e3 if step else None,
        "peak_memory_bytes": backend.memory.peak,
        "train_loss": backend.train_loss,
        "test_accuracy": evaluation.accuracy if evaluation else None,
        "confusion": evaluation.confusion.tolist() if evaluation else None,
        "losses": backend.losses,
    }


def _parity_results(parity: Parity) -> dict:
    return {
        "ok": parity.ok,
        "problems": parity.problems,
        "largest_loss_distance": parity.largest_loss_distance,
        "early_loss_relative_distance": parity.early_loss_distance,
        "last_loss_relative_distance": parity.last_loss_distance,
        "rows": [
            {
                "name": row.name,
                "kind": row.kind,
                "scale": row.scale,
                "relative_distance": row.distance,
                "limit": row.limit,
                "distance_from_float64": row.from_exact,
                "native_distance_from_float64": row.native_from_exact,
                "ok": row.ok,
            }
            for row in parity.rows
        ],
    }


def divergence(run: Run) -> str | None:
    """What to do about a loss that is not finite."""
    for backend in run.backends.values():
        for step, loss in enumerate(backend.losses):
            if not math.isfinite(loss):
                return (
                    f"training diverged: the loss of backend {backend.name} is {loss} at step {step + 1}; "
                    f"a lower --lr than {run.settings.lr:g} mends that, if the other backend did the same"
                )
    return None


def results(run: Run) -> dict:
    """All of a run, in types that JSON knows (but for numbers that are not finite)."""
    settings = run.settings
    parities = {name: judge(run, name) for name in run.backends}
    problems = [f"{name}: {problem}" for name, p in parities.items() if p for problem in p.problems]
    if divergence(run):
        problems.insert(0, divergence(run))
    if not run.processes_agree:
        problems.append(DISAGREEMENT)
    return {
        "command": command_line(),
        "versions": versions("torchvision"),
        "device": {"type": settings.device.type, "name": describe_device(settings.device)},
        "settings": {
            "backends": list(settings.backends),
            "dtype": str(settings.dtype).removeprefix("torch."),
            "epochs": settings.epochs,
            "batch_size": settings.batch_size,
            "lr": settings.lr,
            "seed": settings.seed,
            "limit": settings.limit,
            "data_on": "device" if settings.keep_on_device else "host",
            **run.world.facts(),
        },
        "interrupted": run.interrupted,
        "steps_planned": run.steps_planned,
        "steps_done": run.steps_done,
        "seconds": run.seconds,
        "timing": {
            "phases": list(PHASES),
            "warmup_steps": run.warmup,
            "measured_steps": run.steps_done - run.warmup,
            "measured_by": MEASURED_BY[settings.device.type],
        },
        "train_loss_is_mean_of_last_steps": LAST_STEPS,
        # Kilobytes on Linux; all backends and PyTorch itself together, so that it says nothing of one backend.
        "process_peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "backends": {name: _backend_results(run, name) for name in run.backends},
        "parity": {name: _parity_results(parity) for name, parity in parities.items() if parity},
        "problems": problems,
        "ok": not problems,
    }
