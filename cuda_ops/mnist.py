"""Trains the MNIST CNN with our ops, fused and layer by layer, and with PyTorch's, side by side: same initial weights,
same batches, interleaved in blocks of steps.

Prints the milliseconds of each phase of a training step, the accuracy, and how far gradients and losses differ; writes
report.png, report.md and report.json into --out. Under torchrun each process takes its share of every batch, and batch
norms see that share alone; gradients are means over all processes:

    torchrun --nproc-per-node=2 -m cuda_ops mnist --device cpu --parallel ddp

exit status: 0 success; 1 the backends differ by more than rounding, or training diverged; 2 the command cannot run, and
the message says why; 130 interrupted, with a report of the steps done so far.
"""

import argparse
from pathlib import Path

import torch

from ._errors import UserError
from ._interrupt import Interruption
from .data import Batches, default_root, mnist
from .models import BACKENDS
from .training import compare
from .training.distributed import World
from .training.mnist.settings import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_EPOCHS,
    Settings,
    check_sizes,
    resolve,
)
from .training.options import DTYPES, add_world_arguments, check_outputs, choose_world, require_packages
from .training.progress import progress


def add_arguments(parser: argparse.ArgumentParser):
    add = parser.add_argument
    add(
        "--backend",
        choices=["all", "both", *BACKENDS],
        default="all",
        help="fused: our fused ops; custom: our ops, layer by layer; native: PyTorch's; both: custom and native; "
        "all: the three (default: all)",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto, a GPU if there is one)")
    epochs, sizes = DEFAULT_EPOCHS, DEFAULT_BATCH_SIZE
    add("--epochs", type=int, metavar="N", help=f"default: {epochs['cpu']} on the CPU, {epochs['cuda']} on a GPU")
    add("--batch-size", type=int, metavar="N", help=f"default: {sizes['cpu']} on the CPU, {sizes['cuda']} on a GPU")
    add(
        "--lr",
        type=float,
        default=0.07,
        help="peak learning rate of plain SGD: it rises linearly over the first three tenths of the run and falls to "
        "zero at the end (default: 0.07)",
    )
    add("--seed", type=int, default=0, help="for the initial weights and the order of the batches (default: 0)")
    add(
        "--dtype",
        choices=list(DTYPES),
        default="float32",
        help="bfloat16 and float16: by autocast (default: float32)",
    )
    add(
        "--data-dir",
        type=Path,
        default=default_root(),
        help="the folder that holds MNIST/raw/*.gz (default: data in the repository)",
    )
    add(
        "--data-on",
        choices=["host", "device"],
        default="host",
        help="where the data set is kept: in host memory, from which each batch is copied, or on the device "
        "(default: host)",
    )
    add(
        "--limit",
        type=int,
        metavar="N",
        help="use only the first N training images and the first N test images, for a quick try",
    )
    add(
        "--graph",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on a GPU, also time the whole step as one CUDA graph (default: --graph)",
    )
    add(
        "--save",
        type=Path,
        metavar="FILE",
        help="write the trained weights to FILE (with several backends, the first one's)",
    )
    add(
        "--save-start",
        type=Path,
        metavar="FILE",
        help="write the initial weights and the order of the batches to FILE, for `build/apps/mnist --weights` (make "
        "mnist-c), which trains the same network in plain C",
    )
    add_world_arguments(parser)
    add(
        "--out", type=Path, default=Path("runs/mnist"), metavar="DIR", help="folder of the report (default: runs/mnist)"
    )


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises UserError where it cannot be done as asked."""
    require_packages("matplotlib", "rich", "torchvision")
    world = choose_world(args)
    settings = resolve(args, world)
    train_set = mnist(settings.data_root, train=True, limit=settings.limit)
    test_set = mnist(settings.data_root, train=False, limit=settings.limit)
    check_sizes(settings, len(train_set[1]))
    check_outputs({"--save": settings.save, "--save-start": settings.save_start}, settings.out)
    _set_precision()
    if settings.device.type == "cuda":
        torch.cuda.set_device(settings.device)
    world.join(settings.device)
    try:
        return _run(settings, world, train_set, test_set)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{settings.device} has too little memory for --batch-size {settings.batch_size}: take a smaller one"
        ) from error
    finally:
        world.leave()


def _set_precision():
    # float32 means float32 on both sides, where PyTorch's convolutions would take TF32; and native may choose its
    # fastest algorithms, as whoever cares for speed lets it.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True


def _run(settings: Settings, world: World, train_set, test_set) -> int:
    from rich.console import Console

    console = Console(quiet=not world.is_first)
    device, dtype = settings.device, settings.tensor_dtype
    batches = Batches(*train_set, device, dtype, settings.keep_on_device)
    test_batches = Batches(*test_set, device, dtype, settings.keep_on_device)
    run = compare.prepare(settings, world, batches)
    if settings.save_start:
        world.first_alone(lambda: _save_start(run, len(batches)))
    with Interruption(patient=world.size > 1) as stop, progress(console, run) as advance:
        compare.train(run, batches, stop, advance)
        if settings.graph and not run.interrupted:
            compare.time_graphs(run, train_set)
        # Running statistics differ between processes: the first one's model is the one that is tested and saved.
        compare.make_whole(run)
        if not run.interrupted:
            world.first_alone(lambda: compare.test(run, test_batches))
    if run.steps_done == 0:
        raise KeyboardInterrupt
    # All of them end with its status, and none before it is done: torchrun would end the others with the first to fail.
    return world.first_alone(lambda: _finish(run, console, test_set[0]))


def _save_start(run, images: int):
    from .training.mnist.start import save_start

    try:
        save_start(run, images, run.settings.save_start)
    except OSError as error:
        raise UserError(f"--save-start {run.settings.save_start} cannot be written: {error.strerror}") from error


def _finish(run, console, test_images) -> int:
    from .training.mnist.report import FILES, save_weights, write_report
    from .training.mnist.results import results
    from .training.mnist.tables import backend_table, notes, parity_lines, parity_table
    from .training.tables import to_rich

    outcome = results(run)
    console.print(to_rich(backend_table(outcome), f"MNIST CNN on {outcome['device']['name']}"))
    for line in notes(outcome):
        console.print(line, highlight=False, style="dim")
    for name in outcome["parity"]:
        console.print(to_rich(parity_table(outcome, name), f"{name} against native, relative distances"))
        for line in parity_lines(outcome, name):
            console.print(line, highlight=False)
    try:
        write_report(run, outcome, test_images)
        console.print(f"Report: {', '.join(str(run.settings.out / name) for name in FILES)}", highlight=False)
        if run.settings.save:
            save_weights(run, run.settings.save)
            console.print(f"Weights: {run.settings.save}", highlight=False)
    except OSError as error:
        raise UserError(f"{error.filename or run.settings.out} cannot be written: {error.strerror}") from error
    for problem in outcome["problems"]:
        console.print(f"FAILED: {problem}", highlight=False, style="bold red", soft_wrap=True)
    if run.interrupted:
        return 130
    return 0 if outcome["ok"] else 1
