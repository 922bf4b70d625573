"""What setup.py knows of compiling that makes a build short."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"


def uses_sm90a(source, seen=None):
    """Whether a CUDA file, or a header of ours that it includes, has code for sm_90a (it says so: CUDA_OPS_SM90A)."""
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


def for_sm90a(flag):
    """wgmma and setmaxnreg exist in sm_90a alone, and machine code for 9.0 runs on nothing but 9.0: nothing is lost.
    Other files stay with compute_90, of which nvcc makes PTX and machine code at once: a pass of its front end less."""
    return flag.replace("arch=compute_90,code=sm_90", "arch=compute_90a,code=sm_90a")


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
