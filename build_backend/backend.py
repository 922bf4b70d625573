"""setuptools' build backend, which builds against the PyTorch that the extension will run with.

`pip install .` builds in an environment of its own. Left alone, pip would put the newest torch there, and the
extension would be built against another PyTorch than the one it runs with: an undefined symbol at best. A requirement
of the same version would not do either: the index has no nightly and no "+cpu" of it. So this backend lets the build
see the packages of the Python that pip was started with, behind its own, and where PyTorch is among them the build uses
that one. Where there is none, it asks for the version that development is pinned to. setup.py then makes torch of the
version that was built with a dependency of the wheel.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import setuptools.build_meta as setuptools_hooks

DEVELOPMENT_TORCH = "2.11.0"

# Under --no-build-isolation nothing is installed for the build, and setuptools below 70.1 cannot make a wheel alone.
_setuptools = tuple(map(int, importlib.metadata.version("setuptools").split(".")[:2]))
if _setuptools < (70, 1) and importlib.util.find_spec("wheel") is None:
    sys.exit("cuda_ops: this environment cannot build wheels; run `pip install -U wheel ninja` and try again.")

_ASK = """
import importlib.metadata, json, sys
try:
    version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    version = None
print(json.dumps([version, sys.path]))
"""


def outer_environment():
    """(PyTorch's version or None, sys.path) of the Python that runs this, as it is outside of the build.

    Asked of a process without the variables by which pip isolates a build; it sees what .pth files, system and user
    site-packages add, which a look into one folder does not.
    """
    isolating = ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in isolating}
    result = subprocess.run(
        [sys.executable, "-c", _ASK], env=environment, cwd=os.path.sep, capture_output=True, text=True, check=True
    )
    version, path = json.loads(result.stdout.splitlines()[-1])
    # The first entry is that of -c, the current folder.
    return version, [entry for entry in path[1:] if entry]


def show_outer_torch():
    """Puts the outer environment's packages behind the build's own, where PyTorch is to be found there and not here."""
    if importlib.util.find_spec("torch") is not None:
        return
    version, path = outer_environment()
    if version is not None:
        print(f"cuda_ops: building against the installed PyTorch {version}", flush=True)
        sys.path += [entry for entry in path if entry not in sys.path]


def torch_requirements():
    """What the build needs of PyTorch beside what there is."""
    if importlib.util.find_spec("torch") is not None or outer_environment()[0] is not None:
        return []
    print(
        f"cuda_ops: there is no PyTorch in the environment of {sys.executable}, so that this build takes "
        f"{DEVELOPMENT_TORCH} from the package index. To build against another, install it and run "
        "`pip install --no-build-isolation .` (with setuptools and ninja installed)",
        flush=True,
    )
    return [f"torch=={DEVELOPMENT_TORCH}"]


# setuptools runs setup.py to learn its requirements, and setup.py imports torch, which is what is being asked for
# here; and a source archive is the same whatever it will be built against. With the flag setup.py describes the project
# without its extensions.
@contextlib.contextmanager
def _metadata_only():
    os.environ["CUDA_OPS_METADATA_ONLY"] = "1"
    try:
        yield
    finally:
        del os.environ["CUDA_OPS_METADATA_ONLY"]


def get_requires_for_build_sdist(config_settings=None):
    with _metadata_only():
        return setuptools_hooks.get_requires_for_build_sdist(config_settings)


def build_sdist(sdist_directory, config_settings=None):
    with _metadata_only():
        return setuptools_hooks.build_sdist(sdist_directory, config_settings)


def get_requires_for_build_wheel(config_settings=None):
    with _metadata_only():
        return [*setuptools_hooks.get_requires_for_build_wheel(config_settings), *torch_requirements()]


def get_requires_for_build_editable(config_settings=None):
    with _metadata_only():
        return [*setuptools_hooks.get_requires_for_build_editable(config_settings), *torch_requirements()]


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    show_outer_torch()
    return setuptools_hooks.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    show_outer_torch()
    return setuptools_hooks.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    show_outer_torch()
    return setuptools_hooks.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    show_outer_torch()
    return setuptools_hooks.build_editable(wheel_directory, config_settings, metadata_directory)
