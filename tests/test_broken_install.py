"""Installs that are broken: `import cuda_ops` works, the first use tells why it cannot be used, and `doctor` runs with
whatever is left and names cause and cure."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cuda_ops
from cuda_ops import _library, doctor

PACKAGE = Path(cuda_ops.__file__).parent
# The first use, then the command in the same process.
USE = """
import sys
import cuda_ops
for use in (lambda: cuda_ops.functional.relu, lambda: cuda_ops.nn.ReLU(), lambda: cuda_ops.optim.SGD):
    try:
        use()
        print("works")
    except ImportError as error:
        print(f"first use: {error}")
from cuda_ops.__main__ import main
sys.exit(main(["doctor"]))
"""


@pytest.fixture
def package(tmp_path):
    """A copy of the package to break."""
    shutil.copytree(PACKAGE, tmp_path / "cuda_ops", ignore=shutil.ignore_patterns("__pycache__", "_C*.so"))
    return tmp_path / "cuda_ops"


def run(package, *arguments):
    """(exit status, what it printed) of a Python that takes the package from its folder."""
    result = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(package.parent), "COLUMNS": "300", "CUDA_VISIBLE_DEVICES": ""},
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return result.returncode, result.stdout + result.stderr


def library(package):
    (path,) = package.glob("_ops*.so")
    return path


def record(content):
    return lambda package: (package / "_build_info.json").write_bytes(content)


def changed_record(*left_out, **changes):
    """The record with other values, or without some."""

    def change(package):
        path = package / "_build_info.json"
        info = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({name: value for name, value in info.items() if name not in left_out}))

    return change


def foreign_library(content):
    """Something else under the library's name, with a record that fits."""

    def replace(package):
        library(package).write_bytes(content)
        digest = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        changed_record(library=digest)(package)

    return replace


def truncated(share):
    def cut(package):
        path = library(package)
        os.truncate(path, int(path.stat().st_size * share))

    return cut


WRITTEN = "_build_info.json is damaged"
BROKEN = {
    "library missing": (lambda package: library(package).unlink(), "extension is not built: there is no _ops*.so"),
    "library empty": (truncated(0), "has 0 bytes, and"),
    "library truncated": (truncated(0.6), "extension is damaged, or of another build"),
    "library of text": (foreign_library(b"version https://example.org/lfs\n"), "extension does not load: "),
    "record missing": (lambda package: (package / "_build_info.json").unlink(), "_build_info.json is missing"),
    "record cut": (record(b'{"torch": "2.'), f"{WRITTEN}: it is no JSON"),
    "record of bytes": (record(b"\xff\xfe"), f"{WRITTEN}: it is no JSON"),
    "record is deep": (record(b"[" * 100_000), f"{WRITTEN}: it is no JSON"),
    "record is a list": (record(b"[]"), f"{WRITTEN}: expected an object, got a list"),
    "record without torch": (changed_record("torch"), "_build_info.json is damaged or of another version: it lacks"),
    "record without cuda": (changed_record("cuda"), "it lacks 'cuda'"),
    "record of numbers": (changed_record(torch=2), f"{WRITTEN}: 'torch' is 2"),
    "record without size": (changed_record(library={}), f"{WRITTEN}: it tells neither size nor digest"),
    "another PyTorch": (changed_record(torch="2.3.1"), "was built with PyTorch 2.3.1 and is running with"),
    "another CUDA": (changed_record(cuda="9.2"), "was built for CUDA 9.2 and is running with a PyTorch of"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_doctor_names_cause_and_cure(case, package):
    spoil, message = BROKEN[case]
    spoil(package)
    status, text = run(package, "-c", USE)
    assert status == 1, text
    assert "Traceback" not in text
    uses = [line for line in text.splitlines() if line.startswith(("first use: ", "works"))]
    assert len(uses) == 3
    assert all(message in line and "pip install --no-build-isolation -e ." in line for line in uses), text
    broken = text[text.index("Broken:") :]
    assert message in broken and f"cure: {doctor.INSTALL}" in broken
    assert "1 thing(s) broken" in text


def test_a_truncated_library_ends_no_process(package):
    """Loading it does: the dynamic linker touches pages behind the end."""
    truncated(0.6)(package)
    load = f"import torch; torch.ops.load_library({str(library(package))!r})"
    assert run(package, "-c", load)[0] != 0
    status, text = run(package, "-m", "cuda_ops", "doctor")
    assert (status, "Traceback" in text) == (1, False)
    assert "extension is damaged, or of another build" in text


def test_a_byte_that_has_changed_is_found_by_doctor(package):
    with library(package).open("r+b") as file:  # the last section header, which loading does without
        file.seek(-8, os.SEEK_END)
        last = file.read()
        file.seek(-8, os.SEEK_END)
        file.write(bytes(byte ^ 0xFF for byte in last))
    status, text = run(package, "-m", "cuda_ops", "doctor")
    assert status == 1
    assert "is damaged or was changed: its SHA-256 is not that of the build" in text
    assert "ops, forward and backward" in text


def test_the_record_is_that_of_the_library():
    content = _library.library_path().read_bytes()
    assert _library.build_info()["library"] == {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def test_without_pytorch_or_any_package(package):
    status, text = run(package, "-S", "-c", USE)
    assert status == 1, text
    assert "Traceback" not in text
    assert text.count("first use: cuda_ops needs PyTorch, and `import torch` fails: No module named 'torch'") == 3
    assert "cure: pip install torch" in text
    status, text = run(package, "-S", "-m", "cuda_ops", "mnist")
    assert status == 2
    assert text.startswith("python -m cuda_ops mnist: error: cuda_ops needs PyTorch") and text.count("\n") == 1
    status, text = run(package, "-S", "-c", "import cuda_ops; cuda_ops.training")
    assert "ImportError: cuda_ops needs PyTorch" in text


def test_a_pytorch_that_does_not_load(package):
    (package.parent / "torch.py").write_text("raise OSError('libcudart.so.99: cannot open shared object file')\n")
    status, text = run(package, "-c", USE)
    assert status == 1
    assert "Traceback" not in text
    assert text.count("`import torch` fails: libcudart.so.99: cannot open shared object file") == 4


def test_an_error_of_the_python_files_is_told_as_it_is(package):
    """Not as a library that is too old."""
    with open(package / "functional.py", "a") as file:
        file.write('raise RuntimeError("a mistake of mine")\n')
    status, text = run(package, "-c", "import cuda_ops")
    assert status == 1
    assert "RuntimeError: a mistake of mine" in text and "functional.py" in text
    assert "older" not in text


@pytest.mark.parametrize(
    "line",
    ["torch.library.register_fake('cuda_ops::brand_new')(abs)", "torch.ops.cuda_ops.brand_new"],
    ids=["fake", "look"],
)
def test_a_library_that_lacks_an_op_is_told(line, package):
    with open(package / "ops" / "square.py", "a") as file:
        file.write(f"\n\n{line}\n")
    status, text = run(package, "-c", USE)
    assert status == 1
    assert text.count("extension is older than its Python files") == 4
    assert "brand_new" in text
    status, text = run(package, "-m", "cuda_ops", "race", "resnet18", "--device", "cpu")
    assert status == 2
    assert "extension is older than its Python files" in text and text.count("\n") == 1
