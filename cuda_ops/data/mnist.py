"""MNIST from the four .gz files of the repository, without a download.

torchvision reads the files. It does not tell a truncated file from a missing one, and answers both with a download;
so each file is checked first.
"""

import contextlib
import fcntl
import hashlib
import os
from pathlib import Path

import torch
from torch import Tensor

from .. import functional
from .._arguments import integer
from .._errors import UserError

# Of the pixels of the training set, in [0, 1].
MEAN, STD = 0.1307, 0.3081
# Bytes of the extracted files.
EXTRACTED_SIZES = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}


def default_root(name: str = "MNIST") -> Path:
    """The folder `data` of the repository that cuda_ops is imported from, if it has a data set of that name, else
    `data` in the working directory."""
    in_repository = Path(__file__).resolve().parents[2] / "data"
    return in_repository if (in_repository / name).is_dir() else Path("data")


def _check_archives(raw: Path, resources):
    for name, md5 in resources:
        path = raw / name
        cure = "copy it from data/MNIST/raw of the cuda_ops repository, or give the folder above MNIST/ as --data-dir"
        if not path.is_file():
            raise UserError(f"data file {path} is missing: {cure}")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"data file {path} cannot be read ({error.strerror}): {cure}") from error
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
            raise UserError(f"data file {path} is damaged or truncated ({len(content)} bytes, wrong MD5): {cure}")


def _remove_damaged_extracts(raw: Path):
    # torchvision takes an extracted file for good if it is there; one that an interrupted run left short is not.
    for name, size in EXTRACTED_SIZES.items():
        path = raw / name
        if path.is_file() and path.stat().st_size != size:
            path.unlink()


@contextlib.contextmanager
def _locked(folder: Path):
    """One process at a time, so that none reads what another is still extracting."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def mnist(root=None, train: bool = True, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """The images and labels of MNIST.

    Args:
        root: the folder that holds MNIST/raw/*.gz; default: `data` of the repository. The files are extracted beside
            the archives on first use (55 MB).
        train: the 60,000 training images, else the 10,000 test images.
        limit: only the first `limit` of them; 0 or more.

    Returns:
        (images, labels): uint8 of shape (N, 1, 28, 28), and int64 of shape (N,), on the CPU.

    Raises:
        UserError: a file is missing, or is not the one that torchvision knows by its MD5, or cannot be extracted.
        ValueError: `limit` is negative.

    Example:
        >>> images, labels = cuda_ops.data.mnist()
        >>> images.shape, images.dtype, labels[:3]
        (torch.Size([60000, 1, 28, 28]), torch.uint8, tensor([5, 0, 4]))
    """
    from torchvision.datasets import MNIST

    if limit is not None and integer("mnist", "limit", limit) < 0:
        raise ValueError(f"mnist: expected limit to be 0 or more, got {limit}")
    root = default_root() if root is None else Path(root)
    raw = root / "MNIST" / "raw"
    _check_archives(raw, MNIST.resources)
    try:
        with _locked(raw):
            _remove_damaged_extracts(raw)
            dataset = MNIST(str(root), train=train, download=True)
    except OSError as error:
        raise UserError(
            f"the files in {raw} cannot be extracted there ({error.strerror or error}): make room, or give a folder "
            "that can be written to as --data-dir"
        ) from error
    return dataset.data[:limit, None], dataset.targets[:limit]


def normalize(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 pixels as floating point numbers of mean 0 and standard deviation 1 (over the training set)."""
    return images.to(dtype).sub_(MEAN * 255).div_(STD * 255)


class Batches:
    """Batches of a data set by index: gathered, moved to the device, and normalised there.

    Args:
        images, labels: as `mnist` returns them.
        device: where the batches go.
        dtype: of the batches' images.
        keep_on_device: keep the whole set on the device and gather there; else gather in host memory and copy every
            batch (through pinned memory on CUDA, 784 bytes an image).

    Raises:
        ValueError: there is not one label for each image.
        TypeError: images are not uint8, which is what the normalisation is for, or `dtype` is not floating point.

    Example:
        >>> batches = Batches(*mnist(), device="cuda")
        >>> images, labels = batches(torch.arange(64))
    """

    def __init__(self, images: Tensor, labels: Tensor, device="cpu", dtype=torch.float32, keep_on_device: bool = False):
        if images.dtype != torch.uint8:
            raise TypeError(f"Batches: expected images to be uint8, got {str(images.dtype)[6:]}")
        if not dtype.is_floating_point:
            raise TypeError(f"Batches: expected dtype to be floating point, got {str(dtype)[6:]}")
        if len(images) != len(labels):
            raise ValueError(f"Batches: expected a label for each of {len(images)} images, got {len(labels)}")
        self.device, self.dtype = torch.device(device), dtype
        self.home = self.device if keep_on_device else torch.device("cpu")
        self.images, self.labels = images.to(self.home), labels.to(self.home)

    def __len__(self):
        return len(self.labels)

    def place(self, indices: Tensor) -> Tensor:
        """`indices` on the device that the gather reads them from: once an epoch, not once a batch."""
        return indices.to(self.home)

    def __call__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = self.images[indices], self.labels[indices]
        if self.home != self.device:
            if self.device.type == "cuda":
                images, labels = images.pin_memory(), labels.pin_memory()
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
        return normalize(images, self.dtype), labels

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The same batch, where the set lies on the device, by one launch of our own
        (cuda_ops.functional.gather_normalize); elsewhere there is none."""
        if self.home != self.device:
            return self(indices)
        return functional.gather_normalize(self.images, indices, MEAN, STD, self.dtype, self.labels)
