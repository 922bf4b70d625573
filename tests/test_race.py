"""python -m cuda_ops race: reports, parity that fails where it must, models by each kind of name, bad arguments."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import cuda_ops
from cuda_ops.__main__ import main
from cuda_ops._errors import UserError
from cuda_ops.training.race import measure, parity, report
from cuda_ops.training.race.forward import GraphedForward
from cuda_ops.training.race.measure import Conditions
from cuda_ops.training.race.subject import find

ROOT = Path(__file__).resolve().parents[1]
MODEL = """
import torch


def make():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(inplace=True), torch.nn.Flatten(),
        torch.nn.Linear(144, 16), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 3),
    )
    return model, torch.rand(4, 1, 8, 8)


def with_loss():
    return torch.nn.Linear(3, 2), (torch.rand(4, 3),), lambda output: output.exp().mean()


def broken():
    return torch.nn.Linear(3, 2), torch.rand(4, 5)


def no_model():
    return 3


def of_size(size):
    return torch.nn.Linear(size, 2), torch.rand(4, size)


def without_attribute():
    return torch.nn.Linaer(3, 2), torch.rand(4, 3)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "race_models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("race_models", None)


def test_a_race_writes_its_report(folder, capsys):
    arguments = ["race", "race_models:make", "--device", "cpu", "--blocks", "2"]
    assert main(arguments) == 0
    out = folder / "runs/race/race_models_make"
    outcome = json.loads((out / "report.json").read_text())
    assert [step["name"] for step in outcome["steps"]] == ["PyTorch", "cuda_ops"]
    assert all(len(step["blocks"]) == 2 and min(step["blocks"]) > 0 for step in outcome["steps"])
    assert [row["name"] for row in outcome["parity"]] == ["output", "gradients", "running statistics"]
    assert outcome["ok"] and all(row["distance"] < 1e-4 for row in outcome["parity"])
    layers = {"Conv2d", "BatchNorm2d", "ReLU", "Flatten", "Linear", "Dropout", measure.OUTSIDE}
    for side in ("native", "ours"):
        assert set(outcome["layers"][side]) == layers
        assert all(outcome["layers"][side]["Linear"][phase] > 0 for phase in ("forward", "backward"))
    text = (out / "report.md").read_text()
    printed = capsys.readouterr().out
    for word in ("| Linear |", "cuda_ops", "linear_relu: 1 × 2 calls in one", "running statistics"):
        assert word in text
    assert "linear_relu: 1 × 2 calls in one" in printed and "report.json" in printed
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_race_of_inference(folder, capsys):
    arguments = ["race", "race_models:make", "--device", "cpu", "--blocks", "2", "--mode", "inference", "--out", "out"]
    assert main(arguments) == 0
    outcome = json.loads((folder / "out/report.json").read_text())
    assert outcome["settings"]["mode"] == "inference"
    assert [step["name"] for step in outcome["steps"]] == ["PyTorch", "cuda_ops"]
    assert [row["name"] for row in outcome["parity"]] == ["output"]
    assert outcome["ok"] and outcome["parity"][0]["distance"] < 1e-5
    for side in ("native", "ours"):
        times = outcome["layers"][side]
        assert times["Linear"]["forward"] > 0 and all(of["backward"] == 0 for of in times.values())
    text = (folder / "out/report.md").read_text()
    assert "forward pass, ms" in text and "inference: eval(), torch.inference_mode()" in text
    assert "backward" not in text and "SGD" not in text
    assert "forward pass" in capsys.readouterr().out


def test_inference_is_in_evaluation_and_without_gradients(folder):
    subject = find("race_models:make", "cpu", None, None)
    seen = []

    def call(model, *batch):
        seen.append((model.training, torch.is_inference_mode_enabled()))
        return model(*batch)

    subject = dataclasses.replace(subject, call=call)
    conditions = Conditions(torch.device("cpu"), None, 2, 1, training=False)
    found = measure.contestants(False, False)
    measure.race(subject, found, conditions, lambda text: None)
    parity.compare(subject, conditions, torch.float32)
    measure.layer_times(subject, True, conditions)
    assert seen and set(seen) == {(False, True)}
    assert all(len(one.milliseconds) == 2 and one.first_seconds > 0 for one in found)


def test_wrong_outputs_of_inference_end_with_status_1(folder, capsys, monkeypatch):
    right = cuda_ops.functional.linear_relu
    monkeypatch.setattr(cuda_ops.functional, "linear_relu", lambda *args: 1.01 * right(*args))
    assert main(["race", "race_models:make", "--device", "cpu", "--blocks", "1", "--mode", "inference"]) == 1
    assert "differ by more than rounding" in capsys.readouterr().err


def test_a_report_tells_the_cold_start_of_each(folder, monkeypatch):
    subject = find("race_models:make", "cpu", None, None)
    conditions = Conditions(torch.device("cpu"), None, 1, 1)
    hits = iter([0, 0, 0, 2])
    monkeypatch.setattr(measure, "_cache_hits", lambda: next(hits))
    told = []
    for _ in range(2):
        one = measure.Contestant("PyTorch, compiled", False, compiled=True, milliseconds=[1.0])
        batch = measure.batch_on(subject, conditions.device)
        slow = lambda model: time.sleep(0.2) or model  # noqa: E731
        measure.prepared(subject, one, conditions, batch, compiler=slow)
        told.append((one.first_seconds > 0.2, one.cached))
    assert told == [(True, False), (True, True)]
    step = {**vars(one), "milliseconds": one.summary}
    outcome = {"settings": {"mode": "training"}, "steps": [step]}
    (row,) = report.step_table(outcome)[1]
    assert row[-1] == f"{one.first_seconds:.2f} (compiler's cache)"


def test_a_forward_pass_that_is_no_graph_is_called_as_it_is():
    forward = GraphedForward(lambda x: (x.is_inference(), torch.is_autocast_enabled("cpu")), torch.device("cpu"))
    assert forward(torch.ones(1)) == (False, False) and forward(torch.ones(1)) == (False, False)
    forward = GraphedForward(lambda x: (x + 1).is_inference(), torch.device("cpu"), torch.bfloat16)
    assert forward(torch.ones(1))


def test_the_memory_format_is_that_of_both_sides(folder, capsys):
    arguments = ["race", "race_models:make", "--device", "cpu", "--blocks", "1", "--memory-format", "channels_last"]
    assert main(arguments) == 0
    assert "channels_last" in capsys.readouterr().out
    subject = find("race_models:make", "cpu", None, None).in_channels_last()
    assert subject.batch[0].is_contiguous(memory_format=torch.channels_last)
    weights = [p for p in subject.model.parameters() if p.dim() == 4]
    assert weights and all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)


def test_options_reach_the_model(folder, monkeypatch, capsys):
    def found(*arguments):
        raise UserError(f"asked for {arguments}")

    monkeypatch.setattr("cuda_ops.training.race.subject.find", found)
    assert main(["race", "squeezenet1_1", "--device", "cpu", "--batch", "3", "--size", "48"]) == 2
    assert "asked for ('squeezenet1_1', 'cpu', 3, 48)" in capsys.readouterr().err


def test_a_model_with_its_own_loss(folder):
    subject = find("race_models:with_loss", "cpu", None, None)
    output = subject.call(subject.model, *subject.batch)
    assert torch.equal(subject.loss(torch.nn.functional, output, *subject.batch), output.exp().mean())


def test_wrong_results_end_with_status_1(folder, capsys, monkeypatch):
    right = cuda_ops.functional.linear_relu
    monkeypatch.setattr(cuda_ops.functional, "linear_relu", lambda *args: 1.01 * right(*args))
    assert main(["race", "race_models:make", "--device", "cpu", "--blocks", "1"]) == 1
    assert "differ by more than rounding" in capsys.readouterr().err


def test_a_model_of_torchvision(folder):
    pytest.importorskip("torchvision")
    subject = find("squeezenet1_1", "cpu", 2, 48)
    assert [tuple(tensor.shape) for tensor in subject.batch] == [(2, 3, 48, 48), (2,)]
    conditions = Conditions(torch.device("cpu"), None, 1, 1)
    times = measure.layer_times(subject, True, conditions, steps=1)
    assert times["Conv2d"]["forward"] > 0 and times["Conv2d"]["backward"] > 0
    assert find("vit_b_32", "cpu", 1, 64).model.image_size == 64


def test_a_model_of_transformers(folder):
    pytest.importorskip("transformers")
    subject = find("BertModel", "cpu", 2, 5)
    assert subject.batch[0].shape == (2, 5)
    assert len(subject.model.encoder.layer) == 2
    assert subject.loss(torch.nn.functional, subject.call(subject.model, *subject.batch), *subject.batch).numel() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_model"], "no_such_model is neither a classification model of torchvision's"),
        (["no_such_module:make"], "no_such_module:make cannot be imported"),
        (["race_models:no_such_function"], "race_models:no_such_function cannot be imported"),
        (["race_models:of_size"], "race_models:of_size() does not run: TypeError: "),
        (["race_models:without_attribute"], "race_models:without_attribute() does not run: AttributeError: "),
        (["race_models:no_model"], "has to return a model and its inputs"),
        (["race_models:broken"], "race_models:broken does not run"),
        (["race_models:make", "--precision", "tf32"], "--precision tf32 needs a GPU"),
        (["race_models:broken", "--mode", "inference"], "race_models:broken does not run"),
        (["race_models:make", "--precision", "tf32", "--mode", "inference"], "--precision tf32 needs a GPU"),
        (["race_models:make", "--batch", "0"], "--batch 0: expected a whole number of at least 1"),
        (["race_models:make", "--device", "tpu"], "--device tpu is unknown"),
        (["race_models:make", "--out", "race_models.py"], "--out race_models.py cannot be written to"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(folder, capsys, arguments, message):
    assert main(["race", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_help_names_what_there_is():
    result = subprocess.run(
        [sys.executable, "-m", "cuda_ops", "race", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    for word in ("torchvision", "transformers", "module:function", "--precision", "--size", "--out", "exit status"):
        assert word in result.stdout


def test_a_contestant_that_cannot_run_says_why():
    steps = [{"name": "a", "milliseconds": {}, "problem": "no memory"}]
    table = report.step_table({"settings": {"mode": "training"}, "steps": steps})
    assert table[1] == [["a", "n/a", "", "", "no memory", ""]]


def test_an_unknown_mode_is_said_in_one_line(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["race", "resnet18", "--mode", "eval"])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert "argument --mode: invalid choice: 'eval'" in error and error.count("\n") == 1


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_race_on_cuda(folder, precision, mode):
    arguments = ["race", "race_models:make", "--device", "cuda", "--blocks", "2", "--precision", precision]
    arguments += ["--mode", mode]
    assert main([*arguments, "--out", "out"]) == 0
    outcome = json.loads((folder / "out/report.json").read_text())
    names = [
        "PyTorch",
        "PyTorch, compiled",
        "PyTorch, graph",
        "PyTorch, compiled, graph",
        "cuda_ops",
        "cuda_ops, graph",
    ]
    assert [step["name"] for step in outcome["steps"]] == names
    assert not any(step["problem"] for step in outcome["steps"])
    assert all(step["first_seconds"] > 0 for step in outcome["steps"])


@pytest.mark.cuda
def test_a_graph_of_a_forward_pass():
    weight = torch.rand(4, 4, device="cuda")
    forward = GraphedForward(lambda x: x @ weight, weight.device)
    x = torch.rand(3, 4, device="cuda")
    for _ in range(3):
        torch.testing.assert_close(forward(x), x @ weight)
    x.fill_(2.0)  # read where it lies
    torch.testing.assert_close(forward(x), x @ weight)
    with pytest.raises(ValueError, match="expected the tensors that were captured"):
        forward(x.clone())
