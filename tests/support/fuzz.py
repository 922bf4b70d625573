"""Differential fuzzing: random cases of every public function, module and optimizer (fuzz_cases.py) against PyTorch.

    make fuzz SECONDS=600                          # a new seed, which is printed
    make fuzz SECONDS=600 SEED=7 DEVICE=cuda
    PYTHONPATH=.:tests python -m support.fuzz --case conv2d:17

Values, gradients and double gradients are compared with PyTorch's on contiguous float64 copies on the CPU, but where
PyTorch's gradient for finite arguments is NaN and ours is a number. An answer is
right if it is within the specification's tolerance, or else if it is no farther from the reference than a few times
what rounding does to the problem. That is measured: by the reference itself on inputs that are a few units in the last
place away (an op may magnify the rounding of what it is given: a variance of equal values, a sum that cancels, a relu
at zero), and by PyTorch in the same dtype (`is_explained_by_rounding`).

A call is refused by both or by neither, but for what the specification says is refused (its `bad`). A module gives the
bits of its function. Each call is made twice on copies: the bits repeat, and the inputs stay. Of ops that draw random
numbers values are not compared, all else is.
"""

import argparse
import contextlib
import math
import os
import random
import re
import sys
import traceback
import warnings
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from support.fuzz_cases import TARGETS, Case, Rejected, call_module, copied, draw, relaid
from support.opspec import ELEMENT_FACTOR, Sample, as_tuple, assert_close, upcast
from support.supervisor import add_bounds, supervise

# By how much inputs are perturbed, in units of their dtype's rounding, and how many times.
PERTURBATION = 4
PERTURBATIONS, CONFIRMING = 4, 32
# How many times the largest of these changes the error may be.
SENSITIVITY_FACTOR = 8


class Failure(Exception):
    """What is wrong with a case."""


def evaluated(function, sample: Sample, cotangents, second) -> list[tuple[str, Tensor | None]]:
    """What a call gives: its outputs, its gradients, and (where `second`) those of the gradients, for given gradients
    of each. `cotangents(kind, like)` gives these, tensors of the shapes of `like`."""
    outputs = as_tuple(function(*sample.args, **sample.kwargs))
    found = [(f"output {i}", output) for i, output in enumerate(outputs)]
    inputs = sample.differentiable()
    numbers = [o for o in outputs if isinstance(o, Tensor) and o.is_floating_point()]
    if not inputs or not any(o.requires_grad for o in numbers):
        return found
    # Of all outputs: a composition of PyTorch's may have one that needs no gradient, where an op's all do.
    grad_outputs = cotangents("grad_output", numbers)
    # A module's outputs are without the statistics that its function's specification shows, which come last.
    pairs = [(o, g) for o, g in zip(numbers, grad_outputs, strict=False) if o.requires_grad]
    with_grad, passed = zip(*pairs, strict=True)
    grads = torch.autograd.grad(with_grad, inputs, passed, create_graph=second, allow_unused=True)
    found += [(f"gradient {i}", grad) for i, grad in enumerate(grads)]
    if second:
        grad_grads = cotangents("grad_grad", inputs)
        pairs = [(g, v) for g, v in zip(grads, grad_grads, strict=True) if g is not None and g.requires_grad]
        wanted = [*inputs, *grad_outputs]
        seconds = [None] * len(wanted)
        if pairs:
            outputs_then, gradients = zip(*pairs, strict=True)
            seconds = torch.autograd.grad(outputs_then, wanted, gradients, allow_unused=True)
        zeros = [torch.zeros_like(w) if s is None else s for w, s in zip(wanted, seconds, strict=True)]
        found += [(f"double gradient {i}", s) for i, s in enumerate(zeros)]
    return found


class Cotangents:
    """The gradients that a case passes backward: the same values for every call of it."""

    def __init__(self, case: Case, second):
        self.case, self.second, self.made = case, second, {}

    def values(self, kind, like):
        if kind not in self.made:
            generator = torch.Generator().manual_seed(self.case.seed + 1)
            rng = random.Random(self.case.seed)
            dtype, device = self.case.dtype, self.case.device
            tensors = [torch.rand(t.shape, generator=generator, dtype=torch.float64) * 2 - 1 for t in like]
            self.made[kind] = [relaid(rng, t.to(dtype).to(device)) for t in tensors]
        return self.made[kind]

    def ours(self, kind, like):
        return [copied(v).requires_grad_(self.second and kind == "grad_output") for v in self.values(kind, like)]

    def ours_on_cpu(self, kind, like):
        return [v.detach().cpu().requires_grad_(v.requires_grad) for v in self.ours(kind, like)]

    def in_float64(self, kind, like):
        made = [v.detach().cpu().double().contiguous() for v in self.values(kind, like)]
        return [v.requires_grad_(self.second and kind == "grad_output") for v in made]


def perturbed(sample, cotangents, dtype, seed):
    """A sample in float64 and its gradients, each number a few units in the last place of `dtype` away."""
    generator = torch.Generator().manual_seed(seed)
    size = PERTURBATION * torch.finfo(dtype).eps
    if dtype == torch.float64:  # as the reference, whose own sums of n numbers round by about sqrt(n) units
        size *= max(t.numel() for t in [*sample.tensors(), *cotangents("grad_output", ())]) ** 0.5

    def other(tensor):
        if not tensor.is_floating_point():
            return tensor
        factor = 1 + size * (torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1)
        return (tensor.detach() * factor).requires_grad_(tensor.requires_grad)

    return sample.map(other), lambda kind, like: [other(t) for t in cotangents(kind, like)]


def is_explained_by_rounding(case, expected_sample, cotangents, second, index, name, actual, count):
    """Whether the index-th value is within what the reference's own values spread over when its inputs are perturbed,
    elementwise and in norm, beside the tolerance."""
    spec, dtype = case.target.spec, case.dtype
    tolerance = spec.tolerance(dtype)
    references = []
    for seed in range(count):
        sample, gradients = perturbed(expected_sample, cotangents.in_float64, dtype, case.seed + seed)
        references.append(evaluated(spec.reference, sample, gradients, second)[index][1])
    expected = evaluated(spec.reference, expected_sample, cotangents.in_float64, second)[index][1]
    with contextlib.suppress(RuntimeError):  # halves on the CPU, which PyTorch has not everywhere
        same = case.sample.map(lambda t: t.detach().cpu().clone().contiguous().requires_grad_(t.requires_grad))
        references.append(evaluated(spec.reference, same, cotangents.ours_on_cpu, second)[index][1].double())
    # As the dtype has them: an infinity is what is beyond its range.
    expected, *references = (r.detach().to(dtype).double() for r in (expected, *references))
    actual = actual.detach().cpu().double()
    spread = torch.stack([(r - expected).nan_to_num(nan=0.0, posinf=0.0).abs() for r in references]).amax(0)
    unsure = torch.stack([r.isfinite() != expected.isfinite() for r in references]).any(0)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if has_one_gradient(case, name, cotangents):
        same = same | (expected.isnan() & actual.isfinite())
    judged = ~(same | unsure)
    if not (actual[judged].isfinite().all() and expected[judged].isfinite().all()):
        return False
    finite = expected.isfinite() & actual.isfinite()
    error = torch.where(finite, actual - expected, 0).abs()
    size, spread = torch.where(finite, expected, 0).abs(), torch.where(finite, spread, 0)

    def rms(tensor):
        return tensor.square().mean().sqrt()

    # Terms that cancel (v - E[v] of a softmax that is all but one-hot): rounding of these, of which what is left no
    # longer tells the size. They are about as large as the gradients that are passed backward and the arguments.
    terms = [t for made in cotangents.made.values() for t in made] + case.sample.tensors()
    largest = [t.detach().nan_to_num(posinf=0.0, neginf=0.0).abs().max().item() for t in terms if is_number(t)]
    # Of equal terms, of which an expanded argument makes many, each addition rounds to the same side.
    equal = max((1.0, *(repeats(t) for t in terms)))
    floor = PERTURBATION * torch.finfo(dtype).eps * max([1.0, *largest])
    tolerance += equal / 4 * torch.finfo(dtype).eps
    allowed = ELEMENT_FACTOR * tolerance * (size + rms(size)) + SENSITIVITY_FACTOR * (spread + rms(spread))
    in_norm = tolerance * size.norm() + SENSITIVITY_FACTOR * spread.norm()
    if spec.cancels:
        floor = max(floor, ELEMENT_FACTOR * tolerance * math.prod(max(1.0, size) for size in largest))
    if name.startswith("output"):
        floor = 0
    allowed, in_norm = allowed + floor, in_norm + floor * size.numel() ** 0.5
    return bool((error <= allowed).all() and error.norm() <= in_norm)


def repeats(tensor):
    """How many elements each number in memory stands for, by strides of 0."""
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride == 0)


def has_one_gradient(case, name, cotangents):
    """Whether NaN in PyTorch's gradient says that there is none (the second one of |x|^1.5 at 0), or that the number of
    elements that it divides by is 0: since all arguments are finite, or since it is a sum over no elements. Ours is
    finite there."""
    of_nothing = name.startswith("gradient") and all(g.numel() == 0 for g in cotangents.made["grad_output"])
    return "gradient" in name and (of_nothing or "special values" not in case.notes)


def overflows(values, dtype):
    """Whether float64 has numbers that are beyond the range of dtype."""
    return any(v is not None and v.is_floating_point() and (v.isfinite() & v.to(dtype).isinf()).any() for v in values)


def overflows_in_pytorch(case, cotangents, second, index, value):
    """Whether PyTorch's own, in float16, is not finite either: what is between is beyond its range, and which of it is
    kept depends on how an op is composed."""
    if case.dtype != torch.float16 or value.isfinite().all():
        return False
    try:
        found = evaluated(case.target.spec.reference, fresh(case.sample), cotangents.ours, second)
    except Exception:
        return False  # it has no such kernel: then there is nothing that excuses ours
    return not found[index][1].isfinite().all()


def is_number(tensor):
    return tensor.is_floating_point() and tensor.numel() > 0


def fresh(sample):
    return sample.map(copied)


@contextlib.contextmanager
def stream_of(case):
    """On CUDA, for half of the cases, a side stream that is busy when the inputs are written."""
    if case.device != "cuda" or case.seed % 2:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000)
        yield
    torch.cuda.current_stream().wait_stream(stream)


def bits(tensor):
    """The tensor's values, all NaNs alike and both zeros different."""
    t = tensor.detach().resolve_neg().contiguous()
    if not t.is_floating_point():
        return t
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return torch.where(t.isnan(), torch.zeros_like(t), t).view(integers) + t.isnan()


def assert_same_bits(first, second, what):
    for (name, a), (_, b) in zip(first, second, strict=True):
        if (a is None) != (b is None):
            raise Failure(f"{what}: {name} is None in one of them")
        if a is not None and (a.shape != b.shape or a.dtype != b.dtype or not torch.equal(bits(a), bits(b))):
            raise Failure(f"{what}: {name} differs")


def documented(spec, error):
    """Whether the specification says that such a call is refused."""
    return isinstance(error, NotImplementedError) or any(re.search(bad.match, str(error)) for bad in spec.bad)


def check_module(case, cotangents, second):
    """A module against its function: the same bits, the same state afterwards."""
    spec = case.target.spec
    runs = []
    for call in (spec.function, lambda *a, **k: call_module(case.target.module, spec, Sample(a, k))):
        sample = fresh(case.sample)
        torch.manual_seed(case.seed)
        try:
            found = evaluated(call, sample, cotangents.ours, second)
        except Rejected:
            raise
        except Exception as error:
            if not runs:
                raise Rejected from error  # a matter of the function's own cases
            raise Failure(f"the function takes what its module refuses: {describe(error)}") from error
        # What a specification's wrapper shows of the running statistics, a module's call leaves in them.
        runs.append((found, sample))
    (expected, _), (found, sample) = runs
    outputs = [f for f in found if f[0].startswith("output")]
    more = [f for f in expected if f[0].startswith("output")][len(outputs) :]
    if more:
        statistics = [t for t in (sample.args[i] for i in statistics_of(spec)) if t is not None]
        found = [*outputs, *((n, t) for (n, _), t in zip(more, statistics, strict=True)), *found[len(outputs) :]]
    assert_same_bits(expected, found, "function and module")


def statistics_of(spec):
    """Where among the arguments the running statistics are."""
    import inspect

    from support.fuzz_cases import plain_function

    names = list(inspect.signature(plain_function(spec)).parameters)
    return [names.index("running_mean"), names.index("running_var")]


def describe(error):
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def check(case: Case, judged=None) -> str:
    """The case, in the environment of its specification: see `compared`."""
    environment = case.target.spec.environment()
    if "special values" in case.notes:  # of which Winograd's algorithm makes NaN in whole tiles (conv2d.h)
        environment["CUDA_OPS_CONV2D_WINOGRAD"] = "0"
    with mock.patch.dict(os.environ, environment):
        return compared(case, judged)


def compared(case: Case, judged=None) -> str:
    """Raises Failure, or says how the case went: compared, refused (by both) or ours (taken by ours alone)."""
    target, spec = case.target, case.target.spec
    torch.set_num_threads(case.threads)
    # Which NaN an infinity times zero becomes in a second derivative is a matter of how it is composed.
    second = spec.gradgrad and case.seed % 3 != 0 and "special values" not in case.notes
    cotangents = Cotangents(case, second)
    if target.module is not None:
        with stream_of(case):
            check_module(case, cotangents, second)
        return "compared"
    function = judged or target.function

    expected_sample, expected, refusal = upcast(case.sample), None, None
    torch.manual_seed(case.seed)
    state = torch.get_rng_state()
    try:
        expected = evaluated(spec.reference, expected_sample, cotangents.in_float64, second)
    except Exception as error:
        refusal = error
    # Also where it is an argument, as attention's dropout, that makes an op draw random numbers.
    is_random = spec.random or not torch.equal(torch.get_rng_state(), state)
    with stream_of(case):
        sample = fresh(case.sample)
        before = [bits(t) for t in sample.tensors()]
        try:
            torch.manual_seed(case.seed)
            actual = evaluated(function, sample, cotangents.ours, second)
        except Exception as error:
            if refusal is None and not documented(spec, error):
                raise Failure(f"refused, though PyTorch takes it: {describe(error)}") from error
            return "refused"
        if refusal is not None:
            return f"ours ({describe(refusal)})"
        for i, (tensor, old) in enumerate(zip(sample.tensors(), before, strict=True)):
            if not torch.equal(bits(tensor), old):
                raise Failure(f"tensor {i} of the arguments was changed")
        torch.manual_seed(case.seed)
        again = evaluated(function, fresh(case.sample), cotangents.ours, second)
    assert_same_bits(actual, again, "two calls")

    if [n for n, _ in actual] != [n for n, _ in expected]:
        raise Failure(f"gives {[n for n, _ in actual]}, PyTorch {[n for n, _ in expected]}")
    for index, ((name, value), (_, wanted)) in enumerate(zip(actual, expected, strict=True)):
        if wanted is None and value is not None and "gradient" in name and not value.any():
            continue  # a gradient of zeros: PyTorch's norm has none where p is 0
        if (value is None) != (wanted is None):
            raise Failure(f"{name} is {'None' if value is None else 'not None'}, unlike PyTorch's")
        if value is None:
            continue
        if value.shape != wanted.shape:
            raise Failure(f"{name} has shape {list(value.shape)}, PyTorch's {list(wanted.shape)}")
        if value.is_floating_point() and value.dtype != case.dtype:
            raise Failure(f"{name} is {value.dtype}")
        if is_random:
            continue
        if name == "gradient 0" and not spec.nan_gradient:
            value, wanted = (t.masked_fill(case.sample.args[0].isnan().to(t.device), 0) for t in (value, wanted))
        # On the way to a double gradient is every gradient.
        earlier = expected if "double" in name else expected[:index]
        if "gradient" in name and overflows([v for _, v in earlier], case.dtype):
            continue  # an infinity on the way, and of it what the order of the factors makes
        if has_one_gradient(case, name, cotangents):
            none = wanted.isnan() & value.detach().cpu().isfinite()
            value, wanted = (t.detach().masked_fill(none.to(t.device), 0) for t in (value, wanted))
        elif "gradient" in name and not spec.nonfinite_gradient:
            continue
        try:
            assert_close(value, wanted, spec.tolerance(case.dtype), name)
        except AssertionError as error:
            if not value.is_floating_point():
                raise Failure(str(error)) from error
            if overflows_in_pytorch(case, cotangents, second, index, value):
                continue
            for count in (PERTURBATIONS, CONFIRMING):
                if is_explained_by_rounding(case, expected_sample, cotangents, second, index, name, value, count):
                    break
            else:
                raise Failure(str(error)) from error
    return "compared"


def poison_outputs():
    """As the fixture of conftest.py: what is left unwritten is NaN. And an index out of range is told by its call."""
    os.environ["CUDA_OPS_CHECK_INDICES"] = "1"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    warnings.simplefilter("ignore")


def names(seed, first):
    """The cases of a run, from number `first` on: all targets in turn, in an order of the run's own."""
    order = sorted(TARGETS)
    random.Random(seed).shuffle(order)
    number = first
    while True:
        yield number, f"{order[number % len(order)]}:{seed * 2**32 + number}"
        number += 1


def run_cases(seed, device, first, only):
    """The worker: tells each case before it runs, and how it went (supervisor.py reads it)."""
    poison_outputs()
    for number, name in names(seed, first):
        if only and name.split(":")[0] not in only:
            continue
        print("case", number, name, flush=True)
        try:
            outcome = check(draw(name, device))
        except Rejected:
            outcome = "none"
        except Failure as failure:
            outcome = f"fail {failure}"
        except Exception as error:
            outcome = f"fail the fuzzer itself: {describe(error)}"
        print("done", " ".join(outcome.splitlines()), flush=True)


def run_one(name, device):
    poison_outputs()
    case = None
    try:
        case = draw(name, device)
        print(case)
        outcome = check(case)
    except Rejected as rejected:
        outcome = f"makes no case {rejected}"
    except Failure as failure:
        print("FAIL", failure)
        if failure.__cause__ is not None:
            traceback.print_exception(failure.__cause__)
        return 1
    print(outcome)
    return 0


def main():
    parser = argparse.ArgumentParser(prog="python -m support.fuzz", description=__doc__.splitlines()[0])
    add_bounds(parser)
    parser.add_argument("--seed", type=int, help="of the run; drawn and printed where it is left out")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--case", metavar="TARGET:NUMBER", help="repeat this one case")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz.json"), help="where the figures go")
    parser.add_argument("--worker", type=int, metavar="FIRST", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.only or ()) - set(TARGETS):
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    if options.case:
        return run_one(options.case, options.device)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    if options.worker is not None:
        return run_cases(seed, options.device, options.worker, options.only)
    arguments = ["--seed", str(seed), "--device", options.device]
    if options.only:
        arguments += ["--only", *options.only]
    return supervise(
        "support.fuzz",
        arguments,
        seconds=options.seconds,
        cases=options.cases,
        seed=seed,
        device=options.device,
        out=options.out,
    )


if __name__ == "__main__":
    sys.exit(main())
