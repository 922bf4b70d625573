"""conv_bn_act: convolution, batch normalisation with running statistics and an activation in one.

The normalisation is folded into the convolution's weight and bias where that saves its pass over memory. Evaluation
alone: in training the statistics are those of the convolution's output.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments import check_tensors, check_tensors_or_none, expect, integer, number, pair
from .._fakes import register_fake
from .._modules import buffer, parameter
from .._operators import composite, dual, operator
from .batch_norm_act import SLOPES, batch_norm_act_forward_inference
from .conv2d import (
    _four_paddings,
    check_bias,
    check_sizes,
    conv2d_backward_bias,
    conv2d_backward_input,
    conv2d_backward_weight,
    conv2d_forward,
    empty_image,
    is_channels_last,
    output_size,
)

OP = "conv_bn_act"


class Block(NamedTuple):
    """The arguments of conv_bn_act_inference, which its derivatives are given too."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    bn_weight: Tensor | None
    bn_bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    activation: str | None
    eps: float
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @property
    def geometry(self):
        return self.stride, self.padding, self.dilation, self.groups

    def convolved(self):
        """The convolution's output, and weight in the dtype of input."""
        weight = self.weight.to(self.input.dtype)
        bias = None if self.bias is None else self.bias.to(self.input.dtype)
        return conv2d_forward(self.input, weight, bias, *self.geometry), weight


DIFFERENTIABLE = Block._fields[:5]


@register_fake("cuda_ops::conv_bn_act_inference")
def _(*arguments):
    block = Block(*arguments)
    if block.activation not in (None, *SLOPES):
        names = ", ".join(map(repr, SLOPES))
        raise ValueError(f"{OP}: expected activation to be {names} or None, got {block.activation!r}")
    check_sizes(block.input.shape, block.weight.shape, *block.geometry, OP)
    channels = block.weight.shape[0]
    check_bias(block.bias, channels, OP)
    for name in ("bn_weight", "bn_bias", "running_mean", "running_var"):
        tensor = getattr(block, name)
        if tensor is not None:
            fits = tensor.dim() == 1 and tensor.shape[0] == channels
            message = "{} to have one element for each output channel of weight, {}, got shape {}"
            expect(fits, OP, message, name, channels, list(tensor.shape))
    size = output_size(block.input.shape, block.weight.shape, block.stride, block.padding, block.dilation)
    return empty_image(size, block.input, is_channels_last(block.input) or is_channels_last(block.weight))


@composite("conv_bn_act_gradients")
def _(grad_output, *arguments):
    """The gradients that are wanted, by ops that are differentiable further, of the convolution computed anew."""
    *arguments, wanted = arguments
    block = Block(*arguments)
    input, weight, geometry = block.input, block.weight, block.geometry
    convolved, cast = block.convolved()
    grad, grad_bn_weight, grad_bn_bias, _ = batch_norm_act_gradients(
        grad_output,
        convolved,
        block.bn_weight,
        block.bn_bias,
        None,
        block.running_mean,
        block.running_var,
        False,
        block.activation,
        block.eps,
        [any(wanted[:3]), wanted[3], wanted[4], False],
    )
    gradients = (
        lambda: conv2d_backward_input(grad, cast, input.shape, is_channels_last(input), *geometry),
        lambda: conv2d_backward_weight(grad, input, weight.shape, is_channels_last(weight), *geometry).to(weight.dtype),
        lambda: conv2d_backward_bias(grad, block.bias.shape).to(block.bias.dtype),
        lambda: grad_bn_weight,
        lambda: grad_bn_bias,
    )
    return [gradient() for gradient, want in zip(gradients, wanted, strict=True) if want]


@composite("conv_bn_act_tangent")
def _(*arguments):
    """The tangent of output, by those of the ops that are fused here."""
    count = len(DIFFERENTIABLE)
    tangents, block = arguments[:count], Block(*arguments[count:])
    duals = {
        name: dual(OP, name, getattr(block, name), tangent)
        for name, tangent in zip(DIFFERENTIABLE, tangents, strict=True)
    }
    block = block._replace(**duals)
    convolved, _ = block.convolved()
    output = batch_norm_act_forward_inference(
        convolved,
        block.bn_weight,
        block.bn_bias,
        None,
        block.running_mean,
        block.running_var,
        block.activation,
        block.eps,
    )
    return torch._unpack_dual(output, level=0)[1]


conv_bn_act_inference = operator("conv_bn_act_inference")
batch_norm_act_gradients = operator("batch_norm_act_gradients")


def conv_bn_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    activation: str | None = "relu",
    eps: float = 1e-5,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    r"""A convolution, batch normalisation with running statistics and an activation, as a network in evaluation has
    them: :math:`\text{output} = f(\text{batch_norm}(\text{conv2d}(\text{input})))`.

    Where there is no activation, or the convolution's kernel applies it, the normalisation is folded into the
    convolution's parameters, as :func:`torch.nn.utils.fuse_conv_bn_eval` does,

    .. math::
        \text{weight}'_o = \text{weight}_o \, s_o, \quad
        \text{bias}'_o = (\text{bias}_o - \text{running\_mean}_o) \, s_o + \text{bn\_bias}_o, \quad
        s_o = \frac{\text{bn\_weight}_o}{\sqrt{\text{running\_var}_o + \text{eps}}}

    anew at each call, in float32 or float64 and rounded once: nothing is kept that a change of a parameter, of any kind
    and also between replays of a CUDA graph, would leave out of date. Elsewhere, and where the weight is larger than
    the output and not to be cast anyway, :func:`conv2d` and :func:`batch_norm_act` do it.

    Args:
        input: (N, C_in, H, W), any strides; float32, float64, float16 or bfloat16.
        weight: (C_out, C_in / groups, kernel height, kernel width).
        bias: (C_out), or None.
        running_mean, running_var: (C_out) each.
        bn_weight, bn_bias: (C_out) each, or None for 1 and 0.
        activation: ``"relu"``, ``"relu6"``, ``"silu"``, ``"hardswish"`` or None.
        eps: added to the variance; above 0.
        stride, padding, dilation, groups: of the convolution, as in :func:`conv2d`, 'same' and 'valid' included.

    Parameters and running statistics are of the dtype of `input`, or float32 beside a float16 or bfloat16 `input`.

    Returns:
        (N, C_out, H_out, W_out) of the dtype of `input`, in the memory format of :func:`conv2d`'s output.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: `activation` is none of these; `eps` is not above 0.
        RuntimeError: what :func:`conv2d` and :func:`batch_norm` refuse.

    Under autocast `input` is cast to its dtype, and parameters stay as they are. Deterministic. Differentiable any
    number of times, by a composition of the ops that are fused here, which computes the convolution anew.

    Example:
        >>> image = torch.tensor([[[[1.0, -2.0]]]])
        >>> mean, variance = torch.tensor([1.0]), torch.tensor([3.0])
        >>> cuda_ops.functional.conv_bn_act(image, torch.full((1, 1, 1, 1), 3.0), None, mean, variance, eps=1.0)
        tensor([[[[1., 0.]]]])
    """
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor)):
        check_tensors(OP, input=input, weight=weight)
    if not (isinstance(running_mean, Tensor) and isinstance(running_var, Tensor)):
        check_tensors(OP, running_mean=running_mean, running_var=running_var)
    if (eps if type(eps) is float else number(OP, "eps", eps)) <= 0.0:
        raise ValueError(f"{OP}: expected eps to be positive, got {eps}")
    check_tensors_or_none(OP, bias=bias, bn_weight=bn_weight, bn_bias=bn_bias)
    stride, dilation = pair(OP, "stride", stride), pair(OP, "dilation", dilation)
    padding = _four_paddings(padding, weight, stride, dilation, OP)
    return conv_bn_act_inference(
        input,
        weight,
        bias,
        bn_weight,
        bn_bias,
        running_mean,
        running_var,
        activation,
        eps,
        stride,
        padding,
        dilation,
        integer(OP, "groups", groups),
    )


def conv_bn_act_modules(input: Tensor, conv, norm, activation: str | None) -> Tensor:
    """With the parameters and statistics of a torch.nn.Conv2d and a torch.nn.BatchNorm2d."""
    return conv_bn_act(
        input,
        parameter(conv, "weight"),
        parameter(conv, "bias"),
        buffer(norm, "running_mean"),
        buffer(norm, "running_var"),
        parameter(norm, "weight"),
        parameter(norm, "bias"),
        activation,
        norm.eps,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
    )
