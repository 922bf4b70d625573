"""clip_grad_norm_: torch.nn.utils', in two launches and without a wait."""

import functools
import types
import warnings

import torch
from torch import Tensor

from .._arguments import flag, number
from .._fakes import register_fake
from .._library import ops
from .._optimizer import refuse_sparse


@register_fake("cuda_ops::clip_grad_norm_partials")
def _(grads, norm_type):
    count = (partials_on_cuda if grads[0].is_cuda else partials_on_cpu)(grads)
    return grads[0].new_empty(count, dtype=torch.float64)


@register_fake("cuda_ops::clip_grad_norm_scale_")
def _(grads, partials, norm_type, max_norm, dtype):
    return partials.new_empty((), dtype=dtype)


def partials_on_cpu(grads):
    """As many as csrc/torch/clip_grad_norm.cpp leaves."""
    return sum((grad.numel() + 32767) // 32768 for grad in grads)


def partials_on_cuda(grads):
    """As many as csrc/cuda/clip_grad_norm.cu leaves: of each launch, which takes 180 gradients of one dtype."""
    lists = {}
    for grad in grads:
        if grad.numel() > 0:
            lists.setdefault(grad.dtype, []).append((grad.numel() + 4095) // 4096)
    launches = [chunks[i : i + 180] for chunks in lists.values() for i in range(0, len(chunks), 180)]
    return sum(min(sum(chunks), 1024) for chunks in launches)


def clip_grad_norm_(
    parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    r"""Scales the gradients of `parameters` in place so that their norm, as of one vector, is at most `max_norm`, like
    :func:`torch.nn.utils.clip_grad_norm_`: each is multiplied by :math:`\min(\text{max\_norm} / (\text{norm} +
    10^{-6}), 1)`.

    Args:
        parameters: an iterable of tensors, or one, of any dtypes, on any devices; those without a gradient are passed
            over.
        max_norm: the largest norm that is left as it is.
        norm_type: the norm's order, greater than 0; `float("inf")` for the largest magnitude.
        error_if_nonfinite: an error, before anything is scaled, where the norm is infinite or NaN. It waits for the
            device, as in PyTorch.
        foreach: accepted for the sake of the signature, and without effect.

    Returns:
        The norm before scaling, a tensor without dimensions on the first gradient's device.

    Raises:
        RuntimeError: `error_if_nonfinite`, and the norm is not finite.
        NotImplementedError: `norm_type` is 0 or less; a sparse gradient.

    On CUDA two launches for 180 gradients, which nobody waits for and a CUDA graph may capture; the second reads and
    writes nothing where the norm is not above `max_norm`. The result repeats bit by bit. Sums are made in float32 and
    float64, so that of float16 and bfloat16 gradients the norm is more accurate than PyTorch's, which rounds each
    tensor's. Distributed gradients (FSDP) go to :func:`torch.nn.utils.clip_grad_norm_`, whose sums communicate.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> norm = cuda_ops.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
        >>> norm, weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    name = "clip_grad_norm_"
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    else:
        is_generator = isinstance(parameters, types.GeneratorType)
        parameters = list(parameters)
        if is_generator and not parameters:
            message = "`parameters` is an empty generator, no gradient clipping will occur."
            warnings.warn(message, stacklevel=2)
    max_norm, norm_type = float(max_norm), float(norm_type)
    number(name, "max_norm", max_norm)
    flag(name, "error_if_nonfinite", error_if_nonfinite)
    by_device = {}
    for p in parameters:
        grad = p.grad
        if grad is None:
            continue
        if hasattr(grad, "to_local"):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        refuse_sparse(name, p, grad)
        by_device.setdefault(grad.device, []).append(grad)
    if not by_device:
        return torch.tensor(0.0)
    with torch.no_grad():
        partials = [ops.clip_grad_norm_partials(grads, norm_type) for grads in by_device.values()]
        dtype = functools.reduce(torch.promote_types, (grad.dtype for grads in by_device.values() for grad in grads))
        if error_if_nonfinite:
            norm = ops.clip_grad_norm_scale_([], gathered(partials, partials[0].device), norm_type, max_norm, dtype)
            if not norm.isfinite():
                raise RuntimeError(
                    f"{name}: expected gradients of a finite norm, got {norm.item()} for norm_type {norm_type} "
                    "(with error_if_nonfinite=False they are scaled all the same)"
                )
        norms = [
            ops.clip_grad_norm_scale_(grads, gathered(partials, device), norm_type, max_norm, dtype)
            for device, grads in by_device.items()
        ]
    return norms[0]


def norm_of_gradients(by_device) -> Tensor:
    """The norm of all gradients of a dict by their device, as of one vector, in float32 on the first one."""
    partials = [ops.clip_grad_norm_partials(grads, 2.0) for grads in by_device.values()]
    return ops.clip_grad_norm_scale_([], gathered(partials, partials[0].device), 2.0, 1.0, torch.float32)


def gathered(partials, device):
    return partials[0] if len(partials) == 1 else torch.cat([part.to(device) for part in partials])
