"""python -m cuda_ops bench models: rows from processes of their own, one at a time on the device; what is kept when a
run is interrupted, out of time, or meets a model that fails."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchvision")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import models
import models_report
import models_row

import cuda_ops
from cuda_ops import bench

ROOT = Path(cuda_ops.__file__).resolve().parents[1]
CPU = torch.device("cpu")
MADE = """
import os
import time

import torch


def small():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)), torch.rand(3, 4)


def broken():
    return torch.nn.Linear(4, 8), torch.rand(3, 5)


def absent():
    raise RuntimeError("there is no such model")


def dying():
    os._exit(7)


def slow():
    print("began", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def of(tmp_path, monkeypatch):
    """Makes these the models of the bench, in float32 alone."""
    (tmp_path / "bench_models.py").write_text(MADE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "PRECISIONS", {"cuda": ("bf16", "tf32", "fp32"), "cpu": ("fp32",)})

    def choose(*names):
        monkeypatch.setattr(models, "MODELS", tuple(f"bench_models:{name}" for name in names))

    return choose


def measured(folder) -> list[models_row.Row]:
    (path,) = Path(folder).glob("*/models.json")
    return [models_row.Row(**row) for row in json.loads(path.read_text())["rows"]]


def test_rows_of_both_modes_and_what_failed(of, tmp_path, capsys):
    of("small", "broken", "absent", "dying")
    models.run(CPU, tmp_path, 300, False, True)
    rows = {row.key: row for row in measured(tmp_path)}
    assert len(rows) == 8
    for mode in ("training", "inference"):
        row = rows["bench_models:small", "fp32", mode]
        assert set(row.milliseconds) == {"PyTorch", "ours"} and row.problems == {}
        assert row.ratio("eager / ours eager") > 0 and row.ratio("graph / ours") is None
        assert row.first("PyTorch") > 0 and row.milliseconds["ours"]["blocks"] >= models_row.LEAST_ROUNDS
        assert "mat1 and mat2" in rows["bench_models:broken", "fp32", mode].problems["PyTorch"]
        assert "there is no such model" in rows["bench_models:absent", "fp32", mode].problems["row"]
        assert rows["bench_models:dying", "fp32", mode].problems["row"] == "ended with status 7"
    (path,) = tmp_path.glob("*/models.csv")
    lines = list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))
    assert len(lines) == 8 and float(lines[0]["ours, ms"]) > 0 and "no such model" in lines[2]["problems"]
    text = path.with_suffix(".md").read_text()
    assert (
        "## training, fp32" in text
        and "- ended with status 7: bench_models:dying fp32 training, bench_models:dying fp32 inference" in text
    )
    assert "bench_models:small fp32 training: PyTorch " in capsys.readouterr().out


def test_an_interrupted_run_keeps_its_rows_and_ends_its_processes(of, tmp_path, monkeypatch):
    of("small", "slow")
    started, start, stop = [], models.start, models.stop

    def noted(*arguments):
        started.append(start(*arguments))
        return started[-1]

    interrupted = []

    def interrupt(row):
        if row.mode == "training":
            interrupted.append(row)
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_again(running):
        os.kill(os.getpid(), signal.SIGINT)  # comes too late to interrupt anything
        stop(running)

    monkeypatch.setattr(models, "start", noted)
    monkeypatch.setattr(models, "announce", interrupt)
    monkeypatch.setattr(models, "stop", lambda running: (stop_again if interrupted else stop)(running))
    monkeypatch.setattr(models, "process_count", lambda device: 2)
    with pytest.raises(KeyboardInterrupt):
        models.run(CPU, tmp_path, 300, False, False)
    assert all(one.process.poll() is not None for one in started)
    rows = {row.key: row for row in measured(tmp_path)}
    assert rows["bench_models:small", "fp32", "training"].milliseconds
    assert rows["bench_models:slow", "fp32", "training"].problems == {"row": "no time left"}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_run_out_of_time_keeps_rows_of_an_earlier_one(of, tmp_path):
    of("small")
    folder = tmp_path / models.__name__
    first = models.Run({"commit": "abc", "date": "then"}, [], folder)
    old = models_row.Row("bench_models:small", "bf16", "training", milliseconds={"ours": {"median": 3.0}}, commit="abc")
    first.rows = {old.key: old}
    first.write()
    job = models.planned(CPU, ["fp32", "bf16"], None, False, False, folder)
    second = models.Run({"commit": "def", "date": "now"}, job, folder)
    assert [row.commit for row in second.merged() if row.milliseconds] == ["abc"]
    new = models_row.Row(*old.key, milliseconds={"ours": {"median": 2.0}})
    assert second.take(new) and not second.take(models_row.Row(**asdict(new)))
    second.write()
    rows = {row.key: row for row in models_report.earlier(folder)}
    assert rows[old.key].median("ours") == 2.0 and rows[old.key].commit == "def"
    assert len(rows) == 4
    other = models.Run({"commit": "ghi", "date": "later"}, [], folder)  # of another batch size, which is no replacement
    other.rows = {old.key: models_row.Row(*old.key, "batch 2", milliseconds={"ours": {"median": 1.0}})}
    other.write()
    assert sorted(row.median("ours") for row in models_report.earlier(folder) if row.milliseconds) == [1.0, 2.0]
    assert "## training, bf16, batch 2\n" in (folder / "models.md").read_text()
    (folder / "models.json").write_text("{}")
    with pytest.raises(ValueError, match=r"models\.json is not what this bench writes"):
        models_report.earlier(folder)


def test_the_device_is_for_one_process_at_a_time(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    ((job, _),) = models.planned(CPU, ["fp32"], None, False, True, tmp_path)
    job = dataclasses.replace(job, lock=str(lock), device="cpu", parent=os.getppid())
    mine = models_row.Turn(job)
    mine.take()
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import models_row, json\n"
        "turn = models_row.Turn(models_row.Job(**json.loads(sys.argv[1])))\n"
        "print('asks', flush=True); turn.take(); print('has it', turn.waited > 0.2, flush=True)"
    )
    job = dataclasses.replace(job, parent=os.getpid())
    other = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(asdict(job))], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "asks\n"
    time.sleep(0.4)
    assert other.poll() is None
    mine.give()
    assert other.stdout.readline() == "has it True\n"
    assert other.wait(30) == 0


def test_the_device_is_taken_when_the_model_is_compiled(of, tmp_path, monkeypatch):
    """Before the first kernel is run, and with what backward needs compiled."""
    from cuda_ops.training.race.measure import Conditions
    from cuda_ops.training.race.subject import find

    of("small")
    torch._dynamo.reset()
    ((job, _),) = models.planned(CPU, ["fp32"], None, True, True, tmp_path)
    job = dataclasses.replace(job, row=str(tmp_path / "row.json"))
    events = []

    class Turn:
        held, waited = False, 0.0

        def take(self):
            if not self.held:
                events.append("taken")
            self.held = True

    def compiled(module, inputs):
        events.append("compiled")
        return module.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compiled)
    row = models_row.Row(*job.key)
    subject = find("bench_models:small", "cpu", None, None)
    models_row.measure_graphs(job, row, subject, Conditions(CPU, None, 1, 1), Turn())
    assert events[:2] == ["compiled", "taken"]
    assert torch._functorch.config.force_non_lazy_backward_lowering
    assert row.problems == {} and row.median(models_row.COMPILED) > 0 and row.compile_seconds > 0
    assert models_row.row_of(job) == row


def test_eager_steps_after_the_graphs_trace_no_graph(of, tmp_path):
    """A row of which ours loses, in a process that compiled first."""
    from cuda_ops.training.race.measure import Conditions
    from cuda_ops.training.race.subject import find

    of("small")
    ((job, _),) = models.planned(CPU, ["fp32"], None, True, False, tmp_path)
    row = models_row.Row(
        *job.key, milliseconds={models_row.COMPILED: {"median": 1.0}, models_row.OURS: {"median": 2.0}}
    )

    class Turn:
        def take(self):
            pass

    conditions = Conditions(CPU, None, 1, 1)
    models_row.measure_eager(job, row, find("bench_models:small", "cpu", None, None), conditions, Turn())
    assert row.kernels == {} and row.median(models_row.EAGER) > 0 and row.median(models_row.OURS) == 2.0


def test_kernels_that_were_launched_ahead_do_not_count_while_they_wait(monkeypatch):
    import gpt2_step

    lines = [
        {"kernel": "first", "grid": [1], "start_us": 0.0, "us": 10.0},
        {"kernel": "ahead", "grid": [1], "start_us": 2.0, "us": 11.0},  # waits for 8
        {"kernel": "inside", "grid": [1], "start_us": 3.0, "us": 4.0},
        {"kernel": "after", "grid": [1], "start_us": 20.0, "us": 5.0},
    ]
    monkeypatch.setattr(gpt2_step, "timeline", lambda contender: lines)
    found = {row[0]: row[3] for row in models_row.traced(None, [], CPU)}
    assert found == {"first": "10", "after": "5", "ahead": "3", "inside": "0"}


def test_gpus_are_seen_one_by_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def seen(device):
        return [environment["CUDA_VISIBLE_DEVICES"] for _, environment in models.devices_of(torch.device(device))]

    assert seen("cuda") == ["0", "1", "2"] and seen("cuda:1") == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    assert seen("cuda") == ["5", "GPU-7"] and seen("cuda:1") == ["GPU-7"]


def test_what_a_graph_is_compared_with():
    times = {
        models_row.GRAPH: 6.0,
        models_row.COMPILED: 5.0,
        models_row.OURS: 4.0,
        models_row.EAGER: 9.0,
        models_row.OURS_EAGER: 6.0,
    }
    row = models_row.Row("resnet50", "bf16", "training", "batch 64", {k: {"median": v} for k, v in times.items()})
    row.first_seconds = {models_row.OURS_EAGER: 0.5, models_row.OURS: 2.0, models_row.COMPILED: 31.0}
    row.compile_seconds = 30.0
    assert [row.ratio(name) for name in models_row.RATIOS] == [1.25, 1.5, 1.5]
    row.kernels = {models_row.OURS: [["conv2d_sm90_kernel", "[132, 1, 1]", "16", "80", "5.0", "50.0"]]}
    text = models_report.markdown([row], {"commit": ""}, "about")
    assert "## Kernels of resnet50, bf16, training: ours, graph" in text and "| conv2d_sm90_kernel | [132" in text
    assert "| resnet50 | 9.00 | 6.00 | 5.00 | 6.00 | 4.00 | 1.25 | 1.50 | 1.50 | 30 | – | 31.0 | 2.0 |" in text
    assert "- graph / ours: geometric mean 1.500, worst 1.500, 1 of 1 rows at 1.3 or more" in text


def run_bench(*arguments):
    parser = __import__("argparse").ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args([*map(str, arguments), "--device", "cpu"]))


def test_command(of, tmp_path, capsys):
    of("small")
    assert run_bench("models", "--quick", "--precision", "fp32", "--out", tmp_path) == 0
    assert "models.md" in capsys.readouterr().out
    assert len(measured(tmp_path)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "tf32"], "--precision tf32: on this device models are raced in fp32"),
        (["--batch", "2", "--batch", "4"], "models takes one --batch"),
        (["--dtype", "bfloat16"], "models takes --precision, not --dtype"),
        (["square"], "models is a run of its own"),
        (["--seed", "3"], "--seed is for sweep and regret alone"),
    ],
)
def test_errors_are_one_line(of, tmp_path, capsys, arguments, message):
    assert run_bench("models", *arguments, "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("*/models.*"))


@pytest.mark.cuda
def test_rows_on_cuda(of, tmp_path):
    of("small")
    models.run(torch.device("cuda"), tmp_path, 300, False, True, precisions=["bf16"])
    for row in measured(tmp_path):
        assert row.problems == {} and set(row.milliseconds) == set(models_row.NAMES)
        assert all(ratio > 0 for ratio in map(row.ratio, models_row.RATIOS)) and row.compile_seconds > 0
