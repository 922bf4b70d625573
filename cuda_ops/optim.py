"""torch.optim, with our optimizers in place of its own: same arguments, same state_dict.

`__all__` lists what is ours; every other public name is torch.optim's (`native_names()`), lr_scheduler included.
"""

from typing import TYPE_CHECKING

import torch.optim

from ._superset import superset
from .ops.adam import Adam, AdamW
from .ops.muon import Muon
from .ops.sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Muon",
]

if TYPE_CHECKING:  # see nn.py
    from torch.optim import *  # noqa: F403
    from torch.optim import lr_scheduler as lr_scheduler
    from torch.optim import swa_utils as swa_utils

    def native_names() -> list[str]: ...

else:
    native_names, __getattr__, __dir__ = superset(globals(), torch.optim)
