"""What setup.py knows of compiling that makes a build short."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"


# wgmma and setmaxnreg exist in sm_90a alone, whose machine code runs on 9.0 and nothing else. A file that names
# CUDA_OPS_SM90A, or includes what does, holds kernels for such devices alone, and is compiled for no others.
SM90A = "CUDA_OPS_SM90A|__CUDA_ARCH_FEAT_SM90_ALL"
# What has a meaning of its own from 9.0 on: dependent launches, and what a file chooses by architecture.
HOPPER = r"\b(wait_for_predecessor|release_successor)\(\);|__CUDA_ARCH__ (>=|<) 900"
# Those that nearly every file includes only define it.
DEFINITIONS = ("common.cuh", "half.cuh")
# A file with this line has nothing that Turing could run.
AMPERE = r"^#define CUDA_OPS_LEAST_CAPABILITY 80\b"


def with_includes(source, seen=None):
    """A CUDA file and the headers of ours that it includes, directly or not: {path: text}."""
    seen = {} if seen is None else seen
    if source in seen or source.suffix not in (".cu", ".cuh", ".h"):
        return seen
    seen[source] = source.read_text()
    folders = (source.parent, CSRC / "include", CSRC / "cuda")
    names = re.findall(r'^#include "(.+)"', seen[source], re.MULTILINE)
    for path in (folder / name for name in names for folder in folders):
        if path.exists():
            with_includes(path.resolve(), seen)
    return seen


def matches(pattern, texts):
    return any(re.search(pattern, text, re.MULTILINE) for path, text in texts.items() if path.name not in DEFINITIONS)


def for_sm90a(flags):
    """nvcc's flags for them; the flags as they are where machine code for 9.0 is not asked for."""
    hopper = "-gencode=arch=compute_90,code=sm_90"
    if hopper not in flags:
        return flags
    others = [flag for flag in flags if not flag.startswith("-gencode")]
    return [*others, hopper.replace("90", "90a"), "-DCUDA_OPS_SM90A=1"]


# The front end is most of what a file costs, and it works once for each `arch=compute_NN`. Of one that tells no
# architecture from 8.0 on from another, it makes the same for all: machine code for each of them, and the PTX for those
# to come, are then made from the one for the first.
def from_one_front_end(flags):
    """nvcc's flags for these files: what is asked for from 8.0 on comes from the least of it."""
    pairs = [re.fullmatch(r"-gencode=arch=compute_(\d+),code=(sm|compute)_(\d+)", flag) for flag in flags]
    least = min((int(pair[1]) for pair in pairs if pair and int(pair[1]) >= 80), default=None)

    def changed(flag, pair):
        if pair is None or int(pair[1]) < 80:
            return flag
        code = least if pair[2] == "compute" else pair[3]
        return f"-gencode=arch=compute_{least},code={pair[2]}_{code}"

    return list(dict.fromkeys(changed(flag, pair) for flag, pair in zip(flags, pairs, strict=True)))


def without_turing(flags):
    """nvcc's flags less those for devices before 8.0; the flags as they are where there are no others."""
    kept = [flag for flag in flags if not re.match(r"-gencode=arch=compute_[1-7]\d,", flag)]
    return kept if any(flag.startswith("-gencode") for flag in kept) else flags


def rounds(sources, flags):
    """What is compiled together: [(folder for the objects, sources, nvcc's flags)], the longest first. Sources that
    are not CUDA's come last, in a folder without a name."""
    found = {"sm_90a": ([], for_sm90a(flags)), "compute_80": ([], from_one_front_end(flags))}
    found["ampere"] = ([], without_turing(flags))
    found["ampere_compute_80"] = ([], from_one_front_end(without_turing(flags)))
    found[""] = ([], flags)
    size = {}
    for source in sources:
        texts = with_includes(Path(source).resolve())
        size[source] = sum(map(len, texts.values()))
        if not texts:
            folder = ""
        elif matches(SM90A, texts):
            folder = "sm_90a"
        else:
            folder = "ampere" if matches(AMPERE, texts) else ""
            if not matches(HOPPER, texts):
                folder = "ampere_compute_80" if folder else "compute_80"
        found[folder if found[folder][1] != flags else ""][0].append(source)
    return [(folder, sorted(some, key=lambda source: -size[source]), own) for folder, (some, own) in found.items()]


# Parsing PyTorch's headers is most of what a glue file costs, so it is done once. The result is named after all that it
# depends on, since compilers do not look whether a header has changed since; where one cannot use it, it reads the
# header. ccache does better, and would not work with it.
def start_prelude(torch, compiler, folder, macros, flags):
    """Starts to precompile the glue's headers, unless that is done; what finish_prelude wants to know."""
    cxx = os.environ.get("CXX", "c++")
    if "ccache" in cxx or Path(shutil.which(shlex.split(cxx)[0]) or cxx).resolve().name == "ccache":
        return None, None
    header = CSRC / "torch/prelude.h"
    command = [*shlex.split(cxx), *compiler.compiler_so[1:], *flags]
    command += [f"-D{name}" if value is None else f"-D{name}={value}" for name, value in macros]
    version = subprocess.run([*shlex.split(cxx), "--version"], capture_output=True, check=False).stdout
    key = repr((command, version, torch.__version__, torch.version.git_version, torch.__file__, header.read_text()))
    copy = Path(folder).resolve() / "prelude" / hashlib.sha256(key.encode()).hexdigest()[:16] / header.name
    if Path(f"{copy}.gch").exists():
        return copy, None
    shutil.rmtree(copy.parent.parent, ignore_errors=True)  # hundreds of megabytes
    copy.parent.mkdir(parents=True)
    shutil.copy(header, copy)
    return copy, subprocess.Popen([*command, "-x", "c++-header", str(copy), "-o", f"{copy}.part"])


def finish_prelude(copy, compilation):
    """Flags that make a glue file use it."""
    if compilation:
        if compilation.wait() != 0:
            return []
        Path(f"{copy}.part").rename(f"{copy}.gch")
    return ["-include", str(copy)] if copy else []
