"""Ctrl-C at any point: what is switched for a while is switched back, and a command that is still importing ends
without a traceback."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cuda_ops
from cuda_ops import _interrupt
from cuda_ops.__main__ import main
from cuda_ops.data import Batches
from cuda_ops.training import GraphedStep, evaluate

ROOT = Path(cuda_ops.__file__).resolve().parents[1]


def interrupted_everywhere(function, is_sound):
    """Runs it again and again, with a KeyboardInterrupt at each of the points where Python looks at pending signals: at
    the beginning of a function of Python's and after a call of C's. How many points there are, and at which the state
    is not sound afterwards."""
    unsound, count = [], 0
    while True:
        count += 1
        left = count

        def interrupt(frame, event, argument):
            nonlocal left
            if event in ("call", "c_return"):
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt(f"{event} in {frame.f_code.co_filename}: {frame.f_code.co_name}")

        try:
            sys.setprofile(interrupt)
            function()
            sys.setprofile(None)
        except KeyboardInterrupt as error:
            sys.setprofile(None)
            if not is_sound():
                unsound.append(str(error))
        else:
            return count, unsound
        finally:
            sys.setprofile(None)
            torch.set_grad_enabled(True)
            torch.autograd.set_multithreading_enabled(True)


def test_the_search_finds_what_a_context_manager_of_python_leaves():
    def work():
        with torch.no_grad():
            torch.ones(1) + 1

    count, unsound = interrupted_everywhere(work, torch.is_grad_enabled)
    assert count > 5
    assert any("grad_mode.py: __exit__" in place for place in unsound), unsound


def test_evaluation_switches_gradients_on_again():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 10))
    batches = Batches(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
    count, unsound = interrupted_everywhere(lambda: evaluate(model, batches, 2), torch.is_grad_enabled)
    assert count > 100
    assert unsound == []


def test_a_step_switches_the_threads_of_backward_on_again():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = GraphedStep(model, lambda x: model(x).sum(), optimizer)
    count, unsound = interrupted_everywhere(lambda: step(torch.ones(1, 2)), torch._C._is_multithreading_enabled)
    assert count > 50  # fewer where others have imported and cached before
    assert unsound == []


@pytest.mark.parametrize("grad", [True, False])
def test_evaluation_leaves_gradients_as_they_were(grad):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 10))
    batches = Batches(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
    with torch.set_grad_enabled(grad):
        evaluate(model, batches)
        assert torch.is_grad_enabled() == grad


# Imports. What a process has imported so far it prints by -X importtime, a line for each module.


def interrupt_when(module, *arguments):
    """Exit status and stderr, without the lines of -X importtime, of a Python that gets a SIGINT when it has imported a
    module."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        # What is started in the background ignores the signal, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        text = []
        for line in process.stderr:
            text.append(line)
            if re.search(rf"\\| +{re.escape(module)}$", line):
                process.send_signal(signal.SIGINT)
                break
        text += process.stderr.readlines()
        process.wait(timeout=60)
    finally:
        process.kill()
    return process.returncode, "".join(line for line in text if not line.startswith("import time:"))


@pytest.mark.parametrize("module", ["torch._utils", "torch.nn.functional", "cuda_ops._library"])
def test_a_command_that_is_still_importing_ends_without_a_traceback(module):
    assert interrupt_when(module, "-m", "cuda_ops", "mnist", "--device", "cpu") == (130, "interrupted\n")


def test_an_import_in_a_program_is_interrupted_as_ever():
    status, text = interrupt_when("torch._utils", "-c", "import cuda_ops")
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in text


@pytest.mark.parametrize(
    ("argv", "original", "quiet"),
    [
        (["-m", "mnist"], ["python", "-m", "cuda_ops", "mnist"], True),
        (["-m"], ["python", "-X", "dev", "-Imcuda_ops"], True),
        (["-m", "cuda_ops"], ["python", "-m", "tool", "cuda_ops"], False),
        (["-m", "x"], ["python", "-m", "cuda_ops.bench", "x"], False),
        (["tool.py", "cuda_ops"], ["python", "tool.py", "cuda_ops"], False),
        (["-c"], ["python", "-c", "import cuda_ops"], False),
        ([""], ["python"], False),
    ],
)
def test_which_processes_are_the_command(argv, original, quiet, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.default_int_handler, signal.SIG_IGN):
            signal.signal(signal.SIGINT, handler)
            _interrupt.end_quietly_while_a_command_is_imported()
            changed = quiet and handler is not signal.SIG_IGN  # nohup stays nohup
            assert signal.getsignal(signal.SIGINT) is (_interrupt._end if changed else handler)
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_command_itself_gets_keyboard_interrupts(capsys):
    before = signal.signal(signal.SIGINT, _interrupt._end)
    try:
        assert main(["bench", "cubic"]) == 2
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
