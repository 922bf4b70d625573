"""python -m cuda_ops <command>: each command is a module of its own with add_arguments(parser) and main(args)."""

import argparse
import importlib
import os
import sys

from . import __version__, _interrupt, _library
from ._errors import UserError

# A command's module has its name, but for one whose name is that of a function.
MODULES = {"explain": "_explain"}
COMMANDS = {
    "mnist": "train the MNIST CNN with our ops and with PyTorch's, side by side",
    "gpt": "train GPT-2 with our ops and with PyTorch's, side by side",
    "race": "train any model with our layers and with PyTorch's, side by side",
    "bench": "time our ops beside PyTorch's",
    "explain": "which CUDA kernel takes a call, and why the others do not",
    "doctor": "what is built, what runs, what is missing, and how to fix it",
}
WITHOUT_TORCH = ("doctor",)


def speaks_for_all() -> bool:
    """Whether this process is the one that says what all have met: under torchrun the first."""
    return os.environ.get("RANK", "0") == "0"


class Parser(argparse.ArgumentParser):
    """Reports an error in one line; argparse would put the whole usage before it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n" if speaks_for_all() else None)

    def parse_known_args(self, args=None, namespace=None):
        """Refuses what it does not know itself: argparse would let the parser of all commands say that, whose --help
        tells of no command's arguments."""
        namespace, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return namespace, rest


def make_parser(arguments: list[str]) -> argparse.ArgumentParser:
    """The parser; of the commands, only the one in `arguments` is imported."""
    parser = Parser(
        prog="python -m cuda_ops",
        description="PyTorch ops in hand-written C and CUDA. Each command has a --help of its own.",
    )
    parser.add_argument("--version", action="version", version=f"cuda_ops {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == chosen:
            if _library.without_torch and name not in WITHOUT_TORCH:
                parser.exit(2, f"{parser.prog} {name}: error: {_library.without_torch}\n")
            module = importlib.import_module(f".{MODULES.get(name, name)}", __package__)
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(main=module.main)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show × or ‖ is no reason to fail
    try:
        args = make_parser(arguments).parse_args(arguments)
        _interrupt.raise_again()
        return args.main(args)
    except UserError as error:
        if speaks_for_all():
            print(f"python -m cuda_ops {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if speaks_for_all():
            print("interrupted", file=sys.stderr)
        return _interrupt.INTERRUPTED


def leave(status: int):
    """Ends this process. One of several ends without the interpreter's finalization: a thread of gloo's that releases a
    tensor of Python's meanwhile asks for the GIL, is ended within C++ for it, and the process aborts (PyTorch's issue
    190489): -6 in place of its status, in one of many runs."""
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    leave(main())
