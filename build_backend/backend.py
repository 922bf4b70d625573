"""setuptools' build backend, told which PyTorch an isolated build has to use.

`pip install .` builds in an environment of its own. Left alone, pip would put the newest torch there, and the
extension would be built against another PyTorch than the one it runs with: an undefined symbol at best. So this
backend asks for the torch that is installed beside the project, and only where there is none for the version that
development is pinned to. setup.py then makes torch of the version that was built with a dependency of the wheel.
"""

import importlib.metadata
import importlib.util
import os
import sys
import sysconfig

from setuptools.build_meta import *  # noqa: F403
from setuptools.build_meta import (
    get_requires_for_build_editable as _editable,
)
from setuptools.build_meta import (
    get_requires_for_build_wheel as _wheel,
)

DEVELOPMENT_TORCH = "2.11.0"

# Under --no-build-isolation nothing is installed for the build, and setuptools below 70.1 cannot make a wheel alone.
_setuptools = tuple(map(int, importlib.metadata.version("setuptools").split(".")[:2]))
if _setuptools < (70, 1) and importlib.util.find_spec("wheel") is None:
    sys.exit("cuda_ops: this environment cannot build wheels; run `pip install -U wheel ninja` and try again.")


def _torch_requirement():
    # sysconfig names the environment of the interpreter, also from inside pip's isolated one.
    site_packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    for distribution in importlib.metadata.distributions(name="torch", path=list(site_packages)):
        return f"torch=={distribution.version.split('+')[0]}"
    return f"torch=={DEVELOPMENT_TORCH}"


# setuptools runs setup.py to learn its requirements, and setup.py imports torch, which is what is being asked for
# here. Hence the flag: with it, setup.py describes the project without its extensions.
def _requirements(hook, config_settings):
    os.environ["CUDA_OPS_METADATA_ONLY"] = "1"
    try:
        return [*hook(config_settings), _torch_requirement()]
    finally:
        del os.environ["CUDA_OPS_METADATA_ONLY"]


def get_requires_for_build_wheel(config_settings=None):
    return _requirements(_wheel, config_settings)


def get_requires_for_build_editable(config_settings=None):
    return _requirements(_editable, config_settings)
