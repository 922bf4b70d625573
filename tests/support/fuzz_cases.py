"""Random cases of every public function, module and optimizer, made from the specifications.

A case is its name: "conv2d:17", a target and a number. Everything else (sizes, values, layouts, dtype, arguments, what
requires grad) follows from these two, so that the name alone repeats it, whatever ran before.
"""

import functools
import inspect
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import cuda_ops
from support.devices import CPU_DTYPES, CUDA_DTYPES
from support.opspec import Make, OpSpec, Sample, as_tuple, load_specs

# Around a warp, a vector of 16 bytes, tiles of 16, 32, 64 and 128, a block; nothing; and what is no multiple of these.
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 257, 1023, 1024, 1025]
# The product of a case's different sizes, which is about what a matrix product or a convolution costs, and the elements
# of a tensor; a specification's own samples may be larger. With all the values between that a layout skips:
LARGEST, LARGEST_TENSOR, LARGEST_STORAGE = 2**21, 2**15, 2**19
SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0]


@dataclass
class Target:
    """What is fuzzed: a function of a sample's arguments, and the specification that its samples come from."""

    name: str
    spec: OpSpec
    function: Callable | None = None
    """None for a module, which is judged by the function of its specification."""
    module: type | None = None
    writes: Callable[[Sample], list[Tensor]] = lambda sample: []
    """The arguments that are written in place, and so must not overlap themselves."""


@dataclass
class Case:
    name: str
    target: Target
    sample: Sample
    dtype: torch.dtype
    device: str
    threads: int
    seed: int
    values: str
    grad_layout: random.Random
    notes: list[str] = field(default_factory=list)

    def __str__(self):
        def show(value):
            if isinstance(value, Tensor):
                grad = ", requires_grad" if value.requires_grad else ""
                layout = f"strides {tuple(value.stride())}, offset {value.storage_offset()}"
                return f"{str(value.dtype)[6:]}{list(value.shape)} ({layout}{grad})"
            return repr(value)

        arguments = [show(a) for a in self.sample.args] + [f"{k}={show(v)}" for k, v in self.sample.kwargs.items()]
        notes = "; ".join([f"{self.device}, {self.threads} threads, {self.values}", *self.notes])
        return f"{self.target.name}({', '.join(arguments)})  [{notes}]"


class Rejected(Exception):
    """The drawn sizes make no case."""


class SizedMake(Make):
    """A Make whose tensors have other sizes: what a specification makes n long becomes sizes[n] long, everywhere in the
    sample, indices into it included. Values are uniform, whole (so that sums are exact and ties are ties), or of very
    different sizes."""

    def __init__(self, *args, sizes=None, values="uniform", first=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.sizes, self.values, self.first = sizes or {}, values, first
        self.seen, self.made = set(), []

    def resized(self, shape):
        self.seen.update(shape)
        resized = tuple(self.sizes.get(n, n) for n in shape)
        if resized != shape and product(resized) > LARGEST_TENSOR:
            raise Rejected("too large")
        return resized

    def is_wanted(self):
        """Whether the tensor that is to be made is the sample's, and not one before it, which need not have values."""
        return len(self.made) >= self.first

    def keep(self, tensor):
        self.made.append(tensor)
        return tensor

    def __call__(self, *shape, low=-2.0, high=2.0, requires_grad=None):
        if not self.is_wanted():
            return self.keep(torch.zeros(shape, dtype=self.dtype, device=self.device))
        tensor = super().__call__(*self.resized(shape), low=low, high=high, requires_grad=False)
        if (low, high) == (-2.0, 2.0):  # others have reasons
            if self.values == "whole":
                tensor = tensor.round()
            elif self.values == "scales":
                exponents = torch.randint(-6, 7, tensor.shape, generator=self.generator)
                tensor = tensor * (2.0**exponents).to(tensor)
        return self.keep(tensor.requires_grad_(self.requires_grad if requires_grad is None else requires_grad))

    def distinct(self, *shape, requires_grad=None):
        if not self.is_wanted():
            return self.keep(torch.zeros(shape, dtype=self.dtype, device=self.device))
        return self.keep(super().distinct(*self.resized(shape), requires_grad=requires_grad))

    def integers(self, *shape, low=0, high):
        if not self.is_wanted():
            return self.keep(torch.zeros(shape, dtype=torch.int64, device=self.device))
        self.seen.add(high)
        return self.keep(super().integers(*self.resized(shape), low=low, high=max(self.sizes.get(high, high), 1)))


def unread(dtype):
    """What lies between the elements of a layout."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


GENERATORS = ("samples", "small_samples", "empty_samples")


@functools.cache
def seen_samples(spec_name, generator) -> list[tuple[set, int]]:
    """For each sample, the sizes it is made of, and which of all the tensors that are made is its first."""
    make = SizedMake(requires_grad=True)
    seen, before = [], 0
    for sample in getattr(SPECS[spec_name], generator)(make):
        own = {id(t) for t in sample.tensors()}
        first = min([before, *(i for i, made in enumerate(make.made) if id(made) in own)])
        seen.append(({n for made in make.made[first:] for n in made.shape} | make.seen, first))
        make.seen, before = set(), len(make.made)
    return seen


def drawn_sizes(rng, sizes):
    """Other values for some of a sample's sizes."""
    # A size of 1 is most often no size but a dimension that broadcasts, or a group's only channel.
    candidates = sorted(n for n in sizes if n > 1 or rng.random() < 0.1)
    count = min(len(candidates), rng.choice([0, 1, 1, 2, 2, 3]))
    return {n: rng.choice(SIZES) for n in rng.sample(candidates, count)}


def product(sizes):
    return math.prod(max(n, 1) for n in sizes)


def drawn_sample(rng, spec, make_arguments, values):
    generator = rng.choices(GENERATORS, [6, 3, 1])[0]
    samples = seen_samples(spec.name, generator)
    if not samples:
        generator, samples = "samples", seen_samples(spec.name, "samples")
    index = rng.randrange(len(samples))
    seen, first = samples[index]
    sizes = {} if spec.own_sizes else drawn_sizes(rng, seen)
    if product(sizes.get(n, n) for n in seen) > max(LARGEST, product(seen)):
        raise Rejected("too large")
    make = SizedMake(**make_arguments, sizes=sizes, values=values, first=first)
    try:
        sample = next(itertools.islice(getattr(spec, generator)(make), index, None))
    except (RuntimeError, ValueError, IndexError) as error:  # a specification that builds on its own sizes
        raise Rejected from error
    notes = [f"{generator}[{index}] {sample.name!r}"]
    if sizes:
        notes.append(f"sizes {sizes}")
    return sample, notes


# Arguments that are no tensors


@functools.cache
def words(spec_name):
    """The strings that a specification's samples use, by argument."""
    found = {}
    for sample in SPECS[spec_name].samples(Make()):
        for key, value in sample.kwargs.items():
            if isinstance(value, str):
                found.setdefault(key, set()).add(value)
    return found


def drawn_value(rng, value, choices=()):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([0, 1, 1, 2, 2, 3, 3, 4, 5, 7, -1])
    if isinstance(value, float):
        return rng.choice([0.0, 0.125, 0.5, 1.0, rng.random()])
    if isinstance(value, str) and choices:
        return rng.choice(sorted(choices))
    if isinstance(value, (tuple, list)) and value and not isinstance(value[0], Tensor):
        drawn = list(value)
        where = rng.randrange(len(drawn))
        drawn[where] = drawn_value(rng, drawn[where])
        return type(value)(drawn)
    return value


def other_arguments(rng, spec, sample, notes):
    """The sample with one or two of its numbers, words and flags replaced."""
    keys = [*range(len(sample.args)), *sample.kwargs]
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        key = rng.choice(keys)
        args, kwargs = list(sample.args), dict(sample.kwargs)
        holder = args if isinstance(key, int) else kwargs
        if isinstance(holder[key], Tensor):
            continue
        before = holder[key]
        holder[key] = drawn_value(rng, before, words(spec.name).get(key, ()))
        notes.append(f"{key}={holder[key]!r} for {before!r}")
        sample = Sample(tuple(args), kwargs, sample.name)
    return sample


# Layouts and values


def relaid(rng, tensor, written=False):
    """The tensor's values with other strides, at another offset of its storage, between values that are never to be
    read; or a part of them, repeated. `written`: no element twice."""
    t = tensor.detach()
    kind = rng.choices(["as it is", "strided", "expanded", "overlapping", "negated"], [5, 6, 2, 1, 1])[0]
    if kind == "as it is" or (written and kind in ("expanded", "overlapping")):
        return tensor
    dims = list(range(t.dim()))
    if kind == "negated":  # a view that PyTorch negates as it reads, as that of a complex tensor's imaginary part
        if t.dtype not in CUDA_DTYPES:
            return tensor
        t = torch._neg_view(-t)
    elif kind == "expanded":
        long = [d for d in dims if t.shape[d] > 1]
        if not long or not t.is_floating_point():
            return tensor
        for d in rng.sample(long, rng.choice([1, 1, len(long)])):
            t = t.narrow(d, 0, 1).expand(t.shape)
    elif kind == "overlapping":
        if t.dim() < 2 or not t.is_floating_point() or t.numel() == 0:
            return tensor
        rows, cols = t.shape[0], t[0].numel()
        step = rng.randrange(1, cols + 1)
        values = t.reshape(-1)[: (rows - 1) * step + cols]
        strides = t.contiguous().stride()[1:]
        t = values.as_strided(t.shape, (step, *strides))
    else:
        order = rng.sample(dims, len(dims))
        steps = [rng.choice([1, 1, 1, 2, 3]) for _ in dims]
        more = [rng.choice([0, 0, 1, 5]) for _ in dims]
        extents = [t.shape[d] * steps[d] + more[d] for d in order]
        if math.prod(extents) > LARGEST_STORAGE:
            return tensor
        offset = rng.choice([0, 1, 2, 3, 4, 8, 17])
        storage = torch.full((offset + math.prod(extents),), unread(t.dtype), dtype=t.dtype, device=t.device)
        wide = storage[offset:].view(extents).permute([order.index(d) for d in dims])
        for d in dims:
            wide = wide.narrow(d, 0, t.shape[d] * steps[d])[(slice(None),) * d + (slice(None, None, steps[d]),)]
        wide.copy_(t)
        t = wide
    return t.requires_grad_(tensor.requires_grad)


def with_special_values(rng, tensor):
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return tensor
    t = tensor.detach().clone()
    limits = torch.finfo(t.dtype)
    for _ in range(rng.choice([1, 1, 2, 5])):
        t.view(-1)[rng.randrange(t.numel())] = rng.choice([*SPECIAL, limits.tiny / 4])
    return t.requires_grad_(tensor.requires_grad)


def copied(tensor):
    """A copy in a storage of its own that lies as the tensor does."""
    t = tensor.detach()
    if t.is_neg():
        return torch._neg_view(copied(torch._neg_view(t))).requires_grad_(tensor.requires_grad)
    storage = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage()).clone()
    copy = storage.as_strided(t.shape, t.stride(), t.storage_offset())
    return copy.requires_grad_(tensor.requires_grad)


def draw(name, device) -> Case:
    """The case of that name; Rejected where its sizes make none."""
    target_name, number = name.rsplit(":", 1)
    target = TARGETS[target_name]
    rng = random.Random(f"{target_name}:{int(number)}:{device}")
    spec = target.spec
    dtype = rng.choice(CPU_DTYPES if device == "cpu" else CUDA_DTYPES)
    values = rng.choices(["uniform", "whole", "scales"], [5, 2, 2])[0]
    seed = rng.randrange(2**31)
    arguments = {"device": device, "dtype": dtype, "requires_grad": True, "seed": seed}
    sample, notes = drawn_sample(rng, spec, arguments, values)
    sample = other_arguments(rng, spec, sample, notes)
    if spec.nonfinite and rng.random() < 0.12:
        # Into the first argument, which is what a specification says this of: in others a product with padding's
        # zeros decides, and PyTorch's kernels differ among themselves in which of these they make.
        chosen = next((t for t in sample.tensors() if t.is_floating_point()), None)
        sample = sample.map(lambda t: with_special_values(rng, t) if t is chosen else t)
        notes.append("special values")
    some = rng.random() < 0.25
    written = {id(t) for t in target.writes(sample)}

    def prepared(tensor):
        tensor = relaid(rng, tensor, id(tensor) in written)
        return tensor.detach() if some and rng.random() < 0.5 else tensor

    sample = sample.map(prepared)
    threads = rng.choice([1, 2])
    return Case(name, target, sample, dtype, device, threads, seed, values, rng, notes)


# Modules. What their constructors ask for by PyTorch's names, from the arguments of the function.
OF_SHAPES = {
    "in_features": lambda a: a["weight"].shape[-1],
    "out_features": lambda a: a["weight"].shape[0],
    "in_channels": lambda a: a["weight"].shape[1] * a.get("groups", 1),
    "out_channels": lambda a: a["weight"].shape[0],
    "num_parameters": lambda a: a["weight"].numel(),
    "num_channels": lambda a: a["input"].shape[1],
    "num_features": lambda a: a["input"].shape[1],
    "kernel_size": lambda a: tuple(a["weight"].shape[2:]),
    "affine": lambda a: a["bn_weight" if "bn_weight" in a else "weight"] is not None,
    "elementwise_affine": lambda a: a["weight"] is not None,
    "num_embeddings": lambda a: a["weight"].shape[0],
    "embedding_dim": lambda a: a["weight"].shape[1],
    "track_running_stats": lambda a: a["running_mean"] is not None,
    # Of MultiheadAttention, whose function is told which of its parameters there are.
    "embed_dim": lambda a: a["embed_dim_to_check"],
    "dropout": lambda a: a["dropout_p"],
    "bias": lambda a: a["in_proj_bias"] is not None,
    "add_bias_kv": lambda a: a["bias_k"] is not None,
    "kdim": lambda a: a["key"].shape[-1],
    "vdim": lambda a: a["value"].shape[-1],
    "batch_first": lambda a: False,
}
# What neither they nor the function's arguments say, and keeps its default.
LEFT = {"self", "device", "dtype", "padding_mode", "min_value", "max_value", "_weight", "_freeze", "init"}


# What the functions call a module's input where the module has another word for it.
FORWARD_NAMES = {"input"}


def plain_function(spec):
    """The function itself, where a specification wraps it."""
    return inspect.unwrap(spec.function)


def constructed(module_class, options):
    """The module; Rejected where the class of PyTorch's that it is made after refuses the options too."""
    try:
        return module_class(**options)
    except Exception:
        for base in module_class.__mro__:
            if base.__module__.startswith("torch.nn.modules."):
                try:
                    base(**options)
                except Exception as error:
                    raise Rejected from error
                break
        raise


def module_of(module_class, sample, spec):
    """A module for a sample of its function, and what to call it with: (module, parameters and buffers, inputs)."""
    bound = inspect.signature(plain_function(spec)).bind(*sample.args, **sample.kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    options = {}
    for name, parameter in inspect.signature(module_class.__init__).parameters.items():
        if name in LEFT or parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        if name == "bias" and "bias" in arguments:
            options[name] = arguments["bias"] is not None
        elif name in arguments:
            options[name] = arguments[name]
        elif name in OF_SHAPES:
            options[name] = OF_SHAPES[name](arguments)
            if issubclass(module_class, torch.nn.modules.conv._ConvTransposeNd) and name.endswith("_channels"):
                other = {"in_channels": "out_channels", "out_channels": "in_channels"}[name]
                options[name] = OF_SHAPES[other](arguments)
        else:
            raise LookupError(f"{module_class.__name__}: what is {name} of its constructor? (fuzz_cases.py, OF_SHAPES)")
    tensors = [t for t in sample.tensors() if t.is_floating_point()]
    if options.get("elementwise_affine") is False and arguments.get("bias") is not None:
        raise Rejected("a module has no bias without a weight")
    dims = tensors[0].dim()
    if module_class is cuda_ops.nn.Softmax2d and (dims not in (3, 4) or arguments["dim"] % dims != dims - 3):
        raise Rejected("it is softmax over channels alone")
    if "affine" in options:
        pair = ("bn_weight", "bn_bias") if "bn_weight" in arguments else ("weight", "bias")
        if len({arguments[name] is None for name in pair}) == 2:
            raise Rejected("a module has both or neither")
    with torch.random.fork_rng(devices=[]):  # its first weights: the call draws what its function's does
        module = constructed(module_class, options).to(device=tensors[0].device, dtype=tensors[0].dtype)
    module.train(arguments.get("training", arguments.get("use_input_stats", True)))
    state, state_names = {}, set()
    for name, _ in itertools.chain(module.named_parameters(), module.named_buffers()):
        folder, _, leaf = name.rpartition(".")
        prefix = {"norm": "bn_", "out_proj": "out_proj_"}.get(folder, "")
        argument = f"{prefix}{leaf}" if f"{prefix}{leaf}" in arguments else leaf
        if argument in arguments:
            state[name] = arguments[argument]
            state_names.add(argument)
    # output_size of transposed convolutions stands for output_padding, which the constructor has.
    skipped = {"self", "output_size"}
    names = [name for name in inspect.signature(module_class.forward).parameters if name not in skipped]
    known = {*options, *names, *state_names, *FORWARD_NAMES}
    if any(isinstance(v, Tensor) and k not in known for k, v in arguments.items()):
        raise Rejected("an argument that the module has not")
    inputs = [arguments[name if name in arguments else "input"] for name in names]  # RMSNorm calls it x
    return module, state, inputs


def call_module(module_class, spec, sample):
    module, state, inputs = module_of(module_class, sample, spec)
    if hasattr(module, "_check_input_dim"):
        try:
            module._check_input_dim(inputs[0])
        except ValueError as error:  # BatchNorm1d of images
            raise Rejected from error
    unbatched = getattr(module, "_get_no_batch_dim", lambda: None)()
    if inputs[0].dim() == unbatched:
        raise Rejected("one image of channels, to its function images without channels")
    outputs = torch.func.functional_call(module, state, tuple(inputs))
    # As the specification of MultiheadAttention's function does.
    return outputs[0] if isinstance(outputs, tuple) and outputs[1] is None else outputs


# Optimizers


def optimizer_run(optimizer_class):
    """An optimizer as a function of the parameters and of their gradients in each step: what becomes of the parameters
    and of the optimizer's state."""

    def run(*tensors, steps=1, missing=(), **options):
        count = len(tensors) // (steps + 1)  # as in parameters_of
        parameters = [torch.nn.Parameter(copied(t)) for t in tensors[:count]]
        optimizer = optimizer_class(parameters, **options)
        for step in range(steps):
            for i, parameter in enumerate(parameters):
                grad = tensors[count * (step + 1) + i]
                parameter.grad = None if (step, i) in missing else grad
            optimizer.step()
        # A step's number is float32 on both sides, whatever the parameters are.
        state = [v.to(p) for p in parameters for v in optimizer.state[p].values() if isinstance(v, Tensor)]
        return (*(p.detach() for p in parameters), *state)

    return run


def optimizer_options(optimizer_class):
    """Its options and what each may be, by the type of its default."""
    numbers, flags = [], []
    for name, parameter in inspect.signature(optimizer_class.__init__).parameters.items():
        if name in ("self", "params", "foreach", "fused", "differentiable", "capturable"):
            continue
        (flags if isinstance(parameter.default, bool) else numbers).append(name)
    return numbers, flags


def parameters_of(sample):
    if sample.kwargs["steps"] < 0:
        raise Rejected("a number of steps below 0")
    return sample.args[: len(sample.args) // (sample.kwargs["steps"] + 1)]


def buffers_of(sample):
    return [t for t in sample.tensors() if not t.requires_grad]


SHAPES = [(), (0,), (1,), (3,), (33,), (5, 7), (2047,), (2049,), (4, 3, 2, 5), (2, 0, 3), (5000,)]


def optimizer_spec(name):
    ours, native = getattr(cuda_ops.optim, name), getattr(torch.optim, name)
    numbers, flags = optimizer_options(ours)

    def samples(make):
        # One sample: which options and how many tensors is drawn from the case's own seed.
        rng = random.Random(make.generator.initial_seed())
        steps, count = rng.choice([1, 2, 3]), rng.choice([1, 2, 5, 100])
        shapes = [rng.choice(SHAPES if count < 100 else SHAPES[:6]) for _ in range(count)]
        options = {key: rng.choice([0.0, 0.1, 0.5, 0.9]) for key in numbers if rng.random() < 0.6}
        options |= {key: rng.random() < 0.5 for key in flags}
        missing = [(step, i) for step in range(steps) for i in range(count) if rng.random() < 0.1]
        tensors = [make(*shape, requires_grad=False) for _ in range(steps + 1) for shape in shapes]
        yield Sample(tuple(tensors), {"steps": steps, "missing": missing, **options}, f"{count} parameters")

    return OpSpec(f"optim.{name}", optimizer_run(ours), optimizer_run(native), samples, lambda make: ())


SPECS = {spec.name: spec for spec in load_specs()}


OPTIMIZERS = [name for name in cuda_ops.optim.__all__ if name != "Muon"]
"""Muon's iteration multiplies what bfloat16 rounds: tests/ops/test_muon.py compares whole steps by their norm."""


def targets() -> dict[str, Target]:
    found = {name: Target(name, SPECS[name], SPECS[name].function) for name in cuda_ops.functional.__all__}
    homes = {plain_function(spec).__module__: spec for spec in SPECS.values()}
    for name in cuda_ops.nn.__all__:
        module = getattr(cuda_ops.nn, name)
        if not isinstance(module, type):  # utils, which has functions of parameters
            continue
        found[f"nn.{name}"] = Target(f"nn.{name}", homes[module.__module__], module=module, writes=buffers_of)
    for name in OPTIMIZERS:
        spec = SPECS[f"optim.{name}"] = optimizer_spec(name)
        found[spec.name] = Target(spec.name, spec, spec.function, writes=parameters_of)
    return found


TARGETS = targets()
__all__ = ["TARGETS", "Case", "Rejected", "Target", "as_tuple", "call_module", "copied", "draw"]
