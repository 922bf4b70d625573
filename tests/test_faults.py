"""What goes wrong around the ops: no memory, a process that is killed as it writes, folders that take no files, two
runs into one folder, a GPU whose launches fail, threads, processes. test_output_files.py has full disks and links."""

import concurrent.futures
import ctypes
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.opspec import Make, as_tuple, load_specs, random_grad_outputs
from support.supervisor import ROOT

from cuda_ops import _files, functional

SUPPORT = Path(__file__).parent / "support"


# Memory


def test_every_allocation_of_every_op_may_fail(tmp_path):
    library = tmp_path / "failing_allocations.so"
    compiler = os.environ.get("CC", "cc")
    source = SUPPORT / "failing_allocations.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    result = subprocess.run(
        [sys.executable, "-m", "support.failing_allocations", library],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": path, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    counts = dict(line.split() for line in result.stdout.splitlines())
    assert set(counts) == {*(spec.name for spec in load_specs()), "SGD"}
    assert all(int(count) > 0 for count in counts.values()), counts


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["square", "relu", "polynomial", "log_softmax"])
def test_no_memory_on_the_gpu_forward_and_backward(name):
    function = getattr(functional, name)
    call = (lambda x: function(x, 1)) if name == "log_softmax" else function
    torch.cuda.empty_cache()
    x = torch.rand(4096, 4096, device="cuda", requires_grad=True)
    grad_output = torch.rand_like(x)
    torch.cuda.synchronize()

    def without_memory():
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)

    try:
        without_memory()
        with pytest.raises(torch.cuda.OutOfMemoryError):
            call(x)
        torch.cuda.set_per_process_memory_fraction(1.0)
        output = call(x)
        (expected,) = torch.autograd.grad(output, x, grad_output, retain_graph=True)
        expected = expected.cpu()
        without_memory()
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.autograd.grad(output, x, grad_output, retain_graph=True)
        torch.cuda.set_per_process_memory_fraction(1.0)
        (grad,) = torch.autograd.grad(output, x, grad_output)
        assert torch.equal(grad.cpu(), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


class HeapStatistics(ctypes.Structure):
    """struct mallinfo2 of glibc"""


HeapStatistics._fields_ = [
    *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
    *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
]


def memory_in_use(device):
    if device == "cuda":
        return torch.cuda.memory_allocated()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = HeapStatistics
    statistics = mallinfo2()
    return statistics.uordblks + statistics.hblkhd


def test_a_thousand_steps_take_no_more_memory(spec, device):
    if device == "cpu" and not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    sample = next(iter(spec.small_samples(Make(device, torch.float32, requires_grad=True))))
    inputs = sample.differentiable()

    def steps(count):
        for _ in range(count):
            outputs = [o for o in as_tuple(spec.function(*sample.args, **sample.kwargs)) if o.requires_grad]
            if outputs and inputs:
                torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True)

    steps(100)  # what is kept once
    before = memory_in_use(device)
    steps(1000)
    # A tensor that stays takes some hundred bytes; half of one in each step would be this.
    assert memory_in_use(device) - before < 100_000


# Files


class Killed(Exception):
    pass


def points_of(function, monkeypatch, at=None):
    """Runs a function that writes files and counts its calls of the operating system; is killed before the at-th."""
    count = 0

    def watched(original):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("open", "fchmod", "fsync", "replace", "unlink", "stat"):
            patch.setattr(os, name, watched(getattr(os, name)))
        function()
    return count


def test_killed_while_it_writes(tmp_path, monkeypatch):
    """At each of its calls of the operating system: every file is the old one or the new one, and a run that follows
    is not hindered by what was left."""
    old = {tmp_path / name: b"old" * 1000 for name in ("report.json", "report.md", "weights.pt")}
    new = dict.fromkeys(old, b"new" * 100000)
    _files.write_files(old)
    points = points_of(lambda: _files.write_files(new), monkeypatch)
    assert points > 10
    states = set()
    for at in range(1, points + 1):
        _files.write_files(old)
        child = os.fork()
        if child == 0:
            points_of(lambda: _files.write_files(new), monkeypatch, at)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        contents = [path.read_bytes() for path in old]
        assert all(content in (old[path], new[path]) for path, content in zip(old, contents, strict=True)), at
        states.add(tuple(content == b"old" * 1000 for content in contents))
        _files.write_files(new)
        assert all(path.read_bytes() == new[path] for path in new)
    assert states == {(True, True, True), (False, True, True), (False, False, True), (False, False, False)}


def test_killed_while_weights_are_saved(tmp_path):
    """The command: what lay there before can still be loaded."""
    weights = tmp_path / "weights.pt"
    torch.save({"w": torch.arange(3)}, weights)
    program = (
        "import os, signal, sys\n"
        "from cuda_ops import _files\n"
        "from cuda_ops.__main__ import main\n"
        "fsync, replace = os.fsync, os.replace\n"
        "def killed(draft, target):\n"
        "    if str(target).endswith('weights.pt'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    replace(draft, target)\n"
        "os.replace = killed\n"
        "main(sys.argv[1:])\n"
    )
    options = ["mnist", "--device", "cpu", "--backend", "native", "--limit", "64", "--batch-size", "32"]
    options += ["--epochs", "1", "--out", tmp_path / "out", "--save", weights]
    result = subprocess.run([sys.executable, "-c", program, *options], cwd=ROOT, capture_output=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert torch.equal(torch.load(weights, weights_only=True)["w"], torch.arange(3))


@pytest.mark.parametrize("folder", ["/sys", "/proc"])
def test_folders_that_take_no_files(folder):
    path = Path(folder) / "cuda_ops_test"
    for refused in (_files.check_writable, lambda path: _files.write_file(path, b"")):
        with pytest.raises(OSError) as error:
            refused(path)
        assert error.value.filename == str(path)
    assert not path.exists()


def write_often(folder, letter, count):
    for _ in range(count):
        _files.write_files({folder / name: letter * 50_000 for name in ("report.json", "report.md")})


def test_two_runs_into_one_folder(tmp_path):
    """Each file is one run's or the other's, at any time."""
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=write_often, args=(tmp_path, letter, 100)) for letter in (b"a", b"b")]
    write_often(tmp_path, b"a", 1)
    for run in runs:
        run.start()
    while any(run.is_alive() for run in runs):
        for name in ("report.json", "report.md"):
            assert (tmp_path / name).read_bytes() in (b"a" * 50_000, b"b" * 50_000)
    assert [run.exitcode for run in runs] == [0, 0]
    assert sorted(os.listdir(tmp_path)) == ["report.json", "report.md"]


# Threads and processes


def results(specs, device="cpu"):
    found = []
    for spec in specs:
        for sample in spec.small_samples(Make(device, torch.float32, requires_grad=True)):
            outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
            with_grad, inputs = [o for o in outputs if o.requires_grad], sample.differentiable()
            grads = ()
            if with_grad and inputs:
                grads = torch.autograd.grad(with_grad, inputs, random_grad_outputs(outputs), allow_unused=True)
            found += [(spec.name, t.detach().cpu().nan_to_num()) for t in (*outputs, *grads) if t is not None]
    return found


def assert_same(first, second):
    assert len(first) == len(second)
    for (name, a), (_, b) in zip(first, second, strict=True):
        assert torch.equal(a, b), name


def test_twelve_threads(device):
    specs = [spec for spec in load_specs() if not spec.random]
    expected = {spec.name: results([spec], device) for spec in specs}

    def shuffled(seed):
        order = random.Random(seed).sample(specs, len(specs))
        return [(spec.name, results([spec], device)) for spec in order]

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for found in pool.map(shuffled, range(24)):
            for name, values in found:
                assert_same(expected[name], values)


def digest(device):
    import hashlib

    specs = [spec for spec in load_specs() if not spec.random]
    sha = hashlib.sha256()
    for name, values in results(specs, device):
        sha.update(name.encode())
        sha.update(values.contiguous().numpy().tobytes())
    return sha.hexdigest()


def test_thirty_processes_give_the_same_bits(device):
    """Two of them started anew, the others forked from a process that has imported and not computed."""
    with_server = multiprocessing.get_context("forkserver")
    # The last one is what backward imports at its first call, most of what a process would take.
    imported = ["torch", "cuda_ops.functional", "support.opspec", "support.supervisor"]
    with_server.set_forkserver_preload([*imported, "torch.fx.experimental.symbolic_shapes"])
    digests = []
    for context, count in ((multiprocessing.get_context("spawn"), 2), (with_server, 28)):
        with concurrent.futures.ProcessPoolExecutor(2, context, max_tasks_per_child=1) as pool:
            digests += pool.map(digest, [device] * count)
    assert len(digests) == 30 and len(set(digests)) == 1


@pytest.mark.cuda
def test_a_lost_gpu_is_an_error_that_names_the_op():
    """After an assertion in somebody's kernel each launch of the process gives an error code."""
    program = (
        "import torch\n"
        "from cuda_ops import functional as F\n"
        "x = torch.ones(8, 8, device='cuda')\n"
        "image = torch.ones(1, 2, 8, 8, device='cuda')\n"
        "weight = torch.ones(2, 2, 3, 3, device='cuda')\n"
        "for call in (F.square, lambda x: F.log_softmax(x, 1), lambda x: F.linear(x, x), lambda x: F.matmul(x, x),\n"
        "             lambda x: F.conv2d(image, weight), lambda x: F.max_pool2d(image, 2)):\n"
        "    call(x)\n"
        "torch.zeros(2, device='cuda')[torch.tensor([7], device='cuda')]\n"
        "try:\n"
        "    torch.cuda.synchronize()\n"
        "except RuntimeError:\n"
        "    print('lost')\n"
        "for call in (F.square, lambda x: F.log_softmax(x, 1), lambda x: F.linear(x, x), lambda x: F.matmul(x, x),\n"
        "             lambda x: F.conv2d(image, weight), lambda x: F.max_pool2d(image, 2)):\n"
        "    try:\n"
        "        call(x)\n"
        "    except RuntimeError as error:\n"
        "        print('raised', str(error).splitlines()[0])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = result.stdout.splitlines()
    assert lines[0] == "lost", result.stdout + result.stderr
    assert len(lines) == 7 and all(line.startswith("raised ") for line in lines[1:]), result.stdout
