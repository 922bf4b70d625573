"""python -m cuda_ops gpt: the step, the side-by-side run, and everything that can go wrong."""

import json
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.devices import cuda_param
from support.gpt import OURS, SMALL
from support.runs import interrupted

import cuda_ops
from cuda_ops import _library
from cuda_ops.__main__ import main
from cuda_ops.data import Windows, read_tokens, shakespeare, write_tokens
from cuda_ops.models import GPT
from cuda_ops.training.gpt import checkpoint, learner
from cuda_ops.training.gpt.settings import RECIPES
from cuda_ops.training.timing import PHASES

ROOT = Path(cuda_ops.__file__).resolve().parents[1]
FILES = ["report.json", "report.md", "report.png"]


# The step


def test_learning_rate():
    recipe = RECIPES["cpu-char"]
    rates = [learner.learning_rate(step, recipe) for step in range(recipe.steps + 1)]
    assert rates[0] == pytest.approx(2e-3 / 101)
    assert rates.index(max(rates)) == 100
    assert rates[100] == 2e-3
    assert rates[1050] == pytest.approx((2e-3 + 2e-4) / 2)
    assert rates[2000] == pytest.approx(2e-4)


def test_matrices_alone_decay():
    model = GPT("native", SMALL)
    groups = learner.parameter_groups(model, RECIPES["cpu-char"])
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert sum(p.numel() for group in groups for p in group["params"]) == SMALL.parameter_count
    assert all(p.dim() == 2 for p in groups[0]["params"])
    assert all(p.dim() == 1 for p in groups[1]["params"])


# The run


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "verses.txt"
    path.write_text(shakespeare()[:3000])
    return path


@pytest.fixture(scope="module")
def quick(text_file):
    return ["gpt", "--device", "cpu", "--text", str(text_file), "--batch", "2", "--length", "16", "--warmup", "2"]


def read(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory, quick):
    """A run of all backends: (folder, exit status, checkpoint, exported weights)."""
    folder = tmp_path_factory.mktemp("run")
    saved, exported = folder / "run.pt", folder / "model.bin"
    files = ["--save", str(saved), "--export", str(exported), "--out", str(folder / "report")]
    status = main([*quick, "--backend", "all", "--steps", "12", "--sample", "40", *files])
    return folder / "report", status, saved, exported


def test_report_json(finished):
    folder, status, *_ = finished
    report = read(folder)
    assert report["problems"] == []
    assert status == 0 and report["ok"] is True
    assert report["steps_done"] == report["steps_planned"] == 12
    assert list(report["backends"]) == ["fused", "custom", "native"]
    assert len(report["sample"]) == 41
    for result in report["backends"].values():
        times = result["milliseconds"]
        assert list(times) == [*PHASES, "whole step"]
        assert result["tokens_per_second"] == pytest.approx(32e3 / times["whole step"]["median"])
        assert 0 < result["share_of_peak"] < 1
        assert result["peak_memory_bytes"] is None, "not known on the CPU"
        assert len(result["losses"]) == 12
        assert [step for step, _ in result["validation"]] == [3, 6, 9, 12]
        assert result["losses"][-1] < result["losses"][0]
    native = report["backends"]["native"]["losses"]
    for name in OURS:
        assert report["backends"][name]["losses"] == pytest.approx(native, rel=1e-4)


@pytest.mark.parametrize("backend", OURS)
def test_backends_within_rounding(finished, backend):
    parity = read(finished[0])["parity"][backend]
    names = [name for name, _ in GPT("native", RECIPES["cpu-char"].config).named_parameters()]
    assert [row["name"] for row in parity["rows"] if row["kind"] == "gradient"] == names
    assert [row["kind"] for row in parity["rows"]].count("update") == 1
    assert max(row["distance"] for row in parity["rows"]) < 1e-4
    assert parity["ok"]


def test_report_md_and_png(finished):
    folder, *_ = finished
    text = (folder / "report.md").read_text()
    for word in (
        *PHASES,
        "tokens/s",
        "share of the peak",
        "validation loss",
        "transformer.h.3.ln_1.weight",
        "report.png",
    ):
        assert word in text
    assert (folder / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(path.name for path in folder.iterdir()) == FILES, "no temporary file is left"


def test_exported_weights_are_those_of_the_first_backend(finished):
    exported = GPT.from_llmc(finished[3], "native").state_dict()
    saved = torch.load(finished[2], weights_only=True)["backends"]["fused"]["model"]
    for name, tensor in saved.items():
        assert torch.equal(exported[name], tensor), name


@pytest.mark.parametrize("options", [["--dropout", "0.2"], ["--precision", "fp64"]], ids=["dropout", "fp64"])
def test_a_resumed_run_goes_on_bit_by_bit(options, quick, tmp_path, monkeypatch):
    """The whole run saves on its way; from there on another one has the same losses and the same weights."""
    save, kept = checkpoint.save_checkpoint, tmp_path / "kept.pt"

    def keep(run, path):
        save(run, kept if run.steps_done == 5 else path)

    monkeypatch.setattr("cuda_ops.gpt.save_checkpoint", keep)
    arguments = ["--backend", "all", "--sample", "0", "--eval-every", "4", "--save-every", "5"]
    whole, resumed = tmp_path / "whole.pt", tmp_path / "resumed.pt"
    out = ["--out", str(tmp_path / "out")]
    assert main([*quick, *options, *arguments, "--steps", "9", "--save", str(whole), *out]) == 0
    text = quick[quick.index("--text") + 1]
    again = ["gpt", "--device", "cpu", "--text", text, *arguments[2:], "--resume", str(kept)]
    assert main([*again, "--save", str(resumed), *out]) == 0
    first, second = (torch.load(path, weights_only=True) for path in (whole, resumed))
    for name, expected in first["backends"].items():
        actual = second["backends"][name]
        assert actual["losses"] == expected["losses"]
        assert len(actual["losses"]) == 9
        assert actual["validation"] == expected["validation"]
        for key in expected["model"]:
            assert torch.equal(actual["model"][key], expected["model"][key]), key
        for number, state in expected["optimizer"]["state"].items():
            for key, tensor in state.items():
                assert torch.equal(actual["optimizer"]["state"][number][key], tensor), (number, key)
    if "--dropout" in options:
        assert first["backends"]["native"]["losses"] != first["backends"]["fused"]["losses"]


def test_a_run_from_weights_of_llmcs(tmp_path):
    llmc_file = tmp_path / "model.bin"
    GPT("native", SMALL).save_llmc(llmc_file)
    write_tokens(tmp_path / "tokens.bin", np.arange(400) % 31)
    arguments = ["gpt", "--device", "cpu", "--tokens", str(tmp_path / "tokens.bin"), "--init", str(llmc_file)]
    assert main([*arguments, "--steps", "3", "--batch", "2", "--out", str(tmp_path / "out")]) == 0
    report = read(tmp_path / "out")
    assert report["settings"]["length"] == 12
    assert report["sample"] is None
    inputs = Windows(read_tokens(tmp_path / "tokens.bin", 31)[:360], 12)
    begins = torch.randint(len(inputs), (2,), generator=torch.Generator().manual_seed(0))
    expected = GPT.from_llmc(llmc_file, "native")(*inputs(begins)).item()
    assert report["backends"]["native"]["losses"][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("precision", [cuda_param(p) for p in ("fp32", "tf32", "bf16", "fp64")])
def test_run_on_cuda(precision, tmp_path):
    arguments = ["gpt", "--device", "cuda", "--steps", "60", "--batch", "16", "--length", "128", "--eval-every", "30"]
    assert main([*arguments, "--precision", precision, "--out", str(tmp_path)]) == 0
    for result in read(tmp_path)["backends"].values():
        assert result["peak_memory_bytes"] > 1e6
        assert result["step_milliseconds"]
        assert result["validation_loss"] < 3.5


# A wrong backend is found out


def wrong_norm():
    class Scaled(cuda_ops.nn.LayerNorm):
        def forward(self, input):
            output = super().forward(input)
            if output.requires_grad:
                output.register_hook(lambda grad: grad * 1.01)
            return output

    return Scaled


def wrong_step():
    class Scaled(cuda_ops.optim.AdamW):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] *= 1.01
            super().step(closure)

    return Scaled


WRONG = {
    "backward": ("nn", "LayerNorm", wrong_norm, "custom: gradient transformer"),
    "update": ("optim", "AdamW", wrong_step, "custom: update of all weights"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_backend_that_is_one_percent_wrong_fails(wrong, quick, monkeypatch, tmp_path, capsys):
    namespace, name, make, message = WRONG[wrong]
    monkeypatch.setattr(getattr(cuda_ops, namespace), name, make())
    arguments = ["--backend", "custom", "native", "--steps", "1", "--sample", "0", "--out", str(tmp_path)]
    assert main([*quick, *arguments]) == 1
    assert f"FAILED: {message}" in capsys.readouterr().out
    assert not read(tmp_path)["ok"]


@pytest.mark.parametrize("sample", ["0", "5"])
def test_divergence_exits_1(sample, quick, tmp_path, capsys):
    """With its report, and without a text where one is asked for: weights that are not finite draw none."""
    arguments = ["--backend", "native", "--steps", "6", "--sample", sample, "--lr", "1e30", "--out", str(tmp_path)]
    assert main([*quick, *arguments]) == 1
    assert "training diverged" in capsys.readouterr().out
    assert read(tmp_path)["sample"] is None


# Interruption


def test_ctrl_c_leaves_a_report_and_a_checkpoint(quick, tmp_path):
    """A real SIGINT to a real process, in the middle of its run; what it leaves goes on."""
    saved, out = tmp_path / "run.pt", tmp_path / "out"
    arguments = [*quick, "--steps", "10000", "--eval-every", "5000", "--save", str(saved), "--out", str(out)]
    status, output = interrupted("gpt.learner", "Learner", arguments, 25)
    assert status == 130
    assert "Interrupted after" in output
    report = read(out)
    assert report["interrupted"] is True
    assert 10 <= report["steps_done"] < 100
    assert report["parity"]["fused"]["ok"]
    assert sorted(path.name for path in out.iterdir()) == FILES
    text = quick[quick.index("--text") + 1]
    again = ["gpt", "--text", text, "--device", "cpu", "--resume", str(saved), "--steps", "30", "--sample", "0"]
    assert main([*again, "--eval-every", "30", "--out", str(out)]) == 0
    assert read(out)["steps_done"] == 30
    for name, result in read(out)["backends"].items():
        before = report["backends"][name]["losses"]
        assert result["losses"][: len(before)] == before


def test_second_ctrl_c_ends_at_once(quick, monkeypatch, tmp_path):
    step = learner.Learner.step

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return step(*args, **kwargs)

    monkeypatch.setattr(learner.Learner, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert main([*quick, "--backend", "native", "--out", str(tmp_path)]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert list(tmp_path.iterdir()) == []


# Mistakes: one line on stderr, exit 2, nothing written

MISTAKES = {
    "unknown device": (["--device", "tpu"], r"--device tpu is unknown: expected auto, cpu, cuda or cuda:N"),
    "batch of nothing": (["--batch", "0"], r"--batch 0: expected a whole number of at least 1"),
    "no steps": (["--steps", "-1"], r"--steps -1: expected a whole number of at least 1"),
    "negative warm-up": (["--warmup", "-1"], r"--warmup -1: expected a whole number of at least 0"),
    "negative lr": (["--lr", "-0.1"], r"--lr -0.1: expected a number above 0"),
    "lr beyond float32": (["--lr", "1e308"], r"--lr 1e\+308: expected at most 3.40282e\+38, the largest of float32"),
    "lr that is no number": (["--min-lr", "nan"], r"--min-lr nan: expected a number of at least 0"),
    "dropout of all": (["--dropout", "1"], r"--dropout 1.0: expected a number from 0 to less than 1"),
    "TF32 on the CPU": (["--precision", "tf32"], r"--precision tf32 needs a GPU: on the CPU take --precision fp32"),
    "more than the model sees": (["--length", "65"], r"--length 65: the model sees at most 64 tokens"),
    "data that is too short": (
        ["--text", "{tmp}/short"],
        r"the training data has 9 tokens, and a sequence takes one more",
    ),
    "empty text": (["--text", "{tmp}/file"], r"text file .*file is empty"),
    "no text": (["--text", "{tmp}/none"], r"text file .*none cannot be read \(No such file or directory\)"),
    "text that is none": (["--text", "{tmp}/binary"], r"binary is no text in UTF-8 \(byte 0\); tokens go by --tokens"),
    "tokens and text": (["--tokens", "{tmp}/file"], r"--tokens and --text: expected one of them"),
    "validation alone": (["--val-tokens", "{tmp}/file"], r"--val-tokens needs --tokens"),
    "nothing to save to": (["--save-every", "5"], r"--save-every needs --save"),
    "no weights": (["--init", "{tmp}/none.bin"], r"--init .*none.bin cannot be read \(No such file or directory\)"),
    "weights that are none": (["--init", "{tmp}/binary"], r"--init: .*binary is no state_dict, or is damaged"),
    "weights of another kind": (["--init", "{tmp}/list.pt"], r"--init: .*list.pt is no state_dict: it holds a list"),
    "no checkpoint": (["--resume", "{tmp}/none"], r"--resume .*none cannot be read \(No such file or directory\)"),
    "checkpoint of another kind": (
        ["--resume", "{tmp}/dict.pt"],
        r"dict.pt is no checkpoint of `python -m cuda_ops gpt",
    ),
    "prompt of another text": (["--prompt", "é"], r"--prompt: verses.txt has no 'é': begin with what it has"),
    "no prompt": (["--prompt", ""], r"--prompt: expected at least one character"),
    "save into a missing folder": (["--save", "{tmp}/none/w.pt"], r"there is no folder .*none: make it first"),
    "export over the checkpoint": (["--save", "{tmp}/a", "--export", "{tmp}/a"], r"is written by --save too"),
    "out below a file": (["--out", "{tmp}/file/out"], r"--out .*file/out cannot be made \(Not a directory\)"),
    "gpt2 without its tokenizer": (["--model", "gpt2-124m"], r"GPT-2's tokenizer needs the package tiktoken"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_told_in_one_line(mistake, quick, tmp_path, capsys, monkeypatch):
    arguments, message = MISTAKES[mistake]
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    (tmp_path / "file").write_text("")
    (tmp_path / "short").write_text("a rose is ")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 100)
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "dict.pt")
    before = sorted(tmp_path.iterdir())
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert main([*quick, "--backend", "native", "--out", str(tmp_path / "out"), *arguments]) == 2
    output = capsys.readouterr()
    assert re.search(message, output.err), output.err
    assert output.err.startswith("python -m cuda_ops gpt: error: ")
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert sorted(tmp_path.iterdir()) == before, "nothing is written"


def test_no_data(tmp_path, capsys):
    assert main(["gpt", "--device", "cpu", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "tinyshakespeare/input.txt is missing: copy it from data/tinyshakespeare" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--backend", "fast"], "argument --backend: invalid choice: 'fast'"),
        (["--model", "gpt5"], "argument --model: invalid choice: 'gpt5'"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_usage_is_told_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["gpt", *arguments])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["gpt", "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    for name in RECIPES:
        assert name in text
    for option in [
        "model",
        "backend",
        "device",
        "tokens",
        "text",
        "steps",
        "lr",
        "precision",
        "compile",
        "save",
        "resume",
        "export",
        "init",
        "out",
    ]:
        assert f"--{option}" in text


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_missing_package(package, quick, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main([*quick, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"{package} is missing" in error and 'run `pip install "cuda_ops[app]"`' in error


def damaged(content, change):
    """A checkpoint in which something is what it should not be."""
    if change == "truncated":
        return None
    if change == "steps":
        content["backends"]["native"]["steps_taken"] = 5
    if change == "layers":
        content["recipe"]["config"]["n_layer"] = -1
    if change == "model":
        content["model"] = "gpt5"
    if change == "weights":
        content["backends"]["native"]["model"]["transformer.wpe.weight"] = torch.zeros(3, 3)
    if change == "device":
        content["device"] = "cuda"
    if change == "corpus":
        content["corpus"] = [1, 2]
    return content


DAMAGE = {
    "truncated": "is no checkpoint, or is damaged",
    "steps": "is damaged .ValueError: its steps are not those of its losses",
    "layers": "expected n_layer to be from 1",
    "model": "names a model, precision or backend that there is not",
    "weights": "is damaged .RuntimeError",
    "device": "--device cpu: .* was trained on cuda, whose random numbers are others",
    "corpus": "was trained on other data than verses.txt",
}


@pytest.mark.parametrize("change", DAMAGE)
def test_damaged_checkpoint(change, finished, quick, tmp_path, capsys):
    path, out = tmp_path / "damaged.pt", tmp_path / "out"
    content = damaged(torch.load(finished[2], weights_only=True), change)
    if content is None:
        path.write_bytes(finished[2].read_bytes()[:100_000])
    else:
        torch.save(content, path)
    text = quick[quick.index("--text") + 1]
    assert main(["gpt", "--device", "cpu", "--text", text, "--resume", str(path), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert re.search(DAMAGE[change], error), error
    assert error.count("\n") == 1


def test_options_that_a_checkpoint_contradicts(finished, quick, capsys):
    for option, message in {
        "--batch 3": "--batch 3: .* was trained with 2",
        "--dropout 0.5": "--dropout 0.5: .* was trained with 0.0",
        "--model char": "--model char: .* is of --model cpu-char",
        "--backend native": "--backend: .* has fused, custom, native: leave it out",
        "--steps 3": "--steps 3: .* has taken 12 already",
    }.items():
        text = quick[quick.index("--text") + 1]
        assert main(["gpt", "--device", "cpu", "--text", text, "--resume", str(finished[2]), *option.split()]) == 2
        assert re.search(message, error := capsys.readouterr().err), error


def test_extension_that_is_not_built(quick, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_library, "problem", "cuda_ops' extension is not built: rebuild it.")
    assert main([*quick, "--out", str(tmp_path / "out")]) == 2
    assert "error: cuda_ops' extension is not built: rebuild it." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
