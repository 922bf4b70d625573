"""The data sets of the models, and their batches."""

from .mnist import Batches, default_root, mnist, normalize

__all__ = ["Batches", "default_root", "mnist", "normalize"]
