"""Every rung of the teaching ladders but gemm's (tests/ops/test_gemm_rungs.py): right at odd sizes in every dtype that
the ladder claims, against float64; and what a ladder is made of is there."""

import json
import re
from pathlib import Path

import pytest
import torch

from cuda_ops import _library
from cuda_ops.ladder import Ladder, Numbers, Rung, ladders, notebook

ROOT = Path(__file__).resolve().parents[2]
ALL = list(ladders().values())
RUNGS = [(ladder, rung) for ladder in ALL for rung in ladder.rungs.values()]
CUDA_RUNGS = [pair for pair in RUNGS if pair[1].device == "cuda"]
CPU_RUNGS = [pair for pair in RUNGS if pair[1].device == "cpu"]


def named(value):
    return value.name.replace(" ", "-") if isinstance(value, (Ladder, Rung)) else None


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def copies(inputs):
    """For a rung that may write into its inputs. A view that is not aligned stays one: its copy would be."""
    return tuple(t.clone() if isinstance(t, torch.Tensor) and t.storage_offset() == 0 else t for t in inputs)


def check(ladder, rung, inputs, what):
    expected = as_tuple(ladder.reference(*copies(inputs)))
    bounds = as_tuple(ladder.bound(*copies(inputs))) if ladder.bound else (0,) * len(expected)
    outputs = as_tuple(rung(*copies(inputs)))
    assert len(outputs) == len(expected), what
    for actual, wanted, bound in zip(outputs, expected, bounds, strict=True):
        assert actual.shape == wanted.shape, what
        wrong = ~((actual.double() - wanted.double()).abs() <= bound)  # and so NaN is wrong
        assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()}, the first at {wrong.nonzero()[0]}"


def dtypes_of(ladder, rung):
    return ladder.dtypes_of.get(rung.number, ladder.dtypes)


def needs_hardware(ladder, rung):
    """As build_backend/compiling.py reads it from the file's name."""
    return bool({"mma", "sm80", "sm90"} & set(ladder.source(rung.number).stem.split("_")))


def every_case(ladder, rung, device):
    """(case, dtype, inputs) of the ladder's tests that the rung is for."""
    for dtype in ladder.dtypes:
        for case in ladder.tests:
            if device == "cuda" or case.elements <= rung.largest:
                yield case, dtype, case.inputs(Numbers(device, dtype))


@pytest.mark.parametrize(("ladder", "rung"), CPU_RUNGS, ids=named)
def test_simulated_rungs(ladder, rung):
    ran = 0
    for case, dtype, inputs in every_case(ladder, rung, "cpu"):
        if rung.runs(*inputs):
            check(ladder, rung, inputs, f"{ladder.name} {rung.name} {case.name} {dtype}")
            ran += 1
    assert ran >= 3


@pytest.mark.parametrize(
    ("ladder", "number"), [(ladder, number) for ladder in ALL for number in ladder.simulated], ids=named
)
def test_simulated_kernels_have_no_races(ladder, number):
    """The first test cases, as the simulator's device runs them."""
    twin = ladder.simulated[number]
    for case in ladder.tests[:3]:
        inputs = case.inputs(Numbers("cpu", twin.dtypes[0]))
        arrays = [t.numpy() if isinstance(t, torch.Tensor) else t for t in inputs]
        report = twin.launch(twin.kernel, *arrays)[1]
        assert report.races == [], case.name


@pytest.mark.cuda
@pytest.mark.parametrize(("ladder", "rung"), CUDA_RUNGS, ids=named)
def test_cuda_rungs(ladder, rung):
    """What a rung does not take it refuses, with a reason; only Hopper's own may refuse a dtype's every case."""
    ran, reasons = 0, set()
    for case, dtype, inputs in every_case(ladder, rung, "cuda"):
        what = f"{ladder.name} {rung.name} {case.name} {dtype}"
        if why_not := rung.why_not(*inputs):
            with pytest.raises(NotImplementedError, match=re.escape(why_not)):
                rung(*inputs)
            reasons.add(why_not)
            continue
        check(ladder, rung, inputs, what)
        ran += 1
    if needs_hardware(ladder, rung) and ran == 0:
        pytest.skip(f"not on this device: {reasons}")
    assert ran >= len(dtypes_of(ladder, rung)) * len(ladder.tests) or "sm90" in ladder.source(rung.number).stem


@pytest.mark.cuda
@pytest.mark.parametrize(("ladder", "rung"), [pair for pair in CUDA_RUNGS if pair[1].repeats], ids=named)
def test_same_bits_again(ladder, rung):
    dtype = dtypes_of(ladder, rung)[0]
    inputs = max(ladder.tests, key=lambda case: case.elements).inputs(Numbers("cuda", dtype))
    if not rung.runs(*inputs):
        pytest.skip(rung.why_not(*inputs))
    first = [t.clone() for t in as_tuple(rung(*copies(inputs)))]
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, as_tuple(rung(*copies(inputs))), strict=True))


@pytest.mark.parametrize("ladder", ALL, ids=named)
def test_every_rung_has_its_file_which_tells_what_it_is_for(ladder):
    folder = ROOT / "csrc" / "cuda" / ladder.name / "ladder"
    files = sorted(folder.glob("[0-9]*.cu"))
    assert [int(path.name[:2]) for path in files] == list(range(1, len(ladder.kernels) + 1))
    for number, (name, path) in enumerate(zip(ladder.kernels, files, strict=True), 1):
        assert ladder.source(number) == path
        assert path.stem.removesuffix("_sm90") == f"{number:02}_{name.replace(' ', '_')}"
        header = re.match(r"(//[^\n]*\n)+", path.read_text())[0]
        assert header.startswith(f"// {ladder.name}, rung {number}: ")
        words = " ".join(line.removeprefix("//").strip() for line in header.splitlines())
        for word in ("Threads:", "Bound", *(["Fixes:"] if number > 1 else []), "Leaves:"):
            assert word in words, f"{path.name}: {word}"


@pytest.mark.parametrize("ladder", ALL, ids=named)
def test_notebook_is_what_the_ladder_makes_of_it(ladder):
    """Run `python -m cuda_ops.ladder.notebook` after a change."""
    committed = json.loads((ROOT / "notebooks" / f"{ladder.name}.ipynb").read_text())
    assert notebook.without_outputs(committed) == notebook.make(ladder)


@pytest.mark.parametrize("ladder", ALL, ids=named)
def test_ladder_is_whole(ladder):
    """Cases have names of their own, small ones first; references agree with PyTorch's own ways."""
    names = [case.name for case in ladder.cases]
    assert len(set(names)) == len(names)
    assert ladder.shown in names
    assert ladder.cases[0].elements <= ladder.simulated_largest
    for dtype in ladder.dtypes:
        if dtype.is_floating_point and dtype.itemsize == 2:
            continue  # not on every CPU
        inputs = ladder.cases[0].inputs(Numbers("cpu", dtype))
        for name, function in ladder.native.items():
            check(ladder, Rung(0, name, "cpu", function, lambda *_: ""), inputs, f"{name} {dtype}")


def test_numbers_are_of_the_dtype_and_the_same_again():
    for dtype in (torch.uint8, torch.int32, torch.float64):
        first, again = (Numbers("cpu", dtype).integers(100, high=200) for _ in range(2))
        assert first.dtype == dtype
        assert torch.equal(first, again)
    assert Numbers("cpu", torch.bfloat16).normal(3, 5).dtype == torch.bfloat16


def test_rungs_say_why_not():
    reduce = ladders()["reduce"].rungs
    x = torch.zeros(3)
    assert reduce["shuffles"].why_not(x) in ("takes tensors on CUDA", "this build has no CUDA kernels")
    assert reduce["simulated shared tree"].why_not(x.double()) == "does not take torch.float64"
    assert reduce["simulated shared tree"].runs(x)


def test_bad_calls():
    x = torch.zeros(3)
    with pytest.raises(RuntimeError, match="ladder_rung: expected outputs to be on CUDA, got cpu"):
        _library.ops.ladder_rung("reduce", 1, [x[:1]], [x])


@pytest.mark.cuda
def test_bad_calls_on_the_gpu():
    x = torch.zeros(4, 3, device="cuda")
    call = _library.ops.ladder_rung
    for ladder, rung, outputs, inputs, message in [
        ("nothing", 1, [x[0, :1]], [x], "there is no such ladder"),
        ("reduce", 99, [x[0, :1]], [x], "the ladder has no rung of that number"),
        ("reduce", 2**40, [x[0, :1]], [x], "the ladder has no rung of that number"),
        ("reduce", 2, [x[0, :2]], [x], "one output, of one element"),
        ("reduce", 2, [x[0, :1]], [x.half()], "takes float32 and float64"),
        ("reduce", 2, [x[0, :1].double()], [x], "of one dtype"),
        ("transpose", 2, [x], [x], "of the two exchanged"),
        ("transpose", 2, [x.T.contiguous().half()], [x], "of one dtype"),
        ("softmax", 3, [x[:3]], [x], "one output of its shape"),
        ("softmax", 3, [x], [x.double()], "takes float32"),
        ("layer_norm", 2, [x, x, x[0], x[0]], [x, x[0], x[0], x], "and eps"),
        ("adamw", 2, [x, x], [x], "three outputs for each input"),
        ("histogram", 2, [torch.zeros(256, device="cuda")], [x.int()], "256 elements, int32"),
        ("histogram", 2, [torch.zeros(256, device="cuda").int()], [x], "takes uint8 and int32"),
        ("attention", 2, [x], [x, x, x], "and whether it is causal"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            call(ladder, rung, outputs, inputs)
    for rung, outputs, scalars, message in [
        (2, [x, x, x[0], x[0, :2]], [1e-5], "gradients of its columns"),
        (2, [x, x, x[0], x[0].double()], [1e-5], "takes float32"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            call("layer_norm", rung, outputs, [x, x[0], x[0], x], scalars)
    q, k, wide = (torch.zeros(2, 3, n, d, device="cuda") for n, d in ((5, 64), (7, 64), (5, 96)))
    for rung, output, inputs, message in [
        (1, q, [q[0], q, q], "have four dimensions; output has query's shape"),
        (2, k, [q, k, k], "output has query's shape"),
        (3, q, [q, k, q], "value key's"),
        (3, q[:1], [q[:1], k, k], "the same batch, heads and head_dim"),
        (3, wide, [wide, wide, wide], "a head_dim of 64 and of 128"),
        (3, q, [q, k, k.half()], "takes float32 and bfloat16, of one dtype"),
        (3, q.double(), [q.double(), k.double(), k.double()], "takes float32 and bfloat16"),
        (4, q, [q, k, k], "takes bfloat16"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            call("attention", rung, [output], inputs, [0.0])
    for outputs, message in [([x, x, x[0]], "of one size"), ([x, x, x.double()], "takes float32")]:
        with pytest.raises(NotImplementedError, match=message):
            call("adamw", 2, outputs, [x], [0.0] * 6)
    with pytest.raises(RuntimeError, match="ladder_rung: expected inputs to be contiguous"):
        call("reduce", 2, [x[0, :1]], [x.T])
    with pytest.raises(RuntimeError, match="ladder_rung: expected inputs to be on the device of outputs"):
        call("reduce", 2, [x[0, :1]], [x.cpu()])
