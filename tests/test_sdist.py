"""A source archive holds what a build needs: it is made, unpacked and built into a wheel, which works in an environment
that has nothing but PyTorch.

The objects of this folder's own build are taken where it was made by the same commands, so that nothing is compiled
(without them, minutes): ninja compiles what its log does not know, and misses a file that the archive lacks either way.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ["cuda_ops", "csrc", "build_backend", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]
NEEDED += ["CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "requirements.txt"]
BUILT = shutil.ignore_patterns("__pycache__", "*.so", "_build_info.json")


def hook(folder, name, target, **environment):
    """Calls a hook of the build backend, as pip does without isolation, and returns the path of what it made."""
    code = f"import sys; sys.path.insert(0, 'build_backend'); import backend; print(backend.{name}({str(target)!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "CUDA_OPS_CUDA": "0", **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return target / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what the archive is made from: this folder may hold an egg-info, whose list would be taken over."""
    folder = tmp_path_factory.mktemp("source")
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=BUILT)
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def unpacked(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    # What a build has left in the folder is not for the archive.
    (source / "cuda_ops" / "_ops.abi3.so").touch()
    (source / "cuda_ops" / "_build_info.json").touch()
    with tarfile.open(hook(source, "build_sdist", folder)) as archive:
        archive.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(folder)
    (top,) = (path for path in folder.iterdir() if path.is_dir())
    return top


def files(folder):
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "egg-info" not in str(path)
    }


def test_the_archive_holds_what_a_build_needs_and_nothing_built(source, unpacked):
    expected = files(source) - {"cuda_ops/_ops.abi3.so", "cuda_ops/_build_info.json"}
    assert files(unpacked) - {"PKG-INFO", "setup.cfg"} == expected


def as_built():
    """The environment in which setup.py has the commands of this folder's build, whose objects can then be taken."""
    log, info = ROOT / "build" / "temp" / "build.ninja", ROOT / "cuda_ops" / "_build_info.json"
    commands = log.read_text() if log.exists() and info.exists() else ""
    environment = {"CUDA_OPS_WERROR": "1" if "-Werror" in commands else "0"}
    architectures = (json.loads(info.read_text())["architectures"] or "").split() if commands else []
    # Another environment's commands name its own folders.
    if not architectures or sysconfig.get_path("purelib") not in commands:
        return environment
    machine = sorted(int(name[3:]) for name in architectures if re.fullmatch(r"sm_\d+", name))
    ptx = [name for name in architectures if name.startswith("compute_")]
    listed = ";".join(f"{number // 10}.{number % 10}" for number in machine) + "+PTX" * bool(ptx)
    # PTX of two kinds is what a build has where nothing is asked for and no GPU is there.
    return environment | {"CUDA_OPS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "" if len(ptx) > 1 else listed}


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory):
    if (ROOT / "build" / "temp" / "build.ninja").exists():
        shutil.copytree(ROOT / "build" / "temp", unpacked / "build" / "temp")
    return hook(unpacked, "build_wheel", tmp_path_factory.mktemp("wheel"), **as_built())


def test_the_wheel(wheel, source):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        info = json.loads(archive.read("cuda_ops/_build_info.json"))
        library = archive.getinfo("cuda_ops/_ops.abi3.so")
    python = {name for name in files(source) if re.fullmatch(r"cuda_ops/.*\.py|cuda_ops/py\.typed", name)}
    assert python <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"cuda_ops"}
    assert info["library"]["bytes"] == library.file_size
    series = ".".join(info["torch"].split(".")[:2])
    assert f"Requires-Dist: torch=={series}.*" in metadata
    assert "License: BSD-3-Clause" in metadata


def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], check=True)
    (packages,) = (tmp_path / "empty").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # Behind the environment's own, and without the .pth files that lie there: PyTorch, not an editable cuda_ops.
    (packages / "torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    code = "import torch, cuda_ops\nprint(cuda_ops.__file__)\n"
    code += "x = torch.tensor([-1.0, 2.0], requires_grad=True)\ncuda_ops.functional.relu(x).sum().backward()\n"
    code += "print(x.grad.tolist())\nfrom cuda_ops.__main__ import main\nraise SystemExit(main(['doctor']))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [tmp_path / "empty" / "bin" / "python", "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    where, gradient = result.stdout.splitlines()[:2]
    assert Path(where).is_relative_to(packages)
    assert gradient == "[0.0, 1.0]"
    assert "Healthy" in result.stdout
