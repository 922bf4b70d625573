"""Models whose layers come from a backend of choice: cuda_ops.nn or torch.nn."""

from .backends import BACKENDS, Backend, get_backend
from .gpt import GPT, GPTConfig
from .mnist_cnn import MnistCNN

__all__ = ["BACKENDS", "GPT", "Backend", "GPTConfig", "MnistCNN", "get_backend"]
