"""Peers in CUDA: peers/<name>.cu, compiled by nvcc on first use into build/peers of this repository, or the folder that
CUDA_OPS_PEERS names, for the GPU that is here, or for 9.0. A library that lies there needs no nvcc any more: `python -m
benchmarks.peers.compiled [name ...]` compiles ahead, also for a machine that has none.

CUB's headers are those of the toolkit, or of the package nvidia-cuda-cccl (`pip install nvidia-cuda-cccl`).
"""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch

from cuda_ops.doctor import find_nvcc

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC", "-Xlinker=-s"]


def architecture() -> str:
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return f"-arch=sm_{major}{minor}"


def headers() -> list[str]:
    """-I for the package's headers, where it is installed."""
    package = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in package.submodule_search_locations] if package else []
    found = [path.parent.parent for root in roots for path in root.glob("**/cub/cub.cuh")]
    return [f"-I{folder}" for folder in found[:1]]


def build(name: str) -> Path:
    """Compiles peers/<name>.cu unless the library is there; ImportError where it cannot."""
    source = HERE / f"{name}.cu"
    folder = Path(os.environ.get("CUDA_OPS_PEERS") or HERE.parents[1] / "build" / "peers")
    made_of = hashlib.sha256(source.read_bytes() + " ".join([*FLAGS, architecture()]).encode()).hexdigest()
    path = folder / f"{name}_{made_of[:12]}.so"
    if path.is_file():
        return path
    nvcc = find_nvcc()
    if nvcc is None:
        raise ImportError("there is no nvcc to compile it")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    print(f"peers: compiling {name}.cu, once, for half a minute: {path}", flush=True)
    command = [nvcc, *FLAGS, architecture(), *headers(), "-o", str(draft), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in (result.stdout + result.stderr).splitlines() if "error" in line]
        raise ImportError(f"nvcc could not compile it: {(lines or [f'exit status {result.returncode}'])[0]}")
    draft.replace(path)
    return path


def library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(name)))


def call(function, *arguments):
    """A C function that returns a cudaError_t; tensors are passed as pointers, other arguments as they are."""
    error = function(*(ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments))
    if error:
        raise RuntimeError(f"cudaError_t {error}")


if __name__ == "__main__":
    try:
        for name in sys.argv[1:] or sorted(path.stem for path in HERE.glob("cub_*.cu")):
            print(build(name), flush=True)
    except ImportError as error:
        sys.exit(f"peers: {error}")
