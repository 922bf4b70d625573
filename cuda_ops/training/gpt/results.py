"""A run as plain numbers: what report.json holds, and what the tables and plots are made from."""

import dataclasses
import math
import resource

from ..distributed import DISAGREEMENT
from ..facts import MEASURED_BY, command_line, describe_device, versions
from ..parity import Parity
from ..timing import PHASES, WHOLE_STEP, summarize, summarize_blocks
from .learner import LAST_STEPS, Learner
from .run import PROBED_STEPS, Run, warmup


def step_milliseconds(learner: Learner) -> dict[str, float]:
    """{mean, p10, median, p90} of the whole step as it is trained by: a graph, or its phases together."""
    if learner.graph is not None:
        return summarize_blocks(learner.blocks[1:] or learner.blocks)  # the first block captures
    steps = learner.timer.steps
    return summarize(steps, warmup_steps(learner)).get(WHOLE_STEP, {})


def warmup_steps(learner: Learner) -> int:
    """Steps that were timed by phase and do not count."""
    return warmup(len(learner.timer.steps))


def _backend_results(run: Run, learner: Learner) -> dict:
    recipe = run.settings.recipe
    step = step_milliseconds(learner).get("median")
    per_second = recipe.batch * recipe.length / step * 1e3 if step else None
    flops = recipe.config.flops_per_token(recipe.length)
    share = per_second * flops / (run.peak_flops * run.settings.world.size) if per_second and run.peak_flops else None
    return {
        "milliseconds": summarize(learner.timer.steps, warmup_steps(learner)),
        "step_milliseconds": step_milliseconds(learner),
        "tokens_per_second": per_second,
        "share_of_peak": share,
        "peak_memory_bytes": learner.memory.peak,
        "steps": learner.steps_taken,
        "train_loss": learner.train_loss,
        "validation_loss": learner.validation[-1][1] if learner.validation else None,
        "best_validation_loss": min((loss for _, loss in learner.validation), default=None),
        "losses": learner.losses,
        "validation": [list(pair) for pair in learner.validation],
    }


def _parity_results(parity: Parity) -> dict:
    return {
        "ok": parity.ok,
        "problems": parity.problems,
        "largest_loss_distance": parity.largest_loss_distance,
        "early_loss_relative_distance": parity.early_loss_distance,
        "last_loss_relative_distance": parity.last_loss_distance,
        "rows": [{**dataclasses.asdict(row), "ok": row.ok} for row in parity.rows],
    }


def divergence(run: Run) -> str | None:
    """What to do about a loss that is not finite."""
    for learner in run.backends.values():
        for step, loss in enumerate(learner.losses):
            if not math.isfinite(loss):
                return (
                    f"training diverged: the loss of backend {learner.name} is {loss} at step {step + 1}; a lower --lr "
                    f"than {run.settings.recipe.lr:g} mends that, if the other backends did the same"
                )
    return None


def results(run: Run) -> dict:
    """All of a run, in types that JSON knows (but for numbers that are not finite)."""
    settings, recipe = run.settings, run.settings.recipe
    problems = [f"{name}: {problem}" for name, parity in run.parity.items() for problem in parity.problems]
    if divergence(run):
        problems.insert(0, divergence(run))
    if not run.processes_agree:
        problems.append(DISAGREEMENT)
    return {
        "command": command_line(),
        "versions": versions(),
        "device": {"type": settings.device.type, "name": describe_device(settings.device)},
        "settings": {
            "model": settings.model,
            "backends": list(settings.backends),
            **dataclasses.asdict(recipe),
            "graph": settings.graph,
            "data": run.corpus.name,
            **settings.world.facts(),
        },
        "parameters": recipe.config.parameter_count,
        "flops_per_token": recipe.config.flops_per_token(recipe.length),
        "peak_flops": run.peak_flops,
        "interrupted": run.interrupted,
        "steps_planned": run.steps_planned,
        "steps_done": run.steps_done,
        "seconds": run.seconds,
        "timing": {
            "phases": list(PHASES),
            "phases_of": f"{PROBED_STEPS} eager steps" if settings.graph else "the training's steps",
            "measured_by": MEASURED_BY[settings.device.type],
        },
        "train_loss_is_mean_of_last_steps": LAST_STEPS,
        "validation_tokens": run.evaluated_tokens,
        # Kilobytes on Linux; all backends and PyTorch itself together, so that it says nothing of one backend.
        "process_peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "backends": {name: _backend_results(run, learner) for name, learner in run.backends.items()},
        "parity": {name: _parity_results(parity) for name, parity in run.parity.items()},
        "sample": run.sample,
        "problems": problems,
        "ok": not problems,
    }
