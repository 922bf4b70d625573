"""Builds add2 when it is called for, through torch.utils.cpp_extension.load, and runs it.

    python examples/add2/add2_jit.py [--cuda] [--build-dir DIR]

The first run compiles; later ones find the library in the build folder and only load it.
"""

import argparse
import hashlib
import os
import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"


def compile_c(source: Path, build_dir: Path) -> Path:
    """`load` hands every source but .cu to the C++ compiler, and C11 is not C++: so C files are compiled here.

    The object's name carries a digest of it, since `load` links again only when a name among its flags is new.
    """
    command = [os.environ.get("CC", "cc"), "-std=c11", "-O3", "-fPIC"]
    command += [f"-I{CSRC / 'include'}", f"-I{CSRC / 'cpu'}"]
    compiled = build_dir / f"{source.stem}_c11.o"
    subprocess.run([*command, "-c", str(source), "-o", str(compiled)], check=True)
    digest = hashlib.sha256(compiled.read_bytes()).hexdigest()[:12]
    return compiled.rename(build_dir / f"{source.stem}_c11_{digest}.o")


def build(build_dir: Path, cuda: bool) -> str:
    """Compiles what is out of date, loads the library (which registers torch.ops.add2_jit) and returns its path."""
    build_dir.mkdir(parents=True, exist_ok=True)
    sources = [str(HERE / "add2.cpp")]
    flags = ["-O1", "-DADD2_NAMESPACE=add2_jit"]
    if cuda:
        # The second file knows the GPU, by which kernels are launched.
        sources += [str(CSRC / "cuda" / "add2.cu"), str(CSRC / "cuda" / "common" / "device.cu")]
        flags.append("-DADD2_WITH_CUDA")
    return cpp_extension.load(
        name="add2_jit",
        sources=sources,
        extra_include_paths=[str(CSRC / "include"), str(CSRC / "cuda")],
        extra_cflags=flags,
        # The second flag as in CMakeLists.txt: with a libstdc++ that is linked statically, exceptions would crash.
        extra_ldflags=[str(compile_c(CSRC / "cpu" / "add2.c", build_dir)), "-Wl,--exclude-libs,ALL"],
        build_directory=str(build_dir),
        with_cuda=cuda,
        is_python_module=False,  # a library of ops, with no Python in it, rather than a module to import
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cuda", action="store_true", help="build the CUDA kernel too and run on the GPU (needs nvcc)")
    parser.add_argument("--build-dir", type=Path, default=HERE / "build" / "jit", help="default: %(default)s")
    args = parser.parse_args()
    path = build(args.build_dir, args.cuda)
    a, b = torch.randn(2, 1000, device="cuda" if args.cuda else "cpu")
    torch.testing.assert_close(torch.ops.add2_jit.add2(a, b), a + b)
    print(f"torch.ops.add2_jit.add2 on {a.device.type} agrees with PyTorch: {path}")


if __name__ == "__main__":
    main()
