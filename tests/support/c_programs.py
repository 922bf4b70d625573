"""The C backend and the programs of csrc/apps, under the address and the undefined-behaviour sanitizers."""

import fcntl
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CC = os.environ.get("CC", "cc")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# -fopenmp-simd as in setup.py: `#pragma omp simd` is no warning, and no OpenMP runtime is linked.
FLAGS = ["-std=c11", "-O1", "-g1", "-fopenmp-simd", *SANITIZE, "-Wall", "-Wextra", "-Werror"]
FLAGS += [f"-I{CSRC / 'include'}", f"-I{CSRC / 'cpu'}"]
APP_FLAGS = [f"-I{CSRC / 'apps'}", "-D_POSIX_C_SOURCE=200809L", "-fopenmp"]


def compile_c(*arguments):
    result = subprocess.run([CC, *FLAGS, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def compile_all(sources, folder, *flags):
    """The object files of the sources, made in that folder."""

    def compile_one(source):
        target = folder / f"{source.parent.name}_{source.stem}.o"
        compile_c(*flags, "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compile_one, sources))


def kernels(folder):
    """The object files of the C11 kernels in that folder, compiled by the first process that asks for them."""
    folder.mkdir(exist_ok=True)
    sources = sorted((CSRC / "cpu").rglob("*.c"))
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            compile_all(sources, folder)
            (folder / "complete").touch()
    return sorted(folder.glob("*.o"))


def build_program(name, folder, kernels, defines=(), libraries=()):
    """The program csrc/apps/NAME, of that name in that folder."""
    apps = CSRC / "apps"
    objects = compile_all([*apps.glob("*.c"), *(apps / name).glob("*.c")], folder, *APP_FLAGS, *defines)
    program = folder / name
    compile_c(*APP_FLAGS, *objects, *kernels, "-o", program, *libraries, "-lm")
    return program


def build_cuda_program(name, folder):
    """The same with the CUDA backend and without sanitizers, of the objects that the library's own build has left here:
    to compile them anew would take minutes. None where there are none, or no toolkit."""
    built, nvcc = ROOT / "build" / "temp" / "csrc", shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).parents[1], "/usr/local/cuda"]
    home = next((Path(h) for h in homes if h and (Path(h) / "include" / "cuda_runtime_api.h").is_file()), None)
    command = ["make", "-s", "-f", "csrc/apps/Makefile", "WITH_CUDA=1", "NVCC=nvcc", f"{name}-cuda-kernels"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kernels = [built / path.replace(".o", ".cu.o") for path in listed] + sorted((built / "cpu").rglob("*.o"))
    if home is None or not all(path.is_file() for path in kernels):
        return None
    flags = [*APP_FLAGS, "-std=c11", "-O1", f"-I{CSRC / 'include'}", f"-I{CSRC / 'cpu'}"]
    flags += ["-DCUDA_OPS_WITH_CUDA", f"-isystem{home / 'include'}"]
    sources, program = [*(CSRC / "apps").glob("*.c"), *(CSRC / "apps" / name).glob("*.c")], folder / name
    libraries = [f"-L{folder_of}" for folder_of in (home / "lib64", home / "lib") if folder_of.is_dir()]
    libraries += ["-lcudart_static", "-lstdc++", "-ldl", "-lrt", "-lpthread", "-lm"]
    result = subprocess.run(
        [CC, *flags, *map(str, sources), *map(str, kernels), "-o", program, *libraries], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return program


def run_program(program, *arguments, **environment):
    command = [program, *map(str, arguments)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def refused(program, *arguments, **environment):
    """What the program says on stderr, in its one line."""
    result = run_program(program, *arguments, **environment)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith(f"{program.name}: error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr
