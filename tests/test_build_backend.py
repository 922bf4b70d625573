"""The build backend: which PyTorch a build is made against, in an environment like the one that pip isolates it in."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))
import backend  # noqa: E402

# Of the environment's folders pip leaves the standard library alone.
SITECUSTOMIZE = """
import sys
sys.path[:] = [entry for entry in sys.path if {hidden!r} not in entry]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """What of the repository describes the project."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "csrc/include/cuda_ops/core.h"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "build_backend", folder / "build_backend", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "cuda_ops").mkdir()
    (folder / "cuda_ops" / "__init__.py").touch()
    return folder


class Isolated:
    """An environment, and the build in it that sees setuptools alone."""

    def __init__(self, folder, project):
        self.folder, self.project = folder, project
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "outer"], check=True)
        (self.packages,) = (folder / "outer").glob("lib/python*/site-packages")
        self.overlay = folder / "overlay"
        self.overlay.mkdir()
        (self.overlay / "sitecustomize.py").write_text(SITECUSTOMIZE.format(hidden=str(folder / "outer" / "lib")))
        for name in ("setuptools", "_distutils_hack", "wheel"):
            spec = importlib.util.find_spec(name)
            if spec is not None:
                (self.overlay / name).symlink_to(Path(spec.origin).parent)
        for name in ("setuptools", "wheel"):
            distribution = importlib.metadata.distribution(name)
            (self.overlay / distribution._path.name).symlink_to(distribution._path)

    def install_torch(self, version, folder=None):
        folder = folder or self.packages
        (folder / "torch").mkdir(parents=True)
        (folder / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\nimport beside\n")
        (folder / "beside.py").touch()  # what PyTorch itself needs of the environment
        (folder / f"torch-{version}.dist-info").mkdir()
        (folder / f"torch-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )

    def run(self, code, **environment):
        """What the code prints in the build's Python, which starts with `import backend`."""
        result = subprocess.run(
            [self.folder / "outer" / "bin" / "python", "-c", f"import backend\n{code}"],
            cwd=self.project,
            env={
                **os.environ,
                "PYTHONPATH": f"{self.overlay}{os.pathsep}{self.project / 'build_backend'}",
                "PYTHONNOUSERSITE": "1",
                **environment,
            },
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout


@pytest.fixture
def isolated(tmp_path, project):
    return Isolated(tmp_path, project)


REQUIREMENTS = "print('requires', backend.get_requires_for_build_wheel())"
USED = "backend.show_outer_torch()\nimport torch, setuptools\nprint('used', torch.__version__, setuptools.__file__)"


@pytest.mark.parametrize("version", ["2.10.1", "2.11.0+cpu", "2.12.0.dev20260101+cu130"])
def test_the_installed_pytorch_is_built_against(version, isolated):
    """Itself, whichever it is: no index has it by its local version."""
    isolated.install_torch(version)
    assert "torch" not in re.search("^requires (.+)$", isolated.run(REQUIREMENTS), re.MULTILINE)[1]
    text = isolated.run(USED)
    assert f"building against the installed PyTorch {version}" in text
    # setuptools is still the build's own.
    assert f"used {version} {isolated.overlay}" in text


def test_a_pytorch_that_a_pth_file_brings_is_seen(isolated):
    elsewhere = isolated.folder / "elsewhere"
    isolated.install_torch("2.11.0+cpu", elsewhere)
    (isolated.packages / "more.pth").write_text(f"{elsewhere}\n")
    assert "torch" not in re.search("^requires (.+)$", isolated.run(REQUIREMENTS), re.MULTILINE)[1]
    assert "used 2.11.0+cpu" in isolated.run(USED)


def test_a_pytorch_among_the_users_packages_is_seen(isolated):
    """An environment of all the system's packages has the user's too, and pip hides these from a build."""
    config = isolated.folder / "outer" / "pyvenv.cfg"
    config.write_text(re.sub("(include-system-site-packages = )false", r"\1true", config.read_text()))
    (isolated.overlay / "sitecustomize.py").write_text(SITECUSTOMIZE.format(hidden="-packages"))
    user = isolated.folder / "user"
    isolated.install_torch("2.11.0+cpu", Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(user)})))
    text = isolated.run("print(backend.outer_environment()[0])", PYTHONUSERBASE=str(user))
    assert text == "2.11.0+cpu\n"
    assert "used 2.11.0+cpu" in isolated.run(USED, PYTHONUSERBASE=str(user))


def test_without_pytorch_the_pinned_one_is_asked_for_and_it_is_said_what_to_type(isolated):
    text = isolated.run(REQUIREMENTS)
    assert f"'torch=={backend.DEVELOPMENT_TORCH}'" in text
    assert "there is no PyTorch in the environment of" in text
    assert "`pip install --no-build-isolation .`" in text
    assert "torch ==" not in isolated.run("print(backend.outer_environment())")
    assert isolated.run("print(backend.outer_environment()[0])") == "None\n"


def test_without_isolation_nothing_is_looked_for(isolated):
    isolated.install_torch("2.10.0")
    isolated.install_torch("2.11.0+cpu", isolated.overlay)
    before_and_after = "import sys\nbefore = [*sys.path]\nbackend.show_outer_torch()\nprint(before == sys.path)\n"
    text = isolated.run(
        before_and_after + "import torch\nprint(torch.__version__)\nprint(backend.torch_requirements())"
    )
    assert text.split() == ["True", "2.11.0+cpu", "[]"]


@pytest.mark.parametrize("hook", ["sdist", "wheel", "editable"])
def test_requirements_are_told_without_pytorch(hook, isolated):
    """And the flag that makes setup.py do without it is gone afterwards."""
    text = isolated.run(
        f"print('requires', backend.get_requires_for_build_{hook}())\n"
        "import os\nprint('CUDA_OPS_METADATA_ONLY' in os.environ)"
    )
    assert ("torch==" in text) == (hook != "sdist")
    assert text.endswith("False\n")


def test_the_flag_is_gone_after_an_error(monkeypatch):
    def fail(settings):
        assert os.environ["CUDA_OPS_METADATA_ONLY"] == "1"
        raise OSError("disk full")

    monkeypatch.setattr(backend.setuptools_hooks, "get_requires_for_build_sdist", fail)
    with pytest.raises(OSError, match="disk full"):
        backend.get_requires_for_build_sdist()
    assert "CUDA_OPS_METADATA_ONLY" not in os.environ


def test_metadata(isolated, tmp_path):
    """Of an editable install and of a wheel: the PyTorch that is needed is that of the build."""
    version = importlib.metadata.version("torch")
    (isolated.packages / "torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    for hook in ("wheel", "editable"):
        (tmp_path / hook).mkdir()
        isolated.run(f"backend.prepare_metadata_for_build_{hook}({str(tmp_path / hook)!r})", CUDA_OPS_CUDA="0")
        (path,) = (tmp_path / hook).glob("*/METADATA")
        text = path.read_text()
        assert f"Requires-Dist: torch=={'.'.join(version.split('.')[:2])}.*" in text
        assert "License: BSD-3-Clause" in text


def test_setuptools_that_cannot_make_wheels_is_told(isolated):
    code = "import importlib.metadata, importlib.util, sys\n"
    code += "importlib.metadata.version = lambda name: '65.5.0'\n"
    code += "find = importlib.util.find_spec\n"
    code += "importlib.util.find_spec = lambda name: None if name == 'wheel' else find(name)\n"
    code += "del sys.modules['backend']\n"
    code += "try:\n    import backend\nexcept SystemExit as error:\n    print(error)"
    assert "run `pip install -U wheel ninja` and try again" in isolated.run(code)


def test_the_pinned_pytorch_is_that_of_the_requirements():
    pins = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line)
    assert pins["torch"] == backend.DEVELOPMENT_TORCH
