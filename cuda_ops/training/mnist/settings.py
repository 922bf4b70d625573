"""What a run of `python -m cuda_ops mnist` is asked to do, checked before anything is done."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ... import _library
from ..._errors import UserError
from ..._files import check_writable
from ...models import BACKENDS
from ..compare import HALVES, RunSettings
from ..distributed import World

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# By device type: two CPU cores do one epoch with each backend in half a minute, and a batch of 64 brings it above 98 %
# of the test set; a GPU does three epochs in seconds. Either has several hundred steps to average times over.
DEFAULT_EPOCHS = {"cpu": 1, "cuda": 3}
DEFAULT_BATCH_SIZE = {"cpu": 64, "cuda": 128}
# Of other files in the folder; those of a report replace the last report's.
REPORT_FILES = ("report.json", "report.md", "report.png")


@dataclass(frozen=True)
class Settings(RunSettings):
    """One run. `resolve` makes it from the options of the command line."""

    data_root: Path
    keep_on_device: bool
    limit: int | None
    graph: bool
    """Whether the whole step is timed as a CUDA graph as well."""
    save: Path | None
    save_start: Path | None
    out: Path


def resolve(options, world: World) -> Settings:
    """Checks the options of the command line and fills in what they leave open.

    Args:
        options: the namespace that argparse returns for `mnist`.
        world: the processes of this run.

    Raises:
        UserError: an option cannot be met; the message says which, and what would do.
    """
    several = {"all": tuple(BACKENDS), "both": ("custom", "native")}
    backends = several.get(options.backend, (options.backend,))
    _check_numbers(options, world)
    device = choose_device(options.device, backends, world)
    dtype = DTYPES[options.dtype]
    if dtype in HALVES and device.type == "cpu":
        raise UserError(f"--dtype {options.dtype} needs a GPU: on the CPU take --dtype float32 or float64")
    settings = Settings(
        backends=backends,
        device=device,
        dtype=dtype,
        epochs=options.epochs or DEFAULT_EPOCHS[device.type],
        batch_size=options.batch_size or DEFAULT_BATCH_SIZE[device.type],
        lr=options.lr,
        seed=options.seed,
        data_root=options.data_dir,
        keep_on_device=options.data_on == "device",
        limit=options.limit,
        # float16 goes with a loss scale, whose step asks the device for infinities; and processes wait for each other.
        graph=options.graph and device.type == "cuda" and dtype != torch.float16 and world.size == 1,
        save=options.save,
        save_start=options.save_start,
        out=options.out,
    )
    if settings.save_start and settings.dtype == torch.float64:
        raise UserError("--save-start holds float32 weights: take another --dtype than float64")
    if settings.batch_size % world.size:
        raise UserError(
            f"--batch-size {settings.batch_size} does not divide among {world.size} processes: take a multiple of it"
        )
    return settings


def _check_numbers(options, world: World):
    for name in ("epochs", "batch_size", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected a whole number of at least 1")
    if not (options.lr > 0 and math.isfinite(options.lr)):
        raise UserError(f"--lr {options.lr}: expected a number above 0")
    if options.dtype != "float64" and options.lr > torch.finfo(torch.float32).max:
        raise UserError(
            f"--lr {options.lr}: expected at most {torch.finfo(torch.float32).max:.6g}, the largest of float32, which "
            "the weights are"
        )
    if not 0 <= options.seed < 2**63:
        raise UserError(f"--seed {options.seed}: expected a whole number from 0 to 2**63 - 1")


def _cuda_problem(backends) -> str | None:
    """Why the backends cannot run on a GPU here, and how to fix it."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is a build without CUDA: install one with CUDA, or take --device cpu"
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU: check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or take --device cpu"
    if any(BACKENDS[name].needs_extension for name in backends) and not _library.has_cuda():
        return (
            "cuda_ops was built without CUDA kernels "
            f"({_library.build_info().get('cuda_reason', 'reason unknown')}): rebuild it with CUDA_OPS_CUDA=1, "
            "or take --device cpu or --backend native"
        )
    return None


def choose_device(text: str, backends, world: World) -> torch.device:
    """The device that --device names, "auto" being the GPU where all backends can use one.

    Raises:
        UserError: there is no such device, or a backend cannot use it, or the extension is not built.
    """
    if _library.problem and any(BACKENDS[name].needs_extension for name in backends):
        raise UserError(_library.problem)
    if text == "auto":
        text = "cpu" if _cuda_problem(backends) else "cuda"
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {text} is unknown: expected auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        if device.index:
            raise UserError(f"--device {text} is not there: PyTorch has one CPU for all cores, take --device cpu")
        return torch.device("cpu")
    problem = _cuda_problem(backends)
    if problem:
        raise UserError(f"--device {text}: {problem}")
    if world.size > 1 and device.index is not None:
        raise UserError(f"--device {text}: under torchrun each process takes a GPU of its own, take --device cuda")
    index = world.local_rank if device.index is None else device.index
    count = torch.cuda.device_count()
    if index >= count:
        names = ", ".join(f"cuda:{i}" for i in range(count))
        raise UserError(f"--device cuda:{index} is not there: this machine has {names}")
    return torch.device("cuda", index)


def check_sizes(settings: Settings, count: int):
    """Whether a batch fits into `count` training images.

    Raises:
        UserError: it does not.
    """
    if settings.batch_size > count:
        raise UserError(
            f"--batch-size {settings.batch_size} is larger than the training set of {count} images: take "
            f"{count} or less"
        )


def check_outputs(settings: Settings):
    """Whether the report and the weights can be written, tried out; makes the report's folder.

    Raises:
        UserError: a folder is missing or cannot be written to, or what stands there is no file.
    """
    options = {"--save": settings.save, "--save-start": settings.save_start}
    files = {option: path for option, path in options.items() if path}
    for option, path in files.items():
        if path.is_dir():
            raise UserError(f"{option} {path} is a folder: give the name of a file")
        if not path.parent.is_dir():
            raise UserError(f"{option} {path}: there is no folder {path.parent}: make it first")
        _check_writable(option, path)
    reports = [settings.out / name for name in REPORT_FILES]
    _check_distinct([*files.items(), *(("--out", path) for path in reports)])
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {settings.out} cannot be made ({error.strerror}): give a folder that can be written to"
        ) from error
    for path in reports:
        _check_writable("--out", path)


def _check_writable(option: str, path: Path):
    try:
        check_writable(path)
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written ({error.strerror}): give another name") from error


def _check_distinct(outputs: list[tuple[str, Path]]):
    options = {}
    for option, path in outputs:
        other = options.setdefault(os.path.realpath(path), option)
        if other != option:
            raise UserError(f"{option}: {path} is written by {other} too: give another name")
