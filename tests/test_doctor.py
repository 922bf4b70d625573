"""python -m cuda_ops doctor: healthy here, and cause and cure where something is made to be wrong."""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cuda_ops
from cuda_ops import _kernels, _library, doctor

PACKAGE = Path(cuda_ops.__file__).parent


def run(*arguments, code=None, package_in=PACKAGE.parent, **environment):
    """A Python in a process of its own, with the package taken from a folder: (exit status, what it printed)."""
    command = ["-c", code] if code else ["-m", "cuda_ops.doctor", *arguments]
    result = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(package_in), "COLUMNS": "300", **environment},
        cwd=package_in,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.fixture
def copy(tmp_path):
    """A copy of the package to break; the libraries are links, so that it is small."""

    def link(source, destination):
        return os.symlink(source, destination) if source.endswith(".so") else shutil.copy2(source, destination)

    shutil.copytree(PACKAGE, tmp_path / "cuda_ops", copy_function=link, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def edit_build_info(copy, **changes):
    path = copy / "cuda_ops" / "_build_info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_healthy_without_a_gpu():
    status, text = run("--kernels", CUDA_VISIBLE_DEVICES="")
    assert status == 0, text
    assert "Healthy: all ops work on the CPU." in text
    assert torch.__version__ in text
    assert "CUDA is left out" in text
    assert "kernels: needs a GPU" in text or "kernels: this build has no CUDA kernels" in text


def test_an_instruction_set_that_there_is_none_of():
    status, text = run(CUDA_OPS_CPU_ISA="sse9")
    assert status == 1
    assert "CUDA_OPS_CPU_ISA: expected one of portable" in text
    assert "cure: unset it, or name one of these" in text


def test_json_covers_every_functional():
    status, text = run("--json", "--kernels")
    report = json.loads(text)
    assert (status, report["healthy"]) == (0, True), report["problems"]
    assert set(cuda_ops.functional.__all__) <= set(report["ops"])
    for op, states in report["ops"].items():
        assert all(states[f"cpu {dtype}"] == "ok" for dtype in doctor.DTYPES), (op, states)
    assert report["versions"]["built_with"]["torch"] == torch.__version__


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:_histc_cuda")  # PyTorch's, under the tests' deterministic algorithms
def test_devices_and_kernels_on_a_gpu():
    pytest.importorskip("cuda_ops._C", reason="cuda_ops._C is of another Python")
    report = doctor.examine(with_kernels=True)
    assert report["healthy"], report["problems"]
    assert all(device["runs"] for device in report["cuda"]["devices"])
    assert all(state == "ok" for states in report["ops"].values() for c, state in states.items() if "cuda" in c)
    kernels = {doctor._short_name(k["name"]): k for k in report["kernels"]}
    kernel = kernels["elementwise_kernel<square_forward<float>, float, float>"]
    assert 0 < kernel["registers"] <= 255
    assert kernel["max_threads"] >= 256
    assert 0 < kernel["occupancy"] <= 1
    assert kernel["local_bytes"] == 0


def test_every_functional_has_an_example():
    for states in doctor.check_ops(print).values():
        assert "no example" not in states.values()


def test_a_functional_without_example(monkeypatch):
    """One of a tensor alone is tried all the same; one that needs more is told."""
    monkeypatch.setattr(cuda_ops.functional, "__all__", ["cube", "hypotenuse"])
    monkeypatch.setattr(cuda_ops.functional, "cube", lambda input: input**3, raising=False)
    monkeypatch.setattr(cuda_ops.functional, "hypotenuse", lambda input, other: input, raising=False)
    table = doctor.check_ops(print)
    assert (table["cube"]["cpu float32"], table["hypotenuse"]["cpu float32"]) == ("ok", "no example")


def test_wrong_values_and_errors_are_broken(monkeypatch):
    problems = []

    def boom(input):
        raise RuntimeError("square: boom\nand more")

    monkeypatch.setattr(cuda_ops.functional, "square", boom)
    monkeypatch.setattr(cuda_ops.functional, "add2", lambda input, other: input * other)
    table = doctor.check_ops(lambda *problem: problems.append(problem))
    assert table["square"]["cpu float64"] == "square: boom"
    assert table["add2"]["cpu float32"] == "wrong values"
    assert any("add2 on cpu in float32: wrong values" in problem[0] for problem in problems)


def test_missing_library(copy):
    for library in (copy / "cuda_ops").glob("*.so"):
        library.unlink()
    status, text = run(package_in=copy)
    assert status == 1
    assert "cuda_ops' extension is not built" in text
    assert f"cure: {doctor.INSTALL}" in text
    assert "cuda_ops._C, which lists kernels, does not load (not built)" in text
    status, text = run(
        code="import torch, cuda_ops; cuda_ops.functional.square(torch.ones(1))", package_in=copy, COLUMNS="80"
    )
    assert status == 1
    assert "ImportError: cuda_ops' extension is not built" in text
    assert "pip install --no-build-isolation -e ." in text
    status, text = run(code="from cuda_ops.functional import square", package_in=copy, COLUMNS="80")
    assert status == 1
    assert "ImportError: cuda_ops' extension is not built" in text


def test_library_older_than_the_python_files(copy):
    """As after a `git pull` that brought an op, before the build."""
    with open(copy / "cuda_ops" / "ops" / "square.py", "a") as file:
        file.write('\n\n@torch.library.register_fake("cuda_ops::brand_new")\ndef _(input):\n    return input\n')
    status, text = run(package_in=copy)
    assert status == 1
    assert "older than its Python files: operator cuda_ops::brand_new does not exist" in text
    assert f"cure: {doctor.INSTALL}" in text


def test_ops_without_a_fake_are_missed_at_import_too():
    from cuda_ops._fakes import require_ops

    require_ops("sgd_step_")
    with pytest.raises(RuntimeError, match="cuda_ops::brand_new does not exist"):
        require_ops("sgd_step_", "brand_new")


def test_another_torch(copy):
    edit_build_info(copy, torch="2.3.1+cu121")
    status, text = run("--json", package_in=copy)
    report = json.loads(text)
    assert (status, report["healthy"]) == (1, False)
    causes = "\n".join(p["cause"] for p in report["problems"])
    assert f"was built with PyTorch 2.3.1+cu121 and is running with {torch.__version__}" in causes
    assert doctor.INSTALL in [p["cure"] for p in report["problems"]]
    status, text = run(code="import torch, cuda_ops; cuda_ops.functional.square(torch.ones(1))", package_in=copy)
    assert status == 1
    assert "built with PyTorch 2.3.1+cu121" in text
    assert "install torch==2.3.1" in text


def test_record_of_another_build(copy):
    edit_build_info(copy, architectures="sm_12" if _library.build_info()["cuda"] else "sm_12 sm_13")
    status, text = run(package_in=copy)
    assert status == 1
    assert "they come from different builds" in text


def test_introspection_for_another_python(copy):
    for module in (copy / "cuda_ops").glob("_C*.so"):  # none where it was built without Python's headers
        module.unlink()
    (copy / "cuda_ops" / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    status, text = run(package_in=copy, CUDA_VISIBLE_DEVICES="")
    assert status == 0
    assert "there is _C.cpython-39-x86_64-linux-gnu.so, for another Python than" in text
    assert "Healthy" in text


def test_plain_print_without_rich():
    code = "import sys; sys.modules['rich'] = sys.modules['rich.console'] = None\n"
    code += "import argparse; from cuda_ops import doctor\n"
    code += "sys.exit(doctor.main(argparse.Namespace(json=False, kernels=False)))"
    status, text = run(code=code, CUDA_VISIBLE_DEVICES="")
    assert status == 0, text
    assert "  square " in text
    assert "┃" not in text


def test_damaged_data(tmp_path, monkeypatch):
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in doctor.MNIST_MD5:
        (raw / name).write_bytes(b"short")
    (raw / "t10k-labels-idx1-ubyte.gz").unlink()
    monkeypatch.setattr(_library, "FOLDER", tmp_path / "cuda_ops")
    problems = []
    files = doctor.check_data(lambda cause, cure, broken: problems.append((cause, cure, broken)))["files"]
    assert files["train-images-idx3-ubyte.gz"] == "damaged"
    assert files["t10k-labels-idx1-ubyte.gz"] == "missing"
    ((cause, cure, broken),) = problems
    assert broken and "train-images-idx3-ubyte.gz damaged" in cause and "MNIST" in cure


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_75", (7, 5), True),
        ("sm_80", (8, 6), True),  # machine code is good for later minors of its major,
        ("sm_86", (8, 0), False),  # not for earlier ones,
        ("sm_80", (9, 0), False),  # nor for another major
        ("compute_80", (9, 0), True),  # PTX for everything later
        ("compute_90", (8, 9), False),
        ("sm_90a", (9, 0), True),  # what has an `a` for exactly one
        ("sm_90a", (9, 1), False),
        ("compute_90a", (10, 0), False),
        ("sm_100f", (10, 3), True),
        ("sm_120", (12, 1), True),
        ("nonsense", (9, 0), False),
    ],
)
def test_which_architecture_runs_where(architecture, capability, runs):
    assert doctor.runs_on(architecture, capability) == runs


@pytest.mark.skipif(not _library.has_cuda(), reason="needs a build with CUDA (CUDA_OPS_CUDA=1)")
def test_fat_binaries_are_found():
    """One for each .cu file, with the names of its kernels in it."""
    (library,) = PACKAGE.glob("_ops*.so")
    found = _kernels.fat_binaries(library)
    sources = list((PACKAGE.parent / "csrc" / "cuda").rglob("*.cu"))
    assert len(found) == len(sources)
    assert all(code.startswith(struct.pack("<I", _kernels.FATBIN_MAGIC)) for code in found)


def test_unsound_libraries_are_refused(tmp_path):
    (library,) = PACKAGE.glob("_ops*.so")
    data = library.read_bytes()
    for broken in (
        b"",
        b"\x7fELF\x02\x01",
        data[:200],  # the section table is behind the end
        data[:40] + struct.pack("<Q", 2**63) + data[48:],  # far behind it
        data[:58] + struct.pack("<H", 7) + data[60:],  # entries of another size
        data[:62] + struct.pack("<H", 0xFFFF) + data[64:],  # no such section of names
    ):
        path = tmp_path / "broken.so"
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"ELF|outside|unsound"):
            _kernels.fat_binaries(path)


def test_kernels_need_a_gpu():
    _C = pytest.importorskip("cuda_ops._C")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match=r"needs a GPU|no CUDA kernels"):
        _C.kernels(b"", 0)


def test_arguments():
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert vars(parser.parse_args([])) == {"json": False, "kernels": False}
