"""python -m cuda_ops mnist: the model, the data, the side-by-side run, its report, and everything that can go wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.devices import cuda_param
from support.opspec import assert_close
from support.runs import environment, interrupted

import cuda_ops
from cuda_ops import _library
from cuda_ops.__main__ import COMMANDS, main
from cuda_ops._errors import UserError
from cuda_ops._files import write_file
from cuda_ops.data import Batches, default_root, mnist
from cuda_ops.models import MnistCNN
from cuda_ops.training import Trainer, compare, evaluate, learning_rate
from cuda_ops.training.parity import LIMITS, Parity, Row, compare_losses
from cuda_ops.training.timing import PHASES

ROOT = Path(cuda_ops.__file__).resolve().parents[1]
FILES = ["report.json", "report.md", "report.png"]
QUICK = ["mnist", "--device", "cpu", "--limit", "192", "--batch-size", "32"]


def read(folder):
    return json.loads((folder / "report.json").read_text())


# The model


@pytest.mark.parametrize("source, target", [("native", "custom"), ("custom", "native"), ("custom", "fused")])
def test_one_state_dict_fits_all_backends(source, target):
    torch.manual_seed(1)
    state = MnistCNN(source).state_dict()
    model = MnistCNN(target)
    model.load_state_dict(state, strict=True)
    assert list(model.state_dict()) == list(state)
    assert repr(model) == repr(MnistCNN(source))


def test_parameter_count_is_that_of_the_docstring():
    assert f"{sum(p.numel() for p in MnistCNN('native').parameters()):,}" in MnistCNN.__doc__


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend: expected one of fused, custom, native, got 'fast'"):
        MnistCNN("fast")


@pytest.mark.parametrize("backend", ["custom", "fused"])
def test_backends_compute_the_same(backend, device):
    """Two steps of training in float64: losses, gradients, running statistics and the evaluation."""
    torch.manual_seed(0)
    native = MnistCNN("native").to(device, torch.float64)
    custom = MnistCNN(backend).to(device, torch.float64)
    custom.load_state_dict(native.state_dict())
    batches = Batches(*mnist(limit=64), device, torch.float64)
    trainers = [Trainer(model, batches, model.backend, lr=0.1) for model in (native, custom)]
    for indices in torch.arange(64).split(32):
        losses, gradients = [], []
        for trainer in trainers:
            kept = []
            parameters = list(trainer.model.parameters())
            losses.append(
                trainer.step(indices, on_gradients=lambda k=kept, p=parameters: k.extend(x.grad.clone() for x in p))
            )
            gradients.append(kept)
        assert_close(losses[1], losses[0].cpu(), 1e-10, "loss")
        total = torch.cat([g.flatten() for g in gradients[0]]).norm().item()
        for (name, _), expected, actual in zip(native.named_parameters(), *gradients, strict=True):
            if name in MnistCNN.zero_gradients:
                assert (actual - expected).norm() <= 1e-12 * total, name
            else:
                assert_close(actual, expected.cpu(), 1e-9, name)
    for name, expected in native.state_dict().items():
        assert_close(custom.state_dict()[name], expected.cpu(), 1e-9, name)
    images, _ = batches(torch.arange(64))
    assert_close(custom.eval()(images), native.eval()(images).cpu(), 1e-9, "evaluation")


def test_training_with_our_ops_learns():
    torch.manual_seed(0)
    batches = Batches(*mnist(limit=512))
    trainer = Trainer(MnistCNN("custom"), batches, lr=0.02)
    first = trainer.step(torch.arange(64)).item()
    for _ in range(2):
        for indices in torch.randperm(512).split(64):
            last = trainer.step(indices).item()
    assert last < 0.6 * first
    result = evaluate(trainer.model, batches)
    assert trainer.model.training, "evaluate leaves the mode as it was"
    assert result.confusion.sum() == 512
    assert result.confusion.diagonal().sum().item() == round(512 * result.accuracy)
    assert len(result.misread) == 512 - round(512 * result.accuracy)


def test_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 100, 0.5) for step in range(100)]
    assert rates[0] == pytest.approx(0.5 / 30)
    assert max(rates) == 0.5
    assert rates.index(max(rates)) == 29
    assert 0 < rates[-1] < 0.01
    assert 0 < learning_rate(0, 1, 0.5) <= 0.5


# The data


def test_what_is_no_part_of_the_data_is_refused():
    with pytest.raises(ValueError, match="mnist: expected limit to be 0 or more, got -1"):
        mnist(limit=-1)
    with pytest.raises(TypeError, match="mnist: expected limit to be an int, got '5'"):
        mnist(limit="5")
    images, labels = mnist(limit=4)
    with pytest.raises(ValueError, match="Batches: expected a label for each of 4 images, got 3"):
        Batches(images, labels[:3])
    with pytest.raises(TypeError, match="Batches: expected images to be uint8, got float32"):
        Batches(images / 255, labels)
    with pytest.raises(TypeError, match="Batches: expected dtype to be floating point, got uint8"):
        Batches(images, labels, dtype=torch.uint8)


def test_batches_are_normalised_alike_wherever_the_data_lies(device):
    images, labels = mnist(limit=1000)
    assert images.shape == (1000, 1, 28, 28)
    assert images.dtype == torch.uint8
    for keep_on_device in (False, True):
        batches = Batches(images, labels, device, keep_on_device=keep_on_device)
        expected = (images[[3, 5]].double() / 255 - 0.1307) / 0.3081
        for load in (batches, batches.gather):
            x, y = load(batches.place(torch.tensor([3, 5])))
            assert x.device.type == y.device.type == device
            assert_close(x, expected, 1e-6, "images")
            assert y.tolist() == labels[[3, 5]].tolist()


def test_batch_order_is_a_shuffle_of_whole_batches():
    order = list(compare.batch_order(100, 32, 2, seed=3))
    assert [len(batch) for batch in order] == [32] * 6
    for epoch in (order[:3], order[3:]):
        assert len(set(torch.cat(epoch).tolist())) == 96
    assert not torch.equal(order[0], order[3])
    again = list(compare.batch_order(100, 32, 2, seed=3))
    assert all(torch.equal(a, b) for a, b in zip(order, again, strict=True))


@pytest.fixture
def data_copy(tmp_path):
    """A data folder whose archives are links to the repository's, for a test to spoil."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for archive in (default_root() / "MNIST" / "raw").glob("*.gz"):
        (raw / archive.name).symlink_to(archive)
    return raw


def test_missing_archive(data_copy):
    (data_copy / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte.gz is missing: copy it from"):
        mnist(data_copy.parents[1])


def test_truncated_archive(data_copy):
    name = "train-images-idx3-ubyte.gz"
    content = (data_copy / name).read_bytes()
    (data_copy / name).unlink()
    (data_copy / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=rf"{name} is damaged or truncated \({len(content) // 2} bytes, wrong MD5\)"):
        mnist(data_copy.parents[1])
    assert [path.name for path in data_copy.iterdir() if not path.name.endswith(".gz")] == []


def test_extracted_files_of_the_wrong_length_are_extracted_anew(data_copy):
    """The one that is too short, and beside it the one that is too long, which torchvision would read as it is."""
    (data_copy / "train-images-idx3-ubyte").write_bytes(b"short")
    (data_copy / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + (60001).to_bytes(4, "big") + bytes(60001))
    images, labels = mnist(data_copy.parents[1])
    assert images.shape == (60000, 1, 28, 28)
    assert labels.shape == (60000,) and labels[:3].tolist() == [5, 0, 4]


# The run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of all backends: (folder, exit status, weights)."""
    folder = tmp_path_factory.mktemp("run")
    weights = folder / "weights.pt"
    status = main([*QUICK, "--epochs", "2", "--out", str(folder / "report"), "--save", str(weights)])
    return folder / "report", status, weights


@pytest.mark.parametrize("backend", ["custom", "fused"])
def test_backends_within_rounding(finished, backend):
    folder, status, _ = finished
    report = read(folder)
    assert report["problems"] == []
    assert status == 0
    assert report["ok"] is True
    rows = report["parity"][backend]["rows"]
    names = [name for name, _ in MnistCNN("native").named_parameters()]
    assert [row["name"] for row in rows if row["kind"] == "gradient"] == names
    assert [row["name"] for row in rows if row["kind"] == "update"] == names
    assert len([row for row in rows if row["kind"] == "statistic"]) == 6
    for row in rows:
        assert row["ok"]
        assert row["relative_distance"] <= 5e-3
    assert report["parity"][backend]["early_loss_relative_distance"] <= 5e-4


def test_report_json(finished):
    report = read(finished[0])
    assert report["steps_done"] == report["steps_planned"] == 12
    assert report["timing"]["measured_steps"] + report["timing"]["warmup_steps"] == 12
    assert report["versions"]["torch"] == torch.__version__
    assert report["device"]["type"] == "cpu"
    assert report["device"]["name"]
    assert report["command"]
    assert list(report["backends"]) == ["fused", "custom", "native"]
    for backend in report["backends"]:
        result = report["backends"][backend]
        times = result["milliseconds"]
        assert list(times) == [*PHASES, "whole step"]
        assert sum(times[phase]["mean"] for phase in PHASES) == pytest.approx(times["whole step"]["mean"])
        assert result["samples_per_second"] == pytest.approx(32e3 / times["whole step"]["mean"])
        assert len(result["losses"]) == 12
        assert result["train_loss"] == pytest.approx(sum(result["losses"]) / 12)
        assert 0.1 < result["test_accuracy"] <= 1
        assert sum(map(sum, result["confusion"])) == 192
        assert result["peak_memory_bytes"] is None, "not known on the CPU"
        assert result["graph_milliseconds"] == {}, "there are none on the CPU"


def test_report_md_and_png(finished):
    folder, *_ = finished
    text = (folder / "report.md").read_text()
    for word in (*PHASES, "whole step", "samples/s", "train loss", "test accuracy", "conv1.weight", "report.png"):
        assert word in text
    assert (folder / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(path.name for path in folder.iterdir()) == FILES, "no temporary file is left"


def test_saved_weights_load_into_all(finished):
    state = torch.load(finished[2], weights_only=True)
    for backend in ("native", "custom", "fused"):
        model = MnistCNN(backend)
        model.load_state_dict(state, strict=True)
        accuracy = evaluate(model, Batches(*mnist(train=False, limit=192))).accuracy
        assert accuracy == pytest.approx(read(finished[0])["backends"]["fused"]["test_accuracy"])


def test_same_seed_same_losses(finished, tmp_path):
    assert main([*QUICK, "--epochs", "2", "--backend", "native", "--data-on", "device", "--out", str(tmp_path)]) == 0
    report = read(tmp_path)
    assert report["parity"] == {}
    assert report["backends"]["native"]["losses"] == pytest.approx(
        read(finished[0])["backends"]["native"]["losses"], rel=1e-3
    )


def test_float64_run(tmp_path):
    assert main([*QUICK, "--epochs", "1", "--dtype", "float64", "--out", str(tmp_path)]) == 0
    for parity in read(tmp_path)["parity"].values():
        assert max(row["relative_distance"] for row in parity["rows"] if row["kind"] == "gradient") < 1e-9


@pytest.mark.parametrize("dtype", [cuda_param(d) for d in ("float32", "float64", "bfloat16", "float16")])
def test_run_on_cuda(dtype, tmp_path):
    arguments = ["mnist", "--device", "cuda", "--limit", "4096", "--epochs", "2", "--batch-size", "128"]
    assert main([*arguments, "--dtype", dtype, "--data-on", "device", "--out", str(tmp_path)]) == 0
    for result in read(tmp_path)["backends"].values():
        assert result["peak_memory_bytes"] > 1e6
        assert result["test_accuracy"] > 0.5
        assert bool(result["graph_milliseconds"]) == (dtype != "float16")


# A wrong backend is found out


def scaled_gradient(layer, factor):
    """The class of a layer whose backward is wrong by a factor."""

    class Scaled(layer):
        def forward(self, input):
            output = super().forward(input)
            if output.requires_grad:
                output.register_hook(lambda grad: grad * factor)
            return output

    return Scaled


def biased_evaluation():
    class Biased(cuda_ops.nn.BatchNorm2d):
        def forward(self, input):
            output = super().forward(input)
            return output if self.training else output * 1.001

    return Biased


def scaled_step():
    class Scaled(cuda_ops.optim.SGD):
        def step(self, closure=None):
            rates = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                group["lr"] *= 1.01
            super().step(closure)
            for group, lr in zip(self.param_groups, rates, strict=True):
                group["lr"] = lr

    return Scaled


WRONG = {
    "backward": ("nn", "Conv2d", lambda: scaled_gradient(cuda_ops.nn.Conv2d, 1.01), "gradient conv1.weight"),
    "evaluation": ("nn", "BatchNorm2d", biased_evaluation, "logits in evaluation mode"),
    "update": ("optim", "SGD", scaled_step, "update linear1.weight"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_backend_that_is_one_percent_wrong_fails(wrong, monkeypatch, tmp_path, capsys):
    namespace, name, make, message = WRONG[wrong]
    monkeypatch.setattr(getattr(cuda_ops, namespace), name, make())
    # lr: a gradient's step must stand out of the rounding of the weights that it is added to.
    arguments = [*QUICK, "--backend", "both", "--epochs", "1"]
    assert main([*arguments, "--lr", "0.5" if wrong == "update" else "0.1", "--out", str(tmp_path)]) == 1
    assert f"FAILED: custom: {message}" in capsys.readouterr().out
    assert not read(tmp_path)["ok"]


def test_parity_rejects_nan():
    assert not Row("weight", "gradient", 1.0, float("nan"), 1e-3).ok
    assert not Row("weight", "gradient", 1.0, float("nan"), 1e-3, float("nan"), float("nan")).ok
    assert not Row("weight", "gradient", 1.0, 0.01, 1e-3).ok
    # Far from native, but as close to float64 as native is: native's own rounding.
    assert Row("weight", "gradient", 1.0, 0.01, 1e-3, 0.003, 0.009).ok
    assert not Row("weight", "gradient", 1.0, 0.03, 1e-3, 0.03, 0.009).ok


def test_parity_of_losses():
    limits = LIMITS[torch.float32]
    native = [2.0 / (1 + i / 10) for i in range(200)]
    parity = Parity()
    compare_losses(parity, [loss * (1 + 1e-6) for loss in native], native, limits)
    assert parity.ok
    assert parity.largest_loss_distance == pytest.approx(2e-6)
    for wrong in ([loss * 1.002 for loss in native], native[:100] + [loss * 1.3 for loss in native[100:]]):
        parity = Parity()
        compare_losses(parity, wrong, native, limits)
        assert len(parity.problems) == 1
    # A leap that comes back is no error, nor is the end of a run that has not come to it.
    for right, finished in (([*native[:50], 9.0, *native[51:]], True), (wrong, False)):
        parity = Parity()
        compare_losses(parity, right, native, limits, finished)
        assert parity.ok


def test_divergence_exits_1(tmp_path, capsys):
    assert main([*QUICK, "--backend", "native", "--lr", "1e30", "--out", str(tmp_path)]) == 1
    assert "training diverged" in capsys.readouterr().out
    assert read(tmp_path)["ok"] is False


# Interruption


def test_ctrl_c_leaves_a_report(tmp_path):
    """A real SIGINT to a real process, in the middle of its run."""
    arguments = [*QUICK, "--epochs", "10000", "--out", str(tmp_path)]
    status, output = interrupted("loop", "Trainer", arguments, 35)
    assert status == 130
    assert "Interrupted after" in output
    report = read(tmp_path)
    assert report["interrupted"] is True
    assert 10 <= report["steps_done"] < report["steps_planned"]
    assert report["parity"]["custom"]["ok"]
    assert report["backends"]["native"]["test_accuracy"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


def test_second_ctrl_c_ends_at_once(monkeypatch, tmp_path, capsys):
    step = Trainer.step

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return step(*args, **kwargs)

    monkeypatch.setattr(Trainer, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert main([*QUICK, "--backend", "native", "--out", str(tmp_path)]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert list(tmp_path.iterdir()) == []


def test_files_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_file(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# Mistakes: one line on stderr, exit 2, nothing written

NO_GPU = r"PyTorch sees no GPU|is a build without CUDA"
MISTAKES = {
    "unknown device": (["--device", "tpu"], r"--device tpu is unknown: expected auto, cpu, cuda or cuda:N"),
    "device of another kind": (["--device", "meta"], r"--device meta is unknown"),
    "GPU that is not there": (["--device", "cuda:77"], rf"cuda:77 is not there: this machine has cuda:0|{NO_GPU}"),
    "batch of nothing": (["--batch-size", "0"], r"--batch-size 0: expected a whole number of at least 1"),
    "negative batch": (["--batch-size", "-4"], r"--batch-size -4: expected"),
    "large batch": (["--batch-size", "200"], r"--batch-size 200 is larger than the training set of 192 images"),
    "no epochs": (["--epochs", "0"], r"--epochs 0: expected a whole number of at least 1"),
    "no images": (["--limit", "0"], r"--limit 0: expected a whole number of at least 1"),
    "negative lr": (["--lr", "-0.1"], r"--lr -0.1: expected a number above 0"),
    "lr that is no number": (["--lr", "nan"], r"--lr nan: expected a number above 0"),
    "lr beyond float32": (["--lr", "1e308"], r"--lr 1e\+308: expected at most 3.40282e\+38, the largest of float32"),
    "CPU that is not there": (["--device", "cpu:3"], r"--device cpu:3 is not there: PyTorch has one CPU"),
    "negative seed": (["--seed", "-1"], r"--seed -1: expected"),
    "save into a missing folder": (["--save", "{tmp}/none/w.pt"], r"there is no folder .*none: make it first"),
    "save over a folder": (["--save", "{tmp}"], r"is a folder: give the name of a file"),
    "no data": (["--data-dir", "{tmp}"], r"train-images-idx3-ubyte.gz is missing: copy it from"),
    "out below a file": (["--out", "{tmp}/file/out"], r"--out .*file/out cannot be made \(Not a directory\)"),
    "out where no folder can be": (["--out", "/proc/cuda_ops"], r"--out /proc/cuda_ops cannot be made"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_told_in_one_line(mistake, tmp_path, capsys):
    arguments, message = MISTAKES[mistake]
    (tmp_path / "file").write_text("")
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert main([*QUICK, "--backend", "native", "--out", str(tmp_path / "out"), *arguments]) == 2
    output = capsys.readouterr()
    assert re.search(message, output.err), output.err
    assert output.err.startswith("python -m cuda_ops mnist: error: ")
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is written"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--epochs", "many"], "argument --epochs: invalid int value: 'many'"),
        (["--colour"], "unrecognized arguments: --colour (see python -m cuda_ops mnist --help)"),
    ],
)
def test_wrong_usage_is_told_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["mnist", *arguments])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_extension_that_is_not_built(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_library, "problem", "cuda_ops' extension is not built: rebuild it.")
    assert main([*QUICK, "--out", str(tmp_path / "out")]) == 2
    assert "error: cuda_ops' extension is not built: rebuild it." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("package", ["rich", "matplotlib", "torchvision"])
def test_missing_package(package, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main([*QUICK, "--out", str(tmp_path / "out")]) == 2
    assert f"{package} is missing" in (error := capsys.readouterr().err)
    assert 'run `pip install "cuda_ops[app]"`' in error
    assert error.count("\n") == 1


# The commands


MNIST_HELP = "--backend --device --epochs --batch-size --lr --seed --dtype --data-dir --data-on --limit --graph"
MNIST_HELP += " --save --out"
HELP = {
    "": " ".join(COMMANDS),
    "mnist": MNIST_HELP + " torchrun 130",
    "bench": "--device --dtype",
    "gpt": "--backend --tokens --model --steps --seed --resume --out",
    "race": "--precision --out",
    "doctor": "--json",
}


@pytest.mark.parametrize("command", HELP, ids=lambda command: command or "none")
def test_help(command, capsys):
    with pytest.raises(SystemExit) as exit:
        main([*command.split(), "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    for word in HELP[command].split():
        assert word in text


def test_no_command_is_told_in_one_line(capsys):
    with pytest.raises(SystemExit) as exit:
        main([])
    assert exit.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_two_processes_train_data_parallel(tmp_path):
    """torchrun with gloo: gradients are means over both processes, and only the first one prints and writes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*torchrun, "-m", "cuda_ops", *QUICK, "--epochs", "1", "--out", str(tmp_path / "out")],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    report = read(tmp_path / "out")
    assert report["settings"]["processes"] == 2
    assert report["command"].startswith("torchrun --nproc-per-node=2 -m cuda_ops mnist")
    assert report["steps_done"] == 6
    assert report["ok"], report["problems"]
    assert result.stdout.count("whole step") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
