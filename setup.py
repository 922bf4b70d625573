"""Builds cuda_ops/_ops.abi3.so (the ops; links no Python), and cuda_ops/_C.*.so (introspection, pybind11).

    pip install --no-build-isolation -e .      against the PyTorch that is installed
    pip install -e .                           the same, in an environment that pip makes for the build

Environment:
    CUDA_OPS_CUDA=0|1       without / with the CUDA kernels; default: with, if PyTorch is a CUDA build and nvcc is found
    TORCH_CUDA_ARCH_LIST    compute capabilities, such as "8.0;9.0+PTX"; default: the visible GPUs, else 9.0 and PTX
    CUDA_OPS_WERROR=1       compiler warnings are errors
    CUDA_OPS_SYMBOLS=1      the names of functions stay in the op library, for a profiler of the host
    MAX_JOBS                compile jobs; default: one a core, and at most one for each 3 GB of memory
"""

import glob
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
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


def cxx_command():
    """The C++ compiler, of several words where a cache or an option is named with it."""
    return shlex.split(os.environ.get("CXX", "c++"))


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
    limit_jobs()
    from torch.utils import cpp_extension

    werror = os.environ.get("CUDA_OPS_WERROR") == "1"
    warnings = ["-Wall", "-Wextra", *(["-Werror"] if werror else [])]
    c_flags = ["-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-fopenmp-simd", "-ffp-contract=fast"]
    # No exception passes kernels and launchers; the tables that unwind them are 0.7 MB.
    no_frames = ["-fno-asynchronous-unwind-tables"]
    c_flags += ["-fno-math-errno", "-fno-trapping-math", "-g0", *no_frames, *warnings]
    # Without -fopenmp at::parallel_for, a template, runs on one thread. The libgomp that the link names is the one that
    # PyTorch has loaded by then.
    cxx_flags = ["-std=c++17", "-O2", "-g0", "-fvisibility=hidden", "-fopenmp", *warnings]
    # Over the same folders' -I: our warnings are errors in development, and PyTorch's headers have some.
    cxx_flags += [f"-isystem{path}" for path in cpp_extension.include_paths("cuda" if cuda_home else "cpu")]
    # Two architectures at a time: while one file is worked on, its build is half as long. -O is of host code alone: of
    # -O3 what launches kernels is a quarter larger.
    nvcc_flags = ["-std=c++17", "--threads=2", "-Xcompiler=-O2,-fvisibility=hidden"]
    nvcc_flags += [f"-Xcompiler={','.join([*no_frames, '-fno-exceptions'])}"]
    nvcc_flags += ["-Xcompiler=-Wall,-Wextra", *(["-Werror=all-warnings"] if werror else [])]
    if cuda_home and tuple(map(int, toolkit.nvcc_version(cuda_home).split("."))) >= (12, 8):
        # Device code of a third of the size, unpacked by the driver at first use.
        nvcc_flags += ["--compress-mode=size"]
    c_sources = sorted(glob.glob("csrc/cpu/**/*.c", recursive=True))
    cuda_sources = compiling.longest_first(sorted(glob.glob("csrc/cuda/**/*.cu", recursive=True))) if cuda_home else []

    macros, link_flags = [], ["-fopenmp", "-Wl,--no-undefined", "-Wl,--exclude-libs,ALL"]
    if os.environ.get("CUDA_OPS_SYMBOLS") != "1":
        link_flags.append("-Wl,--strip-all")  # 3.4 MB of names, most of them of what launches a template's kernels
    make_extension = cpp_extension.CppExtension
    architectures = None
    if cuda_home:
        make_extension = cpp_extension.CUDAExtension
        named = os.environ.get("TORCH_CUDA_ARCH_LIST") or torch.cuda.is_available()
        flags = cpp_extension._get_cuda_arch_flags() if named else compiling.WITHOUT_GPU
        nvcc_flags += flags
        if any("sm_90a" in flag for flag in flags):
            nvcc_flags += ["-DCUDA_OPS_SM90A=1"]
        flags = {*flags, *compiling.for_sm90a(flags)}
        architectures = " ".join(sorted(re.findall(r",code=(\w+)", " ".join(flags))))
        macros = [("CUDA_OPS_WITH_CUDA", "1"), ("CUDA_OPS_ARCH_LIST", f'"{architectures}"')]
    ops = make_extension(
        name="cuda_ops._ops",
        sources=[*sorted(glob.glob("csrc/torch/*.cpp")), *c_sources, *cuda_sources],
        define_macros=macros,
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
        sources=sorted(glob.glob("csrc/python/*.cpp")),
        define_macros=macros,
        extra_compile_args={"cxx": cxx_flags},
    )

    # All that is left to PyTorch and setuptools is to link: they know a file's flags by its language alone, and
    # compile one extension after the other.
    class BuildExtension(cpp_extension.BuildExtension.with_options(use_ninja=False)):
        def finalize_options(self):
            super().finalize_options()
            # An editable install would compile into a temporary folder, and the next build would start anew.
            self.build_temp = "build/temp"
            self.force = True  # links anew: sources say nothing of the headers that have changed

        def commands(self):
            """{name of an extension: [(source, object, command)]}"""
            # The user's CFLAGS, and Python's: the rest of what setuptools compiles C with.
            c_compiler = self.compiler.compiler_so
            common = c_compiler[len(shlex.split(os.environ.get("CC", sysconfig.get_config_var("CC")))) :]
            defines = [f"-D{name}={value}" for name, value in macros]
            python = [f"-I{sysconfig.get_path('include')}"]

            # Relative, as sources are: the compiler's messages and objects name no folder of this machine.
            def includes(folder):
                return ["-Icsrc/include", f"-Icsrc/{folder}"]

            cxx = [*cxx_command(), *common, *includes("torch"), *defines]
            nvcc = shlex.split(os.environ.get("PYTORCH_NVCC", f"{cuda_home}/bin/nvcc"))
            nvcc = compiling.without_noise(nvcc)
            nvcc += ["-Xcompiler=-fPIC", *([f"-ccbin={os.environ['CC']}"] if "CC" in os.environ else [])]
            nvcc += includes("cuda")

            def steps(sources, command):
                return [(source, f"{self.build_temp}/{source}.o", command(source)) for source in sources]

            glue = compiling.glue_units(glob.glob("csrc/torch/*.cpp"), f"{self.build_temp}/glue")
            glue_command = [*cxx, "-I.", *ops.extra_compile_args["cxx"]]
            return {
                ops.name: [
                    *[(unit, f"{unit}.o", glue_command) for unit in glue],
                    *steps(cuda_sources, lambda s: [*nvcc, *defines, *compiling.flags_for(s, nvcc_flags)]),
                    *steps(c_sources, lambda _: [*c_compiler, *includes("cpu"), *c_flags]),
                ],
                module.name: steps(module.sources, lambda _: [*cxx, *python, *module.extra_compile_args["cxx"]]),
            }

        def build_extension(self, extension):
            if not self.objects:
                commands = self.commands()
                # The module's one file before the many of the ops, of which the last are short.
                steps = [step for extension in reversed(self.extensions) for step in commands[extension.name]]
                compiling.compile_all(steps, self.build_temp, os.environ["MAX_JOBS"])
                self.objects = {name: [step[1] for step in some] for name, some in commands.items()}
            extension.sources, extension.extra_objects = [], self.objects[extension.name]
            super().build_extension(extension)

        def run(self):
            print(f"cuda_ops: building {'with CUDA' if cuda_home else 'the CPU backend alone'} ({why})", flush=True)
            if not has_python_headers:
                print(
                    "cuda_ops: without Python.h (python3-dev) cuda_ops._C is left out; only `doctor --kernels` needs it"
                )
            if shutil.which(cxx_command()[0]) is None:
                fail("no C++ compiler was found. Install one (Debian, Ubuntu: `apt install g++`) or name it in CXX.")
            self.objects = {}
            super().run()
            folder = ROOT / "cuda_ops" if self.inplace else Path(self.build_lib) / "cuda_ops"
            library = (folder / Path(self.get_ext_filename(ops.name)).name).read_bytes()
            info = {
                "cuda_ops": VERSION,
                "torch": torch.__version__,
                "cuda": torch.version.cuda if cuda_home else None,
                "cuda_reason": why,
                "architectures": architectures,
                "compiler": subprocess.run(
                    [*cxx_command(), "--version"], capture_output=True, text=True, check=False
                ).stdout.split("\n")[0],
                "python": sysconfig.get_python_version(),
                # A library that was cut off ends the process that loads it; by these it is known before.
                "library": {"bytes": len(library), "sha256": hashlib.sha256(library).hexdigest()},
            }
            (folder / "_build_info.json").write_text(json.dumps(info, indent=1) + "\n")
            backends = f"CPU and CUDA ({architectures})" if cuda_home else "CPU"
            print(f"cuda_ops: built for {backends}, against PyTorch {torch.__version__}", flush=True)

    major_minor = ".".join(torch.__version__.split(".")[:2])
    return {
        "ext_modules": [ops, *([module] if has_python_headers else [])],
        "cmdclass": {"build_ext": BuildExtension},
        "install_requires": [f"torch=={major_minor}.*", "numpy"],
    }


metadata_only = os.environ.get("CUDA_OPS_METADATA_ONLY") == "1"
setup(version=VERSION, license="BSD-3-Clause", **({} if metadata_only else extensions()))
