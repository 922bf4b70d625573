"""cuda_ops.nn.utils: torch.nn.utils, with ours in place of its own."""

from typing import TYPE_CHECKING

import torch.nn.utils
import torch.nn.utils.prune

from ._superset import superset
from .ops.clip_grad_norm import clip_grad_norm_

__all__ = ["clip_grad_norm_"]

if TYPE_CHECKING:  # see nn.py
    from torch.nn.utils import *  # noqa: F403

    def native_names() -> list[str]: ...

else:
    native_names, __getattr__, __dir__ = superset({**globals(), "__name__": "cuda_ops.nn.utils"}, torch.nn.utils)
