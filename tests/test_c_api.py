"""The C API without PyTorch: tests/c/test_<op>.c, linked with the C11 kernels alone, under the address and the
undefined-behaviour sanitizers. And: kernels know nothing of PyTorch."""

import os
import re
import subprocess

import pytest
from support.c_programs import CSRC, ROOT, compile_c


def has_header(test):
    """Whether the header that the test is about is there: the op's, or that of a part of the CPU backend."""
    stem = test.stem.removeprefix("test_")
    return (CSRC / "include" / "cuda_ops" / f"{stem}.h").exists() or any((CSRC / "cpu").rglob(f"{stem}.h"))


C_TESTS = sorted(filter(has_header, (ROOT / "tests" / "c").glob("test_*.c")))


@pytest.mark.parametrize("test", C_TESTS, ids=lambda path: path.stem)
def test_c(test, c_kernels, tmp_path):
    program = tmp_path / test.stem
    compile_c(test, *c_kernels, "-o", program, "-lm")
    result = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_halves_without_wide_vectors(c_kernels, tmp_path):
    """By integer arithmetic, as where there is no AVX2."""
    program = tmp_path / "halves"
    compile_c(ROOT / "tests" / "c" / "test_halves_cpu.c", *c_kernels, "-o", program, "-lm")
    environment = {**os.environ, "CUDA_OPS_CPU_ISA": "portable"}
    result = subprocess.run([program], capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr


def test_every_op_of_the_cpu_backend_has_a_c_test():
    headers = (CSRC / "include" / "cuda_ops").glob("*.h")
    ops = {path.stem for path in headers if "_cpu(" in path.read_text()}
    assert ops - {test.stem.removeprefix("test_") for test in C_TESTS} == set()


def test_the_checks_can_fail(c_kernels, tmp_path):
    """A wrong value, a write before or behind the array and undefined behaviour each end the program."""
    cases = {
        "expected 7": "void *a = guarded_numbers(3, 1, 0); CHECK_NEAR(a, 0, 7.0, 1e-5, CUDA_OPS_FLOAT32);",
        "nan, expected 8": "void *a = guarded_new(3, 0); CHECK_NEAR(a, 0, 8.0, 1, CUDA_OPS_FLOAT32);",
        "was written": "float *a = guarded_new(3, 0); a[1] = 1; CHECK_UNWRITTEN(a, 1, CUDA_OPS_FLOAT32);",
        "guard was overwritten": "float *a = guarded_new(3, 0); a[3] = 1; guarded_check_bytes(a, 3, 4);",
        # volatile, so that only the running program can know
        "AddressSanitizer": "char *volatile a = calloc(12, 1); return a[12];",
        "signed integer overflow": "volatile int i = 2147483647; i = i + 1;",
    }
    for message, body in cases.items():
        source, program = tmp_path / "fails.c", tmp_path / "fails"
        source.write_text(f'#include "check.h"\nint main(void) {{ {body} return 0; }}\n')
        compile_c(f"-I{ROOT / 'tests' / 'c'}", source, *c_kernels, "-o", program, "-lm")
        result = subprocess.run([program], capture_output=True, text=True, timeout=60)
        assert result.returncode != 0, message
        assert message in result.stderr


@pytest.mark.parametrize("folder", ["cpu", "cuda", "include", "apps"])
def test_kernels_know_nothing_of_pytorch(folder):
    foreign = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|caffe2|pybind11|Python\.h)\b')
    for path in sorted((CSRC / folder).rglob("*")):
        if path.suffix in {".c", ".h", ".cu", ".cuh", ".cpp"}:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                assert not foreign.match(line.strip()), f"{path.relative_to(ROOT)}:{number}: {line}"
