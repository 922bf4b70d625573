"""Where nvcc is, whether CUDA kernels are to be built, and how to get a matching nvcc. Used by setup.py and make.

python build_backend/toolkit.py     installs nvcc from the package index if it is wanted and there is none
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


class ToolkitError(Exception):
    """What is wrong and what mends it, in one sentence or two."""


def packages(cuda_version):
    """The parts of the CUDA toolkit that a build needs, in PyTorch's own CUDA version. nvidia-nvvm is named since a
    newer one, which the resolver would take, makes PTX that this version's ptxas rejects."""
    return [f"cuda-toolkit[nvcc,cccl,crt,cudart]=={cuda_version}.*", f"nvidia-nvvm=={cuda_version}.*"]


def install_command(cuda_version):
    return "pip install " + " ".join(f'"{package}"' for package in packages(cuda_version))


def _home_of(nvcc):
    """The toolkit of an nvcc, which may be a script that calls the real one: nvcc says itself where it lies."""
    result = subprocess.run(
        [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
    )
    here = re.search(r"^#\$ _HERE_=(.+)$", result.stdout + result.stderr, re.MULTILINE)
    return Path(here.group(1)).parent if here else Path(nvcc).resolve().parent.parent


def _homes(cuda_version):
    yield os.environ.get("CUDA_HOME")
    on_path = shutil.which("nvcc")
    yield on_path and _home_of(on_path)
    # The wheels put theirs under site-packages, also seen from the environment that pip isolates a build in.
    for site_packages in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path}:
        yield Path(site_packages) / "nvidia" / f"cu{cuda_version.split('.')[0]}"


def nvcc_version(cuda_home):
    text = subprocess.run([f"{cuda_home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release (\d+\.\d+)", text).group(1)


def same_major(version, other):
    return version.split(".")[0] == other.split(".")[0]


def find_cuda_home(cuda_version):
    """(home, None) of the first nvcc of this major version in CUDA_HOME, on PATH, in site-packages; else (None, why).

    PyTorch's headers and libcudart are of one major version of CUDA; with another, the build or the first call fails.
    """
    cure = f"`{install_command(cuda_version)}` brings one that matches"
    problem = f"there is no nvcc in CUDA_HOME, on PATH or in site-packages; {cure}"
    for home in filter(None, _homes(cuda_version)):
        if not (Path(home) / "bin" / "nvcc").exists():
            continue
        if same_major(nvcc_version(home), cuda_version):
            return str(home), None
        problem = f"nvcc in {home} is of CUDA {nvcc_version(home)}, and PyTorch of CUDA {cuda_version}; {cure}"
    return None, problem


def wanted():
    """CUDA_OPS_CUDA as True, False or None (not set)."""
    value = os.environ.get("CUDA_OPS_CUDA", "")
    if value not in ("", "0", "1"):
        raise ToolkitError(f"CUDA_OPS_CUDA must be 0 or 1, got {value!r}.")
    return {"": None, "0": False, "1": True}[value]


def choose_cuda(torch):
    """(cuda_home or None, why). Decided by CUDA_OPS_CUDA, by PyTorch's build and by nvcc; never by a visible GPU."""
    must = wanted()
    if must is False:
        return None, "CUDA_OPS_CUDA=0"
    if torch.version.cuda is None:
        home, problem = None, f"PyTorch {torch.__version__} is a build without CUDA"
    else:
        home, problem = find_cuda_home(torch.version.cuda)
    if problem and must:
        raise ToolkitError(f"CUDA_OPS_CUDA=1, but {problem}.")
    return (None, problem) if problem else (home, f"nvcc {nvcc_version(home)} in {home}")


def main():
    import torch

    gpu = torch.cuda.is_available()
    if wanted() is False or torch.version.cuda is None or find_cuda_home(torch.version.cuda)[0]:
        return
    if not (gpu or wanted()):
        print("cuda_ops: no GPU and no nvcc here, so the CPU backend alone is built (CUDA_OPS_CUDA=1 brings nvcc)")
        return
    print(
        f"cuda_ops: no nvcc here; installing the one for CUDA {torch.version.cuda} from the package index", flush=True
    )
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *packages(torch.version.cuda)], check=True)


if __name__ == "__main__":
    try:
        main()
    except ToolkitError as error:
        sys.exit(f"cuda_ops: {error}")
