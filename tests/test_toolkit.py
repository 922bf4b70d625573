"""The build's decisions: which nvcc, with or without CUDA, and what it says when it cannot."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))
import toolkit  # noqa: E402

CUDA_BUILD = types.SimpleNamespace(__version__="2.11.0+cu130", version=types.SimpleNamespace(cuda="13.0"))
CPU_BUILD = types.SimpleNamespace(__version__="2.11.0+cpu", version=types.SimpleNamespace(cuda=None))


def fake_toolkit(folder, version):
    """A folder with an nvcc that says it is of this version."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
    nvcc.chmod(0o755)
    return str(folder)


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """No nvcc anywhere, and nothing asked for."""
    for name in ("CUDA_HOME", "CUDA_OPS_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(toolkit.sysconfig, "get_path", lambda name: str(tmp_path / "site-packages"))
    monkeypatch.setattr(sys, "path", [])


def test_without_nvcc_the_cpu_backend_alone_is_built():
    home, why = toolkit.choose_cuda(CUDA_BUILD)
    assert home is None
    assert "no nvcc" in why
    assert 'pip install "cuda-toolkit[nvcc,cccl,crt,cudart]==13.0.*" "nvidia-nvvm==13.0.*"' in why


def test_cuda_asked_for_without_nvcc_is_an_error_with_the_cure(monkeypatch):
    monkeypatch.setenv("CUDA_OPS_CUDA", "1")
    with pytest.raises(toolkit.ToolkitError, match=r"CUDA_OPS_CUDA=1, but there is no nvcc.*pip install"):
        toolkit.choose_cuda(CUDA_BUILD)


def test_cuda_asked_for_with_a_pytorch_without_it(monkeypatch):
    monkeypatch.setenv("CUDA_OPS_CUDA", "1")
    with pytest.raises(toolkit.ToolkitError, match=r"2\.11\.0\+cpu is a build without CUDA"):
        toolkit.choose_cuda(CPU_BUILD)
    monkeypatch.delenv("CUDA_OPS_CUDA")
    assert toolkit.choose_cuda(CPU_BUILD)[0] is None


def test_cuda_home_comes_first_then_path_then_site_packages(monkeypatch, tmp_path):
    wheel = fake_toolkit(tmp_path / "site-packages" / "nvidia" / "cu13", "13.0")
    assert toolkit.choose_cuda(CUDA_BUILD)[0] == wheel
    on_path = fake_toolkit(tmp_path / "local", "13.0")
    monkeypatch.setenv("PATH", f"{on_path}/bin")
    assert toolkit.choose_cuda(CUDA_BUILD)[0] == on_path
    named = fake_toolkit(tmp_path / "named", "13.1")
    monkeypatch.setenv("CUDA_HOME", named)
    assert toolkit.choose_cuda(CUDA_BUILD)[0] == named


def test_an_nvcc_on_path_that_is_a_script(monkeypatch, tmp_path):
    """Some machines have a script in /usr/local/bin that calls the real one: its folder is no toolkit."""
    real = fake_toolkit(tmp_path / "cuda-13.0", "13.0")
    nvcc = Path(real) / "bin" / "nvcc"
    nvcc.write_text(nvcc.read_text() + f"echo '#$ _HERE_={real}/bin' >&2\n")
    script = tmp_path / "bin" / "nvcc"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    assert toolkit.choose_cuda(CUDA_BUILD)[0] == real


def test_an_nvcc_of_another_major_version_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", fake_toolkit(tmp_path / "old", "12.8") + "/bin")
    home, why = toolkit.choose_cuda(CUDA_BUILD)
    assert home is None
    assert "is of CUDA 12.8, and PyTorch of CUDA 13.0" in why
    wheel = fake_toolkit(tmp_path / "site-packages" / "nvidia" / "cu13", "13.0")
    assert toolkit.choose_cuda(CUDA_BUILD)[0] == wheel


def test_cuda_can_be_left_out(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", fake_toolkit(tmp_path / "named", "13.0"))
    monkeypatch.setenv("CUDA_OPS_CUDA", "0")
    assert toolkit.choose_cuda(CUDA_BUILD) == (None, "CUDA_OPS_CUDA=0")
    monkeypatch.setenv("CUDA_OPS_CUDA", "yes")
    with pytest.raises(toolkit.ToolkitError, match="must be 0 or 1, got 'yes'"):
        toolkit.choose_cuda(CUDA_BUILD)


def test_building_without_pytorch_says_which_command_to_run():
    program = (
        "import sys; sys.modules['torch'] = None; "  # makes `import torch` an ImportError
        "sys.argv = ['setup.py', '--version']; exec(open('setup.py').read(), {'__file__': 'setup.py'})"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PATH": os.defpath},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "cuda_ops: building needs PyTorch" in result.stderr
    assert "`pip install torch`" in result.stderr
