"""What a bench_<op>.py declares: cases, and the implementations that are timed on them."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import cuda_ops

OURS, PEER = "ours", "peer "
BESIDE = ("rung ", PEER)
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "tf32": torch.float32,
    # Of a ladder.
    "uint8": torch.uint8,
    "int32": torch.int32,
}
# Outputs of the two convolutions of the MNIST CNN, by batch size.
MNIST_SHAPES = [(64, 32, 28, 28), (64, 64, 14, 14), (1024, 32, 28, 28), (1024, 64, 14, 14)]
MATRIX_SHAPES = [(8192, 768), (8192, 4096), (8192, 16384)]


class BenchError(ValueError):
    """Its message says in one line what is wrong and what to do."""


class Make:
    """Makes random tensors of the dtype and on the device of a run; floats require grad unless told otherwise.
    Integers are from 0 to 255."""

    def __init__(self, device, dtype, seed=0):
        self.device, self.dtype = torch.device(device), dtype
        self.generator = torch.Generator(device=self.device).manual_seed(seed)

    def __call__(self, *shape, requires_grad=True) -> Tensor:
        if not self.dtype.is_floating_point:
            return self.integers(*shape, high=256).to(self.dtype)
        values = torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
        return values.requires_grad_(requires_grad)

    def integers(self, *shape, high) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator, device=self.device)


@dataclass
class Implementation:
    name: str
    function: Callable
    prepare: Callable = lambda *args: args
    """Makes this implementation's arguments (another layout, an optimizer) from the case's, outside the timed part."""


@dataclass
class Case:
    name: str
    make: Callable[[Make], tuple]
    elements: tuple[int, int] = (0, 0)
    """Elements of the dtype that have to be read and written at the least, forward and backward."""
    flops: tuple[float, float] = (0, 0)
    bytes: tuple[int, int] = (0, 0)
    """Bytes beside those elements, such as indices."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Where it is worth waiting for."""


@dataclass
class Bench:
    op: str
    cases: list[Case]
    """The first one is what --quick runs."""
    native: list[Implementation]
    ours: Implementation | list[Implementation] | None = None
    """Default: cuda_ops.functional.<op>. Several, as PyTorch's are, where a layout is the caller's to choose: their
    names begin with "ours"."""
    backward: bool = True
    random: bool = False
    """Whether the op draws random numbers or works in place, so that results are not compared."""
    bends: float = 1.0
    """How many times as far as others' its gradients may differ: where rounding puts a value on the other side of
    ReLU's bend, a whole gradient is missing."""
    beside: Callable[[torch.device, torch.dtype, "Case"], list[Implementation]] | None = None
    """What else is timed with a case, and is neither ours nor PyTorch's: rungs of a ladder, peers. Names begin with
    one of BESIDE."""
    report: Callable[[list[dict], Path], None] | None = None
    """Is given all rows and the path of the CSV when it is written: for a table or a plot of its own."""

    def implementations(self) -> list[Implementation]:
        ours = self.ours
        if ours is None:
            if not hasattr(cuda_ops.functional, self.op):
                raise BenchError(f"cuda_ops.functional has no {self.op} in this build")
            ours = Implementation("ours", getattr(cuda_ops.functional, self.op))
        return [*(ours if isinstance(ours, list) else [ours]), *self.native]


def elementwise_cases(
    shapes: Iterable[tuple], streams: tuple[int, int], inputs: int = 1, extra: tuple = ()
) -> list[Case]:
    """Cases of an op of `inputs` tensors of one shape, which moves so many such tensors forward and backward."""
    return [
        Case(
            "x".join(map(str, shape)),
            lambda make, shape=shape: (*(make(*shape) for _ in range(inputs)), *extra),
            elements=(streams[0] * math.prod(shape), streams[1] * math.prod(shape)),
        )
        for shape in shapes
    ]


def reduction_cases(several: bool = True) -> list[Case]:
    """Cases of an op of a tensor and the dimensions that it reduces: all, a row's, a column's, and, if `several`, those
    of images but for the channels."""
    sizes = [((8192, 4096), 1), ((8192, 4096), 0), ((32768, 768), 1), ((32768, 768), 0), ((1 << 20,), None)]
    sizes += [((1 << 24,), None), ((1 << 28,), None), ((65536, 100), 1), ((64, 4096, 256), 1)]
    sizes += [((64, 256, 56, 56), (0, 2, 3))] if several else []
    return [
        Case(
            f"{'x'.join(map(str, shape))} along {'all' if dim is None else dim}",
            lambda make, shape=shape, dim=dim: (make(*shape), dim),
            elements=(math.prod(shape), math.prod(shape)),
            devices=("cpu", "cuda") if math.prod(shape) <= 1 << 25 else ("cuda",),
        )
        for shape, dim in sizes
    ]


def adaptive_pool_cases() -> list[Case]:
    """Cases of an op of images and the size that it gives them: planes as they are in classifiers and in blocks of
    squeeze and excitation, and windows of which a pyramid has some, divisible and not."""
    sizes = [((64, 256, 28, 28), 1), ((64, 2048, 7, 7), 1), ((64, 96, 112, 112), 1), ((4, 3, 1024, 1024), 1)]
    sizes += [((16, 512, 60, 60), n) for n in (1, 2, 3, 6)] + [((64, 256, 56, 56), 7), ((256, 512, 14, 14), 7)]
    return [
        Case(
            f"{'x'.join(map(str, shape))} to {size}x{size}",
            lambda make, shape=shape, size=size: (make(*shape), size),
            elements=(math.prod(shape) + math.prod(shape[:2]) * size**2,) * 2,
            devices=("cpu", "cuda") if math.prod(shape) <= 1 << 25 else ("cuda",),
        )
        for shape, size in sizes
    ]


def in_channels_last(input, *arguments):
    """For Implementation.prepare: images in that format."""
    images = input.detach().contiguous(memory_format=torch.channels_last)
    return images.requires_grad_(input.requires_grad), *arguments


def compiled_on_cuda(function: Callable) -> Callable:
    """For `beside`: `function` by torch.compile, on CUDA. It is compiled anew for each case, and not for any size."""

    def beside(device, dtype, case):
        # Else PyTorch would give up after eight cases, and run the function as it is.
        torch._dynamo.reset()
        return (
            [Implementation(f"{PEER}compiled", torch.compile(function, dynamic=False))] if device.type == "cuda" else []
        )

    return beside
