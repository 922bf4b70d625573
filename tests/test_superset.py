"""cuda_ops.nn, functional, optim, nn.init and nn.utils have every public name of torch's, their own where one is."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cuda_ops

ROOT = Path(__file__).resolve().parents[1]
PAIRS = {
    "nn": (cuda_ops.nn, torch.nn),
    "nn.init": (cuda_ops.nn.init, torch.nn.init),
    "nn.utils": (cuda_ops.nn.utils, torch.nn.utils),
    "functional": (cuda_ops.functional, torch.nn.functional),
    "optim": (cuda_ops.optim, torch.optim),
}


def public(module):
    return [name for name in dir(module) if not name.startswith("_")]


@pytest.mark.parametrize("name", PAIRS)
def test_every_public_name_is_there(name):
    ours, native = PAIRS[name]
    theirs = set(ours.native_names())
    assert theirs.isdisjoint(ours.__all__)
    for attribute in public(native):
        value = getattr(ours, attribute)
        if attribute in theirs:
            assert value is getattr(native, attribute)
        elif attribute in ours.__all__:
            assert inspect.ismodule(value) or value.__module__.startswith("cuda_ops.")
    assert set(public(native)) <= set(dir(ours))
    assert theirs <= set(public(native))
    assert set(ours.__all__) <= set(dir(ours))


@pytest.mark.parametrize("name", PAIRS)
def test_ours_stand_in_for_pytorchs(name):
    """isinstance goes on saying what it said."""
    ours, native = PAIRS[name]
    for attribute in set(ours.__all__) & set(public(native)):
        mine, theirs = getattr(ours, attribute), getattr(native, attribute)
        if inspect.isclass(theirs) and name == "nn":
            assert issubclass(mine, theirs)
        elif inspect.isclass(theirs):
            assert issubclass(mine, torch.optim.Optimizer)


@pytest.mark.parametrize("name", PAIRS)
def test_unknown_and_private_names_are_attribute_errors(name):
    ours, _ = PAIRS[name]
    for attribute in ("no_such_name", "__path__", "_no_such_name"):
        with pytest.raises(AttributeError, match=f"has no attribute '{attribute}'"):
            getattr(ours, attribute)
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec(f"from cuda_ops.{name} import no_such_name")


def test_submodules_are_imported_by_our_names():
    assert importlib.import_module("cuda_ops.nn.functional") is cuda_ops.functional
    assert importlib.import_module("cuda_ops.nn.utils") is cuda_ops.nn.utils
    assert importlib.import_module("cuda_ops.nn.utils.parametrize") is torch.nn.utils.parametrize
    assert importlib.import_module("cuda_ops.nn.init") is cuda_ops.nn.init
    assert importlib.import_module("cuda_ops.nn.modules") is torch.nn.modules
    assert importlib.import_module("cuda_ops.optim.lr_scheduler") is torch.optim.lr_scheduler
    assert cuda_ops.nn.functional is cuda_ops.functional


PROGRAM = """
import torch
import cuda_ops.nn as nn
import cuda_ops.nn.functional as F
from cuda_ops import optim
from cuda_ops.nn.parameter import Parameter
from cuda_ops.nn.utils import clip_grad_norm_, parametrizations
from cuda_ops.nn.utils.rnn import pad_sequence
from cuda_ops.optim.lr_scheduler import CosineAnnealingLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = Parameter(torch.ones(1))
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        nn.init.zeros_(self.layers[4].bias)

    def forward(self, input):
        return self.layers(F.interpolate(input, scale_factor=2)) * self.scale


net = Net()
assert type(net.layers[0]).__module__.startswith("cuda_ops")
optimizer = optim.RMSprop(net.parameters())
scheduler = CosineAnnealingLR(optimizer, 3)
loss = F.mse_loss(net(torch.rand(2, 1, 4, 4)), torch.zeros(2, 3))
loss.backward()
clip_grad_norm_(net.parameters(), 1.0)
optimizer.step(), scheduler.step()
compiled = torch.compile(net, fullgraph=True, backend="eager")
torch.testing.assert_close(compiled(torch.ones(1, 1, 4, 4)), net(torch.ones(1, 1, 4, 4)))
"""


def test_a_program_of_torch_nn_runs_with_the_import_changed():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
