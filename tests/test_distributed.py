"""Our modules and optimizer under FullyShardedDataParallel (fully_shard, FSDP2), two processes on the CPU.

A module that read its weight outside of its own forward would meet a shard instead of the whole tensor.
DistributedDataParallel is tested with the application, in test_mnist.py.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cuda_ops
from cuda_ops.models import MnistCNN

dist.init_process_group("gloo")
torch.manual_seed(0)
native = MnistCNN(backend="native")
custom = MnistCNN(backend="custom")
custom.load_state_dict(native.state_dict(), strict=True)
mesh = init_device_mesh("cpu", (2,))
images = torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(dist.get_rank()))
labels = torch.arange(8) % 10
losses = []
for model, optimizer_class, loss_function in (
    (native, torch.optim.SGD, torch.nn.functional.cross_entropy),
    (custom, cuda_ops.optim.SGD, cuda_ops.functional.cross_entropy),
):
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_class(model.parameters(), lr=0.01, momentum=0.9)
    curve = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_function(model(images), labels)
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    losses.append(curve)
difference = max(abs(a - b) for a, b in zip(*losses))
assert difference < 1e-4, losses
assert losses[0][2] < losses[0][0], losses
dist.destroy_process_group()
print("equal")
"""


def test_fully_shard_two_processes(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("equal") == 2
