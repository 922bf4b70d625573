"""python -m cuda_ops bench: that its arithmetic is right, that it refuses wrong results, and that it runs."""

import csv
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import cuda_ops
from cuda_ops import bench

ROOT = Path(cuda_ops.__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import harness  # noqa: E402
from harness import runner, timing  # noqa: E402


def run(*arguments, package_in=ROOT):
    result = subprocess.run(
        [sys.executable, "-m", "cuda_ops.bench", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(package_in)},
        cwd=package_in,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return result.returncode, result.stdout, result.stderr


def test_quick_square_on_the_cpu(tmp_path):
    status, output, errors = run("square", "--quick", "--device", "cpu", "--out", tmp_path)
    assert status == 0, errors
    assert "tf32: allowed on both sides in rows of dtype tf32, off in the others" in output
    assert "PyTorch / ours" in output and "spread, %" in output
    assert "quick: as few as 5 samples" in output
    (path,) = tmp_path.glob("cpu-*/square.csv")
    assert f"# torch: {torch.__version__}\n" in path.read_text()
    assert "# quick: yes, 5 samples of the first case alone\n" in path.read_text()
    rows = harness.read_csv(path)
    keys = {(r["direction"], r["clock"], r["implementation"]) for r in rows}
    assert keys == {(d, "wall", i) for d in ("forward", "backward") for i in ("ours", "eager")}
    for row in rows:
        assert 0 < float(row["p10_us"]) <= float(row["median_us"]) <= float(row["p90_us"])
        assert int(row["samples"]) == 5
        streams = {"forward": 2, "backward": 3}[row["direction"]]
        moved = streams * math.prod(harness.MNIST_SHAPES[0]) * 4
        assert float(row["gb_per_s"]) == pytest.approx(moved / float(row["median_us"]) / 1e3, abs=0.06)
        assert float(row["percent_of_ceiling"]) > 0


def test_quick_host_on_the_cpu(tmp_path):
    status, output, errors = run("host", "--quick", "--device", "cpu", "--out", tmp_path)
    assert status == 0, errors
    assert "Host time of eager calls (cpu)" in output
    lines = [line for line in (tmp_path / "host.csv").read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    modes = {}
    for row in rows:
        modes.setdefault(row["call"], set()).add(row["mode"])
        for side in ("ours", "pytorch"):
            assert 0 < float(row[f"{side}_p10_us"]) <= float(row[f"{side}_us"]) <= float(row[f"{side}_p90_us"])
        assert float(row["ratio"]) == pytest.approx(float(row["ours_us"]) / float(row["pytorch_us"]), abs=0.01)
    assert set(cuda_ops.functional.__all__) <= set(modes)
    without = {"gather_normalize", "argmax", "argmin", "bincount", "histc", "flash_attention_with_kvcache"}
    differentiable = set(cuda_ops.functional.__all__) - without
    for name in differentiable:
        assert modes[name] == {"forward", "forward, with grad", "forward + backward"}
    pytest.importorskip("torchvision")
    assert modes["squeezenet1_1, batch 2 at 64x64"] == {"training step"}
    table = (tmp_path / "host.md").read_text()
    assert all(f"| {name} |" in table for name in modes)


def test_host_takes_nothing_beside_it(tmp_path):
    for arguments, message in (
        (["square"], "host is a run of its own"),
        (["--dtype", "float64"], "--dtype is not for host"),
    ):
        status, _, errors = run("host", *arguments, "--device", "cpu", "--out", tmp_path)
        assert status == 2
        assert message in errors


def test_host_compares_equal_calls():
    """Of both sides the same values, and of the models the same layers."""
    import host_time

    for case in host_time.cases(torch.device("cpu")):
        if not case.name.startswith(("dropout", "stochastic_depth")):  # which draw numbers of their own
            torch.testing.assert_close(case.ours(*case.tensors), case.native(*case.tensors))
    models = pytest.importorskip("torchvision").models
    theirs = models.squeezenet1_1(weights=None).eval()
    mine = models.squeezenet1_1(weights=None)
    mine.load_state_dict(theirs.state_dict())
    mine = host_time.with_our_layers(mine.eval())
    swapped = {type(module) for module in mine.modules()}
    assert cuda_ops.nn.Conv2d in swapped
    assert not swapped & {torch.nn.Conv2d, torch.nn.ReLU, torch.nn.MaxPool2d, torch.nn.Dropout}
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(mine(images), theirs(images), rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_quick_square_on_the_gpu(tmp_path):
    status, output, errors = run("square", "--quick", "--device", "cuda", "--out", tmp_path)
    assert status == 0, errors
    assert "cannot be captured" not in output
    (path,) = tmp_path.glob("*/square.csv")
    rows = harness.read_csv(path)
    assert {r["clock"] for r in rows} == {"wall", "kernel"}
    assert {r["dtype"] for r in rows} == {"float32", "bfloat16"}


@pytest.mark.cuda
def test_quick_ladder_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTLASS_PATH", "/nowhere")  # or its kernels would be compiled, for minutes
    monkeypatch.setenv("CUDA_OPS_PEERS", str(tmp_path / "peers"))
    status, output, errors = run("gemm", "--quick", "--device", "cuda", "--dtype", "all", "--out", tmp_path)
    assert status == 0, errors
    assert "gemm: peer CUTLASS is left out" in output
    (path,) = tmp_path.glob("*/gemm.csv")
    rows = harness.read_csv(path)
    assert {row["dtype"] for row in rows} == set(bench.DTYPES)
    clocks = {name: {r["clock"] for r in rows if r["implementation"] == name} for name in ("ours", "rung 10 cp.async")}
    assert clocks == {"ours": {"wall", "kernel"}, "rung 10 cp.async": {"kernel"}}
    assert {"peer cuBLASLt with bias", "torch.mm"} <= {row["implementation"] for row in rows}


@pytest.mark.parametrize("op", harness.all_ops())
def test_every_bench_runs(op):
    """The smallest case of each, once, with its comparison of values and gradients."""
    found = harness.load_bench(op)
    found = dataclasses.replace(found, cases=[min(found.cases, key=lambda case: max(case.elements))])
    settings = harness.Settings(torch.device("cpu"), ["float32"], quick=True, rounds=1, least_seconds=0, budget=1)
    rows = harness.run_bench(found, settings)
    names = {i.name for i in found.implementations()}
    if found.beside:
        names |= {i.name for i in found.beside(settings.device, torch.float32, found.cases[0])}
    assert {r["implementation"] for r in rows} == names
    assert {r["direction"] for r in rows} == ({"forward", "backward"} if found.backward else {"forward"})


def test_bench_of_the_ladder_has_its_rungs():
    """Each that this device and the size allow; the first size is small enough for all of them."""
    from cuda_ops.ladder.gemm import rungs

    found = harness.load_bench("gemm")
    names = [i.name for i in found.beside(torch.device("cpu"), torch.float32, found.cases[0])]
    assert names == [f"rung {rung.number} {rung.name}" for rung in rungs.values() if rung.device == "cpu"]


def test_every_functional_has_a_bench():
    elsewhere = {"scaled_dot_product_attention": "attention", "flash_attention": "attention", "cat": "concat"}
    elsewhere |= dict.fromkeys(("dropout1d", "dropout3d", "stochastic_depth"), "dropout2d")
    assert {elsewhere.get(name, name) for name in cuda_ops.functional.__all__} <= set(harness.all_ops())


def test_summarize():
    summary = harness.summarize([float(i) for i in range(100, -1, -1)])
    assert (summary.median, summary.p10, summary.p90, summary.samples) == (50, 10, 90, 101)
    # One slow sample moves neither the median nor the percentiles far.
    assert harness.summarize([1.0] * 30 + [1000.0]).p90 == 1.0
    assert harness.summarize([7.0]).median == 7


def test_samples_are_interleaved():
    order = []
    samplers = {name: lambda name=name: order.append(name) or 1.0 for name in "ab"}
    assert harness.interleaved(samplers, 3) == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert order == list("ababab")


def test_wall_sampler_times_one_call_and_goes_round():
    seen = []

    def call(index):
        seen.append(index)
        time.sleep(0.003)

    sample = timing.wall_sampler([lambda i=i: call(i) for i in range(3)], torch.device("cpu"), 0.0)
    seconds = [sample() for _ in range(6)]
    assert min(seconds) >= 0.003
    assert seen[-6:] == [0, 1, 2, 0, 1, 2]


def test_sets_of_inputs():
    assert timing.sets_needed(10, cache=100, budget=1000) == (30, "cold")
    assert timing.sets_needed(400, cache=100, budget=1000) == (1, "cold")
    assert timing.sets_needed(1, cache=100, budget=1000) == (timing.MAX_SETS, "hot")
    assert timing.sets_needed(100, cache=100, budget=200) == (2, "hot")
    assert timing.sets_needed(5000, cache=10_000, budget=1000) == (1, "hot")


def test_wrong_results_are_refused():
    good = torch.ones(4)
    runner.require_agreement("it", {"ours": good, "eager": good + 1e-6}, torch.float32)
    for bad in (good + 0.1, torch.tensor([1, 1, 1, math.nan])):
        with pytest.raises(harness.BenchError, match="it: ours and eager differ by"):
            runner.require_agreement("it", {"ours": bad, "eager": good}, torch.float32)
    wrong = harness.Bench(
        "square", harness.elementwise_cases([(5, 7)], (2, 3)), [harness.Implementation("cubed", lambda x: x**3)]
    )
    settings = harness.Settings(torch.device("cpu"), ["float64"], **harness.QUICK)
    with pytest.raises(harness.BenchError, match="square 5x7 float64 forward: ours and cubed differ"):
        harness.run_bench(wrong, settings)


def bench_with(*beside):
    """The bench of square on one small case, with these functions beside it, by name."""
    implementations = [harness.Implementation(name, function) for name, function in dict(beside).items()]
    return harness.Bench(
        "square",
        harness.elementwise_cases([(5, 7), (2, 3)], (2, 3)),
        [harness.Implementation("eager", torch.square)],
        backward=False,
        beside=lambda device, dtype, case: list(implementations),
    )


def settings_of(**changes):
    return harness.Settings(torch.device("cpu"), ["float32"], rounds=4, least_seconds=0.0005, budget=1, **changes)


def test_peer_that_fails_or_is_wrong_is_left_out(capsys):
    calls = []

    def failing(x):
        calls.append(x)
        raise AttributeError("module 'numpy' has no\nattribute 'row_stack'")

    peers = ("peer Failing", failing), ("peer Wrong", lambda x: x**3), ("peer Right", lambda x: x * x)
    rows = harness.run_bench(bench_with(*peers), settings_of())
    assert {row["implementation"] for row in rows} == {"ours", "eager", "peer Right"}
    assert len(calls) == 1  # not tried again with the next case
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    left_out = "square 5x7 float32 forward: peer {} is left out from here on: "
    why = "AttributeError: module 'numpy' has no attribute 'row_stack'"
    assert lines[0] == left_out.format("Failing") + why
    assert lines[1].startswith(left_out.format("Wrong") + "BenchError: ")


def test_failure_of_ours_is_not_hidden():
    def failing(x):
        raise AttributeError("ours")

    with pytest.raises(AttributeError, match="ours"):
        harness.run_bench(bench_with(("rung 3 failing", failing)), settings_of())
    with pytest.raises(harness.BenchError, match="ours and rung 3 wrong differ"):
        harness.run_bench(bench_with(("rung 3 wrong", lambda x: x**3)), settings_of())


def test_slow_rung_has_few_samples():
    def slow(x):
        time.sleep(0.002)
        return x * x

    rows = harness.run_bench(bench_with(("rung 1 slow", slow), ("rung 2 fast", torch.square)), settings_of())
    samples = {row["implementation"]: int(row["samples"]) for row in rows}
    assert samples == {"ours": 4, "eager": 4, "rung 2 fast": 4, "rung 1 slow": runner.SLOW_SAMPLES}


def test_seconds_bound_an_op():
    """No samples but the fewest where its time is over."""
    rows = harness.run_bench(bench_with(), settings_of(op_seconds=1e-9))
    assert {row["samples"] for row in rows} == {runner.SLOW_SAMPLES}


def test_cut_run_keeps_what_it_has_and_the_last_results(tmp_path, monkeypatch, capsys):
    def interrupt(x):
        if x.shape == (2, 3):
            raise KeyboardInterrupt
        return x * x

    settings = settings_of()
    folder = tmp_path / harness.slug(harness.device_name(settings.device))
    bench_of = {"square": bench_with()}
    monkeypatch.setattr(runner, "load_bench", bench_of.get)
    harness.run(["square"], settings, tmp_path)
    assert [path.name for path in folder.iterdir()] == ["square.csv"]
    before = (folder / "square.csv").read_text()
    bench_of["square"] = bench_with(("rung 1 interrupted", interrupt))
    with pytest.raises(KeyboardInterrupt):
        harness.run(["square"], settings, tmp_path)
    assert (folder / "square.csv").read_text() == before
    assert {row["case"] for row in harness.read_csv(folder / "square.partial.csv")} == {"5x7"}
    assert "square: unfinished; what was measured is in" in capsys.readouterr().out


def test_peers_of_the_ladder_without_their_packages(monkeypatch, capsys):
    """Each missing one in one line, once; cuBLASLt is PyTorch's own."""
    import bench_gemm

    for name in ("triton", "numba", "cutlass_library"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("CUTLASS_PATH", "/nowhere")
    monkeypatch.setenv("CUDA_OPS_PEERS", "/nowhere")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for name in ("triton", "numba", "cutlass"):
        monkeypatch.delitem(sys.modules, f"peers.{name}_gemm", raising=False)
    bench_gemm.peer.cache_clear()
    for dtype in (torch.float32, torch.float64, torch.float32):
        found = bench_gemm.peers(torch.device("cuda"), dtype, 64, 64, 64)
        assert [i.name for i in found] == ["peer cuBLASLt with bias"]
    bench_gemm.peer.cache_clear()
    assert capsys.readouterr().out.splitlines() == [
        "gemm: peer Triton is left out, the package triton is not installed",
        "gemm: peer CUTLASS is left out: CUTLASS_PATH is /nowhere, where there is no include/cutlass/cutlass.h",
        "gemm: peer Numba is left out, the package numba is not installed",
    ]
    assert bench_gemm.peers(torch.device("cpu"), torch.float32, 64, 64, 64) == []


def test_plot_of_the_ladder(tmp_path):
    pytest.importorskip("matplotlib")
    import bench_gemm

    def row(dtype, implementation, size, median):
        values = [
            "gemm",
            f"{size}x{size}x{size}",
            dtype,
            "forward",
            "kernel",
            implementation,
            median,
            median,
            median,
            5,
        ]
        return dict(zip(harness.COLUMNS, [*values, "cold", "1.0", "0.000", "50.0"], strict=True))

    names = ["ours", "torch.mm", "peer Triton", "rung 4 naive", "rung 13 clusters, persistent"]
    rows = [row(dtype, name, 64, "2.0") for dtype in bench.DTYPES for name in names]
    rows.append(row("float32", "ours", 13, "1.0") | {"case": "13x17x5"})  # no square: not drawn
    lines = bench_gemm.table([*rows[:-1], row("float32", "ours", 64, "1.0") | {"clock": "wall"}])
    assert lines[0] == ["64x64x64", "float32", "ours", "2.0", "0.2621", "100.0", "50.0"]
    assert len(lines) == len(rows) - 1
    bench_gemm.plot(rows, tmp_path / "gemm.png")
    assert (tmp_path / "gemm.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    bench_gemm.plot(rows[-1:], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_roofline(tmp_path):
    pytest.importorskip("matplotlib")
    from harness import results, roofline

    def row(op, case, name, median, rate, operations, percent):
        values = [op, case, "float32", "forward", "kernel", name, median, median, median, 5, "cold"]
        return dict(zip(harness.COLUMNS, [*values, rate, operations, percent], strict=True))

    # 100 MB at 2000 of 4000 GB/s; a product at 40 of 50 TFLOP/s; a row whose share has too few digits to say anything.
    copied = [
        row("relu", "1", "ours", "50.0", "2000.0", "0.000", "50.0"),
        row("relu", "1", "eager", "100.0", "1000.0", "0.000", "25.0"),
    ]
    product = [
        row("gemm", "1", "ours", "10.0", "100.0", "40.000", "80.0"),
        row("gemm", "1", "torch.mm", "9.0", "110.0", "45.000", "90.0"),
    ]
    small = [
        row("relu", "2", "ours", "1.0", "1.0", "0.000", "0.1"),
        row("relu", "2", "eager", "1.0", "1.0", "0.000", "0.1"),
    ]
    rows = [
        *copied,
        *product,
        *small,
        row("gemm", "1", "rung 4 naive", "1.0", "1.0", "400.000", "800.0") | {"clock": "wall"},
    ]
    assert roofline.roofs([*copied, *product, *small]) == (4000.0, {"float32": 50.0})
    assert roofline.bytes_of(copied[0]) == 100e6
    pairs = roofline.best_rows(rows)
    assert set(pairs) == {
        ("relu", "1", "float32", "forward"),
        ("relu", "2", "float32", "forward"),
        ("gemm", "1", "float32", "forward"),
    }
    assert [side["implementation"] for side in pairs["gemm", "1", "float32", "forward"]] == ["ours", "torch.mm"]
    results.write_csv(tmp_path / "relu.csv", [*copied, *small], {})
    with pytest.raises(ValueError, match="has no results of both a memory-bound op and a product"):
        roofline.draw(tmp_path)
    results.write_csv(tmp_path / "gemm.csv", product, {})
    assert roofline.draw(tmp_path).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_wrong_gradients_are_refused():
    detached = harness.Implementation("half", lambda x: x * x.detach())
    implementations = [harness.Implementation("ours", torch.square), detached]
    arguments = (torch.randn(5, requires_grad=True),)
    with pytest.raises(harness.BenchError, match="differ"):
        runner.require_agreement_of_gradients("it", implementations, arguments, torch.float32)


def test_ratio_is_against_the_fastest_variant():
    def row(implementation, median):
        values = ["op", "case", "float32", "forward", "wall", implementation, median, median, median, "5"]
        return dict(zip(harness.COLUMNS, [*values, "cold", "1.0", "0.000", "50.0"], strict=True))

    (line,) = harness.comparison([row("ours", "20.0"), row("eager", "40.0"), row("channels_last", "10.0")])
    assert line[-1] == "0.50"
    assert "channels_last" in line


def test_results_go_to_runs_unless_a_folder_is_named(tmp_path, monkeypatch, capsys):
    """A plain run leaves the committed results alone."""
    import argparse

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "load_bench", lambda op: bench_with())
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert bench.main(parser.parse_args(["square", "--quick", "--device", "cpu"])) == 0
    (path,) = tmp_path.rglob("*.csv")
    assert path.relative_to(tmp_path).parts[:2] == ("runs", "bench")
    assert "benchmarks/results" not in capsys.readouterr().out


def test_noise_is_that_of_the_samples():
    def row(median, p10, p90):
        return {"median_us": median, "p10_us": p10, "p90_us": p90, "samples": 5}

    text = harness.noise([row(10, 9, 11), row("100", "99", "100"), row(482, 482, 7015)])
    assert "as few as 5 samples" in text
    assert "by 20 % of the median (in the middle of all measurements), by 1355 % at most" in text


def test_busy_machine_is_told(monkeypatch):
    from harness import results

    cpus = len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0 * cpus, 0, 0))
    assert f"load average {3.0 * cpus:.1f} on {cpus} CPUs" in results.competition(torch.device("cpu"))
    assert results.competition(torch.device("cuda")) is None
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0 * cpus, 0, 0))
    assert results.competition(torch.device("cpu")) is None


def test_percent_of_ceiling_is_by_the_tighter_bound():
    ceiling = harness.Ceiling(bytes_per_second=100, flops_per_second=1000)
    assert ceiling.percent(1, bytes_moved=50, flops=100) == 50
    assert ceiling.percent(1, bytes_moved=50, flops=900) == 90


def test_floor_of_the_mnist_step():
    import mnist_step

    slow_memory = harness.Ceiling(bytes_per_second=1, flops_per_second=1e12)
    slow_products = harness.Ceiling(bytes_per_second=1e12, flops_per_second=1)
    direct = 2 * 64 * (2 * 28 * 28 * 32 * 9 + 3 * (14 * 14 * 64 * 288 + 3136 * 128 + 1280))
    assert mnist_step.floor_seconds(64, "bf16", slow_memory, "cuda") > 1e6
    assert mnist_step.floor_seconds(64, "bf16", slow_memory, "cpu") == direct / 1e12
    assert mnist_step.floor_seconds(64, "fp32", slow_products, "cuda") == direct
    assert mnist_step.floor_seconds(64, "bf16", slow_products, "cpu") == direct
    winograd = direct - 2 * 64 * 3 * 14 * 14 * 64 * 288 * 20 / 36
    assert mnist_step.floor_seconds(64, "fp32", slow_products, "cpu") == pytest.approx(winograd)


def test_race_keeps_other_precisions(tmp_path):
    import mnist_report
    import mnist_step

    def race(precision, us, **facts):
        row = {"precision": precision, "batch": 64, "variant": "fused", "ours": True, "samples": 3}
        row |= dict.fromkeys(("median_us", "p10_us", "p90_us"), us)
        left_out = [f"PyTorch compiled, graph, {precision}, batch 64: no time left to compile it"]
        return mnist_step.Race(facts, [row], {precision: {64: 1.0}}, left_out=left_out)

    mnist_report.write(race("fp32", 7.0, commit="abc", date="yesterday"), tmp_path)
    for us in (2.0, 3.0):
        newer = race("bf16", us, commit="def", date="today")
        mnist_step.keep_other_precisions(newer, tmp_path)
        mnist_report.write(newer, tmp_path)
    text = (tmp_path / "mnist_step.md").read_text()
    assert "7.0" in text and "3.0" in text and "2.0" not in text
    assert "- of fp32: another run than the rest: commit abc, yesterday" in text and "- commit: def" in text
    assert len(newer.left_out) == 2 and set(newer.floors) == {"fp32", "bf16"}


def test_an_interrupted_race_keeps_what_was_raced(monkeypatch, tmp_path):
    import mnist_step

    time_cell, cells = mnist_step.time_cell, []

    def once(race, variants, precision, batch, *rest):
        cells.append(batch)
        if len(cells) == 2:
            raise KeyboardInterrupt
        time_cell(race, variants, precision, batch, *rest)

    monkeypatch.setattr(mnist_step, "time_cell", once)
    with pytest.raises(KeyboardInterrupt):
        mnist_step.run(torch.device("cpu"), tmp_path, 5, True, False, [8, 16], ["fp32"])
    (path,) = tmp_path.glob("*/mnist_step.csv")
    assert {row["batch"] for row in harness.read_csv(path)} == {"8"}
    assert "interrupted" in json.loads(path.with_suffix(".json").read_text())["facts"]


def test_a_cold_start_ends_with_the_time_that_is_left(capsys):
    import mnist_step

    begin = time.perf_counter()
    assert mnist_step.cold_start(torch.device("cpu"), False, 3, begin + 0.01) == {}
    assert "cold start of PyTorch: no time left for it" in capsys.readouterr().out


def test_quick_race_of_the_mnist_step(device, tmp_path):
    arguments = ["--quick", "--no-compile", "--device", device, "--batch", 16, "--precision", "fp32"]
    status, _, errors = run("mnist", *arguments, "--out", tmp_path)
    assert status == 0, errors
    (path,) = tmp_path.glob("*/mnist_step.csv")
    rows = harness.read_csv(path)
    assert {row["batch"] for row in rows} == {"16"}
    variants = {row["variant"] for row in rows}
    wanted = {"custom graph", "fused graph", "PyTorch graph"} if device == "cuda" else {"custom", "fused"}
    assert wanted <= variants
    report = json.loads(path.with_suffix(".json").read_text())
    assert report["left_out"] == []
    assert report["floors"]["fp32"]["16"] > 0
    if device == "cuda":  # on the CPU other processes may take their share of what the floor is measured by
        assert min(float(row["p10_us"]) for row in rows) > report["floors"]["fp32"]["16"]
    assert report["facts"]["quick"] == "yes"
    assert "fastest PyTorch / fastest ours" in path.with_suffix(".md").read_text()
    assert path.with_suffix(".png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    if device == "cuda":
        assert report["timelines"]


def test_quick_time_to_99_percent(device, tmp_path):
    status, _, errors = run("mnist-99", "--quick", "--no-compile", "--device", device, "--out", tmp_path)
    assert status == 0, errors
    (path,) = tmp_path.glob("*/mnist_99.json")
    report = json.loads(path.read_text())
    assert report["pictures"] == 20 * report["recipe"]["batch"]
    for result in report["variants"].values():
        assert result["milliseconds"]["mean"] > 0
        assert result["accuracy"]["mean"] > 0.2


def test_quick_race_of_gpts(device, tmp_path):
    status, _, errors = run("gpt", "--quick", "--no-compile", "--seconds", 5, "--device", device, "--out", tmp_path)
    assert status == 0, errors
    (path,) = tmp_path.glob("*/gpt2_step.json")
    report = json.loads(path.read_text())
    assert report["left_out"] == []
    assert {row["ours"] for row in report["rows"]} == {True, False}
    for row in report["rows"]:
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] * row["length"] / row["median_ms"])
        assert (row["memory_bytes"] is not None) == (device == "cuda")
    assert "fastest PyTorch / this" in path.with_suffix(".md").read_text()
    if device == "cuda":
        assert all(report["timelines"].values())


def test_quick_time_to_the_loss_of_characters(device, tmp_path):
    options = "--quick", "--no-compile", "--batch", 4, "--seconds", 60, "--device", device, "--out", tmp_path
    status, _, errors = run("gpt-char", *options)
    assert status == 0, errors
    (path,) = tmp_path.glob("*/gpt_char.json")
    report = json.loads(path.read_text())
    assert report["recipe"]["batch"] == 4
    assert report["tokens"] == 20 * 4 * report["recipe"]["length"]
    for result in report["variants"].values():
        assert result["seeds"] == len(result["losses"]) == 2
        assert result["seconds"]["mean"] > 0 and result["ready_seconds"] > 0
        assert 2.0 < result["loss"]["mean"] < 4.1  # 4.17 of 65 characters alike
    assert "seeds at the goal" in path.with_suffix(".md").read_text()


def test_recipes_of_characters():
    import gpt_char

    how = {"last_lr": 0.0, "hold": 0.0, "schedule": "cosine", "shallow_share": 0.0}
    recipe = gpt_char.Recipe(batch=4, length=64, steps=100, warmup=9, lr=1.0, short=16, short_share=0.25, **how)
    rates = recipe.learning_rates()
    torch.testing.assert_close(rates[[0, 8, 9]], torch.tensor([0.1, 0.9, 1.0]))
    assert rates.argmax() == 9 and 0 < rates[-1] < 0.01
    linear = recipe.changed("schedule=linear,last_lr=0.2").learning_rates()
    torch.testing.assert_close(linear[-1].item(), 0.2 + 0.8 / 91)
    held = recipe.changed("schedule=linear,hold=0.5").learning_rates()
    assert (held[9:51] == 1).all()
    torch.testing.assert_close(held[75].item(), 0.5)
    assert recipe.stages() == [(25, 16, 16, None), (75, 4, 64, None)] and recipe.tokens == 100 * 256
    shallow = recipe.changed("shallow=3,shallow_share=0.4")
    assert shallow.stages() == [(25, 16, 16, 3), (15, 4, 64, 3), (60, 4, 64, None)] and shallow.tokens == 100 * 256
    assert recipe.changed("shallow_share=0.1").stages() == [(10, 16, 16, 3), (15, 16, 16, None), (75, 4, 64, None)]
    for change, message in (
        ("momentum=0.9", r"momentum=0\.9: expected one of batch, length"),
        ("shallow_share=1", r"shallow=3, shallow_share=1\.0: expected at least 1 layer, and a share"),
        ("shallow=0", "shallow=0, shallow_share=0.0: expected at least 1 layer"),
        (
            "average_share=0.7,shallow_share=0.4",
            "average=64: expected at least 4 steps, of those of the whole model alone",
        ),
        ("short=65", "short=65: expected a length from 1 to 64"),
    ):
        with pytest.raises(ValueError, match=message):
            recipe.changed(f"lr=2e-3,{change}")


def training_of_characters(**recipe):
    import gpt_char

    recipe = {"batch": 2, "length": 16, "short": 4, "steps": 10, "warmup": 0, "average": 4, **recipe}
    tokens = torch.randint(65, (16 * 9 + 5,), generator=torch.Generator().manual_seed(0))
    return gpt_char.Training("fused", "fp32", gpt_char.Recipe(**recipe), tokens, torch.device("cpu"))


def test_a_model_of_characters_grows():
    """Each layer, and what the optimizer knows of it, becomes two; the others stay."""
    training = training_of_characters(shallow=2, shallow_share=0.4, attention_dropout=0.25)
    training.warm_up()
    shallow, whole = training.steps[2], training.step
    assert [len(step.model.transformer["h"]) for step in (shallow, whole)] == [2, 4]
    assert {block.attn.dropout for block in whole.model.transformer["h"]} == {0.25}
    training.grow()
    for mine, theirs in ((0, 0), (1, 0), (2, 1), (3, 1)):
        new, old = whole.model.transformer["h"][mine], shallow.model.transformer["h"][theirs]
        for p, source in zip(new.parameters(), old.parameters(), strict=True):
            assert torch.equal(p, source)
            states = whole.optimizer.state[p], shallow.optimizer.state[source]
            assert states[0].keys() == states[1].keys()
            assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert torch.equal(whole.model.lm_head.weight, shallow.model.lm_head.weight)


def test_weights_of_characters_are_averaged():
    """Of the last 6 of 10 steps the first one's, and then each fourth one's, with a weight of 4 / 8."""
    training = training_of_characters(average=8, average_share=0.6, shallow_share=0.0)
    training.warm_up()
    training.start(0)
    kept, take = [], training.take_average

    def keep(step):
        kept.append([p.detach().clone() for p in training.model.parameters()])
        take(step)

    training.take_average = keep
    training.train(0)
    assert len(kept) == 10
    for p, first, second in zip(training.model.parameters(), kept[4], kept[8], strict=True):
        torch.testing.assert_close(p.detach(), (first + second) / 2)


def test_noise_of_characters():
    """A character in ten of what the model sees is another sequence's; what it is to say is the text."""
    training = training_of_characters(noise=0.1)
    begins, offsets = torch.arange(0, 128, 2), torch.arange(17)
    torch.manual_seed(0)
    inputs, targets = training._batch(begins, offsets)
    rows = training.tokens[begins[:, None] + offsets]
    assert torch.equal(targets, rows[:, 1:])
    differs = inputs != rows[:, :-1]
    assert 0.07 < differs.float().mean() < 0.13
    assert torch.equal(inputs[differs], rows[:, :-1].flip(0)[differs])


def test_texts_of_characters_keep_what_is_held_out_apart():
    import gpt_char

    train, validation = gpt_char.texts(held_out=False)
    less, held_out = gpt_char.texts(held_out=True)
    assert len(train) + len(validation) == 1_115_394
    torch.testing.assert_close(torch.cat([less, held_out]), train)  # nothing of the validation text


def test_characters_are_ordered_and_measured_whole():
    """Each piece of the text once before one comes again; the loss is over all tokens, those of a short rest too."""

    training = training_of_characters()
    tokens = training.tokens
    begins = training.order(8 + 8, 16, torch.Generator().manual_seed(1)).view(2, 8)
    for cut in begins:
        ordered = cut.sort().values
        assert (ordered[1:] - ordered[:-1] == 16).all() and 0 <= ordered[0] < 16
        assert ordered[-1] + 16 < len(tokens)
    length, sizes = training.settings.config.block_size, []
    model, forward = training.model, training.model.forward
    model.forward = lambda inputs, targets: sizes.append(targets.numel()) or forward(inputs, targets)
    found = training.loss(tokens)
    assert sizes == [2 * length, (16 * 9 + 4) % length]
    rows = [tokens[i : i + length + 1] for i in range(0, len(tokens) - 1, length)]
    model.eval()
    wanted = sum(forward(row[None, :-1], row[None, 1:]).item() * (len(row) - 1) for row in rows) / (len(tokens) - 1)
    assert found == pytest.approx(wanted, rel=1e-6)


def test_learning_rates_of_the_recipe_rise_and_fall():
    import mnist_99

    rates = mnist_99.Recipe(steps=100, lr=0.2, conv=4, warmup=0.25).learning_rates()
    assert rates.shape == (100, 2)
    torch.testing.assert_close(rates[24], torch.tensor([0.8, 0.2]))
    assert rates[:, 1].argmax() == 24
    assert 0 < rates[-1, 1] < 0.01
    assert 0 < rates[0, 1] < 0.01


def test_csv_is_written_whole(tmp_path):
    row = dict.fromkeys(harness.COLUMNS, "1")
    harness.write_csv(tmp_path / "a" / "b.csv", [row], {"torch": "2", "device": "x, y"})
    assert harness.read_csv(tmp_path / "a" / "b.csv") == [row]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b.csv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mnist", "--dtype", "tf32"], "mnist takes --precision, not --dtype"),
        (["mnist", "square"], "mnist is a run of its own: name nothing beside it"),
        (["gpt", "--batch", "4", "--batch", "8"], "gpt takes one --batch, of GPT-2's sequences"),
        (["gpt", "--device", "cpu", "--precision", "bf16"], "--precision bf16: the CPU races in fp32"),
        (["gemm", "mnist-99"], "mnist-99 is a run of its own: name nothing beside it"),
        (["mnist", "--seconds", "0"], "--seconds 0.0: expected a number above 0"),
        (["mnist", "--batch", "64", "--batch", "0"], "--batch 0: expected a whole number of at least 1"),
        (["mnist", "--device", "cpu", "--precision", "tf32"], "--precision tf32: the CPU races in fp32, bf16"),
        (["mnist-99", "--device", "cpu", "--precision", "tf32"], "--precision tf32: the CPU races to 99 % in fp32"),
        (["mnist-99", "--batch", "64", "--batch", "128"], "the recipe of mnist-99 is for one batch size"),
        (["gpt-char", "--device", "cpu", "--precision", "bf16"], "--precision bf16: gpt-char on cpu is for fp32"),
        (["gpt-char", "--seeds", "0"], "--seeds 0: expected a whole number of at least 1"),
        (["gpt", "--seeds", "3"], "--seeds is for mnist-99 and gpt-char alone"),
        (
            ["square", "--batch", "64"],
            "--batch is for the races, mnist, mnist-99, gpt, gpt-char, models, models-cpu, al",
        ),
        (["square", "--device", "cpu", "--dtype", "tf32"], "--dtype tf32: the CPU has float32 alone"),
        (["square", "ladder"], "ladder comes first, and after it the names of ladders alone, or none"),
        (["cubic"], "there is no benchmarks/bench_cubic.py; there are: adam, adaptive_avg_pool2d"),
        (["square", "--device", "cpu", "--out", f"{__file__}/x"], f"--out {__file__}/x: {__file__} cannot be written"),
        (["square", "--device", "toaster"], "device toaster cannot be used"),
        (["square", "--device", "meta"], "device meta has no kernels"),
        (["square", "--device", "cpu:3"], "device cpu:3 is not there: PyTorch has one CPU"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    import argparse

    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert bench.main(parser.parse_args(arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"cuda_ops bench: {message}")
    assert error.count("\n") == 1


def test_all_dtypes_of_the_cpu(tmp_path):
    status, _, errors = run("square", "square", "--quick", "--device", "cpu", "--dtype", "all", "--out", tmp_path)
    assert status == 0, errors
    (path,) = tmp_path.glob("cpu-*/*")
    assert {row["dtype"] for row in harness.read_csv(path)} == {"float32", "float64", "float16", "bfloat16"}


def test_without_the_repository(tmp_path):
    shutil.copytree(ROOT / "cuda_ops", tmp_path / "cuda_ops", ignore=shutil.ignore_patterns("__pycache__"))
    status, _, errors = run("square", package_in=tmp_path)
    assert status == 2
    assert "the benchmarks are not part of the installed package" in errors
    assert "pip install --no-build-isolation -e ." in errors


def test_broken_library_is_told(tmp_path):
    shutil.copytree(ROOT / "cuda_ops", tmp_path / "cuda_ops", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results"))
    info = tmp_path / "cuda_ops" / "_build_info.json"
    info.write_text(json.dumps({**json.loads(info.read_text()), "torch": "1.13.0"}))
    status, _, errors = run("square", package_in=tmp_path)
    assert status == 2
    assert "was built with PyTorch 1.13.0" in errors
