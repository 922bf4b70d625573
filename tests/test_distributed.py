"""Several processes: our modules and optimizers in DistributedDataParallel and under fully_shard (FSDP2), and the
commands mnist and gpt, which have to train what one process trains. Two processes on the CPU, over gloo.

A module that read its weight outside of its own forward would meet a shard instead of the whole tensor.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cuda_ops import optim
from cuda_ops.__main__ import main
from cuda_ops.data import Batches, mnist, shakespeare
from cuda_ops.models import MnistCNN
from cuda_ops.training import learning_rate
from cuda_ops.training.compare import batch_order
from cuda_ops.training.distributed import World
from cuda_ops.training.gpt.learner import Learner

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import scaling  # noqa: E402

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


PARTS_PROGRAM = """
import dataclasses

import pytest
import torch
import torch.distributed as dist

from cuda_ops._errors import UserError
from cuda_ops.models import GPT, GPTConfig, MnistCNN
from cuda_ops.training import GraphedStep
from cuda_ops.training.distributed import World, digest, sharded_like, whole
from cuda_ops.training.gradient_buckets import GradientBuckets

world, cpu = World.from_environment(), torch.device("cpu")
world.join(cpu)
config = GPTConfig(vocab_size=31, block_size=12, n_layer=2, n_head=2, n_embd=15 * 2, bias=False)
tokens = world.share(torch.randint(31, (4, 13), generator=torch.Generator().manual_seed(1)))


def gradients(world, how, bucket_bytes=4000):
    torch.manual_seed(0)
    model = GPT("fused", config)
    batch = tokens[:, :-1], tokens[:, 1:]
    if how == "ddp":
        wrapped = world.wrap(model, cpu)
        wrapped(*batch).backward()
        return [p.grad for p in model.parameters()]
    buckets, found = GradientBuckets(model.parameters(), world, bucket_bytes), []

    def keep():
        buckets.finish()
        found[:] = [p.grad.clone() for p in model.parameters()]

    assert len(buckets.buckets) > 3
    assert any(bucket.is_padded for bucket in buckets.buckets)
    step = GraphedStep(model, model, torch.optim.SGD(model.parameters(), lr=0.0), on_gradients=keep)
    for _ in range(2):  # the second time with hooks that have been used
        step(*batch)
    assert [g.stride() for g in found] == [p.stride() for p in model.parameters()]
    return found


for bf16 in (False, True):
    world = dataclasses.replace(world, bf16_reduce=bf16)
    ddp, ours = gradients(world, "ddp"), gradients(world, "buckets")
    assert world.alike(ddp) and world.alike(ours)
    # Of two processes' gradients there is one sum, whatever the order: both are the same bit by bit.
    assert digest(ddp) == digest(ours), bf16
exact = gradients(dataclasses.replace(world, bf16_reduce=False), "buckets")
distance = max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, exact))
assert 1e-5 < distance < 1e-2, distance
assert not world.alike([torch.tensor(float(world.rank))])

# channels_last weights keep their strides; a parameter that backward does not reach is named.
conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
unused = torch.nn.Parameter(torch.zeros(7))
buckets = GradientBuckets([*conv.parameters()], world)
conv(torch.rand(2, 3, 5, 5)).sum().backward()
buckets.finish()
assert conv.weight.grad.stride() == conv.weight.stride() != torch.empty(4, 3, 3, 3).stride()
other = torch.nn.Linear(2, 2)
late = GradientBuckets([unused, *other.parameters()], world)
other(torch.rand(1, 2)).sum().backward()
with pytest.raises(RuntimeError, match="got no gradient for one of shape .7."):
    late.finish()

# Shards
model = MnistCNN("fused")
state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
sharded = dataclasses.replace(world, parallel="fsdp2")
sharded.shard(model, cpu)
for name, tensor in model.state_dict().items():
    assert torch.equal(whole(tensor), state[name])
    again = sharded_like(state[name], tensor)
    assert type(again) is type(tensor) and torch.equal(whole(again), state[name])

# Alone
assert world.first_alone(lambda: world.rank + 5) == 5
with pytest.raises(ZeroDivisionError if world.is_first else UserError):
    world.first_alone(lambda: 1 // world.rank)
assert world.any(world.rank == 1, cpu) and not world.any(False, cpu)
world.leave()
print("equal")
"""


# The commands


def start(command, rank, size=2, port=None):
    """One of the processes that torchrun would start, whose signals and exit status are its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def finish(processes):
    """(exit status, stdout, stderr) of each."""
    found = []
    try:
        for process in processes:
            output = process.communicate(timeout=240)
            found.append((process.returncode, *output))
    finally:
        for process in processes:
            process.kill()
    return found


SESSION = """
import contextlib
import json
import os
import sys

from cuda_ops.__main__ import main

plan = json.load(open(sys.argv[1]))
for port, (name, run) in zip(plan["ports"], plan["runs"].items()):
    os.environ["MASTER_PORT"] = str(port)  # of each its own: one process may begin while the other has not ended yet
    with open(f"{plan['folder']}/{name}.{os.environ['RANK']}", "w") as file, contextlib.redirect_stdout(file):
        status = main(run) if isinstance(run, list) else exec(run, {"__name__": "__main__"}) or 0
        print(f"status {status}")
"""


def read(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "verses.txt"
    text.write_text(shakespeare()[:3000])
    return ["gpt", "--device", "cpu", "--text", str(text), "--sample", "10"]


# In float64 sums of another order show nowhere near a limit.
FIRST = [
    "--backend",
    "fused",
    "native",
    "--precision",
    "fp64",
    "--batch",
    "4",
    "--length",
    "16",
    "--warmup",
    "2",
    "--steps",
    "6",
    "--eval-every",
    "3",
]


MNIST = ["mnist", "--device", "cpu", "--limit", "96", "--batch-size", "32", "--epochs", "1"]
MNIST += ["--dtype", "float64", "--backend", "fused"]


@pytest.fixture(scope="module")
def runs(gpt, tmp_path_factory):
    """A folder in which two processes have run programs and commands one after the other, since it takes longer to
    start them: what each has printed is in <name>.<rank>, reports and checkpoints in the folder <name>."""
    folder = tmp_path_factory.mktemp("runs")

    def files(name):
        (folder / name).mkdir()
        return ["--save", str(folder / name / "run.pt"), "--out", str(folder / name)]

    plan = {"fully_shard": PROGRAM, "gpt": GPT_PROGRAM, "parts": PARTS_PROGRAM}
    for how in ("ddp", "fsdp2"):
        plan[f"gpt-{how}"] = [*gpt, *FIRST, *files(f"gpt-{how}"), "--parallel", how]
        plan[f"mnist-{how}"] = [*MNIST, *files(f"mnist-{how}"), "--parallel", how]
    resume = ["--resume", str(folder / "gpt-ddp" / "run.pt"), "--steps", "10", *files("resumed"), "--parallel", "fsdp2"]
    plan["resumed"] = [*gpt, *resume]
    ports = [free_port() for _ in plan]
    (folder / "plan.json").write_text(json.dumps({"folder": str(folder), "runs": plan, "ports": ports}))
    (folder / "session.py").write_text(SESSION)
    found = finish([start([str(folder / "session.py"), str(folder / "plan.json")], rank) for rank in (0, 1)])
    assert [status for status, *_ in found] == [0, 0], found
    return folder


@pytest.fixture(scope="module")
def one(gpt, tmp_path_factory):
    """The folder of the same run in one process."""
    folder = tmp_path_factory.mktemp("one")
    assert main([*gpt, *FIRST, "--save", str(folder / "run.pt"), "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("name", ["fully_shard", "gpt", "parts"])
def test_programs(name, runs):
    """Our layers and optimizers beside PyTorch's, data parallel and sharded; and the pieces of World and
    GradientBuckets, whose gradients are the same in both processes bit by bit."""
    for rank in (0, 1):
        assert (runs / f"{name}.{rank}").read_text() == "equal\nstatus 0\n"


def assert_same_run(path, expected_path):
    """Of two checkpoints: losses, validation and weights, but for the order of sums."""
    found, expected = (torch.load(p, weights_only=True)["backends"] for p in (path, expected_path))
    assert list(found) == list(expected)
    for name, run in expected.items():
        assert found[name]["losses"] == pytest.approx(run["losses"], rel=1e-12)
        assert len(found[name]["losses"]) == run["steps_taken"] == found[name]["steps_taken"]
        for mine, theirs in zip(found[name]["validation"], run["validation"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12)
        for key, tensor in run["model"].items():
            torch.testing.assert_close(found[name]["model"][key], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_gpt_in_two_processes_is_that_of_one(how, runs, one):
    folder = runs / f"gpt-{how}"
    assert_same_run(folder / "run.pt", one / "run.pt")
    report = read(folder)
    assert report["ok"], report["problems"]
    assert (report["settings"]["processes"], report["settings"]["parallel"]) == (2, how)
    assert report["sample"] == read(one)["sample"]
    assert f"2 processes ({how})" in (folder / "report.md").read_text()
    files = ["report.json", "report.md", "report.png", "run.pt"]
    assert sorted(path.name for path in folder.iterdir()) == files
    assert (runs / f"gpt-{how}.0").read_text().count("Checkpoint: ") == 1
    assert (runs / f"gpt-{how}.1").read_text() == "status 0\n"


def test_checkpoints_go_from_one_process_to_two_and_back(gpt, runs, one, tmp_path):
    for name, folder in (("one", one), ("from_fsdp2", runs / "gpt-fsdp2")):
        files = ["--save", str(tmp_path / f"{name}.pt"), "--out", str(tmp_path / "out")]
        assert main([*gpt, "--resume", str(folder / "run.pt"), "--steps", "10", *files]) == 0
    assert_same_run(tmp_path / "from_fsdp2.pt", tmp_path / "one.pt")
    assert_same_run(runs / "resumed" / "run.pt", tmp_path / "one.pt")


def test_ctrl_c_in_one_process_ends_both(gpt, tmp_path):
    saved, port = tmp_path / "run.pt", free_port()
    options = ["--backend", "fused", "--steps", "100000", "--eval-every", "100000", "--length", "16", "--batch", "4"]
    files = ["--save", str(saved), "--save-every", "10", "--out", str(tmp_path / "out")]
    processes = [start(["-m", "cuda_ops", *gpt, *options, *files], rank, port=port) for rank in (0, 1)]
    deadline = time.monotonic() + 120
    while not saved.exists() and time.monotonic() < deadline and all(p.poll() is None for p in processes):
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGINT)
    first, second = finish(processes)
    assert first[0] == second[0] == 130, first[2] + second[2]
    assert "Traceback" not in first[2] + second[2]
    report = read(tmp_path / "out")
    assert report["interrupted"] and report["ok"]
    state = torch.load(saved, weights_only=True)["backends"]["fused"]
    assert report["steps_done"] == state["steps_taken"] == len(state["losses"]) >= 10
    assert len(state["other_random_states"]) == 1
    assert not torch.equal(state["other_random_states"][0], state["random_state"])


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_mnist_in_two_processes_is_one_that_takes_their_shares(how, runs):
    """Each batch norm sees a share alone, so that of one process the whole batch would be something else."""
    assert (runs / f"mnist-{how}.0").read_text().count("whole step") == 1
    assert (runs / f"mnist-{how}.1").read_text() == "status 0\n"
    report = read(runs / f"mnist-{how}")
    assert report["ok"], report["problems"]
    assert report["settings"]["parallel"] == how

    torch.manual_seed(0)
    state = MnistCNN("native").double().state_dict()
    model = MnistCNN("fused").double()
    model.load_state_dict(state)
    optimizer, batches = optim.SGD(model.parameters(), lr=0.0), Batches(*mnist(limit=96), dtype=torch.float64)
    losses = []
    for step, indices in enumerate(batch_order(96, 32, 1, 0)):
        optimizer.param_groups[0]["lr"] = learning_rate(step, 3, 0.07)
        shares = [model(*batches(World(rank, 2).share(indices))) for rank in (0, 1)]
        loss = torch.stack(shares).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert report["backends"]["fused"]["losses"] == pytest.approx(losses, rel=1e-9)
    saved = torch.load(runs / f"mnist-{how}" / "run.pt", weights_only=True)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), rtol=1e-7, atol=1e-10)
    assert report["backends"]["fused"]["test_accuracy"] is not None


@pytest.mark.parametrize("command", ["gpt", "mnist"])
def test_processes_of_different_weights_are_a_failure(command, gpt, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(World, "alike", lambda self, tensors: not list(tensors))
    arguments = [*gpt, "--backend", "native", "--steps", "1", "--batch", "2"] if command == "gpt" else MNIST
    assert main([*arguments, "--out", str(tmp_path)]) == 1
    assert "FAILED: the processes have come to different weights" in capsys.readouterr().out.replace("\n", " ")


WRONG = {
    "gpt --parallel ddp": (1, "--parallel ddp is for several processes: start them by torchrun"),
    "mnist --bf16-reduce": (1, "--bf16-reduce is for several processes: start them by torchrun"),
    "gpt --parallel zero": (2, "argument --parallel: invalid choice: 'zero'"),
    "gpt --batch 3": (2, "--batch 3 does not divide among 2 processes: take a multiple of 2"),
    "mnist --batch-size 3": (2, "--batch-size 3 does not divide among 2 processes: take a multiple of 2"),
    "gpt --bf16-reduce --precision fp64": (2, "--bf16-reduce: gradients of --precision fp64 are not rounded"),
    "mnist --bf16-reduce --dtype float64": (2, "--bf16-reduce: gradients of --dtype float64 are not rounded"),
}


@pytest.mark.parametrize("line", WRONG)
def test_what_does_not_fit_the_processes_is_one_line_of_the_first(line, monkeypatch, capsys):
    size, message = WRONG[line]
    monkeypatch.setenv("WORLD_SIZE", str(size))
    for rank in range(size):
        monkeypatch.setenv("RANK", str(rank))
        try:
            status = main([*line.split(), "--device", "cpu"])
        except SystemExit as exit:  # argparse's
            status = exit.code
        assert status == 2
        error = capsys.readouterr().err
        if rank == 0:
            assert message in error
            assert error.count("\n") == 1
        else:
            assert error == ""


def test_more_processes_than_gpus(monkeypatch, capsys):
    monkeypatch.setattr("cuda_ops.training.options._cuda_problem", lambda backends: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["mnist", "--device", "cuda"]) == 2
    assert "--device cuda: 2 processes need a GPU each, and there are 1: " in capsys.readouterr().err


def test_after_an_exception_nobody_waits_for_nccl(monkeypatch):
    """Its end would wait for the others, who wait for what this process was to send, and torchrun for all."""
    calls, world = [], World(rank=0, size=2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: calls.append("destroyed"))
    for backend, expected in (("nccl", []), ("gloo", ["destroyed"])):
        monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)  # noqa: B023
        with pytest.raises(ZeroDivisionError):
            try:
                print(1 // world.rank)
            finally:
                world.leave()
        assert calls == expected
        calls.clear()
        world.leave()
        assert calls == ["destroyed"]
        calls.clear()


NCCL_PROGRAM = """
import dataclasses
import os

import torch
import torch.distributed as dist

from cuda_ops.models import GPT, GPTConfig
from cuda_ops.optim import AdamW
from cuda_ops.training import GraphedStep
from cuda_ops.training.distributed import World, digest
from cuda_ops.training.gradient_buckets import GradientBuckets

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device, rank=0, world_size=1, store=dist.HashStore())
config = GPTConfig(vocab_size=65, block_size=32, n_layer=2, n_head=2, n_embd=64)
found = []
for bucketed in (False, True):
    torch.manual_seed(0)
    model = GPT("fused", config).to(device)
    buckets = GradientBuckets(model.parameters(), World(), 50_000) if bucketed else None
    on_gradients = buckets.finish if buckets else None
    step = GraphedStep(model, model, AdamW(model.parameters(), capturable=True), on_gradients=on_gradients)
    tokens = torch.randint(65, (4, 33), generator=torch.Generator().manual_seed(1)).to(device)
    losses = [step(tokens[:, :-1], tokens[:, 1:]).item() for _ in range(6)]
    found.append((losses, digest(model.parameters())))
assert found[0] == found[1], found
assert found[0][0][5] < found[0][0][0]
dataclasses.replace(World(), size=2).leave()
print("equal")
"""


@pytest.mark.cuda
def test_sums_inside_a_cuda_graph_on_one_gpu(tmp_path):
    """A group of one process: the capture of NCCL's calls, and graphs that are gone before the group is."""
    program = tmp_path / "graph.py"
    program.write_text(NCCL_PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0 and result.stdout == "equal\n", result.stdout + result.stderr


def test_a_learner_is_made_on_its_device():
    """Its first numbers are drawn there, whatever the default is."""
    settings = scaling.gpt_settings({"model": "cpu-char", "device": "cpu", "batch": 2}, World())
    state = scaling.initial_state(settings)
    with torch.device("meta"):
        learner = Learner(settings, "fused", state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in learner.model.state_dict().items())


# benchmarks/scaling.py


def test_overlap_of_intervals():
    assert scaling.merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert scaling.common([(0, 4), (5, 6)], [(1, 2), (3, 7)]) == 3
    assert scaling.common([(0, 1)], [(1, 2)]) == scaling.common([], [(0, 9)]) == 0


def test_the_time_line_is_of_one_step_and_the_overlap_of_all():
    kernels = [{"ts": 10 * i, "dur": 4, "tid": 7, "name": "void gemm<int>(int)"} for i in range(scaling.PROFILED)]
    kernels += [{"ts": 10 * i + 3, "dur": 2, "tid": 9, "name": "ncclSum(int)"} for i in range(scaling.PROFILED)]
    assert scaling.timeline(kernels) == [(7, "gemm<int>", 0, 4), (9, "ncclSum", 3, 2)]
    assert scaling.overlap(kernels) == {"us": 2, "hidden_us": 1}
    assert scaling.overlap(kernels[: scaling.PROFILED]) is None


def test_fingerprints_tell_bits_apart():
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0.0
    others = [x.clone() for _ in range(4)]
    others[0].view(torch.int32)[6, 4] ^= 1
    others[1][0, 0] = -0.0
    others[2][1] = x[2]
    others[2][2] = x[1]
    others[3].view(torch.int32)[3, 3] ^= -(2**31)
    found = [scaling.fingerprint([y]) for y in (x, *others)]
    assert len(set(found)) == len(found)
    assert scaling.fingerprint([x.t().contiguous().t()]) == found[0]
    assert scaling.fingerprint([x, others[0]]) != scaling.fingerprint([others[0], x])
    long = torch.zeros(scaling.CHUNK + 2, dtype=torch.bfloat16)
    for place in (0, scaling.CHUNK, scaling.CHUNK + 1):
        long[place] = 1
        found.append(scaling.fingerprint([long]))
        long[place] = 0
    assert len(set(found)) == len(found)


def scaling_results(size, **changes):
    """What the processes of a stage leave, of which `changes` are in the last one's first row."""
    row = {
        "sequences": 8,
        "losses": [2.0, 1.5, 1.0],
        "gradients": ["a"],
        "weights": "b",
        "milliseconds": [4.0, 2.0, 3.0],
        "timeline": None,
    }
    row |= {"tokens": 600, "nccl": None, "name": "ddp", "graph": False, "bf16_reduce": False, "each": False}
    ranks = []
    for rank in range(size):
        mine = {**row, **(changes if rank == size - 1 else {})}
        ranks.append({"rows": {"ddp": mine}, "mnist": dict(row), "precision": "fp32", "length": 64})
        ranks[-1] |= {"facts": {"device": "Test GPU", "torch": "2.0", "commit": "abc1234", "date": "2026-01-01"}}
        ranks[-1] |= {"shares": dict(row), "other_device": None}
    return ranks


def test_scaling_trains():
    """Losses, fingerprints of the first gradients, weights; the same twice."""
    plan = {"model": "cpu-char", "device": "cpu", "batch": 2}
    settings = scaling.gpt_settings(plan, World())
    state = scaling.initial_state(settings)
    one, two = (scaling.train_gpt(settings, scaling.Variant("eager"), state, (1, 1)) for _ in range(2))
    assert len(one["losses"]) == scaling.COMPARED and len(set(one["gradients"])) == scaling.DIGESTED
    assert all(one[key] == two[key] for key in ("losses", "gradients", "weights", "tokens"))


def test_scaling_compares():
    found = scaling.compare(2, scaling_results(1)[0], [scaling_results(2, milliseconds=[6.0, 6.0, 6.0])])
    one, two = found["rows"]
    assert (one["median_ms"], one["per_second"]) == (3.0, 200_000)
    assert (two["median_ms"], two["per_second"], two["efficiency"]) == (6.0, 100_000, 0.25)  # the slowest's
    assert two["loss_distance"] == 0 and two["alike"] and found["problems"] == []
    found |= {"backend": "gloo", "model": "char", "command": "scaling", "note": "A note."}
    found["table"] = scaling.table(found)
    assert found["table"][2] == ["GPT ddp", "2", "8", "6.00", "100,000", "25%", "0.0e+00", "yes", "–", "–"]
    assert "| GPT ddp | 2 | 8 |" in scaling.markdown(found) and "A note." in scaling.markdown(found)


def test_scaling_compares_what_there_is():
    """Without one process's results, and of those variants that all processes have finished."""
    ranks = scaling_results(2)
    ranks[0]["rows"]["fsdp2"] = ranks[0]["rows"]["ddp"] | {"name": "fsdp2"}
    del ranks[1]["mnist"]
    found = scaling.compare(2, {}, [ranks])
    assert [row["name"] for row in found["rows"]] == ["ddp"] and found["mnist"] == [] == found["problems"]
    assert "efficiency" not in found["rows"][0] and "loss_distance" not in found["rows"][0]
    found["backend"] = "gloo"
    assert scaling.table(found)[1][:2] == ["GPT ddp", "2"]
    for rank in ranks:
        rank["rows"]["ddp"]["losses"] = [2.0, float("nan"), 1.0]
    assert scaling.compare(2, {}, [ranks])["problems"] == ["ddp: losses are not finite"]


def test_scaling_writes_the_time_line():
    found = scaling.compare(2, scaling_results(1, timeline=[(7, "gemm", 0.0, 2.5)])[0], [scaling_results(2)])
    for row in found["mnist"]:
        row["timeline"] = [(7, "conv", 0.0, 1.0)]
    assert list(scaling.take_time_lines(found)) == [
        "ddp, 8 in 1 process",
        "MNIST CNN, 8 in 1 process",
        "MNIST CNN, 8 in 2 processes",
    ]
    assert all("timeline" not in row for row in [*found["rows"], *found["mnist"]])
    lines = {"GPT ddp": [(7, "gemm", 0.0, 2.5), (9, "ncclDevKernel_AllReduce", 1.0, 3.0)]}
    text = scaling.timeline_csv(lines).decode()
    assert text == (
        "variant,stream,kernel,begin_us,us\nGPT ddp,7,gemm,0.0,2.5\nGPT ddp,9,ncclDevKernel_AllReduce,1.0,3.0\n"
    )
    assert scaling.timeline_png(lines).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"gradients": ["c"]}, "ddp: gradients or weights differ between processes"),
        ({"weights": "c"}, "ddp: gradients or weights differ between processes"),
        ({"losses": [2.1, 1.5, 1.0], "milliseconds": [9.0] * 3}, "ddp: losses are 5.0e-02 from one process's"),
        ({"losses": [float("nan")] * 3, "milliseconds": [9.0] * 3}, "ddp: losses are nan from one process's"),
    ],
)
def test_scaling_finds_what_is_wrong(changes, problem):
    problems = scaling.compare(2, scaling_results(1)[0], [scaling_results(2, **changes)])["problems"]
    assert len(problems) == 1 and problems[0].startswith(problem), problems


def test_stages_of_scaling():
    """Graphs and what has none are never in one process, since they would share a communicator."""
    for device, graphs in (("cuda", False), ("cuda", True), ("cpu", False)):
        found = scaling.stages(device, 4, graphs)
        assert [stage.processes for stage in found] == [1, 4, 4, 4][: len(found)]
        assert [stage.mnist for stage in found] == [True, True, False, False][: len(found)]
        for stage in found[1:]:
            assert len({(variant.graph, variant.parallel) for variant in stage.variants}) <= 1
            assert len({variant.label for variant in stage.variants}) == len(stage.variants)
    assert len(found) == 4 and not any(variant.graph for stage in found for variant in stage.variants)
    assert all(variant.graph for stage in scaling.stages("cuda", 2, True) for variant in stage.variants)


RANKS = """
import os, subprocess, sys, time
rank, folder = os.environ["RANK"], sys.argv[1]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open(f"{folder}/{rank}.partial", "w").write(f"{os.getpid()} {child.pid} {os.environ['WORLD_SIZE']}")
os.rename(f"{folder}/{rank}.partial", f"{folder}/{rank}")
if sys.argv[2] == "hangs" or rank == "0" and sys.argv[2] == "fails":
    time.sleep(300)
child.kill()
sys.exit(3 if rank == "1" and sys.argv[2] == "fails" else 0)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "way, seconds, problem",
    [("ends", 60, None), ("hangs", 3, "it was ended after 3 s"), ("fails", 60, "process 1 has failed with status 3")],
)
def test_a_stage_of_scaling_is_ended_with_all_it_has_started(way, seconds, problem, tmp_path):
    command = [sys.executable, "-c", RANKS, str(tmp_path), way]
    begin = time.monotonic()
    assert scaling.launch(command, 2, seconds, dict(os.environ)) == problem
    assert time.monotonic() - begin < 50
    pids = []
    for rank in range(2):
        *mine, size = (tmp_path / str(rank)).read_text().split()
        assert size == "2"
        pids += mine
    deadline = time.monotonic() + 10  # whoever inherits a killed child reaps it
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_scaling_writes_after_each_stage_and_names_what_failed(tmp_path, monkeypatch, capsys):
    seen = []

    def start(plan, stage, seconds, folder):
        written = sorted(tmp_path.rglob("scaling.json"))
        seen.append([row["name"] for row in json.loads(written[0].read_text())["rows"]] if written else None)
        assert seconds <= 50
        if stage.name == "fsdp2":
            return [], "it was ended after 50 s"
        return scaling_results(stage.processes), None

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's stays as it is
    monkeypatch.setattr(scaling, "start", start)
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--device", "cpu", "--limit", "50", "--out", str(tmp_path)])
    assert scaling.main() == 1
    assert seen == [None, ["ddp"], ["ddp"] * 2, ["ddp"] * 2]
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["scaling.json", "scaling.md"]
    assert json.loads((folder / "scaling.json").read_text())["problems"] == ["stage fsdp2: it was ended after 50 s"]
    assert "**stage fsdp2: it was ended after 50 s**" in (folder / "scaling.md").read_text()
    assert "| GPT ddp | 2 |" in capsys.readouterr().out

    monkeypatch.setattr(scaling, "start", lambda *_: ([], "process 0 has failed with status 1"))
    assert scaling.main() == 2
    assert "no stage has found anything (stage one process: process 0" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--within", "0"])
    assert scaling.main() == 2
    assert "stage ddp: not begun, the 0 s of --within were over" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--device", "cpu", "--limit", "0.5"])
    assert scaling.main() == 2
    assert "--limit 0.5: expected at least a second" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("asked", [[], ["--device", "cuda"]])
def test_scaling_takes_the_cpu_only_where_it_is_asked_to(gpus, asked, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(scaling, "start", lambda *_: pytest.fail("it trains"))
    monkeypatch.setattr(sys, "argv", ["scaling.py", *asked, "--out", str(tmp_path)])
    assert scaling.main() == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert f"this machine has {'one GPU, which' if gpus else 'no GPU; --device cpu has'}" in found.err


def test_a_process_of_scaling_that_stands_still_says_where(capfd):
    now = time.time()
    plan = {"began": now - 2, "name": "ddp", "stage": {"limit": 60.0, "ends": now + 5.5}}
    watch = scaling.Watch(plan, World(), torch.device("cpu"))
    watch.begin("ddp eager")
    time.sleep(1.5)
    watch.end()
    out, error = capfd.readouterr()
    assert out.strip().endswith("s  ddp: ddp eager") and float(out.split()[0]) >= 2
    assert "Timeout" in error and "test_a_process_of_scaling_that_stands_still_says_where" in error
