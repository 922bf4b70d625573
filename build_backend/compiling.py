"""What setup.py knows of compiling that makes a build short."""

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"

# Where neither a GPU nor TORCH_CUDA_ARCH_LIST says what to build for: machine code for 9.0, and PTX, which the driver
# compiles at the first use, for all others from 8.0 on. Machine code for 8.0 and 7.5 would cost a third more.
WITHOUT_GPU = [
    "-gencode=arch=compute_80,code=compute_80",
    "-gencode=arch=compute_90,code=compute_90",
    "-gencode=arch=compute_90,code=sm_90",
]

# Which architectures a file is compiled for follows from the words, between underscores, of its name and of its folders
# in csrc/cuda: sm90/bfloat16.cu and float32_sm90.cu both have the word sm90.
# wgmma and setmaxnreg exist in sm_90a alone, whose machine code runs on 9.0 and nothing else: these for no others.
SM90A = {"sm90"}
# Turing could run nothing of these: mma.sync of such kinds, cp.async and so much shared memory came with 8.0.
AMPERE = {"sm80", "mma"}

# What the front end tells 9.0 and later from 8.0 by: dependent launches, and what a file chooses by architecture.
HOPPER = r"\b(wait_for_predecessor|release_successor)\(\);|__CUDA_ARCH__ (>=|<) 900"
# Those that nearly every file includes only define it.
DEFINITIONS = ("common.cuh", "half.cuh", "cvt.cuh", "griddepcontrol.cuh")


def words(source):
    """The words of a CUDA file's path in csrc/cuda."""
    path = Path(source).resolve().relative_to(CSRC / "cuda").with_suffix("")
    return {word for part in path.parts for word in part.split("_")}


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


def without_turing_ptx(flags):
    """nvcc's flags less PTX of before 8.0. Later devices would compile and run it, where cp.async and mma.sync are left
    out and the tables of paths, which ask the device alone, believe them to be there: without it the launch fails."""
    return [flag for flag in flags if not re.search(r",code=compute_[1-7]\d$", flag)]


def chooses_by_architecture(source):
    """Whether the front end makes something else of the file for 9.0 than for 8.0."""
    texts = with_includes(Path(source).resolve())
    return any(re.search(HOPPER, text) for path, text in texts.items() if path.name not in DEFINITIONS)


def flags_for(source, flags):
    """nvcc's flags for a file, of those for all that is asked for."""
    if words(source) & SM90A:
        return for_sm90a(flags)
    if words(source) & AMPERE:
        flags = without_turing_ptx(without_turing(flags))
    return flags if chooses_by_architecture(source) else from_one_front_end(flags)


def longest_first(sources):
    """CUDA files by how much there is to read, which tells roughly how long they take: what comes last is short, so
    that no core waits for another for long."""
    return sorted(sources, key=lambda source: -sum(map(len, with_includes(Path(source).resolve()).values())))


# Parsing PyTorch's headers is most of what a glue file costs, and autograd's are twice the others'. So the files are
# compiled as two: those with autograd, which take the longest, and those without. What is static in one has a name of
# its own among them.
def glue_units(sources, folder):
    """Writes a file that includes those sources that need autograd's headers, and one that includes the rest."""
    units = {"glue_autograd.cpp": [], "glue.cpp": []}
    for source in sorted(sources):
        text = Path(source).read_text()
        has_autograd = "#include <torch/csrc/autograd/" in text
        units["glue_autograd.cpp" if has_autograd else "glue.cpp"].append(source)
    paths = []
    for name, included in units.items():
        path = Path(folder, name)
        text = "".join(f'#include "{source}"\n' for source in included)
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        paths += [str(path)] if included else []
    return paths


# ptxas tells each place where it starts a group of wgmma itself, in kernels whose accumulators it moves between
# registers at the turn of a loop. It has no option to be silent of that alone, and -w would hide its warnings too.
NOISE = re.compile(r"^ptxas info +: \(C7519\) warpgroup\.arrive is injected .*(\n|\Z)", re.MULTILINE)


def run_without_noise(command):
    """Runs a compiler, prints what it says less those lines, and returns its exit status."""
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    sys.stdout.write(NOISE.sub("", result.stdout))
    return result.returncode


def without_noise(command):
    """The command, run by the function above."""
    return [sys.executable, str(Path(__file__).resolve().relative_to(CSRC.parent)), *command]


RULE = """ninja_required_version = 1.3
builddir = {folder}
rule compile
  command = $compiler -MD -MF $out.d -c $in -o $out
  description = compiling $in
  depfile = $out.d
  deps = gcc
"""


def compile_all(steps, folder, jobs):
    """Runs those of [(source, object, command)] whose result is older than what went into it, in the order given.

    All of them at once, whichever compiler they need, so that a core waits only at the very end."""

    def escape(path):
        return re.sub(r"([$ :])", r"$\1", path)

    text = RULE.format(folder=escape(folder))
    for source, result, command in steps:
        text += f"build {escape(result)}: compile {escape(source)}\n"
        text += f"  compiler = {shlex.join(command).replace('$', '$$')}\n"
    path = Path(folder, "build.ninja")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    # An environment's ninja lies beside its Python, also where that was started by its path.
    ninja = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
    if ninja is None:
        sys.exit("cuda_ops: building needs ninja. Run `pip install ninja` first.")
    sys.stdout.flush()
    if subprocess.run([ninja, "-f", str(path), "-j", jobs], check=False).returncode != 0:
        sys.exit("cuda_ops: compiling failed; the compiler's message is above.")


if __name__ == "__main__":
    sys.exit(run_without_noise(sys.argv[1:]))
