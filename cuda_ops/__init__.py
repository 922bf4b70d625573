"""PyTorch ops in hand-written C and CUDA.

cuda_ops.functional   like torch.nn.functional
cuda_ops.nn           like torch.nn
cuda_ops.optim        like torch.optim
python -m cuda_ops    the MNIST comparison, benchmarks and `doctor`
"""

from . import functional, nn, optim

__version__ = "0.1.0"
__all__ = ["functional", "nn", "optim"]
