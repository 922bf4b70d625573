"""instance_norm: normalisation of each channel of each image by its mean and deviation, or by running ones."""

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .._arguments import check_tensors, check_tensors_or_none, expect, flag, number
from .._autograd import autograd_function
from .._fakes import register_fake
from .._modules import buffer, parameter
from .._operators import operator
from .group_norm import check_channels, empty_normalized


@register_fake("cuda_ops::instance_norm_forward")
def _(input, weight, bias, eps):
    check_channels("instance_norm", input, weight=weight, bias=bias)
    return empty_normalized(input, input.shape[1])


@register_fake("cuda_ops::instance_norm_forward_inference")
def _(input, weight, bias, running_mean, running_var, eps):
    check_channels("instance_norm", input, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    return torch.empty_like(input, memory_format=suggest_memory_format(input))


@register_fake("cuda_ops::instance_norm_update_")
def _(running_mean, running_var, mean, variance, count, momentum):
    message = "{} to have one element for each channel of input, {}, got shape {}"
    for name, tensor in (("running_mean", running_mean), ("running_var", running_var)):
        fits = tensor.dim() == 1 and tensor.shape[0] == mean.shape[1]
        expect(fits, "instance_norm", message, name, mean.shape[1], list(tensor.shape))


instance_norm_forward = operator("instance_norm_forward")
instance_norm_forward_inference = operator("instance_norm_forward_inference")
instance_norm_update_ = operator("instance_norm_update_")
InstanceNormFunction = autograd_function("instance_norm_forward", "InstanceNormFunction")


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    r"""Instance normalisation, :math:`\text{output} = (\text{input} - \mu) / \sqrt{\sigma^2 + \text{eps}} \cdot
    \text{weight} + \text{bias}` (Ulyanov, Vedaldi and Lempitsky, 2016).

    With `use_input_stats` :math:`\mu` and :math:`\sigma^2` are the mean and the biased variance of each channel of each
    image, and the running statistics, if given, move towards their means over the images, in place:
    :math:`\text{running} \leftarrow (1 - \text{momentum}) \, \text{running} + \text{momentum} \, \text{new}`, with the
    unbiased variance. Else they are the running statistics.

    Args:
        input: (N, C, ...), any strides; float32, float64, float16 or bfloat16.
        running_mean, running_var: (C) each, or both None, which only `use_input_stats` allows.
        weight, bias: (C) each, or None for 1 and 0.
        use_input_stats: whether to use, and keep a running record of, the statistics of `input`.
        momentum: share of `input` in the running statistics.
        eps: added to the variance. With 0 a channel of equal values becomes NaN, as group_norm's (PyTorch: 0).

    weight and bias, and running_mean and running_var, are of the dtype of `input`, or float32 beside a float16 or
    bfloat16 `input`.

    Returns:
        A tensor of the shape and dtype of `input`, channels_last if `input` is, else contiguous.

    Raises:
        TypeError: a tensor is none, `momentum` or `eps` no number, or `use_input_stats` no bool.
        ValueError: with `use_input_stats` a channel of an image has one value, or only one of the running statistics is
            given.
        RuntimeError: without `use_input_stats` a running statistic is None; `input` is not floating point or has less
            than 2 dimensions; another tensor has the wrong shape, dtype or device; a running statistic requires grad.

    Differentiable any number of times with respect to input, weight and bias; beyond the first time by a composition of
    PyTorch's operations.

    Example:
        >>> cuda_ops.functional.instance_norm(torch.tensor([[[1.0, 3.0], [5.0, 5.0]]]))
        tensor([[[-1.0000,  1.0000],
                 [ 0.0000,  0.0000]]])
    """
    check_tensors("instance_norm", input=input)
    check_tensors_or_none("instance_norm", running_mean=running_mean, running_var=running_var)
    use_input_stats, momentum = flag("instance_norm", "use_input_stats", use_input_stats), _momentum(momentum)
    if not use_input_stats:
        if running_mean is None or running_var is None:
            raise RuntimeError(
                "instance_norm: Expected running_mean and running_var to be defined when use_input_stats is false"
            )
        return instance_norm_forward_inference(input, weight, bias, running_mean, running_var, eps)
    if (running_mean is None) != (running_var is None):
        raise ValueError("instance_norm: expected running_mean and running_var to be both None or neither")
    count = 1
    for size in input.shape[2:]:
        count *= size
    if count == 1 and input.dim() >= 2:
        raise ValueError(
            "instance_norm: Expected more than 1 spatial element when training, got input size "
            f"{torch.Size(input.shape)}"
        )
    output, mean, variance = instance_norm_forward(input, weight, bias, eps)
    if running_mean is not None and input.numel() > 0:
        instance_norm_update_(running_mean, running_var, mean, variance, count, momentum)
    return output


def _momentum(value):
    return value if type(value) is float else number("instance_norm", "momentum", value)


class _Forward:
    """The arithmetic of torch.nn's instance normalisations, by our functional."""

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        return instance_norm(
            input,
            buffer(self, "running_mean"),
            buffer(self, "running_var"),
            parameter(self, "weight"),
            parameter(self, "bias"),
            self.training or not self.track_running_stats,
            self.momentum if self.momentum is not None else 0.0,
            self.eps,
        )


class InstanceNorm1d(_Forward, torch.nn.InstanceNorm1d):
    """torch.nn.InstanceNorm1d by :func:`cuda_ops.functional.instance_norm`: same arguments, repr and state_dict."""


class InstanceNorm2d(_Forward, torch.nn.InstanceNorm2d):
    """torch.nn.InstanceNorm2d by :func:`cuda_ops.functional.instance_norm`: same arguments, repr and state_dict."""


class InstanceNorm3d(_Forward, torch.nn.InstanceNorm3d):
    """torch.nn.InstanceNorm3d by :func:`cuda_ops.functional.instance_norm`: same arguments, repr and state_dict."""
