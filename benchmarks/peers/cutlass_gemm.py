"""Matrix multiplication in CUTLASS: cutlass_gemm.cu, and the fastest of its candidates for each problem.

The headers come from the package nvidia-cutlass (`pip install nvidia-cutlass`; it keeps them in the folder that it
calls cutlass_library.source_path), or from a copy of CUTLASS's repository that CUTLASS_PATH names. nvcc compiles them
on first use, a library for each dtype, which takes a minute or two each, into build/peers of this repository or the
folder that CUDA_OPS_PEERS names. A library that lies there needs neither headers nor nvcc: `python -m
benchmarks.peers.cutlass_gemm` compiles all of them ahead, also for a machine that has neither.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from cuda_ops.doctor import find_nvcc

from . import fastest

SOURCE = Path(__file__).with_suffix(".cu")
# NDEBUG, as in CUTLASS's own releases: its assertions are calls, around which nvcc cannot keep wgmma in flight (C7510).
FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr"]
FLAGS += ["-shared", "-Xcompiler=-fPIC,-Wall", "-Xlinker=-s"]
KINDS = ["bfloat16", "float16", "tf32", "float32", "float64"]


def headers() -> Path | None:
    """The folder with cutlass/ and cute/ in it."""
    candidates = [Path(os.environ["CUTLASS_PATH"])] if "CUTLASS_PATH" in os.environ else []
    package = importlib.util.find_spec("cutlass_library")  # not imported: it would bring its code generators along
    if package and package.submodule_search_locations:
        candidates.append(Path(package.submodule_search_locations[0]) / "source")
    folders = [folder for root in candidates for folder in (root / "include", root)]
    return next((folder for folder in folders if (folder / "cutlass" / "cutlass.h").is_file()), None)


def library_path(kind: str) -> Path:
    """Of the library of a dtype; the name changes with what it is made of."""
    folder = Path(os.environ.get("CUDA_OPS_PEERS") or SOURCE.parents[2] / "build" / "peers")
    made_of = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()
    return folder / f"cutlass_gemm_{kind}_{made_of[:12]}.so"


def missing() -> str | None:
    """What would have to be there to compile; None if all is."""
    if headers() is None:
        if "CUTLASS_PATH" in os.environ:
            return f"CUTLASS_PATH is {os.environ['CUTLASS_PATH']}, where there is no include/cutlass/cutlass.h"
        return "its headers are not installed (pip install nvidia-cutlass, or set CUTLASS_PATH)"
    return None if find_nvcc() else "there is no nvcc to compile it"


def build(kind: str) -> Path:
    """Compiles the library of a dtype unless it is there."""
    path = library_path(kind)
    if path.is_file():
        return path
    if problem := missing():
        raise ImportError(problem)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    command = [find_nvcc(), *FLAGS, f"-DCUTLASS_GEMM_{kind.upper()}", f"-I{headers()}", "-o", str(draft), str(SOURCE)]
    print(f"gemm: compiling CUTLASS's kernels of {kind}, once, for a minute or two: {path}", flush=True)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = (result.stdout + result.stderr).splitlines()
        said = [line for line in lines if "error" in line] or lines or [f"exit status {result.returncode}"]
        raise ImportError(f"nvcc could not compile it: {said[0]}")
    draft.replace(path)
    return path


@functools.cache
def library(kind: str) -> ctypes.CDLL:
    found = ctypes.CDLL(str(build(kind)))
    pointer, size = ctypes.c_void_p, ctypes.c_int
    found.cutlass_gemm.argtypes = [size, pointer, pointer, pointer, size, size, size, pointer, pointer]
    found.cutlass_gemm_workspace.argtypes = [size] * 4
    found.cutlass_gemm_workspace.restype = ctypes.c_int64
    found.cutlass_gemm_name.restype = found.cutlass_gemm_status.restype = ctypes.c_char_p
    return found


def launch(functions, d, a, b, candidate, workspace_bytes):
    (m, k), n = a.shape, b.shape[1]
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=a.device) if workspace_bytes else None
    pointers = [t.data_ptr() for t in (d, a, b)]
    status = functions.cutlass_gemm(
        candidate,
        *pointers,
        *(m, n, k),
        workspace.data_ptr() if workspace_bytes else None,
        torch.cuda.current_stream().cuda_stream,
    )
    if status:
        said = functions.cutlass_gemm_status(status).decode()
        raise RuntimeError(f"CUTLASS's {functions.cutlass_gemm_name(candidate).decode()}: {said}")
    return d


@functools.cache
def choice(kind, m, n, k, dtype, device):
    """(candidate, bytes of workspace), the fastest."""
    functions = library(kind)
    able = []
    for candidate in range(functions.cutlass_gemm_candidates()):
        workspace_bytes = functions.cutlass_gemm_workspace(candidate, m, n, k)
        if workspace_bytes >= 0:
            able.append((candidate, workspace_bytes))
    return fastest(able, lambda how, d, a, b: launch(functions, d, a, b, *how), m, n, k, dtype, device)


def kind_of(dtype: torch.dtype) -> str:
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else str(dtype).removeprefix("torch.")


def chosen(a: Tensor, b: Tensor) -> str:
    """The name of the candidate that gemm takes for these."""
    kind = kind_of(a.dtype)
    candidate, _ = choice(kind, a.shape[0], b.shape[1], a.shape[1], a.dtype, str(a.device))
    return library(kind).cutlass_gemm_name(candidate).decode()


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of contiguous CUDA matrices; float64, float32 (with TF32 where PyTorch allows it), float16 or bfloat16."""
    kind = kind_of(a.dtype)
    how = choice(kind, a.shape[0], b.shape[1], a.shape[1], a.dtype, str(a.device))
    return launch(library(kind), a.new_empty((a.shape[0], b.shape[1])), a, b, *how)


if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(KINDS):
        sys.exit(f"cutlass_gemm: there is no {', '.join(unknown)}; there are: {', '.join(KINDS)}")
    try:
        for kind in sys.argv[1:] or KINDS:
            print(build(kind), flush=True)
    except ImportError as error:
        sys.exit(f"cutlass_gemm: {error}")
else:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        raise ImportError("its kernels here are for devices of compute capability 9.0")
    if (why := missing()) and not any(library_path(kind).is_file() for kind in KINDS):
        raise ImportError(why)
