"""Where a model's layers, loss and optimizer come from. A further backend is one more line in BACKENDS."""

from dataclasses import dataclass
from types import ModuleType

import torch

from .. import functional, nn, optim


@dataclass(frozen=True)
class Backend:
    """A name, and the namespaces that stand in for torch.nn, torch.nn.functional and torch.optim."""

    name: str
    nn: ModuleType
    functional: ModuleType
    optim: ModuleType
    needs_extension: bool
    """Whether it calls our compiled ops."""


BACKENDS = {
    backend.name: backend
    for backend in (
        # Its layers' parameters are those of "custom"; MnistCNN runs several of them at a time.
        Backend("fused", nn, functional, optim, needs_extension=True),
        Backend("custom", nn, functional, optim, needs_extension=True),
        Backend("native", torch.nn, torch.nn.functional, torch.optim, needs_extension=False),
    )
}


def get_backend(name: str) -> Backend:
    """The backend of that name.

    Args:
        name: a key of BACKENDS: "fused", "custom" or "native".

    Raises:
        ValueError: there is none of that name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]
