"""The start of a run as one flat file, from which csrc/apps/mnist/mnist.c trains the same network on the same batches.

The layout is written out in csrc/apps/mnist/files.h, which reads it.
"""

from pathlib import Path

import numpy as np
import torch

from ..._files import write_file
from ..compare import Run, batch_order

MAGIC, VERSION = b"CUOPSTRT", 1


def start_bytes(run: Run, images: int) -> bytes:
    """The file's content.

    Args:
        run: from `compare.prepare`, of float32 or an autocast of it.
        images: size of the training set.
    """
    settings = run.settings
    tensors = {name: tensor for name, tensor in run.initial_state.items() if tensor.is_floating_point()}
    parts = [MAGIC, np.array([VERSION, len(tensors)], "<u4").tobytes()]
    parts.append(np.array([images, settings.batch_size, settings.epochs], "<u8").tobytes())
    for name, tensor in tensors.items():
        parts.append(name.encode().ljust(32, b"\0"))
        parts.append(np.array([tensor.numel()], "<u8").tobytes())
        parts.append(tensor.numpy().astype("<f4").tobytes())
    order = list(batch_order(images, settings.batch_size, settings.epochs, settings.seed))
    parts.append(torch.cat(order).numpy().astype("<u4").tobytes())
    return b"".join(parts)


def save_start(run: Run, images: int, path: Path):
    """Writes it whole or not at all."""
    write_file(path, start_bytes(run, images))
