"""CONTRIBUTING.md's "Add an op in an hour", carried out to the letter in a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECTION = "Add an op in an hour"
# The copy holds the template op alone, so that it builds in seconds: the backbone, and whatever is called square.
BACKBONE = [
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "build_backend/backend.py",
    "build_backend/compiling.py",
    "build_backend/toolkit.py",
    "csrc/include/cuda_ops/core.h",
    "csrc/include/cuda_ops/cpu_isa.h",
    "csrc/include/cuda_ops/halves_cpu.h",
    "csrc/include/cuda_ops/round_list.h",
    "csrc/cpu/common/common.h",
    "csrc/cpu/common/half.h",
    "csrc/cpu/core.c",
    "csrc/cpu/cpu_isa.c",
    "csrc/cpu/halves.c",
    "csrc/cpu/common/undef_real.h",
    "csrc/cuda/common/common.cuh",
    "csrc/cuda/common/elementwise.cuh",
    "csrc/torch/autograd.cpp",
    "csrc/torch/autograd.h",
    "csrc/torch/checks.h",
    "csrc/torch/derivatives.cpp",
    "csrc/torch/derivatives.h",
    "csrc/torch/empty.h",
    "csrc/torch/halves.h",
    "csrc/torch/library.cpp",
    "csrc/torch/nlohmann/json.hpp",
    "csrc/torch/rounded_parameters.cpp",
    "csrc/torch/rounded_parameters.h",
    "csrc/torch/vmap.cpp",
    "csrc/torch/vmap.h",
    "csrc/python/bind.cpp",
    "csrc/python/bind.h",
    "csrc/python/module.cpp",
    "cuda_ops/__init__.py",
    "cuda_ops/_arguments.py",
    "cuda_ops/_autograd.py",
    "cuda_ops/_fakes.py",
    "cuda_ops/_flops.py",
    "cuda_ops/_interrupt.py",
    "cuda_ops/_library.py",
    "cuda_ops/_operators.py",
    "cuda_ops/ops/__init__.py",
    "tests/conftest.py",
    "tests/support/__init__.py",
    "tests/support/c_programs.py",
    "tests/support/devices.py",
    "tests/support/opspec.py",
    "tests/specs/__init__.py",
    "tests/c/check.h",
    "tests/test_values.py",
    "tests/test_gradients.py",
    "tests/test_integration.py",
    "tests/test_c_api.py",
]
FUNCTIONAL = """from .ops.square import square

__all__ = [
    "square",
]
"""


def blocks():
    """(language, text) of each code block of the section, in order."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split(f"\n## {SECTION}\n")[1].split("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture
def copy(tmp_path):
    squares = [
        path
        for path in ROOT.glob("[!.]*/**/*square*")
        if path.is_file() and "build" not in path.relative_to(ROOT).parts
    ]
    named = [str(path.relative_to(ROOT)) for path in squares if path.suffix in {".h", ".c", ".cu", ".cpp", ".py"}]
    for name in [*BACKBONE, *named]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "cuda_ops" / "functional.py").write_text(FUNCTIONAL)
    for module in ("nn", "optim"):
        (tmp_path / "cuda_ops" / f"{module}.py").write_text("__all__ = []\n")
    return tmp_path


def test_add_an_op_in_an_hour(copy):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(copy),
        "CUDA_OPS_CUDA": "0",
        "CUDA_OPS_WERROR": "1",
        "GIT_CEILING_DIRECTORIES": str(copy.parent),
    }
    commands = {"sh": ["bash", "-e", "-"], "diff": ["git", "apply", "-p0", "-"]}
    outputs = []
    for language, text in blocks():
        result = subprocess.run(
            commands[language], input=text, cwd=copy, env=environment, capture_output=True, text=True, timeout=600
        )
        assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
        outputs.append(result.stdout)
    passed = int(re.search(r"(\d+) passed", outputs[-1]).group(1))
    assert passed >= 40, outputs[-1]
    assert " failed" not in outputs[-1]
    assert "built for CPU, against PyTorch" in outputs[-1]
    left = [path for path in copy.rglob("*cube*") if path.suffix == ".py" and "square" in path.read_text().lower()]
    assert left == []


def test_every_file_that_it_names_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"(?<![\w/\x22])(?:csrc|cuda_ops|tests|benchmarks)/[\w/.]+\.(?:h|c|cu|cpp|py)\b", text))
    assert len(named) > 8
    for name in named:
        assert (ROOT / name.replace("cube", "square")).is_file(), name
