"""What a ladder is made of; cuda_ops/ladder/<name>.py holds one `LADDER = Ladder(...)`.

Its kernels are csrc/cuda/<name>/ladder/NN_name.cu, in the table of rungs.h there. Tests, `python -m cuda_ops bench
ladder <name>` and the notebook know ladders by these objects alone. (Matrix multiplication, the first ladder, is
of its own kind: gemm.py.)
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import _library
from . import simulator

SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "cuda"


class Numbers:
    """Makes a case's tensors, of the dtype and on the device of a test or a measurement."""

    def __init__(self, device, dtype: torch.dtype, generator: torch.Generator | None = None):
        self.device, self.dtype = torch.device(device), dtype
        self.generator = generator or torch.Generator(device=self.device).manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        wide = self.dtype if self.dtype.is_floating_point else torch.float32
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=wide).to(self.dtype)

    def integers(self, *shape: int, high: int) -> Tensor:
        made = torch.randint(0, high, shape, generator=self.generator, device=self.device, dtype=torch.int32)
        return made.to(self.dtype)


@dataclass(frozen=True)
class Case:
    """One call of the op."""

    name: str
    inputs: Callable[[Numbers], tuple[Tensor, ...]]
    elements: int
    """Elements of the dtype that have to be read and written at the least."""
    bytes: int = 0
    """Bytes beside those elements."""
    flops: float = 0
    """Operations, of an op that arithmetic bounds."""


@dataclass(frozen=True)
class Rung:
    """One way to compute it; call it with the inputs of a case."""

    number: int
    """The rung of the ladder, 1 to the top. A simulated kernel has the number of the one that it stands for."""
    name: str
    device: str
    """ "cpu" or "cuda": where its tensors have to be."""
    function: Callable
    why_not: Callable[..., str]
    """Called with the inputs: why this build or this device does not run it with them; "" where it does."""
    largest: int | None = None
    """Elements of a case (Case.elements) beyond which it is not worth waiting for."""
    repeats: bool = True
    """Whether the result is the same bits again."""

    def __call__(self, *inputs):
        return self.function(*inputs)

    def runs(self, *inputs) -> bool:
        return not self.why_not(*inputs)


@dataclass(frozen=True)
class Simulated:
    """A kernel for the simulator, which does what the rung of that number does."""

    kernel: Callable
    """Of a simulator.Thread and launch's arguments."""
    launch: Callable[..., tuple[np.ndarray | tuple[np.ndarray, ...], simulator.Report]]
    """launch(kernel, *inputs): the output, or a tuple of them, and the report, for inputs as NumPy arrays, float32 or
    integers."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)


@dataclass(frozen=True)
class Ladder:
    name: str
    """Also of the folder of its kernels."""
    formula: str
    introduction: str
    """Markdown, the notebook's first words: what the op is for, and what there is to learn from it."""
    kernels: Sequence[str]
    """The names of the CUDA rungs 1, 2, ...; the files are NN_<name with _ for spaces>.cu, or so with _sm90."""
    dtypes: tuple[torch.dtype, ...]
    arguments: Callable[..., tuple[list[Tensor], list[Tensor], list[float]]]
    """arguments(*inputs): the outputs (new, or those of the inputs that it writes in place), inputs and scalars of
    torch.ops.cuda_ops.ladder_rung."""
    reference: Callable[..., Tensor | tuple[Tensor, ...]]
    """reference(*inputs): the outputs, in float64 where they are floating, of PyTorch's own ops."""
    bound: Callable[..., Tensor | tuple[Tensor, ...]] | None
    """bound(*inputs): what an element of each output may differ by, whatever the order of additions; None: nothing."""
    tests: Sequence[Case]
    """Small, of odd sizes; those that the simulator is to run come first, and end where `simulated_largest` says."""
    cases: Sequence[Case]
    """What is measured; the first one on CPUs too, and by the simulator."""
    shown: str
    """The name of the case that the plot shows."""
    native: dict[str, Callable]
    """PyTorch's own ways, by name."""
    ours: Callable | None = None
    """The library's op for it; None where there is none: then the top rung stands for it."""
    simulated: dict[int, Simulated] = field(default_factory=dict)
    simulated_largest: int = 4096
    """Elements (Case.elements) that the simulator is asked for at the most."""
    largest: dict[int, int] = field(default_factory=dict)
    """By rung: Rung.largest, where one is slow."""
    unrepeatable: tuple[int, ...] = ()
    """Rungs whose additions come in any order."""
    in_place: bool = False
    """Whether inputs are written: results of measurements are then not compared, tests do it."""
    compiled: bool = True
    """Whether torch.compile is a peer (of the first of `native`)."""
    peers: Callable[[torch.dtype], dict[str, Callable]] = lambda dtype: {}
    """PyTorch's kernels that not every device or dtype has, by name; on CUDA."""
    yardstick: str | None = None
    """The implementation whose speed is 100 %, where it takes the case; None: a copy of as many bytes."""
    dtypes_of: dict[int, tuple[torch.dtype, ...]] = field(default_factory=dict)
    """By rung: the dtypes that it takes, where these are not all."""
    models: Sequence[Callable[[], None]] = ()
    """Small models of access patterns, functions that print; the notebook shows them, docstrings first."""

    @functools.cached_property
    def rungs(self) -> dict[str, Rung]:
        """All of them by name, from the bottom up; a simulated kernel before the one that it stands for."""
        found = []
        for number, name in enumerate(self.kernels, 1):
            if number in self.simulated:
                found.append(self._simulated_rung(number, name))
            found.append(
                Rung(
                    number,
                    name,
                    "cuda",
                    functools.partial(self._run, number),
                    functools.partial(self._why_not, number),
                    self.largest.get(number),
                    number not in self.unrepeatable,
                )
            )
        return {rung.name: rung for rung in found}

    @property
    def against(self) -> str:
        """What 100 % is, in words."""
        return f"{self.yardstick.removeprefix('peer ')}'s speed" if self.yardstick else "a copy's bytes per second"

    def shares(self, rows: list[dict]) -> dict[tuple[str, str, str], float | None]:
        """Of a CSV's rows of one clock, by (case, dtype, implementation): % of that; None where the yardstick has not
        been measured."""
        found = {(row["case"], row["dtype"], row["implementation"]): row for row in rows}
        if self.yardstick is None:
            return {key: float(row["percent_of_ceiling"]) for key, row in found.items()}
        yards = {key: found.get((*key[:2], self.yardstick)) for key in found}
        return {
            key: 100 * float(yards[key]["median_us"]) / float(row["median_us"]) if yards[key] else None
            for key, row in found.items()
        }

    def source(self, number: int) -> Path:
        """The file of a rung's kernel, in the repository."""
        (path,) = (SOURCES / self.name / "ladder").glob(f"{number:02}_*.cu")
        return path

    def _run(self, number, *inputs):
        outputs, others, scalars = self.arguments(*inputs)
        _library.ops.ladder_rung(self.name, number, outputs, others, scalars)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _why_not(self, number, *inputs) -> str:
        tensors = [t for t in inputs if isinstance(t, Tensor)]
        if _library.problem is not None:
            return _library.problem
        if not _library.has_cuda():
            return "this build has no CUDA kernels"
        if any(t.device.type != "cuda" for t in tensors):
            return "takes tensors on CUDA"
        if tensors[0].dtype not in self.dtypes:
            return f"does not take {tensors[0].dtype}"
        outputs, others, scalars = self.arguments(*inputs)
        return _library.ops.ladder_refusal(self.name, number, outputs, others, scalars)

    def _simulated_rung(self, number, name) -> Rung:
        twin = self.simulated[number]

        def run(*inputs):
            arrays = [t.numpy() if isinstance(t, Tensor) else t for t in inputs]
            outputs = twin.launch(twin.kernel, *arrays)[0]
            return tuple(map(torch.from_numpy, outputs)) if isinstance(outputs, tuple) else torch.from_numpy(outputs)

        def why_not(*inputs):
            if any(t.device.type != "cpu" for t in inputs if isinstance(t, Tensor)):
                return "takes tensors on the CPU"
            return "" if inputs[0].dtype in twin.dtypes else f"does not take {inputs[0].dtype}"

        return Rung(number, f"simulated {name}", "cpu", run, why_not, self.simulated_largest)


@functools.cache
def ladders() -> dict[str, Ladder]:
    """All of them but gemm's, by name."""
    package = importlib.import_module(__package__)
    modules = [
        importlib.import_module(f"{__package__}.{found.name}")
        for found in pkgutil.iter_modules(package.__path__)
        if not found.name.startswith("_") and found.name != "notebook"
    ]
    return {module.LADDER.name: module.LADDER for module in modules if hasattr(module, "LADDER")}
