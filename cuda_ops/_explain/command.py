"""python -m cuda_ops explain: calls as text."""

import argparse
import ast
import re

import torch

from .._errors import UserError
from .._tf32 import tf32
from .answer import explain, op_of

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "float64": torch.float64,
    "fp64": torch.float64,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
OF_INDICES = {"int32": torch.int32, "int64": torch.int64}  # of a tensor that says so by itself


def _split(text: str) -> list[str]:
    """Splits at commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _literal(text: str):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def parse_call(text: str):
    """Name, positional and named arguments of a call as the command takes it, with tensors on the meta device; and
    whether TF32 is to be allowed."""
    match = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", text, re.DOTALL)
    if not match:
        raise UserError(f"explain: expected a call such as 'relu(64x128, bf16)', got {text!r}")
    op, parts = op_of(match[1]), _split(match[2])
    shape = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")
    default = next((part for part in parts if part in DTYPES), "float32")
    last = "channels_last" in parts
    args, kwargs = [], {}

    def tensor(found):
        dtypes = DTYPES | OF_INDICES
        if found[2] is not None and found[2] not in dtypes:
            raise UserError(f"explain: expected a dtype of {', '.join(dtypes)}, got {found[2]}")
        made = torch.empty(
            [int(size) for size in found[1].split("x")], dtype=dtypes[found[2] or default], device="meta"
        )
        return made.to(memory_format=torch.channels_last) if last and made.dim() == 4 else made

    for part in parts:
        name, equals, value = part.partition("=")
        if part in DTYPES or part == "channels_last":
            continue
        if equals:
            kwargs[name.strip()] = _literal(value.strip())
        elif found := shape.fullmatch(part):
            args.append(tensor(found))
        elif part in ("None", "True", "False"):
            args.append(_literal(part))
        else:
            raise UserError(f"explain: expected sizes such as 64x32x14x14, a dtype, or name=value; got {part!r}")
    return op, args, kwargs, default == "tf32" or any(part.endswith(":tf32") for part in parts)


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("calls", nargs="+", metavar="call", help="such as 'conv2d(64x32x14x14, 64x32x3x3, bf16)'")
    parser.add_argument(
        "--capability", metavar="X.Y", help="compute capability of the GPU to assume, such as 9.0; default: this GPU's"
    )
    parser.add_argument(
        "--multiprocessors", type=int, metavar="N", help="its number of SMs; default: usual for the capability"
    )
    parser.add_argument(
        "--shared-memory", type=int, metavar="BYTES", help="what a block may have; default: usual for the capability"
    )


def main(args) -> int:
    for call in args.calls:
        op, positional, named, allowed = parse_call(call)
        try:
            with tf32(allowed):
                explain(
                    op,
                    *positional,
                    capability=args.capability,
                    multiprocessors=args.multiprocessors,
                    shared_memory=args.shared_memory,
                    **named,
                )
        except (NotImplementedError, RuntimeError, TypeError, ValueError, ImportError) as error:
            raise UserError(str(error)) from None
    return 0
