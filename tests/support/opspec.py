"""What a specification of an op is made of, and the judge that all tests share.

tests/specs/<op>.py holds one `SPEC = OpSpec(...)`; tests/test_*.py each hold one property and run it over all of them.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Largest ‖actual - expected‖ / ‖expected‖ by dtype, where a specification names no other.
RELATIVE_NORM = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
# Largest |actual_i - expected_i|, as a multiple of RELATIVE_NORM times (|expected_i| + rms(expected)).
ELEMENT_FACTOR = 20


@dataclass
class Sample:
    """One call of an op: functional(*args, **kwargs). Floating tensors in args and kwargs may be differentiated if
    they require grad; tensors of indices and the like never do."""

    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def map(self, function) -> "Sample":
        """The sample with `function` applied to each tensor."""

        def walk(value):
            return function(value) if isinstance(value, Tensor) else value

        return Sample(tuple(walk(a) for a in self.args), {k: walk(v) for k, v in self.kwargs.items()}, self.name)

    def tensors(self) -> list[Tensor]:
        return [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor)]

    def differentiable(self) -> list[Tensor]:
        return [t for t in self.tensors() if t.requires_grad]


class Make:
    """Makes a sample's tensors: the same values on every call with the same seed, whatever the device and dtype."""

    def __init__(self, device="cpu", dtype=torch.float32, requires_grad=False, seed=0):
        self.device, self.dtype, self.requires_grad = torch.device(device), dtype, requires_grad
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, low=-2.0, high=2.0, requires_grad=None) -> Tensor:
        """Uniform in [low, high); it requires grad if the sample's tensors do, unless told otherwise."""
        values = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
        values = values.to(self.dtype).to(self.device)
        return values.requires_grad_(self.requires_grad if requires_grad is None else requires_grad)

    def distinct(self, *shape, requires_grad=None) -> Tensor:
        """Values that are all different and at least 1/64 apart, for ops with a kink or a maximum (numeric
        differentiation must not step over it). At most 256 different values in fp16 and bf16."""
        count = 1
        for size in shape:
            count *= size
        values = (torch.randperm(count, generator=self.generator).to(torch.float64) - count // 2 + 0.5) / 32
        values = values.reshape(shape).to(self.dtype).to(self.device)
        return values.requires_grad_(self.requires_grad if requires_grad is None else requires_grad)

    def integers(self, *shape, low=0, high) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)


@dataclass
class Bad:
    """A call that must be refused: `call(device)` raises `error` with a message that matches `match`."""

    name: str
    call: Callable[[str], Any]
    error: type[Exception]
    match: str


def bad(name, call, match, error=RuntimeError) -> Bad:
    """A call that is given torch.ones on the device, and what it raises."""
    return Bad(
        name, lambda device: call(lambda *shape, **kwargs: torch.ones(shape, device=device, **kwargs)), error, match
    )


@dataclass
class OpSpec:
    name: str
    function: Callable
    """cuda_ops.functional.<name>, returning a tensor or a tuple of tensors."""
    reference: Callable
    """PyTorch's own, with the same arguments."""
    samples: Callable[[Make], Iterable[Sample]]
    """Sizes with reasons (1, 31, 33, 1023, 1025), every argument; small enough for a CPU test in milliseconds."""
    small_samples: Callable[[Make], Iterable[Sample]]
    """A few samples of some ten elements each, for gradcheck, gradgradcheck and compile."""
    empty_samples: Callable[[Make], Iterable[Sample]] = lambda make: ()
    op_samples: Callable[[Make], Iterable[tuple[Any, tuple]]] = lambda make: ()
    """(torch.ops.cuda_ops.<op>, its arguments) for torch.library.opcheck: every registered op of this stem."""
    kernel_samples: Callable[[Make], Iterable[Sample]] | None = None
    """What kernel_cases.py runs instead of samples and small_samples, where these are too many."""
    bad: list[Bad] = field(default_factory=list)
    gradgrad: bool = False
    relative_norm: dict[torch.dtype, float] = field(default_factory=dict)
    """Overrides RELATIVE_NORM, with the reason in a comment."""
    expanded_dim: int = 0
    """The dimension that the layout 'expanded' repeats; another one where equal values along the first are degenerate
    (with a reason in a comment)."""
    nonfinite: bool = True
    """Whether NaN and Inf in the first argument travel as in PyTorch (values compared with equal_nan)."""
    nan_gradient: bool = True
    """Whether PyTorch has one gradient where the first argument is NaN. Of an elementwise function of several pieces it
    has two: its vectors compare otherwise than the scalars that are left over."""
    nonfinite_gradient: bool = True
    """Whether the gradients travel so too; of a product PyTorch's depend on the order of the factors."""
    cancels: bool = False
    """Whether gradients are differences of products of the operands, of which nothing but their rounding may be left:
    (v - E[v]) of a softmax that is all but one-hot, x - E[x] of equal x."""
    random: bool = False
    """Whether the op draws random numbers: then the tests that compare values leave it to tests of its own."""
    exact_sums: bool = False
    """Whether samples are of whole numbers, whose sums a kernel must not round where a later step decides by them:
    then float32 convolutions leave Winograd's transforms out."""
    waits: bool = False
    """Whether the host waits for values, on which the sizes of results depend: no graph takes such a call."""

    own_sizes: bool = False
    """Whether values of some arguments, such as where sequences begin, follow from the sizes of others: then the fuzzer
    leaves sizes as they are."""

    stem: str = ""
    """The op's own name in its messages, where it is not that of the functional."""

    def environment(self) -> dict[str, str]:
        """What calls of it are made in, in tests that compare values."""
        return {"CUDA_OPS_CONV2D_WINOGRAD": "0"} if self.exact_sums else {}

    def __repr__(self):
        return self.name

    def tolerance(self, dtype):
        return self.relative_norm.get(dtype, RELATIVE_NORM[dtype])


def load_specs() -> list[OpSpec]:
    import specs

    names = sorted(module.name for module in pkgutil.iter_modules(specs.__path__))
    return [importlib.import_module(f"specs.{name}").SPEC for name in names]


def as_tuple(value) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def upcast(sample: Sample) -> Sample:
    """The sample in float64 on the CPU: what the reference computes from. Values are those of the sample's own dtype,
    so that rounding of the inputs is no part of the error."""

    def convert(tensor):
        copy = tensor.detach().cpu()
        copy = copy.to(torch.float64) if copy.is_floating_point() else copy
        # Contiguous: layouts are a matter of the op under test, and some native backward passes refuse a few.
        return copy.clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)

    return sample.map(convert)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str = "output"):
    """`actual` against `expected` (float64): same shape, same non-finite elements, close in norm and elementwise."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not actual.is_floating_point():
        assert torch.equal(actual.cpu(), expected.cpu()), f"{what}: differs"
        return
    # An expected value beyond the range of the actual dtype is an infinity there.
    expected = expected.detach().cpu().to(actual.dtype).to(torch.float64)
    actual = actual.detach().cpu().to(torch.float64)
    finite = expected.isfinite()
    if not finite.all():
        same = torch.equal(actual[~finite].nan_to_num(nan=0.5), expected[~finite].nan_to_num(nan=0.5))
        assert same, f"{what}: non-finite values differ from the expected ones"
        actual, expected = actual[finite], expected[finite]
    assert actual.isfinite().all(), f"{what}: {(~actual.isfinite()).sum()} values are not finite"
    if expected.numel() == 0:
        return
    difference = actual - expected
    norm = expected.norm()
    relative = (difference.norm() / norm if norm > 0 else difference.norm()).item()
    # Written as "not <=", so that a NaN fails.
    assert relative <= tolerance, f"{what}: relative norm of the error {relative:.3g}, allowed {tolerance:.3g}"
    rms = norm / expected.numel() ** 0.5
    bound = ELEMENT_FACTOR * tolerance * (expected.abs() + rms)
    if not (difference.abs() <= bound).all():
        worst = (difference.abs() - bound).argmax()
        raise AssertionError(
            f"{what}: element {worst} is {actual.flatten()[worst]:.9g}, expected {expected.flatten()[worst]:.9g}"
        )


def run_with_gradients(function, sample: Sample, grad_outputs=None):
    """(outputs, gradients of the sample's differentiable tensors) for given or all-random grad_outputs."""
    outputs = as_tuple(function(*sample.args, **sample.kwargs))
    differentiable = sample.differentiable()
    grads = ()
    with_grad = [o for o in outputs if o.requires_grad]
    if differentiable and with_grad:
        grads = torch.autograd.grad(with_grad, differentiable, grad_outputs, allow_unused=True)
    return outputs, grads


def random_grad_outputs(outputs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(o.shape, generator=generator, dtype=torch.float64) * 2 - 1).to(o.dtype).to(o.device)
        for o in outputs
        if o.requires_grad
    ]
