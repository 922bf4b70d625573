"""A run as plain numbers: what report.json holds, and what the tables and plots are made from."""

import math
import os
import platform
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import torch

import cuda_ops

from ... import _library
from ..compare import LAST_STEPS, Run
from ..parity import Parity, judge
from ..timing import PHASES, WHOLE_STEP, summarize, summarize_blocks

MEASURED_BY = {
    "cuda": "CUDA events on the stream between the phases, read after a synchronisation every block of steps; time in "
    "which the GPU waits for the host counts",
    "cpu": "the host's clock between the phases; on the CPU every op is done when it returns",
}


def command_line() -> str:
    """The command that made the run, for the shell."""
    arguments = shlex.join(["python", "-m", "cuda_ops", *sys.argv[1:]])
    size = os.environ.get("WORLD_SIZE")
    return arguments.replace("python", f"torchrun --nproc-per-node={size}", 1) if size else arguments


def commit() -> str | None:
    """The commit of the repository that cuda_ops is imported from, with "+" if files have changed since."""
    folder = Path(cuda_ops.__file__).resolve().parents[1]

    def git(*arguments):
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if not (folder / ".git").exists():
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe_device(device: torch.device) -> str:
    """The processor's marketing name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str | None]:
    """Versions of everything that the numbers depend on."""
    import torchvision

    return {
        "cuda_ops": cuda_ops.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.cuda.is_available() else None,
        "extension built with": _library.build_info().get("torch"),
        "platform": platform.platform(),
    }


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
    return {
        "command": command_line(),
        "versions": versions(),
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
            "processes": run.world.size,
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
