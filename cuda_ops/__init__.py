"""PyTorch ops in hand-written C and CUDA.

cuda_ops.functional   like torch.nn.functional
cuda_ops.nn           like torch.nn
cuda_ops.optim        like torch.optim
cuda_ops.training     GraphedStep: a training step as one CUDA graph
cuda_ops.models       MnistCNN and GPT, of our layers, of fused ones, or of PyTorch's
cuda_ops.data         MNIST, tiny Shakespeare, files of tokens, and batches of them
cuda_ops.ladder       the same op written again and again, to learn from
cuda_ops.convert      a model of torch.nn's layers made ours, in place; cuda_ops.revert undoes it
cuda_ops.explain      which CUDA kernel takes a call, and why
python -m cuda_ops    the comparisons on MNIST and with GPT-2, benchmarks and `doctor`
"""

import importlib
from typing import TYPE_CHECKING

from . import _interrupt

_interrupt.end_quietly_while_a_command_is_imported()

from . import _library  # noqa: E402

if TYPE_CHECKING:  # what type checkers and editors see; "as" makes it public to them
    from . import data as data
    from . import functional, nn, optim
    from . import ladder as ladder
    from . import models as models
    from . import training as training
    from ._explain import explain as explain
    from .conversion import convert as convert
    from .conversion import revert as revert
else:
    if _library.problem is None:
        try:
            from . import _flops, functional, nn, optim

            _flops.register_with_counter()
        except (RuntimeError, AttributeError) as error:
            if not _library.lacks_an_op(error):
                raise
            _library.problem = f"cuda_ops' extension is older than its Python files: {error}. {_library.REBUILD}."
    if _library.problem is not None:
        functional = nn = optim = _library.Missing()

    _FUNCTIONS = {"convert": ".conversion", "explain": "._explain", "revert": ".conversion"}

    def __getattr__(name):
        """The other parts, loaded at their first use."""
        if name not in (*_FUNCTIONS, "data", "ladder", "models", "training"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if _library.without_torch:
            raise ImportError(_library.without_torch)
        if name in _FUNCTIONS:
            return getattr(importlib.import_module(_FUNCTIONS[name], __name__), name)
        return importlib.import_module(f".{name}", __name__)


__version__ = "0.1.0"
__all__ = ["functional", "nn", "optim"]
