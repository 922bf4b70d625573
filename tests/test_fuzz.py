"""The fuzzers for a bounded time, with a seed which they print, where FUZZ_SECONDS is set (CI runs them by themselves,
for a number of cases); and that they find what is wrong."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from support import fuzz, fuzz_cases, fuzz_raw, supervisor

import cuda_ops

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SEED = os.environ.get("FUZZ_SEED")  # a new one, if it is not set
bounded = pytest.mark.skipif(SECONDS == 0, reason="set FUZZ_SECONDS")


def run(module, seconds, out, device):
    path = os.pathsep.join([str(supervisor.ROOT), str(supervisor.ROOT / "tests")])
    command = [sys.executable, "-m", module, "--seconds", str(seconds), "--out", str(out), "--device", device]
    if SEED:
        command += ["--seed", SEED]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(out.read_text())
    assert figures["cases"] > 0 and figures["failures"] == 0
    return figures


@bounded
@pytest.mark.timeout(int(SECONDS) + 600)
def test_random_cases_agree_with_pytorch(device, tmp_path):
    run("support.fuzz", SECONDS, tmp_path / "fuzz.json", device)


@bounded
@pytest.mark.timeout(600)
def test_hostile_calls_are_refused_by_name(device, tmp_path):
    run("support.fuzz_raw", 20, tmp_path / "fuzz_raw.json", device)


def test_every_public_name_is_a_target():
    modules = (n for n in cuda_ops.nn.__all__ if n not in ("init", "utils"))
    names = {*cuda_ops.functional.__all__, *(f"nn.{n}" for n in modules)}
    assert set(fuzz_cases.TARGETS) == names | {f"optim.{n}" for n in fuzz_cases.OPTIMIZERS}
    assert set(cuda_ops.optim.__all__) - set(fuzz_cases.OPTIMIZERS) == {"Muon"}


def cases(name, count):
    for number in itertools.count():
        try:
            case = fuzz_cases.draw(f"{name}:{number}", "cpu")
        except fuzz_cases.Rejected:
            continue
        yield case
        count -= 1
        if count == 0:
            return


@pytest.mark.parametrize("name", sorted(n for n in fuzz_cases.TARGETS if n.startswith("nn.")))
def test_every_module_is_compared_with_its_function(name):
    outcomes = set()
    for case in cases(name, 40):
        try:
            outcomes.add(fuzz.check(case))
        except fuzz_cases.Rejected:
            continue
        if "compared" in outcomes:
            return
    pytest.fail(f"none of 40 cases is one: {outcomes}")


def test_a_number_of_cases_is_the_same_ones_each_time(tmp_path):
    (tmp_path / "worker.py").write_text(re.sub(r"number == ([359])\b", r"number == 10\1", WORKER))
    for run in range(2):
        out = tmp_path / f"figures{run}.json"
        environment = {"PYTHONPATH": str(tmp_path)}
        supervisor.supervise("worker", [], seconds=0, cases=12, seed=1, device="cpu", out=out, environment=environment)
        figures = json.loads(out.read_text())
        assert figures["cases"] == 12 and [f["case"] for f in figures["failed"]] == ["op:7"]


def test_a_name_repeats_its_case():
    for first in cases("conv2d", 5):
        second = fuzz_cases.draw(first.name, "cpu")
        assert str(first) == str(second)
        for a, b in zip(first.sample.tensors(), second.sample.tensors(), strict=True):
            assert torch.equal(fuzz.bits(a), fuzz.bits(b))


def found(name, function, count=60):
    """What the fuzzer says of a wrong function in the place of an op."""
    for case in cases(name, count):
        try:
            fuzz.check(case, judged=function)
        except fuzz.Failure as failure:
            return str(failure)
    return None


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return input * input

    @staticmethod
    def backward(ctx, grad_output):
        return 2 * ctx.saved_tensors[0] * grad_output * (1 + 1e-4)


def wrong_at_an_offset(input):
    return input * input * (1 if input.storage_offset() == 0 else 2)


counter = itertools.count()
WRONG = {
    "values": (lambda x: x * x * (1 + 1e-4), "output 0"),
    "gradients": (WrongGradient.apply, "gradient 0"),
    "an offset": (wrong_at_an_offset, "output 0"),
    "bits": (lambda x: x * x * (1 + 1e-7 * next(counter)), "two calls: output 0 differs"),
    "its argument": (lambda x: (x.detach().add_(1) - 1) * (x.detach() - 1) + 0 * x, "was changed|output 0|gradient"),
    "a shape": (lambda x: (x * x).reshape(-1), "shape"),
    "a refusal": (lambda x: cuda_ops.functional.square(x.view(-1)).view(x.shape), "refused, though PyTorch takes it"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what):
    function, message = WRONG[what]
    assert re.search(message, found("square", function) or "nothing"), what


@pytest.mark.parametrize("name", ["multi_head_attention_forward", "nn.MultiheadAttention"])
def test_dropout_of_an_op_that_has_none_by_default(name):
    """Its numbers are others than PyTorch's, and a module's the same as its function's."""
    for case in cases(name, 200):
        arguments = list(case.sample.args)
        if arguments[2].numel() == 0:
            continue
        arguments[10] = 0.5
        case.sample = fuzz_cases.Sample(tuple(arguments), {**case.sample.kwargs, "training": True})
        try:
            assert fuzz.check(case) in ("compared", "refused")
        except fuzz_cases.Rejected:
            continue
        return
    pytest.fail("none of 200 cases is one")


def test_what_is_right_is_not():
    assert found("square", cuda_ops.functional.square, 15) is None
    assert found("square", torch.square, 15) is None


# A worker that does what a fuzzer's may: tests/support/supervisor.py runs it as it runs them.
WORKER = """
import os, signal, sys, time
first = int(sys.argv[sys.argv.index("--worker") + 1])
for number in range(first, 1000):
    print("case", number, f"op:{number}", flush=True)
    if number == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 5:
        time.sleep(60)
    if number == 9:
        print("========= Invalid __global__ read of size 16 bytes\\n=========     at kernel+0x10", flush=True)
        raise RuntimeError("CUDA error: lost\\nFor debugging\\nconsider\\nthis\\nand that")
    print("done", "fail wrong value" if number == 7 else "compared", flush=True)
    time.sleep(0.01)
"""


def test_crashes_and_hangs_are_failures_with_a_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "figures.json"
    status = supervisor.supervise("worker", [], seconds=4, seed=1, device="cpu", out=out, case_seconds=2)
    assert status == 1
    figures = json.loads(out.read_text())
    assert {f["case"]: f["what"].split(" in ")[0] for f in figures["failed"]} == {
        "op:3": f"killed by {signal.SIGSEGV.name}",
        "op:5": "does not end",
        "op:7": "wrong value",
        "op:9": "ended with status 1 Invalid __global__ read of size 16 bytes | at kernel+0x10 | "
        "RuntimeError: CUDA error: lost | For debugging | consider",
    }
    assert figures["failures"] == 4 and figures["cases"] > 10 and figures["seed"] == 1
    assert "PYTHONPATH=.:tests python -m worker --case op:7" in capsys.readouterr().out


def test_hostile_calls_reach_every_op():
    ops = fuzz_raw.all_ops()
    assert {"conv2d_forward", "sgd_", "mnist_step_", "derivatives"} <= set(ops)
    assert len(ops) > 80
    assert fuzz_raw.named(None) == list(ops)
    assert fuzz_raw.named(["square_*", "adam_"]) == ["adam_", "square_backward", "square_forward"]
    with pytest.raises(LookupError, match="there is no op cube"):
        fuzz_raw.named(["square_*", "cube"])


@pytest.mark.parametrize(
    ("error", "is_right"),
    [
        (RuntimeError("relu: expected input to be floating point, got int64"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (RuntimeError("relu: x INTERNAL ASSERT FAILED at y, please report a bug to PyTorch"), False),
    ],
)
def test_which_errors_are_right(error, is_right):
    if is_right:
        fuzz_raw.check_error("relu_forward", error, is_composed=False)
    else:
        with pytest.raises(fuzz_raw.Wrong):
            fuzz_raw.check_error("relu_forward", error, is_composed=False)
