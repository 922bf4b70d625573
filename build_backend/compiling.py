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
# CUDA_OPS_SM90A, or includes what does, holds kernels for such devices alone, and is compiled for no others. The other
# files stay with compute_90, of which nvcc makes PTX and machine code at once.
def uses_sm90a(source, seen=None):
    """Whether a CUDA file is one of those."""
    seen = set() if seen is None else seen
    if source in seen or source.suffix not in (".cu", ".cuh", ".h"):
        return False
    seen.add(source)
    text = source.read_text()
    if re.search("CUDA_OPS_SM90A|__CUDA_ARCH_FEAT_SM90_ALL", text):
        return True
    folders = (source.parent, CSRC / "include", CSRC / "cuda")
    included = [folder / name for name in re.findall(r'^#include "(.+)"', text, re.MULTILINE) for folder in folders]
    return any(uses_sm90a(path.resolve(), seen) for path in included if path.exists())


def for_sm90a(flags):
    """nvcc's flags for them; the flags as they are where machine code for 9.0 is not asked for."""
    hopper = "-gencode=arch=compute_90,code=sm_90"
    if hopper not in flags:
        return flags
    others = [flag for flag in flags if not flag.startswith("-gencode")]
    return [*others, hopper.replace("90", "90a"), "-DCUDA_OPS_SM90A=1"]


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
