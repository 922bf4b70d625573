"""Trains any model with PyTorch's layers and with ours (`cuda_ops.convert`), side by side: the time of a training step,
eager, compiled and as a CUDA graph, and until the first one was done, the time by class of layers, and how far outputs,
gradients and running statistics are apart. With --mode inference the same of the forward pass alone.

    python -m cuda_ops race resnet50 --precision bf16
    python -m cuda_ops race resnet50 --precision bf16 --mode inference
    python -m cuda_ops race BertModel --batch 8 --size 128
    python -m cuda_ops race my_project.models:make_model

A model is named by torchvision's name of a classification model, by the name of a class of transformers', or as
module:function; the function returns (model, inputs) or (model, inputs, loss), inputs being a tensor or several, and
loss a function of the model's output. Weights and inputs are random.

Writes report.md, report.json and report.png into --out.

exit status: 0 success; 1 the two differ by more than rounding; 2 the command cannot run, and the message says why.
"""

import argparse
import copy
import shlex
import sys
from pathlib import Path

import torch

from . import _files, _library
from ._errors import UserError
from ._table import print_table

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
# TF32 has the 10 bits of float16.
JUDGED_AS = {"fp32": torch.float32, "tf32": torch.float16, "bf16": torch.bfloat16}
FORMATS = {"cpu": "contiguous", "cuda": "channels_last"}
BLOCKS = {"cpu": (3, 2), "cuda": (10, 10)}


def add_arguments(parser: argparse.ArgumentParser):
    add = parser.add_argument
    add("model", help="a classification model of torchvision's, a class of transformers', or module:function")
    add(
        "--mode",
        choices=["training", "inference"],
        default="training",
        help="inference: the forward pass alone, in eval() under torch.inference_mode() (default: training)",
    )
    add(
        "--precision",
        choices=list(PRECISIONS),
        default="fp32",
        help="tf32 on a GPU only; bf16 by autocast (default: fp32)",
    )
    add("--batch", type=int, metavar="N", help="images or texts in a batch (default: 4 on the CPU, 64 on a GPU)")
    add(
        "--size",
        type=int,
        metavar="N",
        help="side of the images (default: 64 on the CPU, 224 on a GPU), or tokens of a text (default: 32, 128)",
    )
    add(
        "--memory-format",
        choices=["channels_last", "contiguous"],
        help="of images and convolutions' weights, on both sides (default: channels_last on a GPU, where both are "
        "faster in it, contiguous on the CPU)",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto, a GPU if there is one)")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="also time torch.compile (default: on a GPU)",
    )
    add("--blocks", type=int, metavar="N", help="how often each is timed (default: 3 on the CPU, 10 on a GPU)")
    add("--out", type=Path, metavar="DIR", help="folder of the report (default: runs/race/<model>)")


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises UserError where it cannot be done as asked."""
    device = _device(args)  # first: it says what is wrong with an installation whose parts cannot be imported
    from .training.race import measure, parity, report
    from .training.race.subject import find

    for name in ("batch", "size", "blocks"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: expected a whole number of at least 1")
    out = args.out or Path("runs/race") / args.model.replace(":", "_").replace("/", "_")
    _check_out(out)
    subject = find(args.model, device.type, args.batch, args.size)
    if (args.memory_format or FORMATS[device.type]) == "channels_last":
        subject = subject.in_channels_last()
    blocks, block = BLOCKS[device.type]
    autocast = torch.bfloat16 if args.precision == "bf16" else None
    conditions = measure.Conditions(device, autocast, args.blocks or blocks, block, args.mode == "training")
    _set_precision(args.precision)
    print(f"{subject.name} on {_name(device)}, {args.mode}, {args.precision}, {subject.note}", flush=True)
    try:
        outcome = _run(args, subject, conditions, measure, parity, report)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{device} has too little memory: take a smaller --batch or --size") from error
    for title, table in (
        (report.step_name(outcome), report.step_table(outcome)),
        ("layers, one by one", report.layer_table(outcome)),
        (f"one {report.step_name(outcome)} of both, relative distances", report.parity_table(outcome)),
    ):
        print_table(title, *table)
    print(outcome["conversion_text"])
    files = report.contents(outcome)
    try:
        _files.write_files({out / name: content for name, content in files.items()})
    except OSError as error:
        raise UserError(f"{error.filename or out} cannot be written: {error.strerror}") from error
    print(f"Report: {', '.join(str(out / name) for name in files)}")
    if "report.png" not in files:
        print("No plot: matplotlib is missing (pip install matplotlib)")
    if not outcome["ok"]:
        print("FAILED: ours and PyTorch's differ by more than rounding", file=sys.stderr)
    return 0 if outcome["ok"] else 1


def _run(args, subject, conditions, measure, parity, report):
    from .conversion import convert

    device = conditions.device
    compiled = device.type == "cuda" if args.compile is None else args.compile
    found = measure.contestants(device.type == "cuda", compiled)
    try:
        measure.race(subject, found, conditions, _progress)  # first, while nothing has been loaded for it yet
        _progress("parity")
        rows = parity.compare(subject, conditions, JUDGED_AS[args.precision])
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, (torch.OutOfMemoryError, UserError)):
            raise
        raise UserError(f"{subject.name} does not run, {subject.note or 'with these inputs'}: {error}") from error
    layers = {name: measure.layer_times(subject, name == "ours", conditions) for name in ("native", "ours")}
    _progress("")
    settings = {
        "command": f"python -m cuda_ops {shlex.join(sys.argv[1:])}",
        "device": str(device),
        "device_name": _name(device),
        "precision": args.precision,
        "mode": args.mode,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "blocks": conditions.blocks,
        "block": conditions.block,
    }
    model = copy.deepcopy(subject.model).train(conditions.training)
    return report.results(subject, settings, found, rows, layers, convert(model))


def _progress(text):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _device(args) -> torch.device:
    if _library.problem:
        raise UserError(_library.problem)
    from .training.distributed import World
    from .training.options import choose_device

    device = choose_device(args.device, ("custom",), World.from_environment())
    if device.type == "cpu" and args.precision == "tf32":
        raise UserError("--precision tf32 needs a GPU: on the CPU take fp32 or bf16")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _set_precision(precision):
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.benchmark = True


def _name(device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the CPU, {torch.get_num_threads()} threads"


def _check_out(out: Path):
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("report.json", "report.md", "report.png"):
            _files.check_writable(out / name)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written to: {error.strerror}") from error
