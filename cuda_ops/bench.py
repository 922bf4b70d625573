"""python -m cuda_ops bench: times our ops against PyTorch's own, by the harness in the repository's benchmarks/.

`bench host` shows what an eager call costs the host, ours beside PyTorch's (benchmarks/host_time.py). `bench mnist`
times whole training steps of the MNIST CNN (benchmarks/mnist_step.py), `bench mnist-99` its training to 99 % accuracy
on the test set (benchmarks/mnist_99.py). `bench gpt` times whole training steps of GPT-2 and of a small model of
characters (benchmarks/gpt2_step.py), and `bench gpt-char` that model's training until it has learnt tiny Shakespeare
(benchmarks/gpt_char.py). `bench models` times whole classification models of torchvision's, in training and in
inference, eager, in a CUDA graph and compiled (benchmarks/models.py), and `bench models-cpu --device cpu` all of them
on the CPU, on one thread and two and in both formats (benchmarks/models_cpu.py). `bench gemm` times the ladder of
matrix multiplication: every rung beside cuBLAS and, where they are installed, Triton, CUTLASS and Numba, with a plot
(benchmarks/bench_gemm.py), and `bench ladder [name ...]` the other ladders, of ops that memory bounds and of attention
(benchmarks/ladders.py). `bench sweep` draws calls of real models that nobody tuned for (benchmarks/sweep.py), and
`bench regret` times, at such shapes, what the library chooses against all that it could choose (benchmarks/regret.py).
"""

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

import torch

from . import _library

RACES = {"mnist": "mnist_step", "mnist-99": "mnist_99", "gpt": "gpt2_step", "gpt-char": "gpt_char", "models": "models"}
RACES |= {"models-cpu": "models_cpu"}
SECONDS = {"gpt": 150, "gpt-char": 240, "models-cpu": 400}
OF_SEEDS = ("mnist-99", "gpt-char")
"""The races that train again and again, from a seed each."""
DRAWN = {"sweep": 500, "regret": 200}  # calls that a run draws
DTYPES = ["float32", "tf32", "bfloat16", "float16", "float64"]
RUNS = Path("runs/bench")


def benchmarks_folder() -> Path | None:
    """The folder beside the package, where the package is used from its repository."""
    folder = _library.FOLDER.parent / "benchmarks"
    return folder if (folder / "harness").is_dir() else None


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument(
        "ops",
        nargs="*",
        metavar="op",
        help="ops to time, or all (default), or host, mnist, mnist-99, gpt, gpt-char, models, models-cpu, sweep or "
        "regret; or ladder, for the teaching ladders but gemm's: those named after it, or all",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda if there is a GPU and a build for it")
    parser.add_argument(
        "--dtype",
        choices=[*DTYPES, "all"],
        action="append",
        help="may be repeated; tf32: float32 with TF32 allowed on both sides; all: every dtype of the device; "
        "default: float32, and on CUDA bfloat16",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only the first case of each op, with few samples; prints how noisy they are",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="time limit for each op, or for a race, met by fewer samples, at least 3 (default: 31 samples in at most "
        "30 seconds for each case; mnist, models: 600; gpt: 150; gpt-char: 240; models-cpu: 400); models: what is done "
        "by then is kept",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="mnist, gpt, models: time torch.compile too",
    )
    parser.add_argument(
        "--batch",
        type=int,
        action="append",
        metavar="N",
        help="races: a batch size; for mnist may be repeated, for gpt that of GPT-2; default: all; models: 64, on the "
        "CPU 4",
    )
    parser.add_argument(
        "--precision",
        action="append",
        choices=["fp32", "tf32", "bf16"],
        help="mnist, models: may be repeated; results of an earlier run in other precisions are kept; default: all; "
        "gpt: one",
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="mnist-99, gpt-char: from how many seeds (default: 30 and 10)"
    )
    parser.add_argument("--seed", type=int, help="sweep, regret: which calls are drawn (default: 0)")
    parser.add_argument("--count", type=int, help="how many: sweep (default: 500), regret (default: 200)")
    parser.add_argument(
        "--roofline",
        action="store_true",
        help="draw roofline.png from all results in the folder that they go to, these and earlier ones",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RUNS,
        metavar="DIR",
        help=f"results go to DIR/<device>/<op>.csv (default: {RUNS}; the committed ones are in benchmarks/results)",
    )


def _device(name) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() and _library.has_cuda() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name} cannot be used ({reason}); see `python -m cuda_ops doctor`") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name} has no kernels of cuda_ops: use cpu or cuda")
    if device.type == "cpu" and device.index:  # PyTorch takes any number for the same CPU
        raise ValueError(f"device {name} is not there: PyTorch has one CPU for all cores, use cpu")
    return device


def _require_writable(folder: Path):
    """Checked before minutes of measuring, not after them. Creates nothing."""
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ValueError(f"--out {folder}: {parent} cannot be written: {error.strerror}") from error


def _race(args, device) -> int:
    name = next(op for op in args.ops if op in RACES)
    if len(args.ops) > 1:
        raise ValueError(f"{name} is a run of its own: name nothing beside it")
    if args.dtype:
        raise ValueError(f"{name} takes --precision, not --dtype")
    if args.roofline:
        raise ValueError(f"--roofline is of ops: {name} has a plot of its own")
    for batch in args.batch or ():
        if batch < 1:
            raise ValueError(f"--batch {batch}: expected a whole number of at least 1")
    of_seeds = {}
    if args.seeds is not None:
        if name not in OF_SEEDS:
            raise ValueError(f"--seeds is for {' and '.join(OF_SEEDS)} alone")
        if args.seeds < 1:
            raise ValueError(f"--seeds {args.seeds}: expected a whole number of at least 1")
        of_seeds["seeds"] = args.seeds
    race = importlib.import_module(RACES[name])
    seconds = SECONDS.get(name, 600) if args.seconds is None else args.seconds
    race.run(device, args.out, seconds, args.quick, args.compile, args.batch, args.precision, **of_seeds)
    return 0


def _host(args, device, out: Path) -> int:
    if len(args.ops) > 1:
        raise ValueError("host is a run of its own: name nothing beside it")
    for name in ("dtype", "seconds", "batch", "precision", "roofline", "seeds"):
        if getattr(args, name):
            raise ValueError(f"--{name} is not for host")
    importlib.import_module("host_time").main(device, out, args.quick)
    return 0


def _drawn(name, args, device) -> int:
    """sweep and regret, which draw their calls."""
    if len(args.ops) > 1:
        raise ValueError(f"{name} is a run of its own: name nothing beside it")
    for option in ("batch", "precision", "roofline", "seeds"):
        if getattr(args, option):
            raise ValueError(f"--{option} is not for {name}")
    count = DRAWN[name] if args.count is None else args.count
    if count < 1:
        raise ValueError(f"--count {count}: expected a whole number of at least 1")
    run = importlib.import_module(name).run
    differing = run(device, args.out, args.seed or 0, count, args.dtype, args.seconds, args.quick)
    return 1 if differing else 0


def _ladders(args, device, settings_of):
    """Each ladder in the dtypes of its own, or those of them that were asked for."""
    import harness

    from .ladder import ladders

    for name in dict.fromkeys(args.ops[1:] or ladders()):
        found = harness.load_bench(f"ladder_{name}")  # says which there are
        own = [str(dtype).removeprefix("torch.") for dtype in ladders()[name].dtypes]
        if device.type == "cpu":
            own = [dtype for dtype in own if dtype not in ("float16", "bfloat16")]
        dtypes = [dtype for dtype in own if not args.dtype or dtype in args.dtype or "all" in args.dtype]
        if not dtypes:
            raise ValueError(f"the ladder {name} has {', '.join(own)}, and no {', '.join(args.dtype)}")
        harness.run([found.op], settings_of(dtypes), args.out)


def main(args) -> int:
    """0: done, whoever won. 1: results of a sweep differ by more than rounding. 2: cannot run, with one line that says
    why and what to do."""
    try:
        folder = benchmarks_folder()
        if folder is None:
            raise ValueError(
                "the benchmarks are not part of the installed package: run `python -m cuda_ops bench` with an editable "
                "install (pip install --no-build-isolation -e .) of the repository"
            )
        if _library.problem:
            raise ValueError(_library.problem)
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        import harness

        if args.seconds is not None and not args.seconds > 0:
            raise ValueError(f"--seconds {args.seconds}: expected a number above 0")
        device = _device(args.device)
        if "ladder" in args.ops[1:]:
            raise ValueError("ladder comes first, and after it the names of ladders alone, or none")
        _require_writable(args.out)
        for name in DRAWN:
            if name in args.ops:
                return _drawn(name, args, device)
        for name in ("seed", "count"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} is for sweep and regret alone")
        if "host" in args.ops:
            return _host(args, device, args.out)
        if set(args.ops) & set(RACES):
            return _race(args, device)
        if args.seeds is not None:
            raise ValueError(f"--seeds is for {' and '.join(OF_SEEDS)} alone")
        for name in ("batch", "precision"):
            if getattr(args, name):
                raise ValueError(f"--{name} is for the races, {', '.join(RACES)}, alone")
        if device.type == "cpu" and "tf32" in (args.dtype or ()):
            raise ValueError("--dtype tf32: the CPU has float32 alone")
        quick = harness.QUICK if args.quick else {}

        def settings_of(dtypes):
            return harness.Settings(device, dtypes, op_seconds=args.seconds, **quick)

        if args.ops[:1] == ["ladder"]:
            _ladders(args, device, settings_of)
            return 0
        default = ["float32", "bfloat16"] if device.type == "cuda" else ["float32"]
        dtypes = list(dict.fromkeys(args.dtype or default))
        if "all" in dtypes:
            dtypes = [dtype for dtype in DTYPES if dtype != "tf32" or device.type == "cuda"]
        harness.run(args.ops, settings_of(dtypes), args.out)
        if args.roofline:
            from harness import roofline

            print(f"roofline: {roofline.draw(args.out / harness.slug(harness.device_name(device)))}")
    except (ValueError, OSError) as error:
        print(f"cuda_ops bench: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    command = argparse.ArgumentParser(prog="python -m cuda_ops bench", description="Our ops against PyTorch's own.")
    add_arguments(command)
    sys.exit(main(command.parse_args()))
