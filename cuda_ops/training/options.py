"""Options that the training commands share, checked before anything is done."""

import argparse
import dataclasses
import importlib
import os
from pathlib import Path

import torch

from .. import _library
from .._errors import UserError
from .._files import check_writable
from ..models import BACKENDS
from .distributed import PARALLEL, World

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Of other files in the folder; those of a report replace the last report's.
REPORT_FILES = ("report.json", "report.md", "report.png")


def add_world_arguments(parser: argparse.ArgumentParser):
    """How several processes share the training."""
    parser.add_argument(
        "--parallel",
        choices=PARALLEL,
        help="under torchrun, how processes share the training, each with its part of every batch: ddp, with the whole "
        "model (DistributedDataParallel; in CUDA graphs buckets of our own), or fsdp2, with shards (fully_shard, no "
        "CUDA graphs) (default: ddp)",
    )
    parser.add_argument(
        "--bf16-reduce",
        action="store_true",
        help="under torchrun, gradients are rounded to bfloat16 to be summed over processes, half the bytes (default: "
        "summed as they are)",
    )


def choose_world(options) -> World:
    """The processes of this run, and what --parallel and --bf16-reduce say of them.

    Raises:
        UserError: one of them is given, and there is one process.
    """
    world = World.from_environment()
    for option, given in (("--parallel", options.parallel), ("--bf16-reduce", options.bf16_reduce)):
        if given and world.size == 1:
            what = f"{option} {given}" if given is not True else option
            raise UserError(
                f"{what} is for several processes: start them by torchrun --nproc-per-node=N -m cuda_ops "
                f"{options.command}, with N of 2 or more"
            )
    return dataclasses.replace(world, parallel=options.parallel or "ddp", bf16_reduce=options.bf16_reduce)


def require_packages(*packages: str):
    """Raises UserError where one is missing of what the commands need beside PyTorch."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UserError(f'{package} is missing ({error}): run `pip install "cuda_ops[app]"`') from error


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
    if world.local_size > count:  # which all processes say, and not the last ones alone
        raise UserError(
            f"--device {text}: {world.local_size} processes need a GPU each, and there are {count}: start as many, or "
            "take --device cpu"
        )
    if index >= count:
        names = ", ".join(f"cuda:{i}" for i in range(count))
        raise UserError(f"--device cuda:{index} is not there: this machine has {names}")
    return torch.device("cuda", index)


def check_share(option: str, batch: int, world: World):
    """Whether each process gets as much of a batch.

    Raises:
        UserError: it does not.
    """
    if batch % world.size:
        raise UserError(
            f"{option} {batch} does not divide among {world.size} processes: take a multiple of {world.size}"
        )


def check_outputs(options: dict[str, Path | None], out: Path):
    """Whether the report and other files can be written, tried out; makes the report's folder.

    Args:
        options: of the command line, that name files to be written, or None.
        out: the folder of the report.

    Raises:
        UserError: a folder is missing or cannot be written to, or what stands there is no file.
    """
    files = {option: path for option, path in options.items() if path}
    for option, path in files.items():
        if path.is_dir():
            raise UserError(f"{option} {path} is a folder: give the name of a file")
        if not path.parent.is_dir():
            raise UserError(f"{option} {path}: there is no folder {path.parent}: make it first")
        _check_writable(option, path)
    reports = [out / name for name in REPORT_FILES]
    _check_distinct([*files.items(), *(("--out", path) for path in reports)])
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be made ({error.strerror}): give a folder that can be written to"
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
