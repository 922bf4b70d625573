"""What a report says of a run beside its numbers: the command, the machine, versions, how times were taken."""

import importlib
import math
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

import cuda_ops

from .. import _library

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


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of everything that the numbers depend on: PyTorch, and other packages by name."""
    return {
        "cuda_ops": cuda_ops.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: importlib.import_module(package).__version__ for package in packages},
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.cuda.is_available() else None,
        "extension built with": _library.build_info().get("torch"),
        "platform": platform.platform(),
    }


def finite(value):
    """`value` with NaN and infinities as strings, since JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
