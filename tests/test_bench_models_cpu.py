"""python -m cuda_ops bench models-cpu: rows from processes with cores of their own, and what has none, with why."""

import csv
import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchvision")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import models_cpu

CPU = torch.device("cpu")
MADE = """
import os

import torch


def small():
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 3)
    return torch.nn.Sequential(*layers), torch.rand(2, 3, 8, 8)


def broken():
    return torch.nn.Linear(4, 8), torch.rand(3, 5)


def dying():
    os._exit(7)
"""


@pytest.fixture
def of(tmp_path, monkeypatch):
    """Makes these the models of the bench, of a parameter each."""
    (tmp_path / "bench_models_cpu.py").write_text(MADE)
    monkeypatch.chdir(tmp_path)

    def choose(*names):
        monkeypatch.setattr(models_cpu, "catalogue", lambda: {f"bench_models_cpu:{name}": (1, 0.0) for name in names})

    return choose


def lines_of(folder) -> list[dict]:
    (path,) = Path(folder).glob("*/models.csv")
    return list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))


def test_rows_of_threads_and_modes_and_what_failed(of, tmp_path, monkeypatch, capsys):
    of("small", "broken", "dying")
    monkeypatch.setattr(models_cpu, "cores", lambda: sorted(os.sched_getaffinity(0))[:2])
    counts = (1, 2) if len(models_cpu.cores()) == 2 else (1,)
    rows = models_cpu.run(CPU, tmp_path, 300, False, threads=counts)
    assert len(rows) == 6 * len(counts)
    for row in (row for row in rows if row.model.endswith("small")):
        assert set(row.milliseconds) == set(models_cpu.NAMES) and row.rounds >= models_cpu.LEAST_ROUNDS
        assert row.ratio() == max(row.ratio(layout) for layout in models_cpu.FORMATS) > 0 and not row.problem
    assert all("mat1 and mat2" in row.problem for row in rows if row.model.endswith("broken"))
    assert all(row.problem == "ended with status 7" for row in rows if row.model.endswith("dying"))
    found = {(line["model"], line["threads"], line["mode"]): line for line in lines_of(tmp_path)}
    line = found["bench_models_cpu:small", "1", "training"]
    assert float(line["best / best"]) > 0 and float(line["ours, channels_last, least ms"]) > 0
    (path,) = tmp_path.glob("*/models.md")
    text = path.read_text()
    assert "## training, fp32" in text and "ended with status 7: bench_models_cpu:dying" in text
    assert "regnet_y_32gf stands for it" in text
    assert "bench_models_cpu:small fp32 1 training: " in capsys.readouterr().out


def test_a_run_out_of_time_says_what_is_missing(of, tmp_path):
    of("small", "broken")
    rows = models_cpu.run(CPU, tmp_path, 1e-3, True, threads=(1,))
    assert [row.problem for row in rows] == ["no time left"] * 4
    assert "no time left: bench_models_cpu:small" in next(tmp_path.glob("*/models.md")).read_text()


def test_what_is_small_comes_first_and_everything_is_taken_or_left_out_by_name():
    known = models_cpu.catalogue()
    assert list(known.values()) == sorted(known.values(), key=lambda value: value[1])
    assert set(models_cpu.LEFT_OUT) <= set(known) and set(models_cpu.SIZES) <= set(known)


@pytest.mark.parametrize(
    ("where", "options", "message"),
    [
        ("meta", {}, "models-cpu is of the CPU alone"),
        ("cpu", {"precisions": ["tf32"]}, "--precision tf32: on the CPU models are timed in fp32, bf16"),
        ("cpu", {"batches": [1, 2]}, "models-cpu takes one --batch"),
    ],
)
def test_errors_say_what_to_do(tmp_path, where, options, message):
    with pytest.raises(ValueError, match=message):
        models_cpu.run(torch.device(where), tmp_path, 1, True, **options)
    assert not list(tmp_path.iterdir())
