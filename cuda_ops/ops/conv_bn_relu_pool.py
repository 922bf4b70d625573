"""conv_bn_relu_pool: convolution, batch normalisation, relu and max-pooling in one, as one block of a network is.

Fused, the block writes only what comes out of it and what its gradient needs: nothing normalised and not pooled is
ever stored. In training one op goes forward and one backward. Evaluation is an op of its own; the gradients of it,
gradients of gradients and tangents are composed of the ops that the block is made of.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes

from .._arguments import check_tensors, check_tensors_or_none, expect, integer, number, pair
from .._fakes import register_fake
from .._library import ops
from .._modules import buffer, parameter, unlike
from .._operators import composite, dual, operator
from ._pool2d import _pooled_size, pair_or_kernel
from .batch_norm import (
    BatchNorm2d,
    batch_norm_backward,
    batch_norm_forward_inference,
    batch_norm_forward_training,
)
from .conv2d import (
    Conv2d,
    _four_paddings,
    check_sizes,
    conv2d_backward_bias,
    conv2d_backward_input,
    conv2d_backward_weight,
    conv2d_forward,
    empty_image,
    is_channels_last,
)
from .max_pool2d import max_pool2d, max_pool2d_backward, max_pool2d_forward
from .relu import relu, relu_backward, relu_forward

OP = "conv_bn_relu_pool"


class Geometry(NamedTuple):
    """What the ops take as one list of integers."""

    stride: tuple
    padding: tuple  # top, bottom, left, right
    dilation: tuple
    groups: int
    pool_kernel_size: tuple
    pool_stride: tuple
    pool_padding: tuple
    channels_last: bool

    @property
    def convolution(self):
        return self.stride, self.padding, self.dilation, self.groups

    @property
    def window(self):
        return self.pool_kernel_size, self.pool_stride, self.pool_padding, (1, 1), False

    @classmethod
    def of(cls, g):
        """From the list that the ops take."""
        return cls(
            tuple(g[:2]),
            tuple(g[2:6]),
            tuple(g[6:8]),
            g[8],
            tuple(g[9:11]),
            tuple(g[11:13]),
            tuple(g[13:15]),
            bool(g[15]),
        )


def _output_sizes(input, weight, geometry):
    """Sizes of the convolution's output and of what is pooled from it."""
    expect(input.dim() == 4, OP, "input to have 4 dimensions, got shape {}", tuple(input.shape))
    check_sizes(input.shape, weight.shape, *geometry[:4], op=OP)
    top, bottom, left, right = geometry.padding
    conv = [
        (size - geometry.dilation[axis] * (weight.shape[2 + axis] - 1) - 1) // geometry.stride[axis] + 1
        for axis, size in enumerate((input.shape[2] + top + bottom, input.shape[3] + left + right))
    ]
    pooled = [
        _pooled_size(size, kernel, stride, padding, 1, False)
        for size, kernel, stride, padding in zip(conv, *geometry[4:7], strict=True)
    ]
    for size in pooled:
        expect(size > 0, OP, "the convolution's output to have room for a window, got {}", conv)
    return (input.shape[0], weight.shape[0], *conv), (input.shape[0], weight.shape[0], *pooled)


@register_fake("cuda_ops::conv_bn_relu_pool_forward")
def _(
    input,
    weight,
    bias,
    bn_weight,
    bn_bias,
    running_mean,
    running_var,
    num_batches_tracked,
    momentum,
    eps,
    geometry,
):
    conv_size, output_size = _output_sizes(input, weight, Geometry.of(geometry))
    channels_last = bool(geometry[-1])
    # What is kept does not depend on the batch, which may be symbolic. The op is asked outside of the fake world.
    sizes = [1, *map(int, input.shape[1:])], list(map(int, weight.shape))
    with _disable_current_modes():
        keeps_conv_output, keeps_maximum, statistics = ops.conv_bn_relu_pool_saved(
            input.device.type == "cuda", input.dtype, *sizes, geometry
        )
    output = empty_image(output_size, input, channels_last)
    return (
        output,
        empty_image(conv_size, input, channels_last) if keeps_conv_output else input.new_empty(0),
        torch.empty_like(output, dtype=torch.uint8),
        torch.empty_like(output) if keeps_maximum else input.new_empty(0),
        input.new_empty(statistics, dtype=torch.float64),
    )


@register_fake("cuda_ops::conv_bn_relu_pool_inference")
def _(input, weight, bias, bn_weight, bn_bias, running_mean, running_var, eps, geometry):
    geometry = Geometry.of(geometry)
    return empty_image(_output_sizes(input, weight, geometry)[1], input, geometry.channels_last)


@register_fake("cuda_ops::conv_bn_relu_pool_backward")
def _(
    grad_output,
    input,
    weight,
    bias,
    bn_weight,
    bn_bias,
    conv_output,
    argmax,
    maximum,
    statistics,
    eps,
    geometry,
    needs_grad_input,
):
    return (
        empty_image(input.shape, input, is_channels_last(input)) if needs_grad_input else input.new_empty(0),
        empty_image(weight.shape, weight, is_channels_last(weight)),
        *(
            input.new_empty(0)
            if parameter is None
            else torch.empty_like(parameter, memory_format=torch.contiguous_format)
            for parameter in (bias, bn_weight, bn_bias)
        ),
    )


class Composed(NamedTuple):
    """The block by the ops that it fuses."""

    weight: Tensor  # in the dtype of input
    conv_output: Tensor
    mean: Tensor  # that conv_output was normalised by
    variance: Tensor
    activation: Tensor  # of relu
    output: Tensor
    indices: Tensor  # of the maxima


def _composed(input, weight, bias, bn_weight, bn_bias, running_mean, running_var, eps, geometry: Geometry):
    """Without running statistics: as in training."""
    weight, bias = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
    conv_output = conv2d_forward(input, weight, bias, *geometry.convolution)
    if running_mean is None:
        normalised, mean, variance = batch_norm_forward_training(conv_output, bn_weight, bn_bias, eps)
    else:
        mean, variance = running_mean, running_var
        normalised = batch_norm_forward_inference(conv_output, bn_weight, bn_bias, mean, variance, eps)
    activation = relu_forward(normalised)
    output, indices = max_pool2d_forward(activation, *geometry.window)
    return Composed(weight, conv_output, mean, variance, activation, output, indices)


@composite("conv_bn_relu_pool_gradients")
def _(grad_output, input, weight, bias, bn_weight, bn_bias, running_mean, running_var, eps, geometry, wanted):
    """The gradients that are wanted, by ops that are differentiable further, of the block computed anew."""
    geometry, training = Geometry.of(geometry), running_mean is None
    block = _composed(input, weight, bias, bn_weight, bn_bias, running_mean, running_var, eps, geometry)
    plane = block.activation.shape[-2:]
    grad = relu_backward(max_pool2d_backward(grad_output, block.indices, plane, *geometry.window), block.activation)
    grad_conv, grad_bn_weight, grad_bn_bias = batch_norm_backward(
        grad,
        block.conv_output,
        bn_weight,
        block.mean,
        block.variance,
        training,
        eps,
        None if bn_bias is None else bn_bias.dtype,
        [any(wanted[:3]), *wanted[3:]],
    )
    of_input = input.shape, is_channels_last(input), *geometry.convolution
    of_weight = weight.shape, is_channels_last(weight), *geometry.convolution
    gradients = (
        lambda: conv2d_backward_input(grad_conv, block.weight, *of_input),
        lambda: conv2d_backward_weight(grad_conv, input, *of_weight).to(weight.dtype),
        lambda: conv2d_backward_bias(grad_conv, bias.shape).to(bias.dtype),
        lambda: grad_bn_weight,
        lambda: grad_bn_bias,
    )
    return [gradient() for gradient, want in zip(gradients, wanted, strict=True) if want]


@composite("conv_bn_relu_pool_tangent")
def _(
    t_input,
    t_weight,
    t_bias,
    t_bn_weight,
    t_bn_bias,
    input,
    weight,
    bias,
    bn_weight,
    bn_bias,
    running_mean,
    running_var,
    eps,
    geometry,
):
    """The tangent of the composed block's output."""
    tangents = (t_input, t_weight, t_bias, t_bn_weight, t_bn_bias)
    names = ("input", "weight", "bias", "bn_weight", "bn_bias")
    duals = [
        dual("conv_bn_relu_pool", name, tensor, tangent)
        for name, tensor, tangent in zip(names, (input, weight, bias, bn_weight, bn_bias), tangents, strict=True)
    ]
    block = _composed(*duals, running_mean, running_var, eps, Geometry.of(geometry))
    return torch._unpack_dual(block.output, level=0)[1]


conv_bn_relu_pool_forward = operator("conv_bn_relu_pool_forward")
conv_bn_relu_pool_inference = operator("conv_bn_relu_pool_inference")


def conv_bn_relu_pool(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    pool_kernel_size: int | tuple[int, ...] = 2,
    pool_stride: int | tuple[int, ...] | None = None,
    pool_padding: int | tuple[int, ...] = 0,
    channels_last: bool | None = None,
) -> Tensor:
    r"""A block of a convolutional network in one: ``max_pool2d(relu(batch_norm(conv2d(input))))``,

    .. math::
        \text{output} = \max_\text{window} \max\left(0, \frac{y - \mu}{\sqrt{\sigma^2 + \text{eps}}} \,
        \text{bn\_weight} + \text{bn\_bias}\right), \quad y = \text{input} * \text{weight} + \text{bias}

    In training :math:`\mu` and :math:`\sigma^2` are the mean and the biased variance of :math:`y` over the batch, and
    the running statistics, if given, move towards them in place, as in :func:`batch_norm`. Else they are the running
    statistics.

    Args:
        input: (N, C_in, H, W), any strides; float32, float64, float16 or bfloat16.
        weight: (C_out, C_in / groups, kernel height, kernel width).
        bias: (C_out), or None. In training it has no effect but on running_mean, and its gradient is 0.
        running_mean, running_var: (C_out) each, or both None, which only training allows.
        bn_weight, bn_bias: (C_out) each, or None for 1 and 0.
        training: whether to use, and keep a running record of, the statistics of the batch.
        momentum: share of the batch in the running statistics.
        eps: added to the variance; above 0.
        stride, padding, dilation, groups: of the convolution, as in :func:`conv2d`, 'same' and 'valid' included.
        pool_kernel_size, pool_stride, pool_padding: of the pooling, as in :func:`max_pool2d`; a window has at most 255
            values.
        channels_last: memory format of the output; None for that of :func:`conv2d`'s output.

    Parameters and running statistics are of the dtype of `input`, or float32 beside a float16 or bfloat16 `input`.

    Returns:
        (N, C_out, H_out, W_out) of the dtype of `input`.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: training with one value per channel, or with only one of the running statistics; `eps` is not above
            0.
        RuntimeError: what :func:`conv2d`, :func:`batch_norm` and :func:`max_pool2d` refuse.
        NotImplementedError: a window of more than 255 values.

    In training on CUDA, what float32 convolutions (3x3, stride 1, padding 1, pooled 2x2, numbers of channels that are
    multiples of 8 from 16 to 128) multiply is rounded to TF32 where ``torch.backends.cudnn.allow_tf32``, or
    ``torch.backends.cudnn.conv.fp32_precision``, allows it to PyTorch's own; else it may go through Winograd's
    algorithm with tiles of 2 x 2, whose rounding error is about the sum's, unless the environment has
    ``CUDA_OPS_CONV2D_WINOGRAD=0``. Which kernels take a problem,
    ``torch.ops.cuda_ops.conv_bn_relu_pool_path`` tells. Under autocast `input` is cast to its dtype, and
    parameters stay as they are. Deterministic. Differentiable any number of times; beyond the first time, and in
    evaluation, by a composition of the ops that are fused here.

    Example:
        >>> image = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]])
        >>> cuda_ops.functional.conv_bn_relu_pool(image, torch.ones(1, 1, 1, 1), None, None, None)
        tensor([[[[1.6036]]]])
    """
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor)):
        check_tensors(OP, input=input, weight=weight)
    geometry = _geometry(
        weight, stride, padding, dilation, groups, pool_kernel_size, pool_stride, pool_padding, channels_last, input
    )
    return _conv_bn_relu_pool(
        input, weight, bias, (running_mean, running_var, None), bn_weight, bn_bias, training, momentum, eps, geometry
    )


def _geometry(
    weight, stride, padding, dilation, groups, pool_kernel_size, pool_stride, pool_padding, channels_last, input
):
    if type(channels_last) is not bool:
        if channels_last is not None:
            raise TypeError(f"{OP}: expected channels_last to be a bool or None, got {channels_last!r}")
        channels_last = weight.dim() == 4 and input.dim() == 4 and (is_channels_last(input) or is_channels_last(weight))
    arguments = stride, padding, dilation, groups, pool_kernel_size, pool_stride, pool_padding, channels_last
    if is_compiling():
        return _geometry_of(weight, *arguments)
    ids = id(stride), id(padding), id(dilation), id(groups), id(pool_kernel_size), id(pool_stride), id(pool_padding)
    known = _known_geometries.get((ids, channels_last))
    if known is None:
        known = _geometry_of(weight, *arguments), arguments
        if all(_is_fixed(argument) for argument in arguments):
            if len(_known_geometries) >= MOST_GEOMETRIES:
                _known_geometries.clear()
            _known_geometries[ids, channels_last] = known
    return known[0]


# What _geometry_of made of arguments that were the same objects, as a module's attributes are at each call; they are
# kept beside it, so that no others get their ids. By their values it will not do, since 1 and True are equal.
_known_geometries: dict[tuple, tuple] = {}
MOST_GEOMETRIES = 1000


def _is_fixed(argument) -> bool:
    """Whether it always means the same, which a list, a tensor of one integer, and 'same', by the weight, do not."""
    return type(argument) in (int, bool, type(None)) or (
        type(argument) is tuple and all(type(value) is int for value in argument)
    )


def _geometry_of(weight, stride, padding, dilation, groups, pool_kernel_size, pool_stride, pool_padding, channels_last):
    stride, dilation = pair(OP, "stride", stride), pair(OP, "dilation", dilation)
    kernel = pair(OP, "pool_kernel_size", pool_kernel_size)
    return (
        *stride,
        *_four_paddings(padding, weight, stride, dilation, OP),
        *dilation,
        integer(OP, "groups", groups),
        *kernel,
        *pair_or_kernel(OP, "pool_stride", pool_stride, kernel),
        *pair(OP, "pool_padding", pool_padding),
        int(channels_last),
    )


def _conv_bn_relu_pool(input, weight, bias, running, bn_weight, bn_bias, training, momentum, eps, geometry):
    """The functional, after its arguments' types were checked; `running` are the running mean and variance and the
    number of batches, which training updates."""
    if (eps if type(eps) is float else number(OP, "eps", eps)) <= 0.0:
        raise ValueError(f"{OP}: expected eps to be positive, got {eps}")
    mean, variance, batches = running
    if training:
        return conv_bn_relu_pool_forward(
            input, weight, bias, bn_weight, bn_bias, mean, variance, batches, momentum, eps, geometry
        )[0]
    number(OP, "momentum", momentum)
    if not (isinstance(mean, Tensor) and isinstance(variance, Tensor)):
        check_tensors_or_none(
            OP, bias=bias, running_mean=mean, running_var=variance, bn_weight=bn_weight, bn_bias=bn_bias
        )
        name = "running_mean" if mean is None else "running_var"
        raise RuntimeError(f"{OP}: {name} must be defined in evaluation mode")
    return conv_bn_relu_pool_inference(input, weight, bias, bn_weight, bn_bias, mean, variance, eps, geometry)


class ConvBNReLUMaxPool2d(torch.nn.Module):
    """torch.nn.Conv2d, BatchNorm2d, ReLU and MaxPool2d in one: the parameters are those of its submodules `conv` and
    `norm`, whose forward is not called; but where it would do something else (hooks, pruning, parametrizations, other
    modules in their place) it is, and the four run one after the other.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias: of the convolution.
        eps, momentum, affine, track_running_stats: of the batch normalisation.
        pool_kernel_size, pool_stride, pool_padding: of the pooling.
        channels_last: memory format of the output; None for that of the convolution.
        device, dtype: of the parameters.

    Example:
        >>> block = cuda_ops.nn.ConvBNReLUMaxPool2d(1, 32, 3, padding=1, channels_last=True)
        >>> block(torch.rand(64, 1, 28, 28)).shape
        torch.Size([64, 32, 14, 14])
        >>> list(block.state_dict())[:3]
        ['conv.weight', 'conv.bias', 'norm.weight']
    """

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        bias=True,
        eps=1e-5,
        momentum=0.1,
        affine=True,
        track_running_stats=True,
        pool_kernel_size=2,
        pool_stride=None,
        pool_padding=0,
        channels_last=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.conv = torch.nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, **factory
        )
        self.norm = torch.nn.BatchNorm2d(out_channels, eps, momentum, affine, track_running_stats, **factory)
        self.pool_kernel_size = pool_kernel_size
        self.pool_stride = pool_stride
        self.pool_padding = pool_padding
        self.channels_last = channels_last

    def extra_repr(self):
        stride = self.pool_kernel_size if self.pool_stride is None else self.pool_stride
        return (
            f"pool_kernel_size={self.pool_kernel_size}, pool_stride={stride}, pool_padding={self.pool_padding}, "
            f"channels_last={self.channels_last}"
        )

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, Tensor):
            check_tensors(OP, input=input)
        conv, norm = self._modules["conv"], self._modules["norm"]
        pool = self.pool_kernel_size, self.pool_stride, self.pool_padding
        if are_fusable(conv, norm):
            return conv_bn_relu_pool_modules(input, conv, norm, *pool, self.channels_last)
        output = max_pool2d(relu(norm(conv(input))), *pool)
        if self.channels_last is None:
            return output
        return output.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)


CONV2DS, BATCH_NORM2DS = (Conv2d, torch.nn.Conv2d), (BatchNorm2d, torch.nn.BatchNorm2d)


def are_fusable(conv, norm) -> bool:
    """Whether calls of these modules do what conv_bn_relu_pool_modules does by their parameters."""
    return unlike(conv, CONV2DS) is None and unlike(norm, BATCH_NORM2DS) is None and conv.padding_mode == "zeros"


def conv_bn_relu_pool_modules(
    input, conv, norm, pool_kernel_size=2, pool_stride=None, pool_padding=0, channels_last=None
):
    """:func:`conv_bn_relu_pool` by the parameters of a convolution and a batch normalisation that are fusable. One
    kernel updates running statistics and number of batches."""
    training, momentum = norm.training, norm.momentum
    mean, variance = buffer(norm, "running_mean"), buffer(norm, "running_var")
    batches = buffer(norm, "num_batches_tracked")
    if not (training and norm.track_running_stats):
        batches = None
        if training:
            mean = variance = None
    # Without running statistics those of the batch are used in evaluation as well.
    training = training or (mean is None and variance is None)
    if momentum is None:  # the average over all batches so far
        momentum = 0.0
        if batches is not None:
            momentum, batches = 1.0 / float(batches.add_(1)), None
    weight = parameter(conv, "weight")
    geometry = _geometry(
        weight,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        pool_kernel_size,
        pool_stride,
        pool_padding,
        channels_last,
        input,
    )
    return _conv_bn_relu_pool(
        input,
        weight,
        parameter(conv, "bias"),
        (mean, variance, batches),
        parameter(norm, "weight"),
        parameter(norm, "bias"),
        training,
        momentum,
        norm.eps,
        geometry,
    )
