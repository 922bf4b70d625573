"""PyTorch ops in hand-written C and CUDA.

cuda_ops.functional   like torch.nn.functional
cuda_ops.nn           like torch.nn
cuda_ops.optim        like torch.optim
python -m cuda_ops    the MNIST comparison, benchmarks and `doctor`
"""

from . import _library

if _library.problem is None:
    try:
        from . import functional, nn, optim
    except RuntimeError as error:  # a fake kernel for an op that the library lacks
        _library.problem = f"cuda_ops' extension is older than its Python files: {error}. {_library.REBUILD}."
if _library.problem is not None:
    functional = nn = optim = _library.Missing()

__version__ = "0.1.0"
__all__ = ["functional", "nn", "optim"]
