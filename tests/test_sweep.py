"""bench sweep: that its draws are those of the seed and possible, that it measures and reports what it says."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

import cuda_ops

sys.path.insert(0, str(Path(cuda_ops.__file__).parent.parent / "benchmarks"))

import sweep
import sweep_calls

CPU = torch.device("cpu")


def test_draws_are_those_of_the_seed():
    first = sweep.draws(7, 200, sweep.CUDA_DTYPES, "cuda")
    assert first == sweep.draws(7, 200, sweep.CUDA_DTYPES, "cuda")
    assert first[:50] == sweep.draws(7, 50, sweep.CUDA_DTYPES, "cuda")
    assert first != sweep.draws(8, 200, sweep.CUDA_DTYPES, "cuda")
    assert {draw.dtype for draw in first} == set(sweep.CUDA_DTYPES)
    assert {"conv2d", "linear", "batch_norm", "layer_norm", "max_pool2d"} <= {draw.op for draw in first}
    shares = {kind: sum(draw.op in ops for draw in first) / 200 for kind, ops in sweep.KINDS.items()}
    for kind, percent in sweep.SHARES.items():
        assert abs(shares[kind] - percent / 100) < 0.12


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_draws_fit_and_are_calls(kind):
    """Each is a call of torch.nn.functional's, of the size that it says, on the meta device."""
    elements, products = sweep.LIMITS[kind]
    for draw in sweep.draws(3, 300, sweep.CPU_DTYPES, kind):
        assert draw.cost()[0] <= elements and draw.cost()[1] <= products
        make = lambda *shape, **_: torch.empty(shape, device="meta")  # noqa: E731
        arguments, _ = sweep.arguments_of(draw, make)
        output = getattr(torch.nn.functional, draw.op)(*arguments)
        assert output.numel() > 0
        if draw.op in ("conv2d", "linear"):
            tensors = arguments[0].numel() + arguments[1].numel() + output.numel()
            assert draw.cost()[0] == tensors
            depth = arguments[1].numel() // arguments[1].shape[0]
            assert draw.cost()[1] == output.numel() * depth
        assert str(draw)


def test_calls_are_those_that_a_model_makes():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.MaxPool2d(3, 2, 1),
        torch.nn.Conv2d(8, 8, 3, padding=1, groups=8),
        torch.nn.Conv2d(8, 8, 3, padding=1, groups=8),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 10),
    ).to("meta")
    found = sweep_calls.calls_of_model(model, [32]).items()
    found = [(op, sweep_calls.call_of(op, text), count) for (op, text), count in found]
    counts = {(op, *call["input"]): count for op, call, count in found if "input" in call}
    assert counts == {
        ("conv2d", 3, 32, 32): 1,
        ("batch_norm", 8, 16, 16): 1,
        ("max_pool2d", 8, 16, 16): 1,
        ("conv2d", 8, 8, 8): 2,
        ("adaptive_avg_pool2d", 8, 8, 8): 1,
    }
    calls = {op: call for op, call, _ in reversed(found)}
    assert calls["linear"] == {"rows": 1, "in": 8, "out": 10, "bias": True}
    conv = {"input": [3, 32, 32], "out": 8, "kernel": [3, 3], "bias": False, "stride": [2, 2], "padding": [1, 1]}
    assert calls["conv2d"] == conv | {"dilation": [1, 1], "groups": 1}
    assert calls["max_pool2d"]["kernel"] == [3, 3] and calls["max_pool2d"]["stride"] == [2, 2]


def test_collected_calls_are_torchvisions():
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        model = torchvision.models.resnet18(weights=None)
    known = {(op, sweep_calls.text_of(op, call)): n for kind in sweep.known_calls().values() for op, n, call in kind}
    for call, count in sweep_calls.calls_of_model(model).items():
        assert known[call] >= count


@pytest.mark.parametrize("op", [op for ops in sweep.KINDS.values() for op in ops])
def test_every_op_is_measured(op):
    calls = {kind: [call for call in found if call[0] == op] for kind, found in sweep.known_calls().items()}
    if op == "group_norm":  # which torchvision's models do without
        calls = {"norm": [(op, 1, {"input": [8, 6, 6], "groups": 4})]}
    calls = {kind: found for kind, found in calls.items() if found}
    (draw,) = sweep.draws(1, 1, ("float32",), "cpu", calls)
    draw = sweep._fitted(draw, 1 << 18, 1e8) or draw
    rows = sweep.measure(draw, CPU, rounds=1, least_seconds=1e-5)
    assert [row.direction for row in rows] == list(sweep.passes_of(draw))
    for row in rows:
        assert row.op == op and row.ours_us > 0 and row.native_us > 0 and row.ratio > 0
        assert row.distance < 1e-4
        assert row.native_layout in ("contiguous", "channels_last")


def rows_of(ratios):
    return [sweep.Row("linear", f"{i}", "float32", "forward", 10.0, 10 * r, "contiguous", "contiguous", "p", 0.0)
            for i, r in enumerate(ratios)]  # fmt: skip


def test_report(tmp_path):
    rows = rows_of([1.0, 2.0, 4.0, 0.5])
    summary = sweep.tables_of(rows)["all"]["all"]
    assert summary["geometric mean"] == pytest.approx(math.sqrt(2), rel=1e-6)
    assert (summary["rows"], summary["worst"], summary["losses"]) == (4, 0.5, 1)
    many = sweep.tables_of(rows_of([i / 100 for i in range(1, 102)]))["all"]["all"]
    assert many["5th percentile"] == pytest.approx(0.06)
    csv, md, data = sweep.write(rows, {"device": "none"}, tmp_path)
    assert "| linear | 3 | float32 | forward | p (contiguous) | 10.0 | 5.0 (contiguous) | 0.50 |" in md.read_text()
    assert json.loads(data.read_text())["tables"]["path"]["linear: p"]["losses"] == 1
    assert csv.read_text().startswith("# device: none\n") and len(csv.read_text().splitlines()) == 6


def test_results_that_differ_are_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cuda_ops.functional, "linear", lambda x, w, b=None: torch.nn.functional.linear(x, w, b) * 1.5)
    calls = {"linear": [("linear", 1, {"rows": 4, "in": 8, "out": 8, "bias": True})]}
    monkeypatch.setattr(sweep, "known_calls", lambda: calls)
    assert sweep.run(CPU, tmp_path, 0, 1, None, None, True) > 0
    assert "DIFFERS: linear" in capsys.readouterr().out


def test_an_interrupted_sweep_keeps_what_it_measured(monkeypatch, tmp_path):
    measure, measured = sweep.measure, []

    def interrupted(*arguments):
        if measured:
            raise KeyboardInterrupt
        measured.append(measure(*arguments))
        return measured[0]

    monkeypatch.setattr(sweep, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(CPU, tmp_path, 0, 3, None, None, True)
    (path,) = tmp_path.glob("*/sweep.json")
    assert json.loads(path.read_text())["facts"]["count"] == "1 of 3, then interrupted"
    (path,) = tmp_path.glob("*/sweep.csv")
    assert sum(not line.startswith("#") for line in path.read_text().splitlines()) == 1 + len(measured[0])


def test_command(monkeypatch, tmp_path, capsys):
    from cuda_ops import bench

    def run(*arguments):
        parser = __import__("argparse").ArgumentParser()
        bench.add_arguments(parser)
        return bench.main(parser.parse_args([*arguments, "--device", "cpu", "--out", str(tmp_path)]))

    calls = {"linear": [("linear", 1, {"rows": 4, "in": 8, "out": 8, "bias": True})]}
    monkeypatch.setattr(sweep, "known_calls", lambda: calls)
    assert run("sweep", "--seed", "5", "--count", "2", "--quick") == 0
    assert "sweep.md" in capsys.readouterr().out
    (path,) = tmp_path.glob("*/sweep.json")
    assert json.loads(path.read_text())["facts"]["seed"] == "5"
    assert run("sweep", "--count", "0") == 2
    assert run("sweep", "square") == 2
    assert run("square", "--count", "3", "--quick") == 2
    assert "--count is for sweep and regret alone" in capsys.readouterr().err
