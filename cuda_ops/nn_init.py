"""cuda_ops.nn.init: torch.nn.init, with ours in place of its own: the numbers are Philox's on CPU and CUDA, from
PyTorch's generators, any of them from its place alone."""

import math
import warnings
from typing import TYPE_CHECKING

import torch.nn.init
from torch import Generator, Tensor
from torch.nn.init import _calculate_correct_fan, _calculate_fan_in_and_fan_out, calculate_gain

from ._arguments import check_tensors, number
from ._superset import superset
from .ops import random_fill

__all__ = [
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
]


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Generator | None = None) -> Tensor:
    r"""Fills `tensor` with numbers that are uniform between `a` and `b`, as :func:`torch.nn.init.uniform_`.

    The numbers come from Philox-4x32-10, keyed by PyTorch's generator of the tensor's device: the same after the same
    :func:`torch.manual_seed`, whatever the number of threads, other ones on every call and on every replay of a CUDA
    graph. They are not those that PyTorch's own would be.

    Args:
        tensor: any shape, any strides; float32, float64, float16 or bfloat16.
        a: the lower end.
        b: the upper end, which rounding alone gives.
        generator: where the numbers are from; None: the default one of the tensor's device.

    Returns:
        `tensor`.

    Raises:
        TypeError: `tensor` is no tensor, `a` or `b` no number.
        RuntimeError: `tensor` is not floating point, or has elements that share memory; `a` is above `b`; or
            `generator` is of another device.

    Not differentiable: nothing is recorded, and the version of `tensor` moves on.

    Example:
        >>> w = cuda_ops.nn.init.uniform_(torch.empty(3, 5), -1, 1)
        >>> bool((w.abs() <= 1).all())
        True
    """
    check_tensors("uniform_", tensor=tensor)
    with torch.no_grad():
        random_fill.uniform_(tensor, number("uniform_", "a", a), number("uniform_", "b", b), generator)
    return tensor


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None) -> Tensor:
    r"""Fills `tensor` with numbers of a normal distribution, as :func:`torch.nn.init.normal_`. They come from where
    those of :func:`uniform_` do, by the method of Box and Muller, up to 6.7 standard deviations (8.5 of float64).

    Args:
        tensor: any shape, any strides; float32, float64, float16 or bfloat16.
        mean: of the distribution.
        std: its standard deviation, at least 0.
        generator: where the numbers are from; None: the default one of the tensor's device.

    Returns:
        `tensor`.

    Raises:
        TypeError: `tensor` is no tensor, `mean` or `std` no number.
        RuntimeError: `std` is below 0, and what :func:`uniform_` raises.

    Example:
        >>> w = cuda_ops.nn.init.normal_(torch.empty(3, 5), std=0.02)
        >>> w.shape
        torch.Size([3, 5])
    """
    check_tensors("normal_", tensor=tensor)
    with torch.no_grad():
        random_fill.normal_(tensor, number("normal_", "mean", mean), number("normal_", "std", std), generator)
    return tensor


def _kaiming_std(op, tensor, a, mode, nonlinearity):
    """The standard deviation; None of a tensor without elements, of which PyTorch warns."""
    check_tensors(op, tensor=tensor)
    if 0 in tensor.shape:
        warnings.warn("Initializing zero-element tensors is a no-op", stacklevel=3)
        return None
    return calculate_gain(nonlinearity, a) / math.sqrt(_calculate_correct_fan(tensor, mode))


def kaiming_uniform_(
    tensor: Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:
    r"""Fills `tensor` by He's method with numbers that are uniform up to
    :math:`\text{gain} \sqrt{3 / \text{fan}}`, as :func:`torch.nn.init.kaiming_uniform_`.

    Args:
        tensor: at least two dimensions, of which the second has the inputs and the first the outputs; otherwise as
            :func:`uniform_` has it.
        a: the negative slope of the leaky_relu behind it.
        mode: "fan_in", which keeps the variance of what goes forward, or "fan_out", of what goes backward.
        nonlinearity: what follows, by which the gain goes (:func:`torch.nn.init.calculate_gain`).
        generator: where the numbers are from; None: the default one of the tensor's device.

    Returns:
        `tensor`.

    Raises:
        ValueError: fewer than two dimensions, or an unknown `mode` or `nonlinearity`.
        TypeError: `tensor` is no tensor.
        RuntimeError: what :func:`uniform_` raises.

    Example:
        >>> w = cuda_ops.nn.init.kaiming_uniform_(torch.empty(3, 6))
        >>> bool((w.abs() <= 1).all())
        True
    """
    std = _kaiming_std("kaiming_uniform_", tensor, a, mode, nonlinearity)
    return tensor if std is None else uniform_(tensor, -math.sqrt(3.0) * std, math.sqrt(3.0) * std, generator)


def kaiming_normal_(
    tensor: Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:
    r"""Fills `tensor` by He's method with normal numbers of standard deviation :math:`\text{gain} / \sqrt{\text{fan}}`,
    as :func:`torch.nn.init.kaiming_normal_`.

    Args:
        tensor: at least two dimensions, of which the second has the inputs and the first the outputs; otherwise as
            :func:`uniform_` has it.
        a: the negative slope of the leaky_relu behind it.
        mode: "fan_in", which keeps the variance of what goes forward, or "fan_out", of what goes backward.
        nonlinearity: what follows, by which the gain goes (:func:`torch.nn.init.calculate_gain`).
        generator: where the numbers are from; None: the default one of the tensor's device.

    Returns:
        `tensor`.

    Raises:
        ValueError: fewer than two dimensions, or an unknown `mode` or `nonlinearity`.
        TypeError: `tensor` is no tensor.
        RuntimeError: what :func:`normal_` raises.

    Example:
        >>> cuda_ops.nn.init.kaiming_normal_(torch.empty(3, 6)).shape
        torch.Size([3, 6])
    """
    std = _kaiming_std("kaiming_normal_", tensor, a, mode, nonlinearity)
    return tensor if std is None else normal_(tensor, 0.0, std, generator)


def _xavier_std(op, tensor, gain):
    check_tensors(op, tensor=tensor)
    fan_in, fan_out = _calculate_fan_in_and_fan_out(tensor)
    return gain * math.sqrt(2.0 / float(fan_in + fan_out))


def xavier_uniform_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    r"""Fills `tensor` by Glorot's method with numbers that are uniform up to
    :math:`\text{gain} \sqrt{6 / (\text{fan\_in} + \text{fan\_out})}`, as :func:`torch.nn.init.xavier_uniform_`.

    Args:
        tensor: at least two dimensions, of which the second has the inputs and the first the outputs; otherwise as
            :func:`uniform_` has it.
        gain: a factor.
        generator: where the numbers are from; None: the default one of the tensor's device.

    Returns:
        `tensor`.

    Raises:
        ValueError: fewer than two dimensions.
        TypeError: `tensor` is no tensor.
        RuntimeError: what :func:`uniform_` raises.

    Example:
        >>> w = cuda_ops.nn.init.xavier_uniform_(torch.empty(3, 6))
        >>> bool((w.abs() <= 0.82).all())
        True
    """
    bound = math.sqrt(3.0) * _xavier_std("xavier_uniform_", tensor, gain)
    return uniform_(tensor, -bound, bound, generator)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    r"""Fills `tensor` by Glorot's method with normal numbers of standard deviation
    :math:`\text{gain} \sqrt{2 / (\text{fan\_in} + \text{fan\_out})}`, as :func:`torch.nn.init.xavier_normal_`.

    Args:
        tensor: at least two dimensions, of which the second has the inputs and the first the outputs; otherwise as
            :func:`uniform_` has it.
        gain: a factor.
        generator: where the numbers are from; None: the default one of the tensor's device.

    Returns:
        `tensor`.

    Raises:
        ValueError: fewer than two dimensions.
        TypeError: `tensor` is no tensor.
        RuntimeError: what :func:`normal_` raises.

    Example:
        >>> cuda_ops.nn.init.xavier_normal_(torch.empty(3, 6)).shape
        torch.Size([3, 6])
    """
    return normal_(tensor, 0.0, _xavier_std("xavier_normal_", tensor, gain), generator)


if TYPE_CHECKING:  # see nn.py
    from torch.nn.init import *  # noqa: F403

    def native_names() -> list[str]: ...

else:
    native_names, __getattr__, __dir__ = superset({**globals(), "__name__": "cuda_ops.nn.init"}, torch.nn.init)
