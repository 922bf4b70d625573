"""What a type checker sees of cuda_ops: real modules, functions and classes, in a program of a user's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cuda_ops

PACKAGE = Path(cuda_ops.__file__).resolve().parent
# Each line says in its comment what mypy has to say of it; those without one are in order.
SAMPLE = """
import torch

import cuda_ops
from cuda_ops import functional, nn, optim
from cuda_ops.data import Batches
from cuda_ops.models import MnistCNN
from cuda_ops.training import GraphedStep, Trainer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.linear = cuda_ops.nn.Linear(8, 10)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = functional.avg_pool2d(functional.relu(self.conv(input)), 2)
        return functional.log_softmax(self.linear(x.mean((2, 3))), 1)


net = Net()
optimizer = optim.SGD(net.parameters(), lr=0.1)
reveal_type(net.conv)  # Revealed type is "cuda_ops.ops.conv2d.Conv2d"
reveal_type(nn.Flatten())  # Revealed type is "torch.nn.modules.flatten.Flatten"
reveal_type(nn.Sequential(nn.ReLU(), nn.Identity()))  # Revealed type is "torch.nn.modules.container.Sequential"
reveal_type(functional.interpolate(torch.ones(1, 1, 1)))  # Revealed type is "torch._tensor.Tensor"
reveal_type(optim.RMSprop(net.parameters()))  # Revealed type is "torch.optim.rmsprop.RMSprop"
reveal_type(optim.lr_scheduler.StepLR(optimizer, 3))  # Revealed type is "torch.optim.lr_scheduler.StepLR"
reveal_type(nn.native_names())  # Revealed type is "list[str]"
reveal_type(nn.Linear(2, 2, dtype=torch.float64))  # Revealed type is "cuda_ops.ops.linear.Linear"
reveal_type(cuda_ops.revert(net))  # Revealed type is "torch.nn.modules.module.Module"
reveal_type(cuda_ops.convert(net, only="Conv2d"))  # Revealed type is "cuda_ops.conversion.report.Report"
cuda_ops.convert(3)  # Argument 1 to "convert" has incompatible type "int"
reveal_type(functional.relu(torch.ones(1)))  # Revealed type is "torch._tensor.Tensor"
reveal_type(cuda_ops.functional.relu(torch.ones(1)))  # Revealed type is "torch._tensor.Tensor"
reveal_type(optimizer)  # Revealed type is "cuda_ops.ops.sgd.SGD"
reveal_type(cuda_ops.models.MnistCNN())  # Revealed type is "cuda_ops.models.mnist_cnn.MnistCNN"
functional.relu("text")  # Argument 1 to "relu" has incompatible type "str"
functional.no_such_op  # Module has no attribute "no_such_op"
nn.NoSuchModule  # Module has no attribute "NoSuchModule"
cuda_ops.no_such_part  # Module has no attribute "no_such_part"
"""


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_a_program_is_checked_against_real_modules(tmp_path):
    pytest.importorskip("mypy", reason="needs mypy (`make`, or pip install mypy)")
    (tmp_path / "program.py").write_text(SAMPLE)
    # Errors in cuda_ops and in PyTorch themselves are no matter of the program's.
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--show-error-codes", "program.py"]
    result = subprocess.run(
        [*command, f"--cache-dir={tmp_path / 'cache'}"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
    )
    said = {int(number): text for number, text in re.findall(r"^program\.py:(\d+): (.+)$", result.stdout, re.MULTILINE)}
    comments = (line.partition("  # ") for line in SAMPLE.splitlines())
    expected = {number: comment for number, (_, _, comment) in enumerate(comments, 1) if comment}
    assert said.keys() == expected.keys(), result.stdout + result.stderr
    for number, text in expected.items():
        assert text in said[number]
