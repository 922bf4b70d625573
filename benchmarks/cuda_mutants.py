"""Puts single defects into the CUDA kernels and asks whether the tests see them.

    python benchmarks/cuda_mutants.py build [--only 301 302] [--jobs 2]        where nvcc is; needs no GPU
    python benchmarks/cuda_mutants.py run [--only 301] [--workers 8] [--seconds 450] [--limit 120] [--out FOLDER]

The defects are those of cuda_defects.py. `build` compiles, for each, the mutated file alone, with the command by which
the build compiled the sound one (build/temp/build.ninja) but for one architecture, and writes build/cuda_mutants.zip:
all objects of the library, less the machine code for other architectures, and a few mutated ones. The sources stay as
they are. `run` needs a GPU of that architecture, PyTorch, a C++ compiler to link with, and that file: it links a
library for each defect, puts a copy of the package around it, and runs the tests that are named beside the defect,
several at a time.

A test that fails is run with the sound library too: a defect is caught where it passes there. Writes
<out>/cuda_mutants.json, and prints a table.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cuda_defects import DEFECTS, SELECTIONS, Defect

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))
from compiling import with_includes  # noqa: E402

BUILD = ROOT / "build" / "temp"
FOLDER = ROOT / "build" / "cuda_mutants"
PACK = ROOT / "build" / "cuda_mutants.zip"
ARCHITECTURE = 90
# What a copy of the repository has of its own; the rest are links to this one.
COPIED = ("cuda_ops", "tests")


# ---- Objects --------------------------------------------------------------------------------------------------------


def commands_of_build(text: str) -> dict[str, tuple[str, list[str]]]:
    """{object: (source, compiler's words)} of a build.ninja as setup.py writes it."""
    found = re.findall(r"^build (.+?): compile (.+)\n  compiler = (.+)$", text, re.MULTILINE)
    return {result: (source, shlex.split(words.replace("$$", "$"))) for result, source, words in found}


def for_one_architecture(words: list[str]) -> list[str]:
    """nvcc's words, with machine code for ARCHITECTURE alone; warnings are none of our concern here."""
    pattern = rf"-gencode=arch=\w+,code=sm_{ARCHITECTURE}a?"
    kept = [word for word in words if not word.startswith(("-gencode", "-Werror", "--threads"))]
    wanted = [word for word in words if re.fullmatch(pattern, word)]
    if not wanted:
        sys.exit(f"cuda_mutants: expected a build for {ARCHITECTURE / 10:.1f}, got {shlex.join(words)}")
    return [*kept, *wanted]


def fat_binary_for(data: bytes) -> bytes:
    """Of a section .nv_fatbin, what is machine code for ARCHITECTURE. Each of its parts begins with a magic number, a
    version, the size of this header, and that of what follows; of that, each with a header too, machine code is of kind
    2, and its architecture is the header's eighth word."""
    result, at = b"", 0
    while at < len(data):
        magic, version, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != 0xBA55ED50:
            raise ValueError(f"expected a fat binary, got {magic:#x}")
        kept, entry, end = b"", at + header, at + header + size
        while entry < end:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            if kind == 2 and architecture == ARCHITECTURE:
                kept += data[entry : entry + entry_header + payload]
            entry += entry_header + payload
        result += struct.pack("<IHHQ", magic, version, header, len(kept)) + data[at + 16 : at + header] + kept
        at = end
    return result


def device_code(path: Path) -> bytes | None:
    """The section .nv_fatbin; None where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        section = Path(folder, "section")
        command = ["objcopy", "-O", "binary", "--only-section=.nv_fatbin", "--set-section-flags", ".nv_fatbin=alloc"]
        subprocess.run([*command, path, section], check=True)
        return section.read_bytes() or None if section.exists() else None


def trim(source: Path, to: Path) -> None:
    """Copies an object without the machine code for other architectures."""
    code = device_code(source)
    to.parent.mkdir(parents=True, exist_ok=True)
    if code is None:
        shutil.copyfile(source, to)
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(fat_binary_for(code))
        file.flush()
        subprocess.run(["objcopy", f"--update-section=.nv_fatbin={file.name}", source, to], check=True)


# ---- build ----------------------------------------------------------------------------------------------------------


def mutated(defect: Defect, text: str) -> str:
    if text.count(defect.old) != 1:
        raise ValueError(f"{defect.number}: expected its text once in {defect.file}, got {text.count(defect.old)}")
    return text.replace(defect.old, defect.new)


def compile_mutant(defect: Defect, commands: dict) -> str:
    """Compiles the defect's objects, unless they are there; returns what there is to say."""
    folder = FOLDER / str(defect.number)
    by_source = dict(commands.values())
    sources = [f"csrc/cuda/{source}" for source in defect.sources]
    digest = hashlib.sha256(repr((defect.file, defect.old, defect.new, sources)).encode())
    for source in sources:
        digest.update(repr(sorted(with_includes(ROOT / source).values())).encode())
        digest.update(repr(for_one_architecture(by_source[source])).encode())
    stamp = folder / "digest"
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return "there"
    shutil.rmtree(folder, ignore_errors=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        shutil.copytree(ROOT / "csrc" / "cuda", tree / "csrc" / "cuda")
        (tree / "csrc" / "include").symlink_to(ROOT / "csrc" / "include")
        (tree / "build_backend").symlink_to(ROOT / "build_backend")
        file = tree / "csrc" / "cuda" / defect.file
        file.write_text(mutated(defect, file.read_text()))
        for source in sources:
            command = [*for_one_architecture(by_source[source]), "-c", source, "-o", "object.o"]
            result = subprocess.run(
                command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            if result.returncode != 0:
                return f"does not compile:\n{result.stdout[-2000:]}"
            trim(tree / "object.o", folder / f"{source}.o")
    stamp.write_text(digest.hexdigest())
    return f"compiled in {time.monotonic() - start:.0f} s"


def build(options) -> int:
    try:
        commands = commands_of_build((BUILD / "build.ninja").read_text())
    except OSError:
        sys.exit("cuda_mutants: there is no build here; run `python setup.py build_ext --inplace` first")
    failed = False
    with ThreadPoolExecutor(options.jobs) as pool:
        for defect, said in zip(
            options.defects, pool.map(lambda d: compile_mutant(d, commands), options.defects), strict=True
        ):
            print(f"{defect.number} {defect.file}: {said}", flush=True)
            failed |= said.startswith("does not compile")
    library = [name for name, (source, _) in commands.items() if not source.startswith("csrc/python/")]
    names = [Path(name).relative_to("build/temp") for name in library]
    with zipfile.ZipFile(PACK, "w", zipfile.ZIP_LZMA) as pack:
        for name in names:
            trim(BUILD / name, FOLDER / "sound" / name)
            pack.write(FOLDER / "sound" / name, f"sound/{name}")
        for defect in options.defects:
            for source in defect.sources:
                path = FOLDER / str(defect.number) / "csrc" / "cuda" / f"{source}.o"
                if path.exists():
                    pack.write(path, f"{defect.number}/csrc/cuda/{source}.o")
        pack.write(ROOT / "cuda_ops" / "_build_info.json", "_build_info.json")
    print(f"{PACK.relative_to(ROOT)}: {PACK.stat().st_size / 1e6:.1f} MB")
    return int(failed)


# ---- run ------------------------------------------------------------------------------------------------------------


def link(objects: list[Path], library: Path) -> None:
    """As setup.py has the library linked."""
    import torch

    site = Path(torch.__file__).parent.parent
    major = torch.version.cuda.split(".")[0]
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / lib for lib in ("lib64", "lib")]
    folders = [site / "torch" / "lib", *site.glob("nvidia/cu*/lib"), *homes]
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-shared", *map(str, objects), "-o", str(library)]
    command += ["-fopenmp", "-Wl,--no-undefined", "-Wl,--exclude-libs,ALL"]
    command += [f"-L{folder}" for folder in folders if folder.is_dir()]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", "-lc10_cuda", "-ltorch_cuda", f"-l:libcudart.so.{major}"]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"does not link: {result.stdout[-1000:]}")


def make_tree(pack: Path, name: str, tree: Path) -> None:
    """A copy of the repository whose library has the objects of `name` in place of the sound ones."""
    tree.mkdir()
    for path in ROOT.iterdir():
        if path.name in COPIED:
            built = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.json")
            shutil.copytree(path, tree / path.name, ignore=built)
        elif path.name not in (".git", "build", "runs"):
            (tree / path.name).symlink_to(path)
    objects = [
        pack / name / path.relative_to(pack / "sound")
        if (pack / name / path.relative_to(pack / "sound")).exists()
        else path
        for path in sorted((pack / "sound").rglob("*.o"))
    ]
    library = tree / "cuda_ops" / "_ops.abi3.so"
    link(objects, library)
    data = library.read_bytes()
    info = json.loads((pack / "_build_info.json").read_text())
    info["library"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (tree / "cuda_ops" / "_build_info.json").write_text(json.dumps(info, indent=1) + "\n")


def pytest(tree: Path, arguments: list[str], limit: float) -> tuple[int | None, str]:
    """(exit status, or None where the time was up; the end of the output)."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # A group of its own, so that what the tests start ends with them.
        process = subprocess.Popen(
            command, cwd=tree, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        output.seek(0)
        return status, output.read()[-20000:]


def failed_test(text: str) -> str | None:
    found = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?::.+?)(?: - .*)?$", text, re.MULTILINE)
    return found[-1] if found else None


def passed(text: str) -> int:
    found = re.findall(r"\b(\d+) passed\b", text)
    return int(found[-1]) if found else 0


def tests_of(defect: Defect, device: str) -> list[str]:
    files, expression = SELECTIONS[defect.tests]
    return [*(f"tests/{file}" for file in files), "-k", f"({expression}) and {device}"]


def judge(defect: Defect, tree: Path, sound: Path, device: str, limit: float) -> dict:
    """What the tests say: `result`, by which test, and how long that took."""
    start, left_out = time.monotonic(), []
    while True:
        deselected = [f"--deselect={test}" for test in left_out]
        status, text = pytest(tree, [*tests_of(defect, device), *deselected], limit)
        by = failed_test(text) if status == 1 else None
        if status == 1 and by and by not in left_out and pytest(sound, [by], limit)[0] != 0:
            left_out.append(by)  # it fails anyway
            continue
        break
    if status is None:
        result = "timed out"
    elif status < 0:
        result = f"caught: the process ended by signal {-status}"
    elif status == 1 and by:
        result = "caught"
    elif status == 0 and passed(text) > 0:
        result = "not caught"
    else:
        result = f"not judged: pytest's exit status was {status}, {passed(text)} passed"
    found = {"result": result, "by": by, "seconds": round(time.monotonic() - start, 1), "passed": passed(text)}
    if left_out:
        found["fail_anyway"] = left_out
    if not result.startswith(("caught", "not caught")):
        found["output"] = text[-1500:]
    return found


def table_of(results: dict[int, dict]) -> str:
    lines = ["| # | file | defect | result | by |", "|---|---|---|---|---|"]
    for defect in DEFECTS:
        if defect.number in results:
            found = results[defect.number]
            by = (found.get("by") or "").removeprefix("tests/")
            lines.append(f"| {defect.number} | {defect.file} | {defect.what} | {found['result']} | {by} |")
    return "\n".join(lines)


def run(options) -> int:
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("cuda_mutants: expected a GPU, got none; `--device cpu` shows whether the libraries link and load")
    start, results = time.monotonic(), {}
    report = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "limit": options.limit,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack = folder / "pack"
        with zipfile.ZipFile(options.pack) as file:
            file.extractall(pack)
        sound = folder / "sound"
        make_tree(pack, "sound", sound)

        def one(defect: Defect) -> None:
            tree = folder / str(defect.number)
            if time.monotonic() - start > options.seconds - options.limit / 4:
                found = {"result": "not run: the time was up"}
            elif not (pack / str(defect.number)).is_dir():
                found = {"result": "not run: it is not in the pack"}
            else:
                try:
                    make_tree(pack, str(defect.number), tree)
                    left = options.seconds - (time.monotonic() - start)
                    found = judge(defect, tree, sound, options.device, max(10.0, min(options.limit, left)))
                except RuntimeError as error:
                    found = {"result": f"not run: {error}"}
                shutil.rmtree(tree, ignore_errors=True)
            results[defect.number] = found
            print(f"{time.monotonic() - start:4.0f} s {defect.number} {defect.file}: {found['result']}", flush=True)
            report["defects"] = {str(number): results[number] for number in sorted(results)}
            (options.out / "cuda_mutants.json").write_text(json.dumps(report, indent=1) + "\n")

        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(one, options.defects))
    print(table_of(results))
    judged = [found for found in results.values() if found["result"].startswith(("caught", "not caught"))]
    caught = [found for found in judged if found["result"].startswith("caught")]
    print(f"{len(caught)} of {len(judged)} are caught; {len(results) - len(judged)} were not judged")
    return 0


def check(options) -> None:
    """Ends, with a line that says why, what cannot be done as it was asked for."""
    numbers = {defect.number for defect in DEFECTS}
    for number in options.only or ():
        if number not in numbers:
            sys.exit(f"cuda_mutants: --only {number}: there are {min(numbers)} to {max(numbers)} (cuda_defects.py)")
    for name in ("jobs", "workers", "seconds", "limit"):
        value = getattr(options, name, 1)
        if not 0 < value < float("inf"):
            sys.exit(f"cuda_mutants: --{name} {value}: expected a number above 0")
    if options.command == "run":
        if not zipfile.is_zipfile(options.pack):
            sys.exit(f"cuda_mutants: --pack {options.pack} is not there, or is no zip file: `build` writes it")
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.exit(f"cuda_mutants: --out {options.out} cannot be made: {error.strerror}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("build", "run"):
        command = commands.add_parser(name)
        command.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="these defects alone")
        if name == "build":
            command.add_argument("--jobs", type=int, default=1, help="how many compilers run at a time")
        else:
            command.add_argument("--pack", type=Path, default=PACK, help="what `build` has written")
            command.add_argument("--workers", type=int, default=8, help="how many defects are tested at a time")
            command.add_argument("--seconds", type=float, default=450.0, help="after which nothing more is begun")
            command.add_argument("--limit", type=float, default=120.0, help="seconds of one run of tests")
            command.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="whose tests are run")
            command.add_argument("--out", type=Path, default=ROOT / "runs" / "cuda_mutants")
    options = parser.parse_args()
    check(options)
    options.defects = [d for d in DEFECTS if not options.only or d.number in options.only]
    return build(options) if options.command == "build" else run(options)


if __name__ == "__main__":
    sys.exit(main())
