"""python -m cuda_ops doctor: what is installed, what works, and how to fix what does not.

Everything is tried rather than assumed: the op table comes from calling each functional, forward and backward, on
each device in each dtype. The command needs nothing but the standard library, so that it runs where the rest does not:
what needs PyTorch is left out without it.
"""

import argparse
import ctypes
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

from . import _library, functional, optim
from ._library import torch
from ._table import print_table
from ._tf32 import tf32

INSTALL = "pip install --no-build-isolation -e ."
DTYPES = ["float32", "float64", "float16", "bfloat16"]
PACKAGES = {
    "numpy": "pip install numpy",
    "rich": 'pip install -e ".[app]"',
    "torchvision": 'pip install -e ".[app]"',
    "matplotlib": 'pip install -e ".[app]"',
    "pytest": 'pip install -e ".[dev]"',
    "hypothesis": 'pip install -e ".[dev]"',
    "cmake": 'pip install -e ".[dev]"',
}
# As torchvision knows them.
MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


def example_calls(make):
    """Functional -> (arguments, PyTorch's own function of them; None: values only have to be finite)."""
    F = torch.nn.functional
    labels = torch.tensor([0, 2, 1], device=make.device)
    weight, bias = make(4), make(4)
    mean, var = torch.zeros_like(weight).detach(), torch.ones_like(weight).detach()
    images = torch.arange(12, dtype=torch.uint8, device=make.device).view(3, 4)

    # PyTorch's hardsigmoid and hardswish take a sixth in float32 on CUDA, for float64 too.
    def hardsigmoid(input):
        return F.hardtanh(input + 3, 0, 6) / 6

    def rotated(input, cos, sin):
        first, second = input.chunk(2, -1)
        return input * cos + torch.cat((-second, first), -1) * sin

    def normalized(images, indices, mean, std, dtype):
        return (images[indices].double() / 255 - mean) / std

    def packed_attention(qkv):
        return F.scaled_dot_product_attention(*[part.transpose(1, 2) for part in qkv.unbind(2)]).transpose(1, 2)

    def packed_sequences(query, key, value, *_):
        return F.scaled_dot_product_attention(*[t.transpose(0, 1) for t in (query, key, value)]).transpose(0, 1)

    def cached_attention(*tensors):
        return F.scaled_dot_product_attention(*[t.transpose(1, 2) for t in tensors]).transpose(1, 2)

    starts = torch.tensor([[0, 3], [0, 5]], dtype=torch.int32, device=make.device)
    cached = [make(1, length, 2, 4).detach() for length in (3, 5, 5)]
    heads = make(1, 2, 3, 4), make(1, 2, 5, 4), make(1, 2, 5, 4)
    rows = make(3, 2, 4), make(5, 2, 4), make(5, 2, 4)
    return {
        "adaptive_avg_pool2d": ((make(1, 2, 4, 5), 3), F.adaptive_avg_pool2d),
        "adaptive_max_pool2d": ((make(1, 2, 4, 5), 3), F.adaptive_max_pool2d),
        "add2": ((make(3, 4), make(4)), torch.add),
        "add_layer_norm": ((make(3, 4), make(3, 4), (4,), weight, bias), None),
        "add_rms_norm": ((make(3, 4), make(3, 4), (4,), weight), None),
        "amax": ((make(3, 4), 1), torch.amax),
        "amin": ((make(3, 4), 1), torch.amin),
        "argmax": ((make(3, 4), 1), torch.argmax),
        "argmin": ((make(3, 4), 1), torch.argmin),
        "avg_pool2d": ((make(1, 2, 4, 4), 2), F.avg_pool2d),
        "batch_norm": ((make(3, 4), mean, var, weight, bias, True), F.batch_norm),
        "batch_norm_act": (
            (make(3, 4), mean, var, weight, bias, make(3, 4), "silu", True),
            lambda input, mean, var, weight, bias, residual, name, training: F.silu(
                F.batch_norm(input, mean, var, weight, bias, training) + residual
            ),
        ),
        "bincount": ((labels,), torch.bincount),
        "cat": (((make(3, 4), make(2, 4)),), torch.cat),
        "concat": (((make(3, 4), make(2, 4)),), torch.cat),
        "conv1d": ((make(1, 2, 5), make(3, 2, 3), make(3)), F.conv1d),
        "conv2d": ((make(1, 2, 5, 5), make(3, 2, 3, 3), make(3)), F.conv2d),
        "conv_bn_act": (
            (make(1, 2, 5, 5), make(3, 2, 3, 3), make(3), mean[:3], var[:3], weight[:3], bias[:3], "silu"),
            lambda input, kernel, add, mean, var, weight, bias, name: F.silu(
                F.batch_norm(F.conv2d(input, kernel, add), mean, var, weight, bias)
            ),
        ),
        "conv_bn_relu_pool": (
            (make(2, 2, 6, 6), make(3, 2, 3, 3), make(3), mean[:3], var[:3], weight[:3], bias[:3]),
            None,
        ),
        "conv_transpose1d": ((make(1, 2, 5), make(2, 3, 3), make(3)), F.conv_transpose1d),
        "conv_transpose2d": ((make(1, 2, 5, 5), make(2, 3, 3, 3), make(3)), F.conv_transpose2d),
        "cross_entropy": ((make(3, 4), labels), F.cross_entropy),
        "cumsum": ((make(3, 4), 1), torch.cumsum),
        "dropout": ((make(3, 4),), None),
        "dropout1d": ((make(3, 4, 2),), None),
        "dropout2d": ((make(3, 4, 2, 2),), None),
        "dropout3d": ((make(3, 4, 2, 2, 2),), None),
        "dropout_add": ((make(3, 4), make(3, 4)), None),
        "elu": ((make(3, 4),), F.elu),
        "embedding": ((labels, make(3, 4)), F.embedding),
        "flash_attention": (heads, F.scaled_dot_product_attention),
        "flash_attention_qkvpacked": ((make(1, 3, 3, 2, 4),), packed_attention),
        "flash_attention_varlen": ((make(3, 2, 4), make(5, 2, 4), make(5, 2, 4), *starts, 3, 5), packed_sequences),
        "flash_attention_with_kvcache": (cached, cached_attention),
        "gather_normalize": ((images, labels, 0.5, 0.25, make.dtype), normalized),
        "geglu": ((make(3, 4), make(3, 4)), lambda gate, value: F.gelu(gate) * value),
        "gelu": ((make(3, 4),), F.gelu),
        "group_norm": ((make(3, 4, 2), 2, weight, bias), F.group_norm),
        "hardsigmoid": ((make(3, 4),), hardsigmoid),
        "hardswish": ((make(3, 4),), lambda input: input * hardsigmoid(input)),
        "hardtanh": ((make(3, 4),), F.hardtanh),
        "histc": ((make(3, 4).detach(), 4, -1, 1), torch.histc),
        "index_add": ((make(3, 4), 0, labels, make(3, 4)), torch.index_add),
        "index_add_": ((make(3, 4).detach(), 0, labels, make(3, 4).detach()), None),
        "instance_norm": ((make(3, 4, 2), mean, var, weight, bias), F.instance_norm),
        "interleave": ((make(3, 4), make(3, 4)), lambda x, y: torch.stack((x, y), 2).flatten(1)),
        "leaky_relu": ((make(3, 4),), F.leaky_relu),
        "layer_norm": ((make(3, 4), (4,), weight, bias), F.layer_norm),
        "layer_scale_add": (
            (make(3, 4), make(3, 4), weight),
            lambda input, residual, weight: residual + weight * input,
        ),
        "excitation": (
            (make(3, 4), make(2, 4), make(2), make(3, 2), make(3)),
            lambda x, w1, b1, w2, b2: F.linear(F.linear(x, w1, b1).relu(), w2, b2),
        ),
        "rotary_embedding": ((make(1, 2, 3, 4), *make(2, 1, 3, 4).detach().unbind()), rotated),
        "window_attention": (
            (make(1, 2, 2, 12), make(2, 4, 4), 2, 2),
            lambda qkv, bias, heads, window: F.scaled_dot_product_attention(
                *qkv.view(1, 4, 3, heads, 2).permute(2, 0, 3, 1, 4), bias
            )
            .transpose(1, 2)
            .reshape(1, 2, 2, 4),
        ),
        "scale_channels": ((make(2, 3, 4), make(2, 3)), lambda input, scale: input * scale[..., None]),
        "linear": ((make(3, 4), make(2, 4), make(2)), F.linear),
        "linear_cross_entropy": (
            (make(3, 4), make(5, 4), labels),
            lambda input, weight, target: F.cross_entropy(F.linear(input, weight), target),
        ),
        "linear_gelu": ((make(3, 4), make(2, 4), make(2)), lambda *arguments: F.gelu(F.linear(*arguments))),
        "linear_relu": ((make(3, 4), make(2, 4), make(2)), lambda *arguments: F.linear(*arguments).relu()),
        "log_softmax": ((make(3, 4), 1), F.log_softmax),
        "logsumexp": ((make(3, 4), 1), torch.logsumexp),
        "matmul": ((make(3, 4), make(4, 2)), torch.matmul),
        "masked_softmax": ((make(3, 4),), lambda input: F.softmax(input, -1)),
        "max_pool2d": ((make(1, 2, 4, 4), 2), F.max_pool2d),
        "mean": ((make(3, 4), 1), torch.mean),
        "mish": ((make(3, 4),), F.mish),
        "multi_head_attention_forward": (
            (*rows, 4, 2, make(12, 4), make(12), None, None, False, 0.0, make(4, 4), bias),
            lambda *arguments: F.multi_head_attention_forward(*arguments)[0],
        ),
        "nll_loss": ((make(3, 4), labels), F.nll_loss),
        "norm": ((make(3, 4),), torch.linalg.vector_norm),
        "permute_contiguous": ((make(3, 4), (1, 0)), torch.permute),
        "polynomial": ((make(3, 4),), lambda input: input * input + input + 1),
        "prelu": ((make(3, 4), weight), F.prelu),
        "prod": ((make(3, 4), 1), torch.prod),
        "relu": ((make(3, 4),), F.relu),
        "relu6": ((make(3, 4),), F.relu6),
        "rms_norm": ((make(3, 4), (4,), weight), F.rms_norm),
        "scaled_dot_product_attention": (heads, F.scaled_dot_product_attention),
        "scatter_add": ((make(3, 4), 0, labels.view(3, 1), make(3, 4)), torch.scatter_add),
        "scatter_add_": ((make(3, 4).detach(), 0, labels.view(3, 1), make(3, 4).detach()), None),
        "sigmoid": ((make(3, 4),), torch.sigmoid),
        "silu": ((make(3, 4),), F.silu),
        "softmax": ((make(3, 4), 1), F.softmax),
        "softplus": ((make(3, 4),), F.softplus),
        "square": ((make(3, 4),), torch.square),
        "swiglu": ((make(3, 4), make(3, 4)), lambda gate, value: F.silu(gate) * value),
        "mse_loss": ((make(3, 4), make(3, 4)), F.mse_loss),
        "l1_loss": ((make(3, 4), make(3, 4)), F.l1_loss),
        "smooth_l1_loss": ((make(3, 4), make(3, 4)), F.smooth_l1_loss),
        "huber_loss": ((make(3, 4), make(3, 4)), F.huber_loss),
        "binary_cross_entropy_with_logits": ((make(3, 4), make(3, 4)), F.binary_cross_entropy_with_logits),
        "kl_div": ((make(3, 4), make(3, 4), None, None, "sum", True), F.kl_div),
        "tanh": ((make(3, 4),), torch.tanh),
        "token_position_embedding": (
            (labels, make(3, 4), make(5, 4)),
            lambda tokens, table, places: F.embedding(tokens, table) + places[:3],
        ),
        "std": ((make(3, 4), 1), torch.std),
        "stochastic_depth": ((make(3, 4), 0.5, "row"), None),
        "sum": ((make(3, 4), 1), torch.sum),
        "var": ((make(3, 4), 1), torch.var),
    }


class _Make:
    def __init__(self, device, dtype):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape):
        values = torch.rand(shape, generator=self.generator, dtype=torch.float64) * 2 - 1
        return values.to(self.dtype).to(self.device).requires_grad_()


def _run(*command):
    """First lines of what a command prints, or None if it is not there or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- one function a section; each returns what it found, and calls problem(cause, cure, broken) ---------------------


def check_versions(problem):
    info = _library.build_info()
    running = {
        "cuda_ops": importlib.import_module("cuda_ops").__version__,
        "torch": torch.__version__ if torch else None,
        "cuda": torch.version.cuda if torch else None,
        "python": platform.python_version(),
    }
    if _library.problem is None and info.get("cuda_ops") != running["cuda_ops"]:
        problem(
            f"the extension is of cuda_ops {info.get('cuda_ops')}, the Python files of {running['cuda_ops']}", INSTALL
        )
    return {"built_with": info, "running_with": running, "platform": platform.platform()}


def check_extension(problem):
    found = {"loaded": _library.problem is None, "library": None, "build_info": None, "introspection": None}
    path = _library.library_path()
    found["library"] = str(path) if path else None
    info, wrong = _library.read_build_info()
    if _library.problem:
        of_environment = _library.problem.startswith("CUDA_OPS_")
        cure = "unset it, or name one of these" if of_environment else INSTALL
        problem(_library.problem, "pip install torch" if _library.without_torch else cure)
    else:
        found["build_info"] = _library.ops.build_info()
        written = info.get("architectures")
        if not found["build_info"].endswith(f"architectures {written}" if written else " CPU"):
            problem(
                f"the library says '{found['build_info']}' and _build_info.json says architectures {written}: "
                "they come from different builds",
                INSTALL,
            )
    # Else the problem is one of these already.
    if _library.problem is None or _library.without_torch:
        if path is None:
            problem("the op library is missing: there is no _ops*.so", INSTALL)
        elif wrong:
            problem(f"_build_info.json {wrong}", INSTALL)
        else:
            _check_digest(path, info["library"], problem)
    if torch is None:
        found["introspection"] = "needs PyTorch"
        return found
    try:
        module = importlib.import_module("cuda_ops._C")
        # An editable install of another copy answers for submodules that this copy lacks.
        if Path(module.__file__).resolve().parent != _library.FOLDER:
            raise ImportError(f"it was found in another copy of cuda_ops, {Path(module.__file__).parent}")
        found["introspection"] = "loaded"
    except ImportError as error:
        others = [path.name for path in sorted(_library.FOLDER.glob("_C*.so"))]
        why = (
            f"there is {', '.join(others)}, for another Python than {sys.version.split()[0]}" if others else "not built"
        )
        if any(name.endswith(sysconfig.get_config_var("EXT_SUFFIX")) for name in others):
            why = str(error)
        found["introspection"] = why
        problem(
            f"cuda_ops._C, which lists kernels, does not load ({why}); the ops do without it", INSTALL, broken=False
        )
    return found


def _check_digest(path, written, problem):
    """The import looks at the size alone."""
    try:
        content = path.read_bytes()
    except OSError as error:
        problem(f"{path.name} cannot be read: {error.strerror}", INSTALL)
        return
    if len(content) != written["bytes"]:
        problem(f"{path.name} has {len(content)} bytes, and {written['bytes']} were written", INSTALL)
    elif hashlib.sha256(content).hexdigest() != written["sha256"]:
        problem(f"{path.name} is damaged or was changed: its SHA-256 is not that of the build", INSTALL)


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for an architecture, as in sm_90a or compute_80, runs on a device of that compute capability."""
    match = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", architecture)
    if not match:
        return False
    kind, number, suffix = match.groups()
    major, minor = divmod(int(number), 10)
    if suffix == "a":  # uses what only this one has
        return capability == (major, minor)
    if kind == "sm" or suffix == "f":  # machine code (f: PTX as well) is good for later minors of the same major
        return capability[0] == major and capability[1] >= minor
    return capability >= (major, minor)


def why_no_cuda():
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is a build without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).split(". ")[0].split("\n")[0]
    return "PyTorch finds no GPU"


def driver_cuda_version():
    """The newest CUDA version that the driver can run, as 1000 * major + 10 * minor; only where there is a GPU."""
    version = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def check_cuda(problem):
    info = _library.build_info()
    found = {"available": False, "reason": None, "driver": None, "driver_cuda": None, "devices": []}
    found["driver"] = _driver_version()
    if torch is None:
        found["reason"] = "there is no PyTorch"
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PyTorch warns of is reported below, with a cure
        found["available"] = torch.cuda.is_available()
        if not found["available"]:
            found["reason"] = why_no_cuda()
    if found["driver"] and not found["available"]:
        if torch.version.cuda is None:
            cure = "pip install --force-reinstall torch  (see pytorch.org for the build with CUDA), then " + INSTALL
            problem(f"there is an NVIDIA driver, but {found['reason']}", cure, broken=False)
        elif "hides all GPUs" not in found["reason"]:
            cure = f"update the NVIDIA driver to one for CUDA {torch.version.cuda}; `nvidia-smi` shows what it is now"
            problem(f"there is an NVIDIA driver ({found['driver']}), but {found['reason']}", cure)
    if not found["available"]:
        return found
    version = driver_cuda_version()
    found["driver_cuda"] = f"{version // 1000}.{version % 1000 // 10}"
    if not info.get("cuda") and _library.problem is None:
        problem(
            f"there is a GPU, but cuda_ops was built for the CPU alone ({info.get('cuda_reason')})",
            f"CUDA_OPS_CUDA=1 {INSTALL}",
            broken=False,
        )
    architectures = (info.get("architectures") or "").split()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        usable = [a for a in architectures if runs_on(a, capability)]
        found["devices"].append(
            {
                "name": properties.name,
                "compute_capability": f"{capability[0]}.{capability[1]}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "multiprocessors": properties.multi_processor_count,
                "runs": usable,
            }
        )
        if not architectures:
            continue
        rebuild = f"TORCH_CUDA_ARCH_LIST={capability[0]}.{capability[1]} {INSTALL}"
        device = f"device {index} ({properties.name}) has compute capability {capability[0]}.{capability[1]}"
        if not usable:
            problem(f"{device}, and the build is for {' '.join(architectures)}: no kernel runs there", rebuild)
        elif not any(a.startswith("sm_") for a in usable):
            problem(
                f"{device}, and the build has only PTX for it: the driver compiles every kernel on first use",
                rebuild,
                broken=False,
            )
    return found


def _driver_version():
    text = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if text:
        return text.split("\n")[0]
    try:
        match = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return match.group(1) if match else None


def find_nvcc():
    """Where setup.py looks: CUDA_HOME, PATH, the toolkit from the package index."""
    major = ((torch and torch.version.cuda) or "").split(".")[0]
    candidates = [
        os.environ.get("CUDA_HOME") and Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc",
        shutil.which("nvcc"),
        Path(sysconfig.get_path("purelib")) / "nvidia" / f"cu{major}" / "bin" / "nvcc",
    ]
    return next((str(path) for path in candidates if path and Path(path).exists()), None)


def check_tools(problem):
    compiler = os.environ.get("CXX", "c++")
    found = {"compiler": (_run(compiler, "--version") or "").split("\n")[0] or None, "nvcc": None, "nvcc_version": None}
    if found["compiler"] is None:
        problem(
            f"there is no C++ compiler ({compiler}), so that nothing can be rebuilt", "apt install g++", broken=False
        )
    found["nvcc"] = find_nvcc()
    if found["nvcc"]:
        release = re.search(r"release (\d+\.\d+)", _run(found["nvcc"], "--version") or "")
        found["nvcc_version"] = release.group(1) if release else None
    if torch and torch.version.cuda:
        cuda = torch.version.cuda
        cure = f'pip install "cuda-toolkit[nvcc,cccl,crt,cudart]=={cuda}.*" "nvidia-nvvm=={cuda}.*"'
        if found["nvcc"] is None:
            problem("there is no nvcc, so that CUDA kernels cannot be rebuilt", cure, broken=False)
        elif found["nvcc_version"] and found["nvcc_version"].split(".")[0] != cuda.split(".")[0]:
            problem(f"nvcc is of CUDA {found['nvcc_version']}, and PyTorch of CUDA {cuda}", cure, broken=False)
    return found


def check_data(problem):
    """The four files of MNIST in the repository, or in the working directory."""
    folder = _library.FOLDER.parent / "data" / "MNIST" / "raw"
    if not folder.is_dir():
        folder = Path("data", "MNIST", "raw").absolute()
    files = {}
    for name, md5 in MNIST_MD5.items():
        path = folder / name
        if not path.is_file():
            files[name] = "missing"
        else:
            good = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() == md5
            files[name] = "ok" if good else "damaged"
    bad = [name for name, state in files.items() if state != "ok"]
    if bad:
        cure = (
            "git checkout -- data"
            if (folder.parents[2] / ".git").exists()
            else ("python -c \"import torchvision; torchvision.datasets.MNIST('data', download=True)\"")
        )
        damaged = any(state == "damaged" for state in files.values())
        problem(f"MNIST in {folder}: {', '.join(f'{n} {files[n]}' for n in bad)}", cure, broken=damaged)
    return {"folder": str(folder), "files": files}


def check_packages(problem):
    found = {name: _version(name) for name in PACKAGES}
    found["cmake"] = found["cmake"] or (shutil.which("cmake") and "on PATH")
    cures = {}
    for name, version in found.items():
        if version is None:
            cures.setdefault(PACKAGES[name], []).append(name)
    for cure, names in cures.items():
        problem(f"optional packages that are not installed: {', '.join(names)}", cure, broken=False)
    return found


def try_call(name, device, dtype):
    """'ok', 'no' (there is no kernel, and it says so), 'no example' (arguments are needed that the table lacks), or
    what went wrong."""
    make = _Make(device, dtype)
    # An op of one tensor needs no line in the table.
    arguments, reference = example_calls(make).get(name, ((make(3, 4),), None))
    try:
        inspect.signature(getattr(functional, name)).bind(*arguments)
    except TypeError:
        return "no example"
    try:
        # Values are compared as float32's: a convolution that TF32 rounds is no broken one.
        with tf32(False):
            output = getattr(functional, name)(*arguments)
        outputs = output if isinstance(output, tuple) else (output,)
        tensors = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]
        numbers = [t for t in outputs if t.is_floating_point()]  # of indices there are none
        gradients = torch.autograd.grad(sum(t.sum() for t in numbers), tensors) if tensors and numbers else ()
        if reference is None:
            good = all(t.isfinite().all() for t in (*outputs, *gradients))
        else:
            upcast = [
                t.detach().double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in arguments
            ]
            epsilon = torch.finfo(dtype).eps
            good = torch.allclose(
                outputs[0].double(), reference(*upcast).double(), rtol=16 * epsilon, atol=16 * epsilon
            )
        return "ok" if good else "wrong values"
    except NotImplementedError:
        return "no"
    except (RuntimeError, ImportError, ValueError, TypeError) as error:
        return str(error).split("\n")[0]


def try_optimizer(name, device, dtype):
    """As try_call, for one step of an optimizer."""
    parameter = _Make(device, dtype)(5, 3)
    before = parameter.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    try:
        getattr(optim, name)([parameter], lr=0.125).step()
        return "wrong values" if torch.equal(parameter, before) or not parameter.isfinite().all() else "ok"
    except NotImplementedError:
        return "no"
    except (RuntimeError, ImportError, ValueError, TypeError) as error:
        return str(error).split("\n")[0]


def check_ops(problem):
    """{op: {"<device> <dtype>": state}}, by calling each of them."""
    if _library.problem:
        return {}
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() and _library.has_cuda() else [])]
    table = {}
    entries = [(name, try_call, name) for name in functional.__all__]
    entries += [(f"optim.{name}", try_optimizer, name) for name in optim.__all__]
    for label, attempt, name in entries:
        table[label] = {}
        for device in devices:
            for dtype in DTYPES:
                state = attempt(name, device, getattr(torch, dtype))
                table[label][f"{device} {dtype}"] = state
                expected = ["ok", "no example"]
                if state not in expected:
                    problem(f"{label} on {device} in {dtype}: {state}", f"{INSTALL} && pytest -k {name} tests")
    return table


def check_kernels(problem):
    """Registers, memory and occupancy of each CUDA kernel, from the driver; a sentence where that cannot be had."""
    if _library.problem:
        return "the op library does not load"
    if not _library.has_cuda():
        return "this build has no CUDA kernels"
    if not torch.cuda.is_available():
        return f"needs a GPU: {why_no_cuda()}"
    try:
        from ._kernels import kernels

        return kernels(_library.library_path())
    except (ImportError, RuntimeError, ValueError) as error:
        problem(f"the kernels cannot be listed: {error}", INSTALL, broken=False)
        return str(error)


SECTIONS = {
    "versions": check_versions,
    "extension": check_extension,
    "cuda": check_cuda,
    "tools": check_tools,
    "data": check_data,
    "packages": check_packages,
    "ops": check_ops,
}


def examine(with_kernels: bool = False) -> dict:
    """Everything that doctor knows: a dict a section, and `problems`, each with cause, cure and whether it breaks."""
    problems = []

    def problem(cause, cure, broken=True):
        problems.append({"cause": cause, "cure": cure, "broken": broken})

    report = {name: check(problem) for name, check in SECTIONS.items()}
    if with_kernels:
        report["kernels"] = check_kernels(problem)
    report["problems"] = problems
    report["healthy"] = not any(p["broken"] for p in problems)
    return report


# --- printing -------------------------------------------------------------------------------------------------------


def _short_name(kernel):
    """A kernel's name without its return type and its parameters."""
    return re.sub(r"\([^()]*(\([^()]*\)[^()]*)*\)$", "", kernel.removeprefix("void "))


def print_report(report):
    built, running = report["versions"]["built_with"], report["versions"]["running_with"]
    cuda, tools, extension = report["cuda"], report["tools"], report["extension"]
    rows = [[name, built.get(name) or "–", running[name] or "–"] for name in running]
    rows += [
        ["compiler", built.get("compiler") or "–", tools["compiler"] or "none"],
        [
            "nvcc",
            built.get("cuda_reason") or "–",
            f"{tools['nvcc_version']} ({tools['nvcc']})" if tools["nvcc"] else "none",
        ],
    ]
    print_table("versions", ["", "built with", "running with"], rows)

    rows = [
        ["op library", "loaded" if extension["loaded"] else "not loaded"],
        ["holds", extension["build_info"] or "–"],
        ["introspection (cuda_ops._C)", extension["introspection"]],
        [
            "driver",
            f"{cuda['driver'] or 'none'}" + (f", up to CUDA {cuda['driver_cuda']}" if cuda["driver_cuda"] else ""),
        ],
        ["CUDA", "available" if cuda["available"] else f"not available: {cuda['reason']}"],
    ]
    for index, device in enumerate(cuda["devices"]):
        runs = " ".join(device["runs"]) or "nothing"
        rows.append(
            [
                f"device {index}",
                f"{device['name']}, compute capability {device['compute_capability']}, "
                f"{device['memory_gib']} GiB; of the build it runs {runs}",
            ]
        )
    states = set(report["data"]["files"].values())
    rows.append(["MNIST", f"{'there' if states == {'ok'} else 'incomplete'} ({report['data']['folder']})"])
    rows.append(["optional packages", ", ".join(f"{n} {v or '(missing)'}" for n, v in report["packages"].items())])
    print_table("this machine", ["", ""], rows)

    if report["ops"]:
        columns = list(next(iter(report["ops"].values())))
        rows = [
            [op, *(states[c] if len(states[c]) <= 12 else "error" for c in columns)]
            for op, states in report["ops"].items()
        ]
        print_table("ops, forward and backward", ["", *columns], rows)
        if not any(column.startswith("cuda") for column in columns):
            print(f"CUDA is left out: {cuda['reason'] or 'the build has no CUDA kernels'}.")

    if isinstance(report.get("kernels"), str):
        print(f"kernels: {report['kernels']}.")
    elif "kernels" in report:
        columns = ["kernel", "registers", "static shared", "local", "max threads", "occupancy"]
        rows = [
            [
                _short_name(k["name"]),
                k["registers"],
                k["static_shared_bytes"],
                k["local_bytes"],
                k["max_threads"],
                f"{k['occupancy']:.0%} at {k['occupancy_threads']}",
            ]
            for k in report["kernels"]
        ]
        print_table("kernels (bytes; local: spills and arrays; occupancy without dynamic shared memory)", columns, rows)

    for kind, broken in (("Worth knowing", False), ("Broken", True)):
        found = [p for p in report["problems"] if p["broken"] == broken]
        if found:
            print(f"\n{kind}:")
            for p in found:
                print(f"- {p['cause']}\n  cure: {p['cure']}")
    count = sum(p["broken"] for p in report["problems"])
    where = "on CPU and CUDA" if cuda["available"] and _library.has_cuda() else "on the CPU"
    print(f"\n{f'Healthy: all ops work {where}.' if report['healthy'] else f'{count} thing(s) broken, see above.'}")


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("--json", action="store_true", help="print everything as JSON, and nothing else")
    parser.add_argument(
        "--kernels", action="store_true", help="registers, shared and local memory and occupancy of each CUDA kernel"
    )


def main(args) -> int:
    """0: healthy, which a machine without a GPU is too. 1: something is broken."""
    report = examine(with_kernels=args.kernels)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)
    return 0 if report["healthy"] else 1


if __name__ == "__main__":
    command = argparse.ArgumentParser(
        prog="python -m cuda_ops doctor", description="What is installed, what works, and the cure for what does not."
    )
    add_arguments(command)
    sys.exit(main(command.parse_args()))
