"""RESULTS.md and README's table: made of the files that the commands write, and tolerant of those that are missing."""

import itertools
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpt2_step  # noqa: E402
import gpt_char  # noqa: E402
import harness  # noqa: E402
import mnist_99  # noqa: E402
import mnist_report  # noqa: E402
import mnist_step  # noqa: E402
import update_results  # noqa: E402

FACTS = {"device": "Test GPU", "torch": "2.0", "commit": "abc1234", "date": "2026-01-01 00:00 UTC"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of results."""
    monkeypatch.setattr(update_results, "RESULTS", tmp_path)
    (tmp_path / update_results.GPU).mkdir()
    return tmp_path / update_results.GPU


def step_row(variant, median, batch=64, ours=False):
    return {"precision": "bf16", "batch": batch, "variant": variant, "ours": ours, "samples": 3} | {
        f"{name}_us": median for name in ("median", "p10", "p90")
    }


def test_without_results_every_part_names_its_command(folder):
    for part in update_results.PARTS.values():
        (line,) = part()
        assert line.startswith("Not measured yet: `")


def test_a_page_for_each_gpu(folder, monkeypatch):
    """The first one's says what has not been measured; another's has what was, and both point at each other."""
    first, other = update_results.PAGES
    monkeypatch.setattr(update_results, "GPU", first)
    other_folder = folder.parent / other
    other_folder.mkdir(exist_ok=True)
    (other_folder / "check.json").write_text(json.dumps({"gpu": "Other", "torch": "2", "cuda": "13"}))
    page = update_results.results_page(other)
    assert page.startswith("# Results on NVIDIA H100\n") and update_results.NOT_YET not in page
    assert "## Checks on the GPU" in page and f"results/{other}/check.json" in page
    assert "](RESULTS.md)" in page and "](RESULTS_H100.md)" in update_results.results_page(first)
    assert (
        update_results.results_page(first).count(update_results.NOT_YET) == len(update_results.PARTS) - 2
    )  # regret, models
    assert first == update_results.GPU


def test_several_gpus_are_shown_where_they_were_measured(folder):
    for size in (10, 2):
        found = {"processes": size, "model": "char", "precision": "bf16", "command": "scaling", "facts": FACTS}
        found |= {"table": [["", "ms"], ["GPT ddp", str(size)]], "problems": ["ddp: wrong"] if size == 2 else []}
        own = folder.parent / f"{update_results.GPU}-x{size}"
        own.mkdir()
        (own / "scaling.json").write_text(json.dumps(found))
    text = "\n".join(update_results.several_gpus())
    assert text.index("2 × Test GPU") < text.index("10 × Test GPU")
    assert "| GPT ddp | 10 |" in text and text.count("- ddp: wrong") == 1


def test_regret_is_shown_once_it_was_measured(folder):
    title = "What the choice of a path costs"
    assert title not in update_results.results_page(update_results.GPU)
    summary = {"rows": 8, "mean": 0.021, "95th percentile": 0.1, "worst": 0.2, "losers": 1}
    tables = {"all": {"all": summary}, "op": {"gemm": summary}, "dtype": {}, "path": {"gemm: mma": summary}}
    found = {"facts": FACTS | {"seed": "3"}, "aims": {"mean": 0.03, "worst": 0.15}, "tables": tables}
    (folder / "regret.json").write_text(json.dumps(found))
    assert f"## {title}" in update_results.results_page(update_results.GPU)
    text = "\n".join(update_results.PARTS[title]())
    assert "at 8 random shapes" in text and "seed 3" in text and "Test GPU" in text
    assert "| gemm: mma | 8 | 2.1% | 10.0% | 20.0% | 1 |" in text


def test_whole_models_are_shown_once_they_were_measured(folder):
    title = "Whole models"
    assert title not in update_results.results_page(update_results.GPU)
    names = ("PyTorch", "PyTorch, graph", "PyTorch, compiled, graph", "ours", "ours, graph")
    times = {name: {"median": float(i + 1)} for i, name in enumerate(names)}
    common = {"mode": "inference", "precision": "bf16", "sizes": "batch 64", "commit": "abc", "date": "then"}
    rows = [
        {"model": "resnet50", "milliseconds": times, "compile_seconds": 12.3, **common},
        {"model": "vgg11_bn", "milliseconds": {"ours, graph": {"median": 2.0}}, "compile_seconds": None, **common},
        {"model": "vit_b_16", "milliseconds": {}, "compile_seconds": None, **common},
    ]
    (folder / "models.json").write_text(json.dumps({"facts": FACTS, "rows": rows}))
    assert f"## {title}" in update_results.results_page(update_results.GPU)
    text = "\n".join(update_results.PARTS[title]())
    line = "| inference, bf16 | resnet50 | 1.00 | 2.00 | 3.00 | 4.00 | 5.00 | **0.60** | **0.40** | **0.25** | 12 |"
    assert line in text and "commit `abc`, then" in text and "batch 64" in text
    assert "| vgg11_bn | – | – | – | – | 2.00 | – | – | – | – |" in text and "vit_b_16" not in text


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
    lines = update_results.race()
    assert "| bf16, 64 | 2,000 | 800.4 | 200.0 (compiled, graph) | 50.0 (fused graph) | **4.00** | 12.3 |" in lines
    assert not any("1,024" in line for line in lines if line.startswith("|"))  # nothing to compare with
    assert lines[-1] == "- 1 time of fused graph is missing (see `mnist_step.md`)."
    text = "\n".join(lines)
    assert "quick" not in text
    assert "torch.compile" not in text
    # The CSV beside it is no op's.
    assert update_results.ops()[0].startswith("Not measured yet")


def test_race_says_what_it_lacks(folder):
    rows = [step_row("PyTorch graph", 200.0), step_row("fused graph", 50.0, ours=True)]
    mnist_report.write(mnist_step.Race({**FACTS, "quick": "yes"}, rows), folder)
    lines = update_results.race()
    assert "| bf16, 64 | – | – | 200.0 (graph) | 50.0 (fused graph) | **4.00** | – |" in lines
    assert "- A quick run, of few samples." in lines
    assert any(line.startswith("- torch.compile, which may be faster") for line in lines)


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
    lines = update_results.goal()
    assert "| fused bf16 | 41.0 ± 1.4 | 99.05 ± 0.07 | 99.00 | 2 of 2 | – |" in lines
    assert "70,400 images on one Test GPU" in lines[0]


def test_time_to_the_loss_of_characters(folder):
    variant = {
        "seeds": 2,
        "seconds": gpt_char.statistics_of([2.5, 2.7]),
        "loss": gpt_char.statistics_of([1.46, 1.47]),
        "losses": [1.46, 1.47],
        "seeds_at_goal": 1,
        "ready_seconds": 3.21,
    }
    found = {
        "facts": FACTS,
        "goal": 1.4697,
        "recipe": {"lr": 3e-3},
        "tokens": 9_000_000,
        "variants": {"fused": variant},
    }
    found["validation_tokens"] = 111_539
    (folder / "gpt_char.json").write_text(json.dumps({**found, "model": "char"}))
    lines = update_results.characters()
    assert "| fused | 2.60 ± 0.14 | 1.4650 ± 0.0071 | 1.4700 | 1 of 2 | 3.2 |" in lines
    assert "9,000,000 characters of training on one Test GPU" in lines[0]
    assert "Recipe: lr 0.003; 9,000,000 tokens" in gpt_char.markdown({**found, "model": "char"})


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
    lines = update_results.check()
    assert ("at commit `eeeeeee`" in lines[0]) == whole
    assert lines[2:] == [
        "- tests: 3 passed, 1 failed, 2 skipped" + ("" if whole else " (commit `fffffff`)"),
        "  - tests/a.py::b: failed",
        "- compute-sanitizer memcheck: add2: 1; clean elsewhere",
    ]


def test_runs_of_the_fuzzers_are_added_up(folder):
    runs = folder.parent / update_results.CPU / "fuzz"
    runs.mkdir(parents=True)
    failed = [{"case": "conv2d:7", "what": "output 0 differs", "command": "…"}]
    run = {"cases": 1000, "failures": 0, "seconds": 20, "seed": 10, "torch": "2.0", "commit": "f" * 40, "failed": []}
    (runs / "10.json").write_text(json.dumps(run))
    (runs / "9.json").write_text(json.dumps({**run, "cases": 500, "failures": 1, "seed": 9, "failed": failed}))
    assert update_results.fuzzers() == [
        "- random cases beside PyTorch (`make fuzz`): 1,500 in 40 s of one thread, 1 failed; seeds 9, 10; PyTorch 2.0, "
        "commit `fffffff`",
        "  - conv2d:7: output 0 differs",
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
    lines = update_results.mnist()
    assert "commit `abcdef1`" in lines[2]
    assert "|  | fused | custom | PyTorch | PyTorch / fused | PyTorch / custom |" in lines
    assert "| whole step, ms (median) | 1.000 | 2.000 | 4.000 | 4.00 | 2.00 |" in lines
    assert "| whole step as one CUDA graph, ms (median) | 0.100 | 0.200 | 0.400 | 4.00 | 2.00 |" in lines
    assert "| test accuracy | 98.00% | 98.00% | 98.00% |  |  |" in lines


def op_rows(folder, op, times):
    """A CSV of one case: {implementation: GPU time}."""
    case = next(line for line in update_results.HEADLINES if line.op == op)
    rows = [
        [op, case.case, case.dtype, case.direction, case.clock, name, us, us, us, 5, "cold", 1, 1, 50]
        for name, us in times.items()
    ]
    rows = [dict(zip(harness.COLUMNS, row, strict=True)) for row in rows]
    harness.write_csv(folder / f"{op}.csv", rows, FACTS)
    return case


def test_headlines_show_wins_and_losses(folder):
    mnist_report.write(
        mnist_step.Race(FACTS, [step_row("PyTorch graph", 200.0), step_row("one kernel", 25.0, ours=True)]), folder
    )
    win = op_rows(folder, "attention", {"ours": 10.0, "eager": 25.0})
    loss = op_rows(folder, "dropout", {"ours": 2000.0, "eager": 1000.0, "rung 1": 1.0})
    lines = update_results.headlines()
    assert (
        "| MNIST training step, bf16, batch 64 (one kernel; graph) | 25.0 µs | 200.0 µs | **8.00** | `bench mnist` |"
        in lines
    )
    assert f"| {win.what} | 10.0 µs | 25.0 µs | **2.50** | `bench attention --dtype bfloat16` |" in lines
    assert f"| {loss.what} | 2,000 µs | 1,000 µs | **0.50** | `bench dropout --dtype bfloat16` |" in lines
    assert len(lines) == 5


def test_formats_are_compared_like_with_like(folder):
    times = {"ours": 20.0, "ours channels_last": 5.0, "eager": 10.0, "channels_last": 8.0}
    op_rows(folder, "conv2d", times)
    lines = update_results.formats()
    assert "| GPU time, NCHW | 1 of 1 | 0.50 | 0.50 | 0.50 |" in lines
    assert "| GPU time, channels_last | 0 of 1 | 1.60 | 1.60 | 1.60 |" in lines
    assert "| GPU time, the faster on each side | 0 of 1 | 1.60 | 1.60 | 1.60 |" in lines


def test_readme_needs_its_markers():
    text = "before\n<!-- begin: results -->\nold\n<!-- end: results -->\nafter\n"
    new = update_results.readme(text)
    assert new.startswith("before\n<!-- begin: results -->\n|") and new.endswith("<!-- end: results -->\nafter\n")
    assert "old" not in new
    with pytest.raises(SystemExit, match="expected one pair"):
        update_results.readme("none")


def row(precision, variant, batch, time):
    times = {"median_us": time, "p10_us": time, "p90_us": time}
    return {"precision": precision, "batch": batch, "variant": variant, "ours": "fused" in variant, **times}


def test_no_step_is_below_the_floor():
    """Where one is, the floors' rates were measured too low, for all batch sizes of that precision."""
    rows = [row("fp32", "fused", 64, 80.0), row("fp32", "fused", 256, 300.0), row("bf16", "fused", 64, 80.0)]
    race = mnist_step.Race({}, rows, {"fp32": {64: 100.0, 256: 400.0, 1024: 1600.0}, "bf16": {64: 60.0}})
    assert mnist_report.floors_of(race, "fp32") == {64: 75.0, 256: 300.0, 1024: 1200.0}
    assert mnist_report.floors_of(race, "bf16") == {64: 60.0}
    assert mnist_report.floors_of(race, "tf32") == {}
    assert "| floor | 75.0 | 300.0 |" in mnist_report.race_table(race, "fp32")


def test_labels_are_moved_apart_and_stay_in_order():
    assert mnist_report.apart([0.5, 0.1], 0.1) == [0.5, 0.1]
    positions = [0.51, 0.5, 0.9, 0.52, 0.505, 0.3]
    moved = mnist_report.apart(positions, 0.1)
    order = sorted(range(6), key=positions.__getitem__)
    assert order == sorted(range(6), key=moved.__getitem__)
    heights = sorted(moved)
    assert all(above - below > 0.1 - 1e-9 for below, above in itertools.pairwise(heights))
    assert abs(sum(moved) - sum(positions)) < 1e-9


def test_variants_have_one_colour_and_the_plot_one_that_it_does_not_know(monkeypatch):
    """In every panel, whichever variants it has; each line is named beside it."""
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn, named, plot, annotate = [], [], Axes.plot, Axes.annotate

    def record(axis, *args, **kwargs):
        drawn.append((axis.get_title(), kwargs["color"]))
        return plot(axis, *args, **kwargs)

    def record_name(axis, name, *args, **kwargs):
        named.append((name, kwargs["color"]))
        return annotate(axis, name, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", record)
    monkeypatch.setattr(Axes, "annotate", record_name)
    rows = [row("fp32", "PyTorch eager", 64, 200.0), row("fp32", "fused eager", 64, 90.0)]
    rows += [row("bf16", "fused eager", b, b + 0.0) for b in (64, 256)] + [row("bf16", "brand new", 64, 70.0)]
    content = mnist_report.plot(mnist_step.Race({}, rows, {"bf16": {64: 60.0}}))
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    colors = mnist_report.COLORS
    expected = [("PyTorch eager", colors["PyTorch eager"]), ("fused eager", colors["fused eager"])]
    expected += [("fused eager", colors["fused eager"]), ("brand new", "C0"), ("floor", "black")]
    assert [color for _, color in drawn] == [color for _, color in expected]
    assert sorted(named) == sorted(expected)


def gpt_race(device):
    def row(variant, milliseconds, ours=False):
        shape = {"model": "gpt2-124m", "batch": 32, "length": 1024, "samples": 5, "prepared_in_s": 1.0}
        times = {f"{name}_ms": milliseconds for name in ("median", "p10", "p90")}
        tokens = 32 * 1024 / milliseconds * 1e3
        facts = {"tokens_per_second": tokens, "share_of_peak": 0.5, "memory_bytes": 16_100_000_000}
        return {**shape, **times, **facts, "variant": variant, "ours": ours}

    lines = [
        {"kernel": name, "grid": [8, 1, 1], "start_us": 10.0 * i, "us": us}
        for i, (name, us) in enumerate([("product", 9.0), ("norm", 2.0), ("product", 7.0)])
    ]
    rows = [row("PyTorch eager", 80.0), row("PyTorch compiled", 64.0), row("fused graph", 50.0, True)]
    facts = {**FACTS, "device": device, "precision": "bf16"}
    return gpt2_step.Race(facts, rows, {"gpt2-124m, fused graph": lines, "lost": []}, ["custom graph: no memory"])


def test_gpt2s_step_and_its_kernels(folder):
    race = gpt_race("Test GPU")
    (folder / "gpt2_step.json").write_text(json.dumps(race.__dict__))
    page = "\n".join(update_results.PARTS["A training step of GPT-2"]())
    assert "| gpt2-124m, 32 × 1024 | fused graph | 50.00 | 655,360 | 50 | 16.1 | **1.28** |" in page
    assert "| gpt2-124m, 32 × 1024 | PyTorch eager | 80.00 | 409,600 | 50 | 16.1 |  |" in page
    assert "- custom graph: no memory" in page
    text = gpt2_step.markdown(race)
    assert "| fused graph | 50.00 | 50.00 – 50.00 | 655,360 | 50.0 | 16.10 | 1.0 | 1.28 |" in text
    assert "3 kernels in 27 µs, of which they take 18." in text
    assert "| product | [8, 1, 1] | 2 | 16 | 8.0 | 88.9 |" in text
    assert "Kernels of lost" not in text


@pytest.mark.parametrize(
    "name, shown",
    [
        ("void cuda_ops::gemm_kernel<__nv_bfloat16, 128>(float*, int)", "gemm_kernel<__nv_bfloat16, 128>"),
        ("(anonymous namespace)::softmax_kernel(float*)", "softmax_kernel"),
        ("Memset (Device)", "Memset "),
    ],
)
def test_kernels_are_named_without_their_arguments(name, shown):
    assert gpt2_step.kernel_name(name) == shown
