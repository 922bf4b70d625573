"""group_norm: normalisation of groups of channels of each image by their mean and deviation."""

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .._arguments import check_tensors, expect, integer
from .._autograd import autograd_function
from .._fakes import register_fake
from .._modules import parameter
from .._operators import composite, operator
from ._norm import centered_twice, gradients, tangents


def check_channels(op, input, **tensors):
    """For fake kernels."""
    expect(input.dim() >= 2, op, "input to have at least 2 dimensions, got shape {}", list(input.shape))
    for name, tensor in tensors.items():
        if tensor is not None:
            message = f"{name} to have one element for each channel of input, {{}}, got shape {{}}"
            fits = tensor.dim() == 1 and tensor.shape[0] == input.shape[1]
            expect(fits, op, message, input.shape[1], list(tensor.shape))


def empty_normalized(input, num_groups):
    """Forward's results."""
    mean = input.new_empty((input.shape[0], num_groups), dtype=torch.float64)
    return torch.empty_like(input, memory_format=suggest_memory_format(input)), mean, torch.empty_like(mean)


@register_fake("cuda_ops::group_norm_forward")
def _(input, num_groups, weight, bias, eps):
    expect(num_groups > 0, "group_norm", "num_groups to be positive, got {}", num_groups)
    check_channels("group_norm", input, weight=weight, bias=bias)
    message = "num_groups to be positive and to divide the channels of input, {}, got {}"
    expect(input.shape[1] % num_groups == 0, "group_norm", message, input.shape[1], num_groups)
    return empty_normalized(input, num_groups)


@register_fake("cuda_ops::group_norm_backward")
def _(grad_output, input, num_groups, weight, mean, variance, eps, bias_dtype, wanted):
    dtype = weight.dtype if weight is not None else input.dtype if bias_dtype is None else bias_dtype
    return (
        torch.empty_like(input, memory_format=suggest_memory_format(input)) if wanted[0] else input.new_empty(0),
        input.new_empty(input.shape[1] if wanted[1] else 0, dtype=dtype),
        input.new_empty(input.shape[1] if wanted[2] else 0, dtype=dtype),
    )


class _Groups:
    """Arithmetic by group, in at least float32, with the methods of layer_norm's _Rows. Mean and deviation are computed
    anew, so that further derivatives reach input through them too."""

    def __init__(self, input, num_groups, weight, eps):
        self.shape = input.shape
        self.groups = input.shape[0], num_groups or input.shape[1], -1
        self.zeros = torch.zeros_like(input, dtype=torch.promote_types(input.dtype, torch.float32))
        self.dtype = self.zeros.dtype
        self.other_dims = [d for d in range(input.dim()) if d != 1]
        self.gamma = self.values(weight, 1.0)
        x = input.to(self.dtype)
        x = centered_twice(x, self.mean)
        self.rstd = (self.mean(x * x) + eps).rsqrt()
        self.normalised = x * self.rstd

    def whole(self, tensor):
        """A tensor of the shape of input; zeros for None."""
        return self.zeros if tensor is None else tensor.to(self.dtype)

    def values(self, tensor, default):
        """One value a channel, which broadcasts; a number for None."""
        if tensor is None:
            return default
        return tensor.to(self.dtype).view([-1 if d == 1 else 1 for d in range(len(self.shape))])

    def mean(self, tensor):
        """Of the group, for each of its elements."""
        if tensor.numel() == 0:
            return tensor
        groups = tensor.reshape(self.groups)
        return groups.mean(2, keepdim=True).expand_as(groups).reshape(self.shape)

    def sum_rows(self, tensor):
        return tensor.sum(self.other_dims)

    def project(self, z):
        return z - self.mean(z) - self.normalised * self.mean(z * self.normalised)


@composite("group_norm_backward_gradients")
def _(v, v_weight, v_bias, grad_output, input, num_groups, weight, eps, wanted):
    c = _Groups(input, num_groups, weight, eps)
    return gradients(c, v, v_weight, v_bias, grad_output, input, weight, wanted)


@composite("group_norm_backward_tangents")
def _(t_grad, t_input, t_weight, grad_output, input, num_groups, weight, eps, bias_dtype, wanted):
    c = _Groups(input, num_groups, weight, eps)
    return tangents(c, t_grad, None, t_input, t_weight, grad_output, input, weight, bias_dtype, wanted)


group_norm_forward = operator("group_norm_forward")
GroupNormFunction = autograd_function("group_norm_forward", "GroupNormFunction")


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    r"""Group normalisation, :math:`\text{output} = (\text{input} - \mu) / \sqrt{\sigma^2 + \text{eps}} \cdot
    \text{weight} + \text{bias}`, with the mean and the biased variance of each group of neighbouring channels of each
    image (Wu and He, 2018).

    Args:
        input: (N, C, ...), any strides; float32, float64, float16 or bfloat16.
        num_groups: into how many groups the C channels are divided.
        weight, bias: (C) each, or None for 1 and 0; of the dtype of `input`, or float32 beside a float16 or bfloat16
            `input`.
        eps: added to the variance.

    Mean and variance are computed without loss where the mean is far larger than the deviation.

    Returns:
        A tensor of the shape and dtype of `input`, channels_last if `input` is, else contiguous.

    Raises:
        TypeError: a tensor is none, `num_groups` no int, or `eps` no number.
        ValueError: a group has one value, of one image.
        RuntimeError: `input` is not floating point or has less than 2 dimensions; `num_groups` is not positive or does
            not divide C; a parameter has the wrong shape, dtype or device.

    Under CUDA's autocast it computes in float32. Differentiable any number of times; beyond the first time by a
    composition of PyTorch's operations.

    Example:
        >>> cuda_ops.functional.group_norm(torch.tensor([[1.0, 3.0, 5.0, 5.0]]), 2)
        tensor([[-1.0000,  1.0000,  0.0000,  0.0000]])
    """
    check_tensors("group_norm", input=input)
    num_groups = integer("group_norm", "num_groups", num_groups)
    if input.dim() >= 2 and num_groups > 0:
        count = input.shape[0] * (input.shape[1] // num_groups)
        for size in input.shape[2:]:
            count *= size
        if count == 1:
            raise ValueError(
                "group_norm: Expected more than 1 value per channel when training, got input size "
                f"{[input.shape[0] * input.shape[1] // num_groups, num_groups, *input.shape[2:]]}"
            )
    return group_norm_forward(input, num_groups, weight, bias, eps)[0]


class GroupNorm(torch.nn.GroupNorm):
    """torch.nn.GroupNorm by :func:`cuda_ops.functional.group_norm`: same arguments, repr and state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, parameter(self, "weight"), parameter(self, "bias"), self.eps)
