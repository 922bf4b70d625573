"""PyTorch ops in hand-written C and CUDA.

cuda_ops.functional   like torch.nn.functional
cuda_ops.nn           like torch.nn
cuda_ops.optim        like torch.optim
cuda_ops.training     GraphedStep: a training step as one CUDA graph
cuda_ops.models       MnistCNN, of our layers, of fused ones, or of PyTorch's
cuda_ops.data         MNIST, and batches of it
cuda_ops.ladder       one product written again and again, to learn from
cuda_ops.explain      which CUDA kernel takes a call, and why
python -m cuda_ops    the MNIST comparison, benchmarks and `doctor`
"""

import importlib

from . import _library

if _library.problem is None:
    try:
        from . import functional, nn, optim
    except RuntimeError as error:  # a fake kernel for an op that the library lacks
        _library.problem = f"cuda_ops' extension is older than its Python files: {error}. {_library.REBUILD}."
if _library.problem is not None:
    functional = nn = optim = _library.Missing()


def __getattr__(name):
    """The other parts, loaded at their first use."""
    if name in ("data", "ladder", "models", "training"):
        return importlib.import_module(f".{name}", __name__)
    if name == "explain":
        return importlib.import_module("._explain", __name__).explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = ["functional", "nn", "optim"]
