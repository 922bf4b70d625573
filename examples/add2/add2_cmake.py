"""Builds add2 with CMake, loads it with torch.ops.load_library, and runs it.

    python examples/add2/add2_cmake.py [--cuda] [--build-dir DIR]

CMake comes from PATH, or from the package index: pip install cmake.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


def find_cmake() -> str:
    # pip puts its cmake beside this Python, which PATH does not reach unless the environment is activated.
    beside = Path(sys.executable).parent / "cmake"
    cmake = str(beside) if beside.exists() else shutil.which("cmake")
    if cmake is None:
        sys.exit("There is no cmake. `pip install cmake` brings one.")
    return cmake


def build(build_dir: Path, cuda: bool) -> Path:
    cmake = find_cmake()
    options = [f"-DPYTHON={sys.executable}", f"-DADD2_CUDA={'ON' if cuda else 'OFF'}"]
    subprocess.run([cmake, "-S", str(HERE), "-B", str(build_dir), *options], check=True)
    subprocess.run([cmake, "--build", str(build_dir)], check=True)
    return build_dir / "libadd2_cmake.so"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cuda", action="store_true", help="build the CUDA kernel too and run on the GPU (needs nvcc)")
    parser.add_argument("--build-dir", type=Path, default=HERE / "build" / "cmake", help="default: %(default)s")
    args = parser.parse_args()
    path = build(args.build_dir, args.cuda)
    torch.ops.load_library(str(path))
    a, b = torch.randn(2, 1000, device="cuda" if args.cuda else "cpu")
    torch.testing.assert_close(torch.ops.add2_cmake.add2(a, b), a + b)
    print(f"torch.ops.add2_cmake.add2 on {a.device.type} agrees with PyTorch: {path}")


if __name__ == "__main__":
    main()
