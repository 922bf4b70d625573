"""Trains GPT-2, or a small model of characters, with our ops, fused and layer by layer, and with PyTorch's, side by
side: same initial weights, same batches, interleaved in blocks of steps.

Prints the milliseconds of each phase of a training step, tokens a second, the losses, how far gradients and losses
differ, and a text by the trained model; writes report.png, report.md and report.json into --out.

    python -m cuda_ops gpt                                                      tiny Shakespeare, by characters
    python -m cuda_ops gpt --save run.pt, then --resume run.pt --save run.pt    goes on bit by bit
    python -m cuda_ops gpt --model gpt2-124m --tokens train.bin --val-tokens val.bin
    python -m cuda_ops gpt --init gpt2_124M.bin --tokens train.bin              from weights of llm.c's
    torchrun --nproc-per-node=8 -m cuda_ops gpt --parallel ddp                  on 8 GPUs, --batch shared among them

exit status: 0 success; 1 the backends differ by more than rounding, or training diverged; 2 the command cannot run, and
the message says why; 130 interrupted, with a report of the steps done so far.
"""

import argparse
import dataclasses
from pathlib import Path

import torch

from ._errors import UserError
from ._interrupt import Interruption
from .data import default_root
from .models import BACKENDS
from .training.gpt.checkpoint import read_checkpoint, resume, save_checkpoint
from .training.gpt.corpus import corpus, vocabulary_size
from .training.gpt.parity import compare_backends, compare_curves
from .training.gpt.run import Run, generate_sample, load_model, measure_peak, prepare, probe, train
from .training.gpt.settings import PRECISIONS, RECIPES, Settings, resolve
from .training.options import add_world_arguments, check_outputs, choose_world, require_packages
from .training.progress import progress


def add_arguments(parser: argparse.ArgumentParser):
    add = parser.add_argument
    add(
        "--model",
        choices=list(RECIPES),
        help="cpu-char, char: nanoGPT's, of characters; gpt2-…: GPT-2's sizes (default: cpu-char on the CPU, char on a "
        "GPU)",
    )
    add(
        "--backend",
        nargs="+",
        choices=["all", *BACKENDS],
        metavar="NAME",
        help="one or more of fused (our fused ops), custom (our ops, layer by layer), native (PyTorch's), or all "
        "(default: fused and native on the CPU, all on a GPU)",
    )
    add("--compile", action="store_true", help="native under torch.compile too, as a backend of its own")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto, a GPU if there is one)")
    add("--tokens", type=Path, metavar="FILE", help="train on a token file of llm.c's (uint16)")
    add("--val-tokens", type=Path, metavar="FILE", help="validate by this one (default: the last tenth of --tokens)")
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="train on a text, by characters, or where the model is GPT-2 by its tokenizer, package tiktoken (default: "
        "tiny Shakespeare)",
    )
    add(
        "--data-dir", type=Path, default=default_root("tinyshakespeare"), help="the folder of tinyshakespeare/input.txt"
    )
    add("--steps", type=int, metavar="N", help="default: 2000 of characters, 100 of GPT-2")
    add("--batch", type=int, metavar="N", help="sequences of a step")
    add("--length", type=int, metavar="N", help="tokens of a sequence")
    add("--lr", type=float, help="peak learning rate of AdamW: it rises in --warmup steps and falls along a cosine")
    add("--min-lr", type=float, help="what it falls to (default: a tenth)")
    add("--warmup", type=int, metavar="N")
    add("--weight-decay", type=float, help="of matrices (default: 0.1)")
    add("--clip", type=float, help="the norm that gradients are clipped at (default: 1)")
    add("--dropout", type=float, metavar="P")
    add("--seed", type=int, help="for weights, batches, dropout and the generated text (default: 0)")
    add(
        "--precision",
        choices=list(PRECISIONS),
        help="bf16 by autocast; tf32 on a GPU only (default: fp32 on the CPU, bf16 on a GPU)",
    )
    add(
        "--graph",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on a GPU, each step is one CUDA graph, on all sides (default: --graph)",
    )
    add(
        "--eval-every",
        type=int,
        metavar="N",
        help="steps between looks at the validation loss (default: a quarter on the CPU, an eighth on a GPU)",
    )
    add("--sample", type=int, default=500, metavar="N", help="generate a text of N tokens at the end (default: 500)")
    add("--prompt", default="\n", metavar="TEXT", help="what the generated text begins with (default: a new line)")
    add(
        "--init",
        type=Path,
        metavar="FILE",
        help="begin with weights of llm.c's (.bin) or Hugging Face's (.safetensors, or torch.save's)",
    )
    add("--save", type=Path, metavar="FILE", help="write a checkpoint at the end, and where the run is interrupted")
    add("--save-every", type=int, metavar="N", help="and every N steps")
    add("--resume", type=Path, metavar="FILE", help="go on from a checkpoint, with its options and backends")
    add_world_arguments(parser)
    add("--export", type=Path, metavar="FILE", help="write the first backend's weights as a checkpoint of llm.c's")
    add("--out", type=Path, default=Path("runs/gpt"), metavar="DIR", help="folder of the report (default: runs/gpt)")


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises UserError where it cannot be done as asked."""
    require_packages("matplotlib", "rich")
    saved = read_checkpoint(args.resume) if args.resume else None
    settings = resolve(args, choose_world(args), saved)
    if not saved:
        settings = _sized(settings, args.length)
    data = corpus(settings)
    _check_prompt(settings, data)
    check_outputs({"--save": settings.save, "--export": settings.export}, settings.out)
    _set_precision(settings)
    if settings.device.type == "cuda":
        torch.cuda.set_device(settings.device)
    settings.world.join(settings.device)
    try:
        return _train(settings, data, saved)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{settings.device} has too little memory for --batch {settings.recipe.batch}: take a smaller one, a "
            "smaller --length, or fewer of --backend"
        ) from error
    finally:
        settings.world.leave()


def _sized(settings: Settings, length: int | None) -> Settings:
    """With the sizes that the weights to begin with have, or the vocabulary of a text. `length`: what was asked for."""
    recipe = settings.recipe
    if settings.init:
        config = dataclasses.replace(load_model(settings.init).config, dropout=recipe.config.dropout)
        length = length or min(recipe.length, config.block_size)
        recipe = dataclasses.replace(recipe, config=config, length=length)
    elif (size := vocabulary_size(settings)) is not None:
        recipe = dataclasses.replace(recipe, config=dataclasses.replace(recipe.config, vocab_size=size))
    return dataclasses.replace(settings, recipe=recipe)


def _check_prompt(settings: Settings, data):
    if data.tokenizer is None or not settings.sample:
        return
    if not settings.prompt:
        raise UserError("--prompt: expected at least one character")
    try:
        data.tokenizer.encode(settings.prompt)
    except KeyError as error:
        raise UserError(f"--prompt: {data.name} has no {error.args[0]!r}: begin with what it has") from error


def _set_precision(settings: Settings):
    allowed = settings.recipe.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def _train(settings: Settings, data, saved: dict | None) -> int:
    from rich.console import Console

    world = settings.world
    console = Console(quiet=not world.is_first)
    run = prepare(settings, data)
    if saved:
        resume(run, saved)

    def save(run):
        if settings.save:
            try:
                save_checkpoint(run, settings.save)
            except OSError as error:
                raise UserError(f"--save {settings.save} cannot be written: {error.strerror}") from error

    with Interruption(patient=world.size > 1) as interrupted:

        def stop():
            return world.any(interrupted(), settings.device)

        if not stop():
            world.first_alone(lambda: compare_backends(run))
        if settings.graph and not stop():
            probe(run)
        if not stop():
            world.first_alone(lambda: measure_peak(run))
        with progress(console, run) as advance:
            train(run, interrupted, advance, save)
        model = next(iter(run.backends.values())).whole_model()
        if not run.interrupted and world.is_first:
            run.sample = generate_sample(run, model)
    compare_curves(run)
    if run.steps_done == 0:
        raise KeyboardInterrupt
    save(run)
    # All of them end with its status, and none before it is done: torchrun would end the others with the first to fail.
    return world.first_alone(lambda: _finish(run, console, model))


def _finish(run: Run, console, model) -> int:
    from .training.gpt.report import FILES, write_report
    from .training.gpt.results import results
    from .training.gpt.tables import backend_table, notes, parity_lines
    from .training.tables import to_rich

    settings, outcome = run.settings, results(run)
    if run.sample:
        console.print(run.sample, highlight=False, markup=False)
    console.print(to_rich(backend_table(outcome), f"GPT {settings.model} on {outcome['device']['name']}"))
    for line in notes(outcome):
        console.print(line, highlight=False, style="dim")
    for name in outcome["parity"]:
        for line in parity_lines(outcome, name):
            console.print(f"{name}: {line}", highlight=False)
    try:
        write_report(run, outcome)
        console.print(f"Report: {', '.join(str(settings.out / name) for name in FILES)}", highlight=False)
        if settings.export:
            model.save_llmc(settings.export)
            console.print(f"Weights, as llm.c's: {settings.export}", highlight=False)
    except OSError as error:
        raise UserError(f"{error.filename or settings.out} cannot be written: {error.strerror}") from error
    if settings.save:
        console.print(f"Checkpoint: {settings.save}", highlight=False)
    for problem in outcome["problems"]:
        console.print(f"FAILED: {problem}", highlight=False, style="bold red", soft_wrap=True)
    if run.interrupted:
        return 130
    return 0 if outcome["ok"] else 1
