"""Our modules and optimizers under FullyShardedDataParallel (fully_shard, FSDP2), two processes on the CPU.

A module that read its weight outside of its own forward would meet a shard instead of the whole tensor. The CNN is
tested under DistributedDataParallel with the application, in test_mnist.py, GPT here.
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


GPT_PROGRAM = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cuda_ops
from cuda_ops.models import GPT, GPTConfig

dist.init_process_group("gloo")
torch.manual_seed(0)
config = GPTConfig(vocab_size=31, block_size=12, n_layer=2, n_head=2, n_embd=16)
tokens = torch.randint(31, (4, 13), generator=torch.Generator().manual_seed(1))
mine = tokens[dist.get_rank() :: 2]
state = GPT("native", config).state_dict()
curves = {}
for backend, how in [("native", "alone"), *((name, way) for name in ("custom", "fused") for way in ("ddp", "fsdp"))]:
    model = GPT(backend, config)
    model.load_state_dict(state)
    wrapped, ours = model, backend != "native"
    if how == "ddp":
        wrapped = DistributedDataParallel(model)
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optim, utils = (cuda_ops.optim, cuda_ops.nn.utils) if ours else (torch.optim, torch.nn.utils)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    curve = curves[backend, how] = []
    part = mine if ours else tokens
    for _ in range(3):
        loss = wrapped(part[:, :-1], part[:, 1:])
        loss.backward()
        utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if ours:
            dist.all_reduce(total)
            total /= 2
        curve.append(total.item())
expected = curves["native", "alone"]
for name, curve in curves.items():
    assert max(abs(a - b) for a, b in zip(curve, expected)) < 1e-4, curves
assert expected[2] < expected[0], curves
dist.destroy_process_group()
print("equal")
"""


def run_on_two_processes(program, text):
    program.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("equal") == 2


def test_fully_shard_two_processes(tmp_path):
    run_on_two_processes(tmp_path / "train.py", PROGRAM)


def test_gpt_data_parallel_and_fully_sharded_on_two_processes(tmp_path):
    """Half a batch each, in DistributedDataParallel and with fully_shard, is what one process makes of the whole."""
    run_on_two_processes(tmp_path / "train.py", GPT_PROGRAM)
