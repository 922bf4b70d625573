"""Builds cuda_ops/_ops.abi3.so (the ops; links no Python), and cuda_ops/_C.*.so (introspection, pybind11).

    pip install --no-build-isolation -e .      against the PyTorch that is installed
    pip install -e .                           the same, in an environment that pip makes for the build

Environment:
    CUDA_OPS_CUDA=0|1       without / with the CUDA kernels; default: with, if PyTorch is a CUDA build and nvcc is found
    TORCH_CUDA_ARCH_LIST    compute capabilities, such as "8.0;9.0+PTX"; default: the visible GPUs, else a fixed list
    CUDA_OPS_WERROR=1       compiler warnings are errors
    MAX_JOBS                compile jobs; default: one a core, and at most one for each 3 GB of memory
"""

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
# setuptools wants paths relative to setup.py, and pip may start it elsewhere.
os.chdir(ROOT)

VERSION = re.search(r'CUDA_OPS_VERSION "(.+)"', Path("csrc/include/cuda_ops/core.h").read_text()).group(1)
# Every architecture from Turing on runs one of these, newer ones through the PTX of the last.
DEFAULT_ARCHITECTURES = "7.5;8.0;9.0+PTX"
GIGABYTES_PER_JOB = 3


def fail(message):
    sys.exit(f"cuda_ops: {message}")


def import_torch():
    try:
        import torch
    except ImportError:
        fail(
            "building needs PyTorch, and this Python has none. Run `pip install torch` first, or leave out "
            "--no-build-isolation, or run `make` in the repository, which does everything."
        )
    return torch


def wheel_cuda_home(cuda_version):
    """The toolkit that `pip install cuda-toolkit[nvcc,...]` puts into site-packages, or None."""
    major = cuda_version.split(".")[0]
    for site_packages in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path}:
        home = Path(site_packages) / "nvidia" / f"cu{major}"
        if (home / "bin" / "nvcc").exists():
            return str(home)
    return None


def find_cuda_home(cuda_version):
    """CUDA_HOME, else the nvcc on PATH, else the toolkit from the package index; None if there is no nvcc."""
    on_path = shutil.which("nvcc")
    candidates = [
        os.environ.get("CUDA_HOME"),
        on_path and str(Path(on_path).resolve().parent.parent),
        wheel_cuda_home(cuda_version),
    ]
    for home in filter(None, candidates):
        if (Path(home) / "bin" / "nvcc").exists():
            return home
    return None


def nvcc_version(cuda_home):
    text = subprocess.run([f"{cuda_home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release (\d+\.\d+)", text).group(1)


def install_nvcc_command(cuda_version):
    return f'pip install "cuda-toolkit[nvcc,cccl,crt,cudart]=={cuda_version}.*" "nvidia-nvvm=={cuda_version}.*"'


def choose_cuda(torch):
    """(cuda_home or None, why), by CUDA_OPS_CUDA, by the PyTorch that is there and by nvcc; never by a visible GPU."""
    wanted = os.environ.get("CUDA_OPS_CUDA", "")
    if wanted not in ("", "0", "1"):
        fail(f"CUDA_OPS_CUDA must be 0 or 1, got {wanted!r}.")
    if wanted == "0":
        return None, "CUDA_OPS_CUDA=0"
    if torch.version.cuda is None:
        if wanted == "1":
            fail(f"CUDA_OPS_CUDA=1, but PyTorch {torch.__version__} is a build without CUDA. Install one with CUDA.")
        return None, f"PyTorch {torch.__version__} is a build without CUDA"
    home = find_cuda_home(torch.version.cuda)
    if home is None:
        cure = f"`{install_nvcc_command(torch.version.cuda)}` brings one"
        if wanted == "1":
            fail(f"CUDA_OPS_CUDA=1, but there is no nvcc in CUDA_HOME, on PATH or in site-packages. {cure}.")
        return None, f"no nvcc was found; {cure}"
    version = nvcc_version(home)
    if version.split(".")[0] != torch.version.cuda.split(".")[0]:
        problem = (
            f"nvcc in {home} is of CUDA {version}, and PyTorch {torch.__version__} of CUDA {torch.version.cuda}: "
            f"their major versions must be the same. `{install_nvcc_command(torch.version.cuda)}` brings the "
            "matching one; set CUDA_HOME to choose between several"
        )
        if wanted == "1":
            fail(problem + ".")
        return None, problem
    return home, f"nvcc {version} in {home}"


def limit_jobs():
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    jobs = max(1, min(len(os.sched_getaffinity(0)), int(gigabytes // GIGABYTES_PER_JOB)))
    os.environ.setdefault("MAX_JOBS", str(jobs))


def extensions():
    torch = import_torch()
    cuda_home, why = choose_cuda(torch)
    if cuda_home:
        os.environ["CUDA_HOME"] = cuda_home  # read by torch.utils.cpp_extension when it is imported
        if not torch.cuda.is_available():
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHITECTURES)
    limit_jobs()
    from torch.utils import cpp_extension

    werror = os.environ.get("CUDA_OPS_WERROR") == "1"
    warnings = ["-Wall", "-Wextra", *(["-Werror"] if werror else [])]
    c_flags = ["-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-fopenmp-simd", "-ffp-contract=fast"]
    c_flags += ["-fno-math-errno", "-fno-trapping-math", *warnings]
    # Without -fopenmp at::parallel_for, a template, runs on one thread. The libgomp that the link names is the one that
    # PyTorch has loaded by then.
    cxx_flags = ["-std=c++17", "-O2", "-g0", "-fvisibility=hidden", "-fopenmp", *warnings]
    # Over the same folders' -I: our warnings are errors in development, and PyTorch's headers have some.
    cxx_flags += [f"-isystem{path}" for path in cpp_extension.include_paths("cuda" if cuda_home else "cpu")]
    nvcc_flags = ["-std=c++17", "-O3", "-Icsrc/cuda", "-Xcompiler=-fvisibility=hidden"]
    nvcc_flags += ["-Xcompiler=-Wall,-Wextra", *(["-Werror=all-warnings"] if werror else [])]
    include_dirs = [str(ROOT / "csrc" / folder) for folder in ("include", "cpu", "cuda", "torch")]

    # setuptools hands C files of an extension to the C++ compiler; a library of its own gets the C compiler.
    headers = glob.glob("csrc/cpu/*.h") + glob.glob("csrc/include/cuda_ops/*.h")
    sources = sorted(glob.glob("csrc/cpu/*.c"))
    # A file that includes itself depends on itself alone, so that any header is a dependency of each file.
    dependencies = dict.fromkeys(sources, headers)
    c_library = (
        "cuda_ops_cpu",
        {
            "sources": sources,
            "include_dirs": include_dirs,
            "cflags": c_flags,
            "obj_deps": {"": headers, **dependencies},
        },
    )

    libraries, macros, link_flags = [], [], ["-fopenmp", "-Wl,--no-undefined", "-Wl,--exclude-libs,ALL"]
    make_extension = cpp_extension.CppExtension
    ops_sources = sorted(glob.glob("csrc/torch/*.cpp"))
    architectures = None
    if cuda_home:
        make_extension = cpp_extension.CUDAExtension
        ops_sources += sorted(glob.glob("csrc/cuda/**/*.cu", recursive=True))
        flags = cpp_extension._get_cuda_arch_flags()
        architectures = " ".join(sorted({re.search(r",code=(\w+)", flag).group(1) for flag in flags}))
        macros = [("CUDA_OPS_WITH_CUDA", "1"), ("CUDA_OPS_ARCH_LIST", f'"{architectures}"')]
    ops = make_extension(
        name="cuda_ops._ops",
        sources=ops_sources,
        include_dirs=include_dirs,
        define_macros=macros,
        libraries=libraries,
        extra_compile_args={"cxx": cxx_flags, "nvcc": nvcc_flags},
        extra_link_args=link_flags,
        py_limited_api=True,  # of all it means, this is what counts: no Python symbol is linked
    )
    if cuda_home:
        # The toolkit in site-packages has no libcudart.so, only the one with its major version, like PyTorch's own.
        ops.libraries.remove("cudart")
        ops.library_dirs += [f"{cuda_home}/lib", *map(str, Path(torch.__file__).parent.parent.glob("nvidia/cu*/lib"))]
        ops.extra_link_args += [f"-l:libcudart.so.{torch.version.cuda.split('.')[0]}"]
    module = cpp_extension.CppExtension(
        name="cuda_ops._C",
        sources=["csrc/python/module.cpp"],
        include_dirs=include_dirs,
        define_macros=macros,
        extra_compile_args={"cxx": cxx_flags},
    )

    class BuildExtension(cpp_extension.BuildExtension):
        def finalize_options(self):
            super().finalize_options()
            # An editable install would compile into a temporary folder, and the next build would start anew.
            self.build_temp = str(ROOT / "build" / "temp")

        def run(self):
            print(f"cuda_ops: building {'with CUDA' if cuda_home else 'the CPU backend alone'} ({why})", flush=True)
            self.run_command("build_clib")
            super().run()
            folder = ROOT / "cuda_ops" if self.inplace else Path(self.build_lib) / "cuda_ops"
            info = {
                "cuda_ops": VERSION,
                "torch": torch.__version__,
                "cuda": torch.version.cuda if cuda_home else None,
                "cuda_reason": why,
                "architectures": architectures,
                "compiler": subprocess.run(
                    [os.environ.get("CXX", "c++"), "--version"], capture_output=True, text=True, check=False
                ).stdout.split("\n")[0],
                "python": sysconfig.get_python_version(),
            }
            (folder / "_build_info.json").write_text(json.dumps(info, indent=1) + "\n")
            backends = f"CPU and CUDA ({architectures})" if cuda_home else "CPU"
            print(f"cuda_ops: built for {backends}, against PyTorch {torch.__version__}", flush=True)

    from setuptools.command.build_clib import build_clib

    class BuildCLibrary(build_clib):
        def finalize_options(self):
            super().finalize_options()
            self.build_temp = self.build_clib = str(ROOT / "build" / "temp")

    major_minor = ".".join(torch.__version__.split(".")[:2])
    return {
        "ext_modules": [ops, module],
        "libraries": [c_library],
        "cmdclass": {"build_ext": BuildExtension, "build_clib": BuildCLibrary},
        "install_requires": [f"torch=={major_minor}.*", "numpy"],
    }


metadata_only = os.environ.get("CUDA_OPS_METADATA_ONLY") == "1"
setup(version=VERSION, **({} if metadata_only else extensions()))
