"""What makes a module of ours a superset of PyTorch's: names that it does not have are PyTorch's own."""

import sys
from collections.abc import Callable
from types import ModuleType


def superset(ours: dict, native: ModuleType) -> tuple[Callable, Callable, Callable]:
    """native_names, __getattr__ and __dir__ for the module with the namespace `ours`.

    Submodules can be imported from by its name, `from cuda_ops.nn.parameter import Parameter`, though it is a file.
    """
    name = ours["__name__"]
    for loaded in [module for module in sys.modules if module.startswith(f"{native.__name__}.")]:
        alias = loaded.replace(native.__name__, name, 1)
        sys.modules.setdefault(alias, ours.get(alias.removeprefix(f"{name}."), sys.modules[loaded]))

    def native_names() -> list[str]:
        """The public names here that are PyTorch's own, not ours."""
        return sorted(n for n in dir(native) if not n.startswith("_") and n not in ours)

    def __getattr__(attribute):
        # Private names are PyTorch's own affair, and what Python asks of any module (__path__) is this one's.
        if not attribute.startswith("_"):
            try:
                return getattr(native, attribute)
            except AttributeError:
                pass
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}, nor has {native.__name__!r}")

    def __dir__():
        return sorted({*ours, *native_names()})

    native_names.__module__ = name
    return native_names, __getattr__, __dir__
