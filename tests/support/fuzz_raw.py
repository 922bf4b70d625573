"""Hostile calls of every registered op: arguments that do not fit, in a process where a wrong write is noticed.

    make fuzz-raw SECONDS=600                      # a new seed, which is printed
    make fuzz-raw ARGS="--only conv2d_forward '*_tangents'"
    PYTHONPATH=.:tests python -m support.fuzz_raw --case conv2d_forward:17

A call's arguments are those of a specification's `op_samples`, or what a derivative makes of these, or those of an op
with arguments of the same names, or made up from the op's schema, with some of them replaced: tensors of other shapes,
dtypes, layouts and devices, that share memory with themselves, of more elements than there is memory for; integers at
the limits; lists too short, too long and empty; None; NaN. The worker runs under glibc's MALLOC_CHECK_ and
MALLOC_PERTURB_ with a limit on its memory, on a GPU under compute-sanitizer where it is installed. What is right: a
result, or an exception that names the op, or says that there is no memory; of what is composed of PyTorch's own ops
(the second derivatives), any of theirs. What is not: a signal, a hang, "INTERNAL ASSERT".
"""

import argparse
import contextlib
import ctypes.util
import fnmatch
import os
import random
import re
import resource
import shutil
import sys
import traceback
import warnings
from pathlib import Path

import torch
from torch import Tensor

from cuda_ops._autograd import Call
from support.fuzz_cases import Rejected, copied, relaid
from support.opspec import Make, load_specs
from support.supervisor import add_bounds, supervise

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
INTEGERS = [
    0,
    1,
    2,
    3,
    5,
    7,
    -1,
    -2,
    -100,
    2**15,
    2**30,
    2**31 - 1,
    2**31,
    2**32 + 1,
    2**40,
    2**62,
    2**63 - 1,
    -(2**63),
]
FLOATS = [0.0, -0.0, 0.5, 1e-45, float("nan"), float("inf"), -float("inf"), 1.0, -1.0, 2.0, 1e308, -1e308]
WORDS = ["", "none", "tanh", "mean", "same", "forward", "backward_input", "simt", "x" * 10_000, "ä\0b"]
EXTENTS = [0, 1, 1, 2, 3, 4, 5, 8, 17, 33]
# Beyond what a process needs that has PyTorch loaded; a call of these sizes needs next to nothing.
MEMORY = 3 * 2**30
CASE_SECONDS = 60
# Derivatives of how many orders are called, as they are of how many calls of an op.
ORDERS, SAMPLES = 3, 6
BROKEN = "the GPU is lost"  # to the process
DRAWN = object()  # stands for an argument that is drawn at each call


class Wrong(Exception):
    """What a call did that it must not."""


def all_ops():
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("cuda_ops::")]
    return {s.name.split("::")[1]: s for s in sorted(schemas, key=lambda s: s.name)}


def valid_calls(device):
    """Arguments that specifications call an op with, or that are its where another is differentiated, by op."""
    calls = specified_calls(device)
    fresh = calls
    for _ in range(ORDERS):
        found = {}
        for op, several in fresh.items():
            for arguments in several[:: -(-len(several) // SAMPLES)]:
                for name, made in calls_of_derivatives(op, arguments):
                    if name not in calls:
                        found.setdefault(name, []).append(made)
        calls, fresh = calls | found, found
    return calls | {op: borrowed(op, calls) for op in all_ops() if op not in calls}


def borrowed(op, calls):
    """Arguments of the op that shares the most names with this one, the others being drawn at each call; [] where none
    shares a tensor and another argument."""

    def kinds(name):
        return {a.name: str(a.real_type) for a in getattr(torch.ops.cuda_ops, name).default._schema.arguments}

    wanted = kinds(op).items()
    shared = {other: wanted & kinds(other).items() for other in sorted(calls)}
    best = max(shared, key=lambda other: (len(shared[other]), len(os.path.commonprefix([op, other]))))
    if len(shared[best]) < 2 or not any("Tensor" in kind for _, kind in shared[best]):
        return []
    found = []
    for arguments in calls[best]:
        named = dict(zip(kinds(best), arguments, strict=False))
        found.append([named.get(pair[0], DRAWN) if pair in shared[best] else DRAWN for pair in wanted])
    return found


def calls_of_derivatives(op, arguments):
    """(op, arguments) of what the derivatives of this call call."""
    overload = getattr(torch.ops.cuda_ops, op).default
    lines = torch.ops.cuda_ops.derivatives(op)
    names = [a.name for a in overload._schema.arguments]
    returns = [r.name or "output" for r in overload._schema.returns]
    arguments = [copied(a).detach() if isinstance(a, Tensor) else a for a in arguments]
    arguments += [a.default_value for a in overload._schema.arguments[len(arguments) :]]
    values = dict(zip(names, arguments, strict=True))
    with torch.no_grad(), contextlib.suppress(Exception):
        if lines:
            # Before an op in place writes.
            values |= {f"tangent_{n}": torch.rand_like(a) if is_number(a) else None for n, a in values.items()}
            results = overload(*[a.clone() if isinstance(a, Tensor) else a for a in arguments])
            results = results if isinstance(results, (tuple, list)) else [results]
            values |= dict(zip(returns, results, strict=False))
            values |= {f"grad_{n}": torch.rand_like(r) for n, r in zip(returns, results, strict=False) if is_number(r)}
    for line in lines:
        targets, _, text = line.partition("<-" if "<-" in line else ":")
        wanted = {target.strip(): is_number(values.get(target.strip())) for target in targets.split(",")}
        for call in text.split(" or "):
            with contextlib.suppress(KeyError, AttributeError):  # not differentiable, or of a result that is not there
                call = Call(call)
                if call.op is not None and call.op.__module__.endswith("cuda_ops"):
                    yield call.op.__name__, call.arguments(values, wanted)


def is_number(value):
    return isinstance(value, Tensor) and value.is_floating_point()


def specified_calls(device):
    """Arguments that specifications call an op with, by op."""
    calls = {}
    for spec in load_specs():
        for dtype in (torch.float32, torch.float64):
            for op, arguments in spec.op_samples(Make(device, dtype)):
                calls.setdefault(str(op).split(".")[-1], []).append(arguments)
    return calls


def some_tensor(rng, device, like=None):
    """A tensor of any kind; mostly one property away from `like`."""
    dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.int64, rng.choice(DTYPES)])
    shape = [rng.choice(EXTENTS) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4, 4, 5]))]
    kind = rng.choice(["new", "dtype", "shape", "rank", "layout", "layout", "huge", "meta", "special", "grad", "odd"])
    if like is None or kind == "new":
        like, kind = torch.ones(shape, device=device).to(dtype), "layout"
    t = like.detach()
    if kind == "dtype":
        return t.to(rng.choice(DTYPES))
    if kind == "shape" and t.dim():
        sizes = list(t.shape)
        sizes[rng.randrange(t.dim())] = rng.choice(EXTENTS)
        return torch.ones(sizes, device=t.device).to(t.dtype)
    if kind == "rank":
        return rng.choice([t[None], t.reshape(-1), t.squeeze(), t[..., None], t.reshape(-1)[:1].sum()])
    if kind == "layout":
        return relaid(rng, t)
    if kind == "huge":  # no memory behind it but one element
        sizes = list(t.shape) or [1]
        sizes[rng.randrange(len(sizes))] = rng.choice([2**31, 2**33 + 1, 2**40])
        return torch.zeros((), dtype=t.dtype, device=t.device).expand(sizes)
    if kind == "meta":
        return t.to("meta")
    if kind == "special" and t.numel():
        values = {torch.int64: INTEGERS, torch.uint8: [255], torch.float32: FLOATS[:7], torch.float64: FLOATS}
        flat = t.reshape(-1).clone()
        if t.dtype in values:
            flat[rng.randrange(t.numel())] = rng.choice(values[t.dtype])
        return flat.view(t.shape)
    if kind == "grad" and t.is_floating_point():
        return t.clone().requires_grad_()
    if kind == "odd":
        odd = [lambda: torch.nested.nested_tensor([t.float()]), lambda: t.to_sparse(), lambda: torch.nn.Parameter(t)]
        odd.append(lambda: torch.empty(0, dtype=t.dtype).set_())
        try:
            return rng.choice(odd)()
        except (RuntimeError, NotImplementedError) as error:
            raise Rejected from error
    return t


def some_value(rng, kind, size, device, value=None):
    """A value for an argument of that type in a schema; `value` is what was there, None too."""
    if kind.startswith("Optional["):
        if rng.random() < 0.4:
            return None
        kind = kind[len("Optional[") : -1]
    if kind == "Tensor":
        return some_tensor(rng, device, value if isinstance(value, Tensor) else None)
    if kind == "List[Tensor]":
        tensors = list(value or [torch.ones(3, device=device)])
        change = rng.choice(["empty", "one", "more", "replaced"])
        if change == "empty":
            return []
        if change == "one":
            return tensors[:1]
        if change == "more":
            return tensors * rng.choice([2, 3, 100])
        tensors[rng.randrange(len(tensors))] = some_tensor(rng, device, rng.choice(tensors))
        return tensors
    if kind in ("int", "SymInt"):
        return rng.choice(INTEGERS)
    if kind == "float":
        return rng.choice(FLOATS)
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "str":
        return rng.choice(WORDS)
    if kind == "ScalarType":
        return rng.choice(DTYPES)
    if kind in ("List[int]", "List[SymInt]", "List[float]", "List[bool]"):
        of = {"List[float]": FLOATS, "List[bool]": [True, False]}.get(kind, INTEGERS)
        values = list(value) if isinstance(value, (tuple, list)) else [rng.choice(of) for _ in range(size or 4)]
        change = rng.choice(["empty", "shorter", "longer", "one", "one", "one", "all"])
        if change == "empty":
            return []
        if change == "shorter":
            return values[:-1]
        if change == "longer":
            return values + [rng.choice(of)] * rng.choice([1, 1, 500])
        if change == "one" and values:
            values[rng.randrange(len(values))] = rng.choice(of)
            return values
        return [rng.choice(of) for _ in values]
    if kind == "Generator":
        return torch.Generator(rng.choice(["cpu", device]))
    raise LookupError(f"what is a {kind}? (fuzz_raw.py, some_value)")


def drawn_call(rng, schema, calls, device):
    parameters = [(a.name, str(a.real_type), a.N) for a in schema.arguments]
    name = schema.name.split("::")[1]
    if calls.get(name) and rng.random() < 0.9:
        arguments = list(rng.choice(calls[name]))
        arguments += [a.default_value for a in schema.arguments[len(arguments) :]]
        arguments = [copied(a) if isinstance(a, Tensor) else a for a in arguments]
        changed = set(rng.sample(range(len(arguments)), min(len(arguments), rng.choice([0, 1, 1, 1, 2, 3]))))
        changed |= {i for i, argument in enumerate(arguments) if argument is DRAWN}
        arguments = [None if argument is DRAWN else argument for argument in arguments]
    else:
        arguments = [None] * len(parameters)
        changed = range(len(arguments))
    for i in sorted(changed):
        _, kind, size = parameters[i]
        arguments[i] = some_value(rng, kind, size, device, arguments[i])
        # What PyTorch's ops make of those that have no memory behind them takes them hours.
        if is_composed_op(name) and isinstance(arguments[i], Tensor) and arguments[i].numel() > 2**30:
            raise Rejected
    if rng.random() < 0.1:  # the same memory twice
        tensors = [i for i, a in enumerate(arguments) if isinstance(a, Tensor)]
        if len(tensors) > 1:
            to, of = rng.sample(tensors, 2)
            arguments[to] = arguments[of]
    keyword = [a.name for a in schema.arguments if a.kwarg_only]
    count = len(arguments) - len(keyword)
    return tuple(arguments[:count]), dict(zip(keyword, arguments[count:], strict=True))


def tensors_in(result):
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [t for part in result for t in tensors_in(part)]
    return []


# What is told of indices that a functional was given is told by its name.
ALIASES = {"attention_cache": "flash_attention_with_kvcache", "linear_rounded": "linear"}

# What PyTorch says itself before or after an op of ours: that there is no memory, and of what may not be written.
ALLOWED = re.compile(
    "not enough memory|can't allocate memory|CUDA out of memory|Storage size calculation overflowed"
    "|numel: integer multiplication overflow|in-place operation|Tried to convert a List"
    "|more than one element of the written-to tensor"
)


def is_composed_op(name):
    """Whether it is made of other ops, of which PyTorch's say what they say."""
    return not torch._C._dispatch_has_kernel_for_dispatch_key(f"cuda_ops::{name}", "CPU")


def check_error(name, error, is_composed):
    text = str(error)
    is_composed = is_composed or is_composed_op(name)
    if is_composed and "NestedTensorImpl doesn't support" in text:  # PyTorch's, which it calls an internal error
        return
    if re.search("internal assert|internal error|report a bug", text, re.IGNORECASE):
        raise Wrong(f"{type(error).__name__}: {text.splitlines()[0]}") from error
    if isinstance(error, MemoryError) or ALLOWED.search(text):
        return
    if is_composed:
        return
    parts = (
        "forward|backward|inference|inplace|update|gradients|tangent|step|paths?|plan|rung|refusal|saved|share|scale"
        "|partials"
        "|range|packed|append"
    )
    stem = re.split(f"_(?:{parts})", name)
    if not any(said in text for said in (stem[0].rstrip("_"), ALIASES.get(stem[0])) if said):
        raise Wrong(f"names no op: {type(error).__name__}: {' | '.join(text.splitlines()[:2])}") from error


def attempt(name, call):
    arguments, options = call
    backward = False
    try:
        result = getattr(torch.ops.cuda_ops, name)(*arguments, **options)
        results = [t for t in tensors_in(result) if t.is_floating_point() or t.is_complex()]
        with_grad = [t for t in results if t.requires_grad]
        inputs = [t for t in arguments if isinstance(t, Tensor) and t.requires_grad]
        backward = True
        if with_grad and inputs:
            torch.autograd.grad(with_grad, inputs, [torch.ones_like(t) for t in with_grad], allow_unused=True)
        for tensor in results:  # reads what came back
            if not tensor.is_meta and tensor.numel() < 10**6:
                tensor.detach().abs().sum().item()
    except Exception as error:
        check_error(name, error, is_composed=backward)
        return "refused"
    finally:
        # What was launched before a refusal, too, or for a result of integers: the next case is not to blame for it.
        finish_kernels()
    return "passed"


def finish_kernels():
    """Wrong where one has left the process unable to do anything more on the GPU, whosever kernel it was."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise Wrong(f"{BROKEN}: {str(error).splitlines()[0]}") from error
        if torch.cuda.memory_reserved() > MEMORY:  # of a case of many elements: other processes are there too
            torch.cuda.empty_cache()


def limit_memory(device):
    if device == "cuda":  # which reserves addresses without end
        return
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))


def named(patterns):
    """The ops that these name, each a name or a pattern of names as a shell's; all of them where there is none."""
    ops = sorted(all_ops())
    if not patterns:
        return ops
    for pattern in patterns:
        if not fnmatch.filter(ops, pattern):
            raise LookupError(f"there is no op {pattern}")
    return [op for op in ops if any(fnmatch.fnmatchcase(op, pattern) for pattern in patterns)]


def run_cases(seed, device, first, only):
    warnings.simplefilter("ignore")
    ops, calls = all_ops(), valid_calls(device)
    order = named(only)
    torch.set_num_threads(2)
    limit_memory(device)
    number = first
    while True:
        op = order[number % len(order)]
        name = f"{op}:{seed * 2**32 + number}"
        print("case", number, name, flush=True)
        try:
            outcome = attempt(op, drawn_call(random.Random(f"{name}:{device}"), ops[op], calls, device))
        except Rejected:
            outcome = "none"
        except Wrong as wrong:
            if BROKEN in str(wrong):  # which the supervisor tells as it starts another process
                sys.exit(str(wrong))
            outcome = f"fail {wrong}"
        print("done", " ".join(outcome.split()), flush=True)
        number += 1


def show(value):
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested:
        shared = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{str(value.dtype)[6:]}{list(value.shape)}:{list(value.stride())}{shared}"
    if isinstance(value, Tensor):
        return f"{value.layout} tensor"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(show, value))}]"
    return repr(value)[:80]


def run_one(name, device):
    op = name.split(":")[0]
    arguments, options = drawn_call(random.Random(f"{name}:{device}"), all_ops()[op], valid_calls(device), device)
    print(f"{op}({', '.join([*map(show, arguments), *(f'{k}={show(v)}' for k, v in options.items())])})", flush=True)
    limit_memory(device)
    try:
        print(attempt(op, (arguments, options)))
    except Wrong as wrong:
        print("FAIL", wrong)
        traceback.print_exception(wrong.__cause__)
        return 1
    return 0


def main():
    parser = argparse.ArgumentParser(prog="python -m support.fuzz_raw", description=__doc__.splitlines()[0])
    add_bounds(parser)
    parser.add_argument("--seed", type=int, help="of the run; drawn and printed where it is left out")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="*", metavar="OP", help="these alone; as in a shell, * stands for any letters")
    parser.add_argument("--case", metavar="OP:NUMBER", help="repeat this one case")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz_raw.json"), help="where the figures go")
    parser.add_argument("--worker", type=int, metavar="FIRST", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        named([*(options.only or ()), *([options.case.split(":")[0]] if options.case else [])])
    except LookupError as error:
        parser.error(str(error))
    if options.case:
        return run_one(options.case, options.device)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    if options.worker is not None:
        return run_cases(seed, options.device, options.worker, options.only)
    arguments = ["--seed", str(seed), "--device", options.device]
    if options.only:
        arguments += ["--only", *options.only]
    return supervise(
        "support.fuzz_raw",
        arguments,
        seconds=options.seconds,
        cases=options.cases,
        seed=seed,
        device=options.device,
        out=options.out,
        wrapper=sanitizer(options.device),
        environment=checked_memory(),
        case_seconds=CASE_SECONDS,
    )


def checked_memory():
    """glibc's own checks: a write past an end or a second free ends the process, and fresh memory is no zeros."""
    environment = {"MALLOC_PERTURB_": "165", "MALLOC_CHECK_": "3", "GLIBC_TUNABLES": "glibc.malloc.perturb=165"}
    if library := ctypes.util.find_library("c_malloc_debug"):  # since glibc 2.34 MALLOC_CHECK_ is in there
        environment["LD_PRELOAD"] = library
    return environment


def sanitizer(device):
    """On a GPU each launch is watched; an error there is a status, which ends the case."""
    tool = shutil.which("compute-sanitizer") if device == "cuda" else None
    if device == "cuda" and tool is None:
        print("compute-sanitizer is not on PATH: on the GPU only what PyTorch itself is told is seen", flush=True)
    return [tool, "--error-exitcode", "77"] if tool else []


if __name__ == "__main__":
    sys.exit(main())
