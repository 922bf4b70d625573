"""The defects that benchmarks/cuda_mutants.py puts into CUDA kernels: that each is still one, and what the tool makes
of objects and of pytest's words. Whether the tests see them takes a GPU."""

import importlib.util
import struct
import sys
from pathlib import Path

import pytest

import cuda_ops

sys.path.insert(0, str(Path(cuda_ops.__file__).parent.parent / "benchmarks"))

import cuda_mutants
from cuda_defects import DEFECTS, SELECTIONS

ROOT = cuda_mutants.ROOT
CUDA = ROOT / "csrc" / "cuda"


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: str(defect.number))
def test_a_defect_changes_one_place_of_what_is_compiled(defect):
    text = (CUDA / defect.file).read_text()
    assert text.count(defect.old) == 1
    assert cuda_mutants.mutated(defect, text) != text
    for source in defect.sources:
        assert source.endswith(".cu")
        assert (CUDA / defect.file).resolve() in cuda_mutants.with_includes((CUDA / source).resolve())


def test_numbers_are_used_once_and_selections_at_all():
    numbers = [defect.number for defect in DEFECTS]
    assert len(set(numbers)) == len(numbers)
    assert {defect.tests for defect in DEFECTS} == set(SELECTIONS)
    for files, _ in SELECTIONS.values():
        for file in files:
            assert (ROOT / "tests" / file).is_file()


def test_a_text_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match=r"expected its text once in concat\.cu, got 0"):
        cuda_mutants.mutated(next(defect for defect in DEFECTS if defect.file == "concat.cu"), "")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["build", "--only", "99999"], "--only 99999: there are "),
        (["build", "--jobs", "0"], "--jobs 0: expected a number above 0"),
        (["run", "--workers", "0"], "--workers 0: expected a number above 0"),
        (["run", "--limit", "-1"], "--limit -1.0: expected a number above 0"),
        (["run", "--seconds", "nan"], "--seconds nan: expected a number above 0"),
        (["run", "--pack", "nowhere.zip"], "--pack nowhere.zip is not there, or is no zip file"),
        (["run", "--pack", __file__], f"--pack {__file__} is not there, or is no zip file"),
    ],
)
def test_options_that_make_no_sense_are_named(arguments, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cuda_mutants.py", *arguments])
    monkeypatch.setattr(cuda_mutants, "build", None)
    monkeypatch.setattr(cuda_mutants, "run", None)
    with pytest.raises(SystemExit, match=f"^cuda_mutants: {message}"):
        cuda_mutants.main()


def entry(kind, architecture, payload):
    header = struct.pack("<HHIQ", kind, 257, 64, len(payload)) + bytes(12) + struct.pack("<I", architecture) + bytes(32)
    return header + payload


def fat_binary(*entries):
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)


def test_machine_code_for_one_architecture_is_kept():
    code, ptx, older = entry(2, 90, b"sass" * 4), entry(1, 90, b"ptx." * 2), entry(2, 80, b"8.0 " * 8)
    assert cuda_mutants.fat_binary_for(fat_binary(older, ptx, code)) == fat_binary(code)
    both = fat_binary(older) + fat_binary(code, code)
    assert cuda_mutants.fat_binary_for(both) == fat_binary() + fat_binary(code, code)
    with pytest.raises(ValueError, match="expected a fat binary"):
        cuda_mutants.fat_binary_for(b"elf!" + bytes(60))


def test_commands_are_those_of_the_build():
    spec = importlib.util.spec_from_file_location("compiling", ROOT / "build_backend" / "compiling.py")
    compiling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiling)
    text = compiling.RULE.format(folder="build/temp")
    text += "build build/temp/a.cu.o: compile a.cu\n  compiler = nvcc '-DA=\"b c\"' -O3\n"
    assert cuda_mutants.commands_of_build(text) == {"build/temp/a.cu.o": ("a.cu", ["nvcc", '-DA="b c"', "-O3"])}


def test_commands_for_one_architecture():
    flags = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_80,code=sm_90", "-Werror=all-warnings"]
    flags += ["-gencode=arch=compute_80,code=compute_80", "--threads=2"]
    assert cuda_mutants.for_one_architecture(["nvcc", *flags]) == ["nvcc", "-gencode=arch=compute_80,code=sm_90"]
    hopper = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a"]
    assert cuda_mutants.for_one_architecture(hopper) == hopper
    with pytest.raises(SystemExit, match=r"expected a build for 9\.0"):
        cuda_mutants.for_one_architecture(["nvcc", "-gencode=arch=compute_80,code=sm_80"])


OUTPUT = """..F
FAILED tests/ops/test_concat.py::test_many[cuda-float32] - AssertionError: a - b
1 failed, 12 passed, 3 skipped, 40 deselected in 3.21s
"""


def test_what_pytest_says():
    assert cuda_mutants.failed_test(OUTPUT) == "tests/ops/test_concat.py::test_many[cuda-float32]"
    assert cuda_mutants.passed(OUTPUT) == 12
    assert cuda_mutants.failed_test("12 passed in 3.21s") is None
    assert cuda_mutants.passed("2 skipped in 0.10s") == 0


@pytest.mark.parametrize(
    ("runs", "result"),
    [
        ([(0, "5 passed in 1s")], "not caught"),
        ([(0, "5 skipped in 1s")], "not judged: pytest's exit status was 0, 0 passed"),
        ([(4, "ERROR: no such file")], "not judged: pytest's exit status was 4, 0 passed"),
        ([(None, "..")], "timed out"),
        ([(-11, "..")], "caught: the process ended by signal 11"),
        ([(1, "FAILED tests/a.py::b\n"), (0, "1 passed")], "caught"),
        # The sound library fails there too: the others decide.
        ([(1, "FAILED tests/a.py::b\n"), (1, "FAILED tests/a.py::b\n"), (0, "9 passed")], "not caught"),
        ([(1, "FAILED tests/a.py::b\n"), (1, ""), (1, "FAILED tests/a.py::c\n"), (0, "1 passed")], "caught"),
    ],
)
def test_a_defect_is_caught_by_a_test_that_passes_without_it(runs, result, monkeypatch):
    calls, remaining = [], iter(runs)

    def pytest_stub(tree, arguments, limit):
        calls.append((tree, arguments))
        return next(remaining)

    monkeypatch.setattr(cuda_mutants, "pytest", pytest_stub)
    found = cuda_mutants.judge(DEFECTS[0], Path("mutant"), Path("sound"), "cuda", 10.0)
    assert found["result"] == result
    assert len(calls) == len(runs)
    assert calls[0] == (Path("mutant"), cuda_mutants.tests_of(DEFECTS[0], "cuda"))
    if len(calls) > 2:
        assert calls[1] == (Path("sound"), ["tests/a.py::b"])
        assert calls[2][1][-1] == "--deselect=tests/a.py::b"
        assert found["fail_anyway"] == ["tests/a.py::b"]
