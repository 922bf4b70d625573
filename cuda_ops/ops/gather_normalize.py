"""gather_normalize: a batch of images by index from a data set of bytes, normalised while it is loaded."""

import torch
from torch import Tensor

from .._arguments import check_dtype, expect
from .._arguments import number as one_number
from .._fakes import register_fake
from .._operators import operator


@register_fake("cuda_ops::gather_normalize_forward")
def _(images, indices, mean, std, labels, dtype):
    op = "gather_normalize"
    expect(images.dim() >= 1, op, "images to have at least one dimension, got shape []")
    expect(indices.dim() == 1, op, "indices to have 1 dimension, got shape {}", list(indices.shape))
    rows = indices.shape[0]
    channels_last = images.dim() == 4 and not images.is_contiguous()
    channels_last = channels_last and images.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    output = torch.empty((rows, *images.shape[1:]), dtype=dtype, device=images.device, memory_format=memory_format)
    return output, indices.new_empty((0 if labels is None else rows,), dtype=torch.int64)


def number(name, value):
    if type(value) is float:
        return value
    if isinstance(value, (tuple, list)) or (isinstance(value, Tensor) and value.numel() != 1):
        raise NotImplementedError(
            f"gather_normalize: expected {name} to be one number, got {type(value).__name__} of {len(value)}"
        )
    if isinstance(value, Tensor) and not value.requires_grad:
        value = value.item()
    return one_number("gather_normalize", name, value)


gather_normalize_forward = operator("gather_normalize_forward")


def gather_normalize(
    images: Tensor,
    indices: Tensor,
    mean: float,
    std: float,
    dtype: torch.dtype | None = None,
    labels: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""A batch from a data set of bytes, :math:`\text{output}_b = (\text{images}_{\text{indices}_b} / 255 -
    \text{mean}) / \text{std}`, and its labels, in one launch. A training step that takes its batch this way reads one
    byte a pixel, and has no kernels of its own for the conversion.

    Args:
        images: uint8, [N, ...]: the data set, on the device where the batch is wanted.
        indices: [B], int64 or int32, in [0, N); unlike in indexing none may be negative.
        mean, std: of all pixels, as fractions of 255; one number each.
        dtype: of the batch: float32, float64, float16 or bfloat16; default: torch.get_default_dtype().
        labels: [N], int64 or uint8, or None.

    Returns:
        The batch, [B, ...], in the memory format of `images` where that is contiguous or channels_last; with `labels`
        the pair of it and labels[indices] as int64.

    Raises:
        IndexError: an index is not in [0, N). On CUDA, where waiting for the kernel would cost more than the kernel,
            its image is NaN and its label -1, and the next call of gather_normalize that finds the mistake recorded
            raises; with CUDA_OPS_CHECK_INDICES=1 in the environment the call itself waits and raises (not while a CUDA
            graph is being captured).
        TypeError: `images`, `indices` or `labels` is no tensor, `mean` or `std` no number.
        ValueError: `mean` is not finite, or `std` not above 0.
        RuntimeError: another mismatch of shapes, dtypes or devices.
        NotImplementedError: several means or standard deviations.

    Nothing of it is differentiable. Under autocast it stays with `dtype`.

    Example:
        >>> images = torch.arange(6, dtype=torch.uint8).view(3, 2)
        >>> cuda_ops.functional.gather_normalize(images, torch.tensor([2, 0]), mean=0.0, std=1 / 255)
        tensor([[4., 5.],
                [0., 1.]])
    """
    if dtype is None:
        dtype = torch.get_default_dtype()
    else:
        check_dtype("gather_normalize", dtype)
    output, output_labels = gather_normalize_forward(
        images, indices, number("mean", mean), number("std", std), labels, dtype
    )
    return output if labels is None else (output, output_labels)
