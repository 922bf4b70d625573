"""`python -m cuda_ops bench ladder`: rows of every rung, table, plot, and names that do not fit."""

import argparse
import sys
from pathlib import Path

import pytest
import torch

from cuda_ops import bench
from cuda_ops.ladder import ladders

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import harness  # noqa: E402
import ladders as benchmark  # noqa: E402
import update_results  # noqa: E402
from harness import roofline, timing  # noqa: E402


def run(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args([*map(str, arguments)]))


@pytest.mark.parametrize("name", ladders())
def test_quick(name, tmp_path, capsys):
    """On a CPU: the simulated kernels, ours and PyTorch's, compared before they are timed."""
    assert run("ladder", name, "--quick", "--device", "cpu", "--out", tmp_path) == 0, capsys.readouterr().err
    (path,) = tmp_path.glob("*/ladder_*.csv")
    rows, ladder = harness.read_csv(path), ladders()[name]
    simulated = {rung.name for rung in ladder.rungs.values() if rung.device == "cpu"}
    found = {row["implementation"] for row in rows}
    assert {name.split(" ", 2)[2] for name in found if name.startswith("rung ")} == simulated
    assert {"ours", *ladder.native} <= found
    assert not {"float16", "bfloat16"} & {row["dtype"] for row in rows}
    assert f"% of {ladder.against}" in capsys.readouterr().out


@pytest.mark.cuda
@pytest.mark.parametrize("name", ladders())
def test_quick_on_the_gpu(name, tmp_path):
    assert run("ladder", name, "--quick", "--device", "cuda", "--out", tmp_path) == 0
    (path,) = tmp_path.glob("*/ladder_*.csv")
    rows = harness.read_csv(path)
    assert {row["dtype"] for row in rows} == {str(d).removeprefix("torch.") for d in ladders()[name].dtypes}
    found = {row["implementation"] for row in rows if row["clock"] == "kernel"}
    assert f"rung 1 {ladders()[name].kernels[0]}" in found
    assert ladders()[name].yardstick in {None, *found}


def test_dtypes_are_the_ladders_own(tmp_path, capsys):
    assert run("ladder", "histogram", "--quick", "--device", "cpu", "--dtype", "float64", "--out", tmp_path) == 2
    assert "the ladder histogram has uint8, int32, and no float64" in capsys.readouterr().err
    assert run("ladder", "reduce", "--quick", "--device", "cpu", "--dtype", "float64", "--out", tmp_path) == 0
    (path,) = tmp_path.glob("*/ladder_reduce.csv")
    assert {row["dtype"] for row in harness.read_csv(path)} == {"float64"}


def test_unknown_ladder(tmp_path, capsys):
    assert run("ladder", "nothing", "--device", "cpu", "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert "there is no ladder nothing; there are: " in error
    assert all(name in error for name in (*ladders(), "gemm"))


def test_peers_that_are_not_there_are_left_out(monkeypatch, capsys):
    assert benchmark.peer("cub", "transpose") is None
    assert capsys.readouterr().out == ""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "peers.triton_reduce", raising=False)
    benchmark.peer.cache_clear()
    assert benchmark.peer("triton", "reduce") is None
    assert "reduce: peer Triton is left out, the package triton is not installed" in capsys.readouterr().out
    benchmark.peer.cache_clear()


def rows_of(ladder):
    values = {"op": f"ladder_{ladder.name}", "direction": "forward", "clock": "kernel", "samples": 5, "cache": "cold"}
    values |= {"tflop_per_s": "0.000", "gb_per_s": "1000.0", "p10_us": "1.0", "p90_us": "3.0"}
    names = ["ours", next(iter(ladder.native)), f"rung 1 {ladder.kernels[0]}", "rung 2 other", "peer Triton"]
    return [
        values
        | {"case": case.name, "dtype": dtype, "implementation": name, "median_us": "2.0"}
        | {"percent_of_ceiling": f"{10 + 20 * number}.0"}
        for case in ladder.cases[-2:]
        for dtype in ("float32", "float64")
        for number, name in enumerate(names)
    ]


def test_table_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    ladder = ladders()["reduce"]
    rows = rows_of(ladder)
    lines = benchmark.table(ladder, [*rows, rows[0] | {"clock": "wall"}])
    assert len(lines) == len(rows)
    assert [line[2] for line in lines[:3]] == ["rung 1 global atomics", "rung 2 other", "ours"]
    assert lines[0] == [ladder.cases[-2].name, "float32", "rung 1 global atomics", "2.0", "1000.0", "50.0"]
    benchmark.plot(ladder, rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    benchmark.plot(ladder, rows[:10], tmp_path / "none.png")  # not the case that is shown
    assert not (tmp_path / "none.png").exists()


def test_results_page(tmp_path, monkeypatch):
    monkeypatch.setattr(update_results, "RESULTS", tmp_path)
    ladder = ladders()["reduce"]
    path = tmp_path / update_results.GPU / "ladder_reduce.csv"
    harness.write_csv(path, rows_of(ladder), {"commit": "abc1234", "date": "2026-01-01 00:00 UTC"})
    text = "\n".join(update_results.ladders())
    assert f"| float32, {ladder.cases[-1].name} |" in text
    assert "| rung 1 global atomics | 2.0 (50) |" in text
    assert "bench ladder reduce`" in text
    assert update_results.ops() == update_results.nothing_yet("python -m cuda_ops bench")
    with pytest.raises(ValueError, match="has no results"):
        roofline.draw(path.parent)  # which leaves ladders out


def test_table_and_plot_against_a_yardstick(tmp_path, monkeypatch):
    """TFLOP/s, and the share of another implementation's speed where that was measured."""
    pytest.importorskip("matplotlib")
    ladder = ladders()["attention"]
    rows = [row | {"tflop_per_s": "400.0"} for row in rows_of(ladder)]
    rows += [
        row | {"implementation": "peer cuDNN", "median_us": "0.5", "tflop_per_s": "1600.0"}
        for row in rows
        if row["implementation"] == "ours" and row["dtype"] == "float64"
    ]
    lines = benchmark.table(ladder, rows)
    shares = {(dtype, name): (speed, share) for _, dtype, name, _, speed, share in lines}
    assert shares["float32", "ours"] == ("400.0", "–")
    assert shares["float64", "ours"] == ("400.0", "25.0")
    assert shares["float64", "peer cuDNN"] == ("1600.0", "100.0")
    benchmark.plot(ladder, rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    monkeypatch.setattr(update_results, "RESULTS", tmp_path)
    path = tmp_path / update_results.GPU / "ladder_attention.csv"
    harness.write_csv(path, rows, {"commit": "abc1234", "date": "2026-01-01 00:00 UTC"})
    text = "\n".join(update_results.ladders())
    assert "TFLOP/s (% of cuDNN's)" in text
    assert "| rung 1 stored scores | 400 | 400 | 400 (25) | 400 (25) |" in text


def test_yardsticks_of_the_results_page_are_the_ladders():
    found = {name: ladder.yardstick for name, ladder in ladders().items() if ladder.yardstick}
    assert found == update_results.YARDSTICKS


def test_ceiling_of_integers_is_a_copy():
    ceiling = timing.measure_ceiling(torch.device("cpu"), "uint8", True)
    assert ceiling.percent(1.0, ceiling.bytes_per_second, 0) == pytest.approx(100)
