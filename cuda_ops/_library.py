"""Loads the op library, or keeps the reason why it cannot be, and tells it on first use.

`import cuda_ops` never fails for want of the library: `doctor` must be able to run. So without it cuda_ops.functional,
nn and optim are `Missing`, and the modules under ops/, whose fake kernels belong to ops of the library, are not
imported. They take `ops` from here.
"""

import json
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
REBUILD = "Rebuild it with `pip install --no-build-isolation -e .` in the repository (or `make build`)"


def build_info():
    """What setup.py wrote down of the build, as a dict; empty if nothing was built."""
    try:
        return json.loads((FOLDER / "_build_info.json").read_text())
    except (OSError, ValueError):
        return {}


def _series(version):
    return ".".join(version.split("+")[0].split(".")[:2])


def _problem():
    """Loads the library and returns None, or a sentence that says what is wrong and what mends it."""
    libraries = sorted(FOLDER.glob("_ops*.so"))
    if not libraries:
        return f"cuda_ops' extension is not built: there is no _ops*.so in its folder. {REBUILD}."
    info = build_info()
    if not info:
        return f"cuda_ops' extension was not built to the end: _build_info.json is missing. {REBUILD}."
    if _series(info["torch"]) != _series(torch.__version__):
        return (
            f"cuda_ops' extension was built with PyTorch {info['torch']} and is running with {torch.__version__}. "
            f"{REBUILD}, or install torch=={info['torch'].split('+')[0]}."
        )
    if info["cuda"] and info["cuda"] != torch.version.cuda:
        running = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        return (
            f"cuda_ops' extension was built for CUDA {info['cuda']} and is running with a PyTorch of {running}. "
            f"{REBUILD}."
        )
    try:
        torch.ops.load_library(str(libraries[0]))
    except (OSError, RuntimeError) as error:
        return (
            f"cuda_ops' extension does not load: {error}. It was built with PyTorch {info['torch']} and is running "
            f"with {torch.__version__}. {REBUILD}."
        )
    try:
        torch.ops.cuda_ops.cpu_isa()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


class Missing:
    """Stands in for what needs the library when it did not load: any use of it is the error."""

    def __getattr__(self, name):
        raise ImportError(problem)


problem = _problem()
ops = Missing() if problem else torch.ops.cuda_ops
# For ops that are defined in C++ and implemented in Python; as long as it lives, they are.
library = Missing() if problem else torch.library.Library("cuda_ops", "IMPL")


def has_cuda():
    """Whether the library is loaded and holds CUDA kernels."""
    return problem is None and build_info()["cuda"] is not None
