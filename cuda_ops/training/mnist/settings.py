"""What a run of `python -m cuda_ops mnist` is asked to do, checked before anything is done."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from ..._errors import UserError
from ...models import BACKENDS
from ..compare import RunSettings
from ..distributed import World
from ..options import DTYPES, check_share, choose_device

# By device type: two CPU cores do one epoch with each backend in half a minute, and a batch of 64 brings it above 98 %
# of the test set; a GPU does three epochs in seconds. Either has several hundred steps to average times over.
DEFAULT_EPOCHS = {"cpu": 1, "cuda": 3}
DEFAULT_BATCH_SIZE = {"cpu": 64, "cuda": 128}


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
        # float16 goes with a loss scale, whose step asks the device for infinities; fully_shard frees what it gathers.
        graph=options.graph and device.type == "cuda" and dtype != torch.float16 and not world.is_sharded,
        save=options.save,
        save_start=options.save_start,
        out=options.out,
    )
    if settings.save_start and settings.dtype == torch.float64:
        raise UserError("--save-start holds float32 weights: take another --dtype than float64")
    check_share("--batch-size", settings.batch_size, world)
    if world.bf16_reduce and dtype == torch.float64:
        raise UserError("--bf16-reduce: gradients of --dtype float64 are not rounded, leave one of them out")
    if world.is_sharded and dtype == torch.float16:
        raise UserError("--parallel fsdp2: its shards have no common loss scale, which float16 needs: take ddp")
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
