"""Loads the op library, or keeps the reason why it cannot be, and tells it on first use.

`import cuda_ops` never fails for want of the library, or of PyTorch: `doctor` must be able to run. So without them
cuda_ops.functional, nn and optim are `Missing`, and the modules under ops/, whose fake kernels belong to ops of the
library, are not imported. They take `ops` from here.
"""

import json
from pathlib import Path

try:
    import torch
except Exception as error:  # whatever a missing, half removed or damaged PyTorch comes up with
    torch, without_torch = None, f"cuda_ops needs PyTorch, and `import torch` fails: {error}. Run `pip install torch`."
else:
    without_torch = None

FOLDER = Path(__file__).resolve().parent
REBUILD = "Rebuild it with `pip install --no-build-isolation -e .` in the repository (or `make build`)"
# What setup.py writes down of a build, and what of it a build without CUDA leaves empty.
RECORD = {"cuda_ops": str, "torch": str, "cuda": str, "architectures": str, "library": dict}
ONLY_WITH_CUDA = ("cuda", "architectures")


def read_build_info():
    """(what setup.py recorded of the build, None), or ({}, what is wrong with it)."""
    try:
        info = json.loads((FOLDER / "_build_info.json").read_text())
    except FileNotFoundError:
        return {}, "is missing"
    except OSError as error:
        return {}, f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        return {}, "is damaged: it is no JSON"
    if not isinstance(info, dict):
        return {}, f"is damaged: expected an object, got a {type(info).__name__}"
    for name, kind in RECORD.items():
        if name not in info:
            return {}, f"is damaged or of another version: it lacks {name!r}"
        if not isinstance(info[name], kind) and not (name in ONLY_WITH_CUDA and info[name] is None):
            return {}, f"is damaged: {name!r} is {info[name]!r}"
    if not (isinstance(info["library"].get("bytes"), int) and isinstance(info["library"].get("sha256"), str)):
        return {}, "is damaged: it tells neither size nor digest of the library"
    return info, None


def build_info():
    """What setup.py recorded of the build, as a dict; empty if nothing was built, or it is not to be trusted."""
    return read_build_info()[0]


def library_path():
    """The op library's file, or None."""
    return next(iter(sorted(FOLDER.glob("_ops*.so"))), None)


def _series(version):
    return ".".join(version.split("+")[0].split(".")[:2])


def _problem():
    """Loads the library and returns None, or a sentence that says what is wrong and how to fix it."""
    if without_torch:
        return without_torch
    path = library_path()
    if path is None:
        return f"cuda_ops' extension is not built: there is no _ops*.so in its folder. {REBUILD}."
    info, wrong = read_build_info()
    if wrong:
        return f"cuda_ops' extension was not built to the end: _build_info.json {wrong}. {REBUILD}."
    # Before it is loaded: of a file that was cut off, the first look at a page that is not there ends the process. The
    # digest, which would take longer than all the rest, is doctor's to check.
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"cuda_ops' extension cannot be read: {path.name}: {error.strerror}. {REBUILD}."
    if size != info["library"]["bytes"]:
        return (
            f"cuda_ops' extension is damaged, or of another build than _build_info.json: {path.name} has {size} bytes, "
            f"and {info['library']['bytes']} were written. {REBUILD}."
        )
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
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return (
            f"cuda_ops' extension does not load: {error}. It was built with PyTorch {info['torch']} and is running "
            f"with {torch.__version__}. {REBUILD}."
        )
    try:
        torch.ops.cuda_ops.cpu_isa()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    except AttributeError:
        return f"cuda_ops' extension does not load: {path.name} is no library of cuda_ops. {REBUILD}."
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
    return problem is None and build_info().get("cuda") is not None


def lacks_an_op(error):
    """Whether an error at import comes of an op that the Python files know and the library does not: that of a fake
    kernel, or of a look at torch.ops.cuda_ops. Any other is a mistake in the Python files."""
    if isinstance(error, AttributeError):
        return "'_OpNamespace' 'cuda_ops' object has no attribute" in str(error)
    return str(error).startswith("operator cuda_ops::") and "does not exist" in str(error)
