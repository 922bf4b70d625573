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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))
import compiling  # noqa: E402
import toolkit  # noqa: E402

# setuptools wants paths relative to setup.py, and pip may start it elsewhere.
os.chdir(ROOT)

CORE = Path("csrc/include/cuda_ops/core.h")
VERSION = re.search(r'CUDA_OPS_VERSION "(.+)"', CORE.read_text()).group(1)
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


def limit_jobs():
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    jobs = max(1, min(len(os.sched_getaffinity(0)), int(gigabytes // GIGABYTES_PER_JOB)))
    os.environ.setdefault("MAX_JOBS", str(jobs))


def extensions():
    torch = import_torch()
    try:
        cuda_home, why = toolkit.choose_cuda(torch)
    except toolkit.ToolkitError as error:
        fail(error)
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
    # Two architectures at a time: while one file is worked on, its build is half as long.
    nvcc_flags = ["-std=c++17", "-O3", "--threads=2", "-Icsrc/cuda", "-Xcompiler=-fvisibility=hidden"]
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
        nvcc_flags += flags  # with these there, PyTorch adds none of its own
        if any("sm_90a" in flag for flag in flags):
            nvcc_flags += ["-DCUDA_OPS_SM90A=1"]
        flags = {*flags, *compiling.for_sm90a(flags)}
        architectures = " ".join(sorted(re.findall(r",code=(\w+)", " ".join(flags))))
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
    # Python's headers are a package of their own on some systems; the ops do without them.
    has_python_headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
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

        def build_extension(self, extension):
            compile_round = self.compiler.compile

            # Rounds by what they are compiled for; objects and records of dependencies lie apart.
            def compile_rounds(sources, output_dir, extra_postargs, macros, **rest):
                prelude = compiling.start_prelude(torch, self.compiler, output_dir, macros, extra_postargs["cxx"])
                objects, flags = [], dict(extra_postargs)
                for folder, some, flags["nvcc"] in compiling.rounds(sources, extra_postargs["nvcc"]):
                    if folder == "":  # the last, which has the glue
                        flags["cxx"] = [*flags["cxx"], *compiling.finish_prelude(*prelude)]
                    if some:
                        place = str(Path(output_dir, folder))
                        objects += compile_round(
                            some, output_dir=place, extra_postargs=dict(flags), macros=macros, **rest
                        )
                self.c_library.result()  # is linked next
                return objects

            if extension is ops:
                self.compiler.compile = compile_rounds
            try:
                super().build_extension(extension)
            finally:
                self.compiler.compile = compile_round

        def run(self):
            print(f"cuda_ops: building {'with CUDA' if cuda_home else 'the CPU backend alone'} ({why})", flush=True)
            if not has_python_headers:
                print(
                    "cuda_ops: without Python.h (python3-dev) cuda_ops._C is left out; only `doctor --kernels` needs it"
                )
            if shutil.which(os.environ.get("CXX", "c++")) is None:
                fail("no C++ compiler was found. Install one (Debian, Ubuntu: `apt install g++`) or name it in CXX.")
            # setuptools compiles C one file after the other. Beside it, the rest keeps the other cores busy.
            self.get_finalized_command("build_clib")
            with ThreadPoolExecutor(1) as pool:
                self.c_library = pool.submit(self.run_command, "build_clib")
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
        "ext_modules": [ops, *([module] if has_python_headers else [])],
        "libraries": [c_library],
        "cmdclass": {"build_ext": BuildExtension, "build_clib": BuildCLibrary},
        "install_requires": [f"torch=={major_minor}.*", "numpy"],
    }


metadata_only = os.environ.get("CUDA_OPS_METADATA_ONLY") == "1"
setup(version=VERSION, **({} if metadata_only else extensions()))
