"""csrc/apps/mnist, the MNIST network in plain C: the same losses as Python's from the same start, and one clear line
for each file or option that is wrong. Everything runs under the address and the undefined-behaviour sanitizers."""

import gzip
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess

import pytest
from support.c_programs import CC, ROOT, build_program, refused
from support.c_programs import run_program as run

from cuda_ops.__main__ import main
from cuda_ops.data import default_root
from cuda_ops.data.mnist import EXTRACTED_SIZES
from cuda_ops.training.timing import PHASES, WHOLE_STEP

RAW = default_root() / "MNIST" / "raw"
IMAGE_COUNT, BATCH, STEPS = 640, 32, 20
# With the default of 0.07 over so few steps, rounding grows to a hundredth of the loss between native and custom too.
LR = "0.01"
HEADER_BYTES = 40
# Named tensors follow the header: 32 bytes of name and 8 of count before each.
FIRST_TENSOR_BYTES = 40 + 4 * 288


def has_zlib():
    return subprocess.run([CC, "-E", "-include", "zlib.h", "-xc", "/dev/null"], capture_output=True).returncode == 0


@pytest.fixture(scope="session")
def program(tmp_path_factory, c_kernels):
    zlib = has_zlib()
    folder = tmp_path_factory.mktemp("mnist_c")
    return build_program("mnist", folder, c_kernels, ["-DMNIST_WITH_ZLIB"] * zlib, ["-lz"] * zlib)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Small sets that are not compressed: the first images of MNIST."""
    root = tmp_path_factory.mktemp("data")
    (root / "MNIST" / "raw").mkdir(parents=True)
    for name in EXTRACTED_SIZES:
        with gzip.open(RAW / f"{name}.gz") as file:
            dimensions = 3 if "idx3" in name else 1
            header, item = file.read(4 + 4 * dimensions), 784 if dimensions == 3 else 1
            content = header[:4] + struct.pack(">I", IMAGE_COUNT) + header[8:] + file.read(IMAGE_COUNT * item)
        (root / "MNIST" / "raw" / name).write_bytes(content)
    return root


@pytest.fixture(scope="session")
def python_run(tmp_path_factory):
    """20 steps of both backends in Python, and the start that they had."""
    folder = tmp_path_factory.mktemp("python")
    start = folder / "start.bin"
    arguments = [
        "--device",
        "cpu",
        "--limit",
        str(IMAGE_COUNT),
        "--batch-size",
        str(BATCH),
        "--epochs",
        "1",
        "--lr",
        LR,
    ]
    assert main(["mnist", *arguments, "--save-start", str(start), "--out", str(folder)]) == 0
    return start, json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("threads", [1, 3])
def test_losses_are_those_of_python(threads, program, data, python_run, tmp_path):
    start, expected = python_run
    result = run(
        program, "--data-dir", data, "--weights", start, "--lr", LR, "--threads", threads, "--out", tmp_path / "out"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    ours = report["backends"]["plain C"]
    assert report["steps_done"] == STEPS == len(ours["losses"])
    for name in ("custom", "native"):
        theirs = expected["backends"][name]
        # float32 has 6e-8; the first losses part by sums of that in another order, and each step multiplies it by a
        # little, as it does between native and custom themselves.
        assert ours["losses"][:5] == pytest.approx(theirs["losses"][:5], rel=1e-5)
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
        assert ours["test_accuracy"] == pytest.approx(theirs["test_accuracy"], abs=3 / IMAGE_COUNT)
    labels = [line.rsplit(maxsplit=1)[0] for line in result.stdout.splitlines()[2:12]]
    phases = [f"{phase}, ms" for phase in (*PHASES, WHOLE_STEP)]
    assert labels == [*phases, "samples/s", "peak memory, MB", "train loss", "test accuracy, %"]


def test_result_does_not_depend_on_threads(program, data, tmp_path):
    losses = []
    for threads in (1, 2, 5):
        out = tmp_path / str(threads)
        options = ("--limit", 96, "--batch-size", 24, "--seed", 3, "--threads", threads, "--out", out)
        assert run(program, "--data-dir", data, *options).returncode == 0
        losses.append(json.loads((out / "report.json").read_text())["backends"]["plain C"]["losses"])
    assert losses[0] == losses[1] == losses[2]


def test_it_learns_from_weights_of_its_own(program, data, tmp_path):
    """A first loss near log 10, a lower one at the end; another seed gives other weights and another order."""
    first = []
    for seed in (0, 1):
        out = tmp_path / str(seed)
        result = run(program, "--data-dir", data, "--batch-size", 32, "--epochs", 2, "--seed", seed, "--out", out)
        assert result.returncode == 0, result.stderr
        losses = json.loads((out / "report.json").read_text())["backends"]["plain C"]["losses"]
        assert losses[0] == pytest.approx(2.303, abs=0.35)
        assert sum(losses[-5:]) / 5 < 0.6 * losses[0]
        first.append(losses[0])
    assert first[0] != first[1]


def test_all_64_bits_of_a_seed_count(program, data, tmp_path):
    losses = []
    for seed in (0, 2**32):
        out = tmp_path / str(seed)
        options = ("--limit", 32, "--batch-size", 16, "--seed", seed, "--out", out)
        assert run(program, "--data-dir", data, *options).returncode == 0
        losses.append(json.loads((out / "report.json").read_text())["backends"]["plain C"]["losses"])
    assert losses[0] != losses[1]


def test_divergence_exits_1(program, data, tmp_path):
    """Within the steps that would have been its warm-up, too: the report's times are those of the steps taken."""
    arguments = "--data-dir", data, "--limit", 640, "--batch-size", 32, "--lr", "1e30", "--out", tmp_path
    result = run(program, *arguments)
    assert result.returncode == 1
    assert "training diverged" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert report["steps_done"] < report["steps_planned"]
    assert 0 < report["backends"]["plain C"]["milliseconds"][WHOLE_STEP]["mean"] < float("inf")


@pytest.mark.skipif(not has_zlib(), reason="zlib's headers are not installed")
def test_compressed_files_are_read(program, tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in EXTRACTED_SIZES:
        shutil.copy(RAW / f"{name}.gz", raw)
    result = run(program, "--data-dir", tmp_path, "--limit", 64, "--batch-size", 32)
    assert result.returncode == 0, result.stderr
    path = raw / "t10k-labels-idx1-ubyte.gz"
    content = path.read_bytes()
    for wrong, message in (
        (content[:1000], r"damaged or truncated \(unexpected end of file\)"),
        (content[:1000] + b"\xff" * 50 + content[1050:], r"damaged or truncated \(|expected a digit|past its end"),
        (gzip.decompress(content), "is not compressed by gzip"),
        (b"", "is not compressed by gzip|truncated"),
    ):
        path.write_bytes(wrong)
        assert re.search(message, refused(program, "--data-dir", tmp_path))


def test_without_zlib(data, tmp_path, c_kernels):
    program = build_program("mnist", tmp_path, c_kernels)
    assert run(program, "--data-dir", data, "--limit", 32, "--batch-size", 16).returncode == 0
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    assert "is missing, with and without .gz" in refused(program, "--data-dir", tmp_path)
    shutil.copy(RAW / "train-images-idx3-ubyte.gz", raw)
    assert "was built without zlib: run `gunzip -k`" in refused(program, "--data-dir", tmp_path)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
BAD_IDX = {
    "empty": (IMAGES, lambda b: b"", "truncated: expected the magic number to have 4 bytes, got 0"),
    "short header": (IMAGES, lambda b: b[:10], "truncated: expected the sizes to have 12 bytes, got 6"),
    "short data": (IMAGES, lambda b: b[:-1], r"truncated: expected the data to have 501760 bytes, got 501759"),
    "trailing byte": (LABELS, lambda b: b + b"\0", "bytes past its end: its sizes do not match its header"),
    "labels as images": (IMAGES, lambda b: b"\0\0\x08\x01" + b[4:], "expected it to begin with 00000803, got 00000801"),
    "floats": (LABELS, lambda b: b"\0\0\x0d\x01" + b[4:], "no IDX file of bytes with 1 dimensions"),
    "other width": (IMAGES, lambda b: b[:12] + struct.pack(">I", 29) + b[16:], "expected dimension 2 to be 28, got 29"),
    "no images": (LABELS, lambda b: b[:4] + struct.pack(">I", 0), "expected 1 to 1048576 images, got 0"),
    "count that lies": (LABELS, lambda b: b[:4] + b"\xff\xff\xff\xff" + b[8:], "images, got 4294967295"),
    "label 10": (LABELS, lambda b: b[:20] + b"\x0a" + b[21:], "label 12 is 10: expected a digit"),
    "label 255": (LABELS, lambda b: b[:20] + b"\xff" + b[21:], "label 12 is 255: expected a digit"),
    "last label": (LABELS, lambda b: b[:-1] + b"\x0a", "label 639 is 10: expected a digit"),
    "fewer labels": (LABELS, lambda b: b[:4] + struct.pack(">I", 639) + b[8:-1], "640 images and .* 639 labels"),
}


@pytest.mark.parametrize("case", BAD_IDX)
def test_wrong_data_is_told_in_one_line(case, program, data, tmp_path):
    name, spoil, message = BAD_IDX[case]
    shutil.copytree(data, tmp_path / "data")
    path = tmp_path / "data" / "MNIST" / "raw" / name
    path.write_bytes(spoil(path.read_bytes()))
    # With --limit too: what is beyond it is not used, and is checked.
    for limit in ([], ["--limit", 8, "--batch-size", 8]):
        error = refused(program, "--data-dir", tmp_path / "data", *limit)
        assert re.search(message, error), error
        assert name in error


@pytest.mark.parametrize("name", [IMAGES, f"{IMAGES}.gz"])
def test_a_named_pipe_as_data_is_refused(name, program, tmp_path):
    """It was waited for, for ever."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    os.mkfifo(raw / name)
    error = refused(program, "--data-dir", tmp_path)
    assert f"file {raw / name} is a folder, a pipe or a device, not a regular file" in error
    assert "not a regular file" in refused(program, "--data-dir", tmp_path, "--weights", raw / name)


def replaced(position, pattern, value):
    """A file with one number in it replaced."""
    new = struct.pack(pattern, value)
    return lambda content: content[:position] + new + content[position + len(new) :]


ORDER = -4 * BATCH * STEPS  # from the end
BAD_STARTS = {
    "empty": (lambda b: b"", "truncated: expected the header to have 40 bytes"),
    "short header": (lambda b: b[:39], "truncated: expected the header"),
    "other magic": (lambda b: b"PK" + b[2:], "its magic is wrong"),
    "other version": (replaced(8, "<I", 2), "expected version 1 with 16 tensors, got version 2 with 16"),
    "other tensors": (replaced(12, "<I", 17), "got version 1 with 17"),
    "no images": (replaced(16, "<Q", 0), "invalid sizes in its header"),
    "large batch": (replaced(24, "<Q", IMAGE_COUNT + 1), "invalid sizes in its header"),
    "no batch": (replaced(24, "<Q", 0), "invalid sizes in its header"),
    "many epochs": (replaced(32, "<Q", 2**63), "invalid sizes in its header"),
    "high half of images": (replaced(16, "<Q", 2**32 + IMAGE_COUNT), "invalid sizes in its header: 4294967936 ima"),
    "high half of batch": (replaced(24, "<Q", 2**32 + BATCH), "invalid sizes in its header"),
    "high half of epochs": (replaced(32, "<Q", 2**32 + 1), "invalid sizes in its header.* 4294967297 epochs"),
    "other epochs": (replaced(32, "<Q", 2), "is truncated: by its header it has"),
    "truncated": (lambda b: b[:-4], "is truncated: by its header it has"),
    "trailing byte": (lambda b: b + b"\0", "has bytes past its end: by its header it has"),
    "other name": (replaced(HEADER_BYTES, "<c", b"C"), "expected the tensor conv1.weight, got Conv1.weight"),
    "other count": (replaced(HEADER_BYTES + 32, "<Q", 289), "expected conv1.weight to have 288 elements, got 289"),
    "high half of count": (replaced(HEADER_BYTES + 32, "<Q", 2**32 + 288), "to have 288 elements, got 4294967584"),
    "nan": (replaced(HEADER_BYTES + 40 + 8, "<f", float("nan")), "conv1.weight holds a number that is not finite"),
    "index beyond": (lambda b: b[:ORDER] + struct.pack("<I", IMAGE_COUNT) + b[ORDER + 4 :], "beyond the training set"),
    "index twice": (lambda b: b[:ORDER] + b[ORDER + 4 : ORDER + 8] + b[ORDER + 4 :], "repeated"),
    "other set": (lambda b: replaced(16, "<Q", IMAGE_COUNT + 1)(b), "written for 641 training images, and there"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_STARTS)
def test_wrong_start_is_told_in_one_line(case, program, data, python_run, tmp_path):
    spoil, message = BAD_STARTS[case]
    path = tmp_path / "start.bin"
    path.write_bytes(spoil(python_run[0].read_bytes()))
    error = refused(program, "--data-dir", data, "--weights", path)
    assert re.search(message, error), error


MISTAKES = {
    "unknown option": (["--colour"], "unrecognized argument: --colour"),
    "no value": (["--lr"], "--lr: expected a value after it"),
    "no number": (["--epochs", "many"], "--epochs many: expected a whole number from 1 to"),
    "half a number": (["--epochs", "3x"], "--epochs 3x: expected a whole number"),
    "no epochs": (["--epochs", "0"], "--epochs 0: expected"),
    "high half of epochs": (["--epochs", str(2**32 + 1)], "--epochs 4294967297: expected"),
    "high half of a batch": (["--batch-size", str(2**32 + 16)], "--batch-size 4294967312"),
    "huge batch": (["--batch-size", "99999999999999999999"], "--batch-size 9+: expected"),
    "large batch": (["--batch-size", "641"], "--batch-size 641 is larger than the training set of 640 images"),
    "negative lr": (["--lr", "-1"], "--lr -1: expected a number above 0"),
    "lr that is no number": (["--lr", "nan"], "--lr nan: expected a number above 0"),
    "lr beyond float32": (["--lr", "1e308"], "--lr 1e308: expected a number above 0, and at most 3.40282e\\+38"),
    "negative seed": (["--seed", "-1"], "--seed -1: expected"),
    "unknown device": (["--device", "tpu"], "--device tpu is unknown: expected cpu or cuda"),
    "no CUDA": (["--device", "cuda"], "this program was built without CUDA: take --device cpu"),
    "no threads": (["--threads", "0"], "--threads 0: expected"),
    "missing start": (["--weights", "none.bin"], r"--weights none.bin cannot be read \(No such file"),
    "folder as start": (["--weights", "."], "file . is a folder, a pipe or a device"),
    "other epochs": (["--weights", "{start}", "--epochs", "2"], r"--epochs 2: .* was written for 1; leave the option"),
    "missing data": (["--data-dir", "none"], "none/MNIST/raw/train-images-idx3-ubyte.gz"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistake_is_told_in_one_line(case, program, data, python_run):
    arguments, message = MISTAKES[case]
    arguments = [argument.replace("{start}", str(python_run[0])) for argument in arguments]
    error = refused(program, "--data-dir", data, *arguments)
    assert re.search(message, error), error


def test_help(program):
    result = run(program, "--help")
    assert result.returncode == 0
    for option in "--epochs --batch-size --lr --seed --weights --data-dir --limit --device --threads --out".split():  # noqa: SIM905
        assert option in result.stdout


def test_report_that_cannot_be_written(program, data, tmp_path):
    (tmp_path / "file").write_text("")
    result = run(program, "--data-dir", data, "--limit", 32, "--batch-size", 16, "--out", tmp_path / "file" / "out")
    assert result.returncode == 2
    assert "cannot be made (Not a directory)" in result.stderr
    assert not result.stdout  # before the training, not after it


SHORT = "--limit", 32, "--batch-size", 16


def test_the_report_follows_links_and_honours_the_umask(program, data, tmp_path):
    (tmp_path / "out").mkdir()
    link, target = tmp_path / "out" / "report.json", tmp_path / "real.json"
    link.symlink_to("../real.json")
    before = os.umask(0o027)
    try:
        for _ in range(2):  # to a file that is not there yet, and to one that is
            assert run(program, "--data-dir", data, *SHORT, "--out", tmp_path / "out").returncode == 0
            assert link.is_symlink()
            assert json.loads(target.read_text())["ok"]
            assert target.stat().st_mode & 0o777 == 0o640
            os.umask(0o077)
    finally:
        os.umask(before)
    assert sorted(os.listdir(tmp_path)) == ["out", "real.json"]


def test_a_report_in_the_place_of_something_else_is_refused(program, data, tmp_path):
    report = tmp_path / "report.json"
    for kind, make in {
        "folder": os.mkdir,
        "named pipe": os.mkfifo,
        "device": lambda path: os.symlink("/dev/full", path),
    }.items():
        make(report)
        before = os.lstat(report)
        error = refused(program, "--data-dir", data, *SHORT, "--out", tmp_path)
        assert f"{report} cannot be written (it is a {kind}, not a regular file)" in error
        assert os.lstat(report).st_ino == before.st_ino
        os.rmdir(report) if kind == "folder" else report.unlink()
    report.symlink_to("report.json")
    assert "Too many levels of symbolic links" in refused(program, "--data-dir", data, *SHORT, "--out", tmp_path)


def test_a_full_disk_is_told_and_leaves_the_old_report(program, data, tmp_path):
    """A limit on the size of files stands for it: the write itself fails, in the middle of the file."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

    (tmp_path / "report.json").write_text("old")
    command = [program, "--data-dir", data, *SHORT, "--out", tmp_path]
    result = subprocess.run(list(map(str, command)), preexec_fn=limit, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert f"mnist: error: {tmp_path}/report.json cannot be written (File too large)\n" in result.stderr
    assert os.listdir(tmp_path) == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "old"


def test_the_makefile_builds_the_programs(data, tmp_path):
    """As `make mnist-c` and `make gpt2-c` do, without CUDA."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc", ignore=shutil.ignore_patterns("cuda", "torch"))
    command = ["make", "-s", "-f", "csrc/apps/Makefile", "OPTIMIZE=-O1", f"-j{len(os.sched_getaffinity(0))}"]
    command += ["build/apps/mnist", "build/apps/gpt2"]
    environment = {**os.environ, "CUDA_OPS_CUDA": "0", "CUDA_OPS_WERROR": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert run(tmp_path / "build/apps/mnist", "--data-dir", data, "--limit", 32, "--batch-size", 16).returncode == 0
    text = default_root("tinyshakespeare")
    result = run(tmp_path / "build/apps/gpt2", "--data-dir", text, "--steps", 2, "--batch", 2, "--sample", 5)
    assert result.returncode == 0, result.stderr


def symbols(objects, *options):
    listed = subprocess.run(["nm", "-P", *options, *objects], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if " " in line}


@pytest.mark.parametrize("name", ["mnist", "gpt2"])
def test_the_makefile_links_all_that_its_cuda_kernels_call(name):
    """By the objects of the library's own build, which has them too: to compile them anew would take minutes."""
    folder = ROOT / "build" / "temp" / "csrc" / "cuda"
    built = {path.relative_to(folder).as_posix().removesuffix(".cu.o"): path for path in folder.rglob("*.cu.o")}
    if "conv2d/conv2d" not in built or shutil.which("nm") is None:
        pytest.skip("the CUDA kernels were not built in this folder")
    command = ["make", "-s", "-f", "csrc/apps/Makefile", "WITH_CUDA=1", "NVCC=nvcc", f"{name}-cuda-kernels"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names = {name.removeprefix("cuda/").removesuffix(".o") for name in listed}
    assert names <= built.keys()
    chosen = [built[name] for name in names]
    others = [path for name, path in built.items() if name not in names]
    missing = (symbols(chosen, "-u") - symbols(chosen, "--defined-only")) & symbols(others, "--defined-only", "-g")
    assert not missing
    # And what the program itself calls.
    source = (ROOT / "csrc" / "apps" / name / "cuda.c").read_text()
    assert set(re.findall(r"\bcuda_ops_\w+_cuda(?=\()", source)) <= symbols(chosen, "--defined-only")
