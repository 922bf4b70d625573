"""What the documentation shows is run: the Example of every docstring, with its output, and the README's Python."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cuda_ops
import cuda_ops.conversion

ROOT = Path(__file__).resolve().parents[1]
NAMES = [f"{module}.{name}" for module in ("functional", "optim") for name in getattr(cuda_ops, module).__all__]


# Of the rest, those whose examples say what comes out, and need no training set.
NAMES += [f"nn.{name}" for name in ("ConvBNReLUMaxPool2d", "LinearCrossEntropyLoss", "LinearReLU")]
NAMES += ["data.Characters", "data.Windows", "models.GPT", "models.MnistCNN"]
NAMES += ["training.GraphedStep", "training.learning_rate"]
NAMES += [f"nn_init.{name}" for name in cuda_ops.nn.init.__all__]
NAMES += ["nn_utils.clip_grad_norm_", "conversion.convert", "conversion.revert"]


@pytest.mark.parametrize("name", NAMES)
def test_example_prints_what_it_says(name):
    module, member = name.split(".")
    documented = getattr(getattr(cuda_ops, module), member)
    globs = {"torch": torch, "cuda_ops": cuda_ops, member: documented}
    (test,) = doctest.DocTestFinder(recurse=False).find(documented, name, globs=globs)
    assert test.examples, f"{name} has no example"
    assert test.examples[-1].want, f"{name}: the last line of the example prints nothing"
    report = []
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert result.failed == 0, "".join(report)


def test_readme_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_pages_name_files_that_exist():
    """Paths in backquotes and links; runs/ and build/ are made by commands, and <op> stands for any."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "benchmarks" / "notes").glob("*.md")]
    named = re.compile(
        r"\b(?:csrc|cuda_ops|benchmarks|tests|build_backend|notebooks|examples)/[\w./-]*\w/?(?![\w<*{…])"
    )
    missing = []
    for page in pages:
        for path in named.findall(page.read_text()):
            if "cube" not in path and not (ROOT / path).exists():
                missing.append(f"{page.name}: {path}")
    assert pages
    assert missing == []


def test_pages_are_what_the_results_make_of_them():
    command = [sys.executable, str(ROOT / "benchmarks" / "update_results.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
