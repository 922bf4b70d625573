"""bench regret: that its draws are those of the seed, that it tells the regret, and that it reports what it says."""

import csv
import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch

import cuda_ops

sys.path.insert(0, str(Path(cuda_ops.__file__).parent.parent / "benchmarks"))

import regret
import sweep

MULTIPROCESSORS = 132


def test_draws_are_those_of_the_seed():
    first = regret.draws(7, 200, sweep.CUDA_DTYPES)
    assert first == regret.draws(7, 200, sweep.CUDA_DTYPES)
    assert first[:40] == regret.draws(7, 40, sweep.CUDA_DTYPES)
    assert first != regret.draws(8, 200, sweep.CUDA_DTYPES)
    assert {draw.dtype for draw in first} == set(sweep.CUDA_DTYPES)
    assert sum(draw.op == "gemm" for draw in first) == sum(draw.op == "conv2d" for draw in first) == 100
    assert {draw.direction for draw in first if draw.op == "conv2d"} == set(regret.PASSES)
    products = [draw for draw in first if draw.op == "gemm"]
    assert {draw.order for draw in products} == {"NN", "NT", "TN", "TT"}
    assert any(draw.batch > 1 for draw in products)
    assert any(draw.k % 8 for draw in products)  # rows of no whole 16 bytes
    assert len({str(draw) for draw in first}) > 190


def test_draws_fit_and_are_calls():
    for draw in regret.draws(3, 200, ("float32",)):
        elements, products = draw.cost()
        assert elements <= regret.MOST_ELEMENTS and products <= regret.MOST_PRODUCTS
        if draw.op == "gemm":
            assert min(draw.m, draw.n, draw.k, draw.batch) >= 1
            continue
        make = lambda *shape, **_: torch.empty(shape, device="meta")  # noqa: E731
        arguments, _ = sweep.arguments_of(draw.draw, make)
        assert torch.nn.functional.conv2d(*arguments).numel() > 0


def test_products_of_a_layer_are_its_passes():
    call = {"rows": 3, "in": 5, "out": 7, "bias": True}
    calls = {"linear": [("linear", 1, call)], "conv2d": sweep.known_calls()["conv2d"]}
    found = set()
    for seed in range(60):
        draw = regret.draws(seed, 1, ("float16",), calls)[0]
        found.add((draw.order, *(math.gcd(size, 21) for size in (draw.m, draw.n, draw.k))))
    assert {order for order, *_ in found} == {"NT", "NN", "TN"}


def test_the_tuner_leaves_rows_of_small_products(monkeypatch):
    """They are fitted to the times of random products, and its line through few times would put them back."""
    tuner, measured = regret.tune_gemm, []
    monkeypatch.setattr(tuner, "measure", lambda row, *_: measured.append((row["path"], row["tile"])) or row)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert tuner.tuned(1).split() == tuner.FILE.read_text().split()
    known = regret.tables()
    direct = [(row["path"], row["tile"]) for row in known["FLOAT64_TIMES"] if row["path"] == regret.DIRECT]
    assert [of for of in measured if of[0] in (regret.SM90_SKINNY, regret.DIRECT)] == direct
    assert len(measured) > len(direct)


def test_plans_are_of_the_tables():
    known = regret.tables()
    assert set(known) == set(regret.tune_gemm.TABLES)
    square = regret.Gemm(1024, 1024, 1024, 1, "NT", "bfloat16")
    found = regret.plans(square, known, MULTIPROCESSORS)
    assert len(found) == len(set(found))
    assert {path for path, *_ in found} == {11, 13, 14, 15, 16, 17}
    assert {(path, tile) for path, tile, *_ in found} >= {(row["path"], row["tile"]) for row in known["HALVES_TIMES"]}
    assert all(path in (13, 14, 16) for path, _, _, swapped in found if swapped)
    splits = {path: {splits for other, _, splits, _ in found if other == path} for path in (11, 13, 14, 15)}
    assert splits[11] == {1} and splits[14] <= {1, 2, 4}
    few = regret.plans(regret.Gemm(64, 64, 4096, 1, "NT", "bfloat16"), known, MULTIPROCESSORS)
    assert {splits for path, _, splits, _ in few if path == 13} >= {1, 2, 4, 8, 16}
    assert {splits for path, _, splits, _ in few if path == 15} == {1, 2, 4, 8}
    odd = {path for path, *_ in regret.plans(regret.Gemm(64, 62, 4096, 1, "NN", "bfloat16"), known, MULTIPROCESSORS)}
    assert 19 in odd and 19 not in {path for path, *_ in few}
    short = regret.plans(regret.Gemm(64, 64, 64, 1, "NT", "bfloat16"), known, MULTIPROCESSORS)
    assert {splits for _, _, splits, _ in short} == {1}
    assert {path for path, *_ in regret.plans(square, known, 0)} == {11, 13, 14, 15, 16, 17}
    cores = regret.Gemm(64, 64, 64, 1, "NN", "float32")
    assert {path for path, *_ in regret.plans(cores, known, MULTIPROCESSORS)} == {10, 15, 17, 18}
    tensor = regret.Gemm(64, 64, 64, 1, "NN", "tf32")
    assert {path for path, *_ in regret.plans(tensor, known, MULTIPROCESSORS)} == {10, 11, 13, 14, 15, 16, 17}


def test_names_of_plans():
    assert regret.plan_name((13, 4, 3, 1)) == "sm90 4 s3 w"
    assert regret.plan_name((16, 33, 1, 0)) == "padded 33"


def test_a_path_is_forced_for_the_call_alone(monkeypatch):
    monkeypatch.setenv("REGRET_TEST", "before")

    def seen():
        return regret.os.environ.get("REGRET_TEST")

    assert regret.forced("REGRET_TEST", "mma", seen)() == "mma"
    assert regret.forced("REGRET_TEST", None, seen)() is None
    with pytest.raises(ZeroDivisionError):
        regret.forced("REGRET_TEST", "mma", lambda: 1 / 0)()
    assert seen() == "before"


def contend(own, others, rounds=3):
    """A contest of calls that take given times. A list: one after the other, the last one again and again."""

    def sampler_of(calls, limit):
        (times,) = calls
        if times is None:
            raise NotImplementedError
        times = times if isinstance(times, list) else [times]
        if times[0] > limit:
            return None
        left = itertools.chain(times, itertools.repeat(times[-1]))
        return lambda: next(left)

    contest = regret.Contest("own", [own], {name: [times] for name, times in others.items()})
    return regret.contend(contest, sampler_of, rounds)


def test_the_best_is_found():
    assert contend(3.0, {"a": 2.0, "b": 4.0, "c": None}) == (3.0, "a", 2.0, 3)
    assert contend(3.0, {"a": 3.0, "b": 4.0}) == (3.0, "own", 3.0, 3)  # no regret where nothing is faster
    assert contend(3.0, {}) == (3.0, "own", 3.0, 1)
    assert contend(3.0, {"a": None}) == (3.0, "own", 3.0, 1)


def test_hopeless_ones_contend_but_are_not_timed():
    assert contend(1.0, {"a": 100.0, "b": 0.5}) == (1.0, "b", 0.5, 3)
    assert contend(1.0, {"a": 100.0}) == (1.0, "own", 1.0, 2)


def test_a_lucky_sample_of_the_first_round_is_no_regret():
    """The finalists are timed again, and their medians are compared."""
    assert contend(1.0, {"a": [0.1, 1.2]}, rounds=5) == (1.0, "own", 1.0, 2)


def test_finalists():
    assert regret.finalists({"a": 3.0, "b": 1.0, "c": 2.0, "d": 4.0}, 2) == ["b", "c"]
    assert regret.finalists({}) == []


def rows_of(regrets, path="sm90 1"):
    return [regret.Row("gemm", f"{i}", "bfloat16", path, 10 * (1 + r), "mma 0", 10.0, 4) for i, r in enumerate(regrets)]


def test_summaries():
    rows = [*rows_of([0.0, 0.1, 0.2]), *rows_of([0.5], "direct 0 s2")]
    tables = regret.summaries(rows)
    assert tables["all"]["all"] == pytest.approx(
        {"rows": 4, "mean": 0.2, "95th percentile": 0.5, "worst": 0.5, "losers": 2}
    )
    assert set(tables["path"]) == {"gemm: sm90", "gemm: direct"}
    assert tables["path"]["gemm: sm90"]["worst"] == pytest.approx(0.2)
    many = regret.summary_of([i / 1000 for i in range(101)])
    assert many["95th percentile"] == pytest.approx(0.095) and many["mean"] == pytest.approx(0.05)
    assert [row.regret for row in regret.losers(rows)] == pytest.approx([0.5, 0.2])


def test_report(tmp_path):
    table, md, data = regret.write(rows_of([0.0, 0.02, 0.25]), {"device": "none", "seed": "1"}, tmp_path)
    assert "| gemm | 2 | bfloat16 | sm90 1 | 12.5 | mma 0 | 10.0 | 25.0% |" in md.read_text()
    assert "| all | 3 | 9.0% | 25.0% | 25.0% | 1 |" in md.read_text()
    lines = [line for line in table.read_text().splitlines() if not line.startswith("#")]
    assert [row["regret"] for row in csv.DictReader(lines)] == ["0.0000", "0.0200", "0.2500"]
    found = json.loads(data.read_text())
    assert found["tables"]["op"]["gemm"]["rows"] == 3 and found["aims"] == {"mean": 0.03, "worst": 0.15}
    assert [row["regret"] for row in found["losers"]] == pytest.approx([0.25])


def test_command(tmp_path, capsys):
    from cuda_ops import bench

    def run(*arguments):
        parser = __import__("argparse").ArgumentParser()
        bench.add_arguments(parser)
        return bench.main(parser.parse_args([*arguments, "--device", "cpu", "--out", str(tmp_path)]))

    assert run("regret") == 2
    assert "needs --device cuda" in capsys.readouterr().err
    assert run("regret", "--count", "0") == 2
    assert "--count 0" in capsys.readouterr().err
    assert run("regret", "square") == 2
    assert "regret is a run of its own" in capsys.readouterr().err
    assert run("regret", "--batch", "4") == 2
    assert "--batch is not for regret" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_dtypes_that_it_lacks_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"regret has bfloat16, .*, and no float64"):
        regret.run(torch.device("cuda"), tmp_path, 0, 1, ["float64"], None, True)


@pytest.mark.cuda
def test_a_run(tmp_path, capsys):
    """A few draws of each kind, on the GPU: the choice contends, and usually is not alone."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert regret.run(device, tmp_path, 1, 8, None, None, True) is None
    (path,) = tmp_path.glob("*/regret.json")
    assert json.loads(path.read_text())["tables"]["all"]["all"]["rows"] == 8
    (path,) = tmp_path.glob("*/regret.csv")
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    assert all(float(row["regret"]) >= 0 for row in rows)
    assert max(int(row["contenders"]) for row in rows) > 4
    assert "regret" in capsys.readouterr().out
