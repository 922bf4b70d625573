"""The C backend and the programs of csrc/apps, under the address and the undefined-behaviour sanitizers."""

import fcntl
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CC = os.environ.get("CC", "cc")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# -fopenmp-simd as in setup.py: `#pragma omp simd` is no warning, and no OpenMP runtime is linked.
FLAGS = ["-std=c11", "-O1", "-g", "-fopenmp-simd", *SANITIZE, "-Wall", "-Wextra", "-Werror"]
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
