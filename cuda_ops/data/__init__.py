"""The data sets of the models, and their batches."""

from .mnist import Batches, default_root, mnist, normalize
from .text import BytePairs, Characters, Windows, read_tokens, shakespeare, write_tokens

__all__ = [
    "Batches",
    "BytePairs",
    "Characters",
    "Windows",
    "default_root",
    "mnist",
    "normalize",
    "read_tokens",
    "shakespeare",
    "write_tokens",
]
