"""csrc/cuda/ptx: every instruction that is written in asm, once (`make lint` finds asm nowhere else)."""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEADERS = sorted((ROOT / "csrc/cuda/ptx").glob("*.cuh"))


def statements(text):
    """The asm statements of a header, each as one line without what differs from one writing to another."""
    text = re.sub(r"//[^\n]*|\\\n", "", text)
    return [re.sub(r"\s|\\n|\"", "", found) for found in re.findall(r"\basm\b[^(]*(\(.*?\));", text, re.DOTALL)]


def test_statements_are_found():
    assert statements('asm volatile("a %0;" ::"r"(x)\n : "memory"); // asm("b");\nasm("c {\\n}");') == [
        "(a%0;::r(x):memory)",
        "(c{})",
    ]


def test_no_instruction_stands_twice():
    found = Counter(statement for header in HEADERS for statement in statements(header.read_text()))
    assert len(found) > 60
    assert [statement for statement, count in found.items() if count > 1] == []


@pytest.mark.parametrize("architecture", ["75", "90a"])
def test_each_header_compiles_alone(architecture, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc on PATH")
    sources = []
    for header in HEADERS:
        sources.append(tmp_path / f"{header.stem}.cu")
        sources[-1].write_text(f'#include "ptx/{header.name}"\n#include "ptx/{header.name}"\n')
    # Each file of a command is a translation unit of its own.
    result = subprocess.run(
        [
            *("nvcc", "-std=c++17", "-ptx", f"-arch=compute_{architecture}"),
            *("-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra", f"-I{ROOT}/csrc/include", f"-I{ROOT}/csrc/cuda"),
            *map(str, sources),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(list(tmp_path.glob("*.ptx"))) == len(HEADERS)
