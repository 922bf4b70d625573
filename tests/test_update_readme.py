"""README's generated parts: made of the files that the commands write, and tolerant of those that are missing."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import mnist_99  # noqa: E402
import mnist_report  # noqa: E402
import mnist_step  # noqa: E402
import update_readme  # noqa: E402

FACTS = {"device": "Test GPU", "torch": "2.0", "commit": "abc1234", "date": "2026-01-01 00:00 UTC"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of results."""
    monkeypatch.setattr(update_readme, "RESULTS", tmp_path)
    (tmp_path / update_readme.GPU).mkdir()
    return tmp_path / update_readme.GPU


def step_row(variant, median, batch=64, ours=False):
    return {"precision": "bf16", "batch": batch, "variant": variant, "ours": ours, "samples": 3} | {
        f"{name}_us": median for name in ("median", "p10", "p90")
    }


def test_without_results_every_part_names_its_command(folder):
    for part in update_readme.PARTS.values():
        (line,) = part()
        assert line.startswith("Not measured yet: `")


def test_race(folder):
    rows = [
        step_row("PyTorch eager NCHW", 2000.0),
        step_row("PyTorch compiled, graph", 200.0),
        step_row("fused eager", 800.4, ours=True),
        step_row("fused graph", 50.0, ours=True),
        step_row("PyTorch eager NCHW", 9000.0, batch=1024),
    ]
    race = mnist_step.Race(FACTS, rows, {"bf16": {64: 12.34}}, left_out=["fused graph, bf16, batch 1024: too late"])
    mnist_report.write(race, folder)
    lines = update_readme.race()
    assert "| bf16, 64 | 2,000 | 800.4 | 200.0 (compiled, graph) | 50.0 (fused graph) | **4.00** | 12.3 |" in lines
    assert not any("1,024" in line for line in lines if line.startswith("|"))  # nothing to compare with
    assert lines[2].endswith(" 1 time of fused graph is missing (see `mnist_step.md`).")
    text = "\n".join(lines)
    assert "quick" not in text
    assert "torch.compile" not in text
    # The CSV beside it is no op's.
    assert update_readme.ops()[0].startswith("Not measured yet")


def test_race_says_what_it_lacks(folder):
    rows = [step_row("PyTorch graph", 200.0), step_row("fused graph", 50.0, ours=True)]
    mnist_report.write(mnist_step.Race({**FACTS, "quick": "yes"}, rows), folder)
    lines = update_readme.race()
    assert "| bf16, 64 | – | – | 200.0 (graph) | 50.0 (fused graph) | **4.00** | – |" in lines
    assert "A quick run, of few samples. torch.compile, which may be faster" in "\n".join(lines)


def test_time_to_99_percent(folder):
    variant = {
        "seeds": 2,
        "milliseconds": mnist_99.statistics_of([40.0, 42.0]),
        "accuracy": mnist_99.statistics_of([0.9900, 0.9910]),
        "seeds_at_goal": 2,
        "cold_seconds": None,
    }
    found = {"facts": FACTS, "pictures": 70400, "variants": {"fused bf16": variant}}
    (folder / "mnist_99.json").write_text(json.dumps(found))
    lines = update_readme.goal()
    assert "| fused bf16 | 41.0 ± 1.4 | 99.05 ± 0.07 | 99.00 | 2 of 2 | – |" in lines
    assert "70,400 pictures on one Test GPU" in lines[0]


@pytest.mark.parametrize("failures", [["tests/a.py::b"], {"tests/a.py::b": "failed"}])
def test_check_in_both_forms(folder, failures):
    """As check_gpu.py writes it, and of steps that ran at commits of their own."""
    whole = isinstance(failures, list)
    step = {"passed": 3, "failed": 1, "skipped": 2, "failures": failures} | ({} if whole else {"commit": "f" * 40})
    report = {
        "gpu": "Test GPU",
        "torch": "2.0",
        "cuda": "13.0",
        "tests": step,
        "sanitizer": {"memcheck": {"add2": "1"}},
    }
    (folder / "check.json").write_text(json.dumps(report | ({"commit": "e" * 40} if whole else {})))
    lines = update_readme.check()
    assert ("at commit `eeeeeee`" in lines[0]) == whole
    assert lines[2:] == [
        "- tests: 3 passed, 1 failed, 2 skipped" + ("" if whole else " (commit `fffffff`)"),
        "  - tests/a.py::b: failed",
        "- compute-sanitizer memcheck: add2: 1; clean elsewhere",
    ]


def test_mnist_of_three_backends(folder):
    phases = ("batch load", "forward", "backward", "update", "zero_grad", "whole step")

    def backend(milliseconds):
        return {
            "milliseconds": {phase: {"median": milliseconds} for phase in phases},
            "graph_milliseconds": {"median": milliseconds / 10},
            "peak_memory_bytes": 1e6 * milliseconds,
            "test_accuracy": 0.98,
        }

    (folder / "mnist").mkdir()
    report = {
        "device": {"name": "Test GPU"},
        "versions": {"commit": "abcdef123"},
        "command": "python -m cuda_ops mnist",
        "settings": {"dtype": "float32", "epochs": 3, "batch_size": 128},
        "backends": {"fused": backend(1.0), "custom": backend(2.0), "native": backend(4.0)},
    }
    (folder / "mnist" / "report.json").write_text(json.dumps(report))
    lines = update_readme.mnist()
    assert "commit `abcdef1`" in lines[2]
    assert "|  | fused | custom | PyTorch | PyTorch / fused | PyTorch / custom |" in lines
    assert "| whole step, ms (median) | 1.000 | 2.000 | 4.000 | 4.00 | 2.00 |" in lines
    assert "| whole step as one CUDA graph, ms (median) | 0.100 | 0.200 | 0.400 | 4.00 | 2.00 |" in lines
    assert "| test accuracy | 98.00% | 98.00% | 98.00% |  |  |" in lines
