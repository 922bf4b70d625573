"""Shared set-up: devices, poisoned outputs, and one test per specification where a test asks for `spec`."""

import os

import pytest
import torch
from support import c_programs
from support.devices import CPU_DTYPES, CUDA_DTYPES, CUDA_MISSING, cuda_param
from support.opspec import load_specs

import cuda_ops

SPECS = load_specs()

# Files that take longest, most of them in few tests: they begin first, so that at the end no worker waits for another.
LONG = ["test_c_api", "test_emulation", "test_contributing", "test_distributed", "test_gpt2_c", "test_mnist_c"]
LONG += ["test_faults", "test_bench", "test_integration", "test_values", "test_gradients", "test_doctor", "test_sdist"]


def pytest_configure():
    """Workers of pytest-xdist share the cores: with a thread per core in each, they would spend their time
    waiting for threads that do not run. What tests start by a process of their own goes by the variable."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def pytest_addoption(parser):
    parser.addoption("--large", action="store_true", help="run tests that need tens of gigabytes of GPU memory")


def pytest_report_header():
    cuda = f"on {torch.cuda.get_device_name()}" if not CUDA_MISSING else f"CUDA tests skip: {CUDA_MISSING}"
    return f"cuda_ops {cuda_ops.__version__}, PyTorch {torch.__version__}, {cuda}"


def pytest_generate_tests(metafunc):
    """`spec` runs over all specifications, `device` over the devices, `device_dtype` over the pairs there are."""
    if "spec" in metafunc.fixturenames:
        metafunc.parametrize("spec", SPECS, ids=lambda spec: spec.name)
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", cuda_param("cuda", id="cuda")])
    if "device_dtype" in metafunc.fixturenames:
        pairs = [pytest.param(("cpu", d), id=f"cpu-{str(d)[6:]}") for d in CPU_DTYPES]
        pairs += [cuda_param(("cuda", d), id=f"cuda-{str(d)[6:]}") for d in CUDA_DTYPES]
        metafunc.parametrize("device_dtype", pairs)


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    for item in items:
        if item.get_closest_marker("cuda") and CUDA_MISSING:
            item.add_marker(pytest.mark.skip(reason=CUDA_MISSING))
        if item.get_closest_marker("large") and not config.getoption("--large"):
            item.add_marker(pytest.mark.skip(reason="run with --large"))


@pytest.fixture(scope="session")
def c_kernels(request, tmp_path_factory):
    """The C11 kernels under sanitizers, which all workers of a run share: they take a minute to compile."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    return c_programs.kernels(folder / "c_kernels")


@pytest.fixture
def force_attention(monkeypatch):
    """force_attention(path): attention on CUDA takes that path to the end of the test."""

    def take(path):
        monkeypatch.setenv("CUDA_OPS_ATTENTION_PATH", path)
        torch.ops.cuda_ops.reload_paths()

    yield take
    monkeypatch.undo()
    torch.ops.cuda_ops.reload_paths()


@pytest.fixture(autouse=True)
def environment_of_the_specification(request, monkeypatch):
    """A specification's calls run in the environment that it asks for."""
    spec = request.node.callspec.params.get("spec") if hasattr(request.node, "callspec") else None
    for name, value in (spec.environment() if spec else {}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """Fills what at::empty returns with NaN (integers: the largest), so that an unwritten output is seen.

    Deterministic algorithms are what PyTorch ties the filling to; they also make our own ops take their deterministic
    paths, and only warn where a native reference has none.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    # Full float32 on both sides; what TF32 changes has tests of its own.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.use_deterministic_algorithms(False)
