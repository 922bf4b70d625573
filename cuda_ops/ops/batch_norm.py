"""batch_norm: normalisation by channel, with the statistics of the batch or with running ones."""

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .._arguments import check_tensors, check_tensors_or_none, expect, flag, number
from .._autograd_old import Function
from .._fakes import register_fake
from .._library import ops


def _empty_like(input):
    return torch.empty_like(input, memory_format=suggest_memory_format(input))


def _check_channels(input, **tensors):
    expect(input.dim() >= 2, "batch_norm", "input to have at least 2 dimensions, got shape {}", list(input.shape))
    for name, tensor in tensors.items():
        if tensor is not None:
            message = f"{name} to have one element for each channel of input, {{}}, got shape {{}}"
            fits = tensor.dim() == 1 and tensor.shape[0] == input.shape[1]
            expect(fits, "batch_norm", message, input.shape[1], list(tensor.shape))


@register_fake("cuda_ops::batch_norm_forward_training")
def _(input, weight, bias, eps):
    _check_channels(input, weight=weight, bias=bias)
    mean = input.new_empty(input.shape[1], dtype=torch.float64)
    return _empty_like(input), mean, torch.empty_like(mean)


@register_fake("cuda_ops::batch_norm_forward_inference")
def _(input, weight, bias, running_mean, running_var, eps):
    _check_channels(input, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    return _empty_like(input)


@register_fake("cuda_ops::batch_norm_backward")
def _(
    grad_output,
    input,
    weight,
    mean,
    variance,
    training,
    eps,
    parameter_dtype,
    needs_grad_input,
    needs_grad_parameters,
):
    channels = input.shape[1] if needs_grad_parameters else 0
    return (
        _empty_like(input) if needs_grad_input else input.new_empty(0),
        input.new_empty(channels, dtype=parameter_dtype),
        input.new_empty(channels, dtype=parameter_dtype),
    )


@register_fake("cuda_ops::batch_norm_update")
def _(running_mean, running_var, mean, variance, momentum, count):
    return None


def _leave_grads_none(ctx):
    # mean and variance have no gradient, and zeros for them would be two launches. torch.compile does not know the
    # call, and needs it not, since it drops what nobody uses.
    if not torch.compiler.is_compiling():
        ctx.set_materialize_grads(False)


class BatchNormTrainingFunction(Function):
    """(output, mean, variance). The two last, biased and in float64, are for backward and the running statistics; the
    gradient of output takes into account that they depend on input."""

    @staticmethod
    def forward(ctx, input, weight, bias, eps):
        output, mean, variance = ops.batch_norm_forward_training(input, weight, bias, eps)
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        _leave_grads_none(ctx)
        ctx.eps = eps
        ctx.parameter_dtype = _parameter_dtype(input, weight, bias)
        return output, mean, variance

    @staticmethod
    def backward(ctx, grad_output, _mean, _variance):
        input, weight, mean, variance = ctx.saved_tensors
        grads = _backward(ctx, grad_output, input, weight, mean, variance, True)
        return (*grads, None)


class BatchNormInferenceFunction(Function):
    @staticmethod
    def forward(ctx, input, weight, bias, running_mean, running_var, eps):
        ctx.save_for_backward(input, weight, running_mean, running_var)
        ctx.eps = eps
        ctx.parameter_dtype = _parameter_dtype(input, weight, bias)
        return ops.batch_norm_forward_inference(input, weight, bias, running_mean, running_var, eps)

    @staticmethod
    def backward(ctx, grad_output):
        input, weight, mean, variance = ctx.saved_tensors
        grads = _backward(ctx, grad_output, input, weight, mean, variance, False)
        return (*grads, None, None, None)


def _parameter_dtype(input, weight, bias):
    """The dtype of the gradients of weight and bias."""
    parameter = weight if weight is not None else bias if bias is not None else input
    return parameter.dtype


def _backward(ctx, grad_output, input, weight, mean, variance, training):
    if grad_output is None:
        return None, None, None
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad_input, grad_weight, grad_bias = BatchNormBackwardFunction.apply(
        grad_output,
        input,
        weight,
        mean,
        variance,
        training,
        ctx.eps,
        ctx.parameter_dtype,
        needs_input,
        needs_weight or needs_bias,
    )
    return (
        grad_input if needs_input else None,
        grad_weight if needs_weight else None,
        grad_bias if needs_bias else None,
    )


class BatchNormBackwardFunction(Function):
    """(grad_input, grad_weight, grad_bias), themselves differentiable. Their own backward is composed of PyTorch's
    operations, which makes it differentiable in turn: it is rarely used, by gradient penalties and the like."""

    @staticmethod
    def forward(
        ctx,
        grad_output,
        input,
        weight,
        mean,
        variance,
        training,
        eps,
        parameter_dtype,
        needs_grad_input,
        needs_grad_parameters,
    ):
        ctx.save_for_backward(grad_output, input, weight, mean, variance)
        ctx.training, ctx.eps = training, eps
        _leave_grads_none(ctx)
        return ops.batch_norm_backward(
            grad_output,
            input,
            weight,
            mean,
            variance,
            training,
            eps,
            parameter_dtype,
            needs_grad_input,
            needs_grad_parameters,
        )

    @staticmethod
    def backward(ctx, grad_grad_input, grad_grad_weight, grad_grad_bias):
        grad_output, input, weight, mean, variance = ctx.saved_tensors
        differentiate = _differentiate_training if ctx.training else _differentiate_inference
        grads = differentiate(
            grad_grad_input, grad_grad_weight, grad_grad_bias, grad_output, input, weight, mean, variance, ctx.eps
        )
        wanted = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad[:3], strict=True)]
        return (*wanted, *[None] * 7)


class _Channels:
    """Arithmetic by channel on tensors of the shape of `input`, in at least float32."""

    def __init__(self, input):
        self.zeros = torch.zeros_like(input)
        self.dims = [d for d in range(input.dim()) if d != 1]
        self.shape = [-1 if d == 1 else 1 for d in range(input.dim())]
        self.dtype = torch.promote_types(input.dtype, torch.float32)

    def whole(self, tensor):
        """A tensor of the shape of input; zeros for None."""
        return (self.zeros if tensor is None else tensor).to(self.dtype)

    def spread(self, tensor, default):
        """A value for each channel, so that it broadcasts; a number for None."""
        return default if tensor is None else tensor.to(self.dtype).view(self.shape)

    def sum(self, tensor):
        return tensor.sum(self.dims, keepdim=True)

    def mean(self, tensor):
        return tensor.mean(self.dims, keepdim=True)


def _differentiate_training(v, v_weight, v_bias, grad_output, input, weight, mean, variance, eps):
    r"""Gradients of <v, grad_input> + <v_weight, grad_weight> + <v_bias, grad_bias>, where v are the incoming ones.

    With :math:`\hat x` the normalised input, :math:`r` one over the deviation, :math:`\gamma` the weight, means over
    the channel, and the projection :math:`P(z) = z - \bar z - \hat x \, \overline{z \hat x}`, which is symmetric:
    grad_input is :math:`\gamma r P(g)` and grad_weight is :math:`\sum g \hat x`. By
    :math:`\partial \langle u, \hat x \rangle / \partial x = r P(u)` and
    :math:`\partial r / \partial x = -r^2 \hat x / n` the rest follows. mean and variance are computed anew, so that
    further derivatives reach input through them too.
    """
    c = _Channels(input)
    x, g, v = c.whole(input), c.whole(grad_output), c.whole(v)
    gamma, v_weight, v_bias = c.spread(weight, 1.0), c.spread(v_weight, 0.0), c.spread(v_bias, 0.0)
    centered = x - c.mean(x)
    rstd = (c.mean(centered * centered) + eps).rsqrt()
    normalised = centered * rstd

    def project(z):
        return z - c.mean(z) - normalised * c.mean(z * normalised)

    projected_g, projected_v = project(g), project(v)
    grad_grad_output = gamma * rstd * projected_v + v_weight * normalised + v_bias
    through_rstd = normalised * c.mean(v * projected_g)
    through_projection = c.mean(g * normalised) * projected_v + c.mean(v * normalised) * projected_g
    grad_input = rstd * (v_weight * projected_g - gamma * rstd * (through_rstd + through_projection))
    grad_weight = rstd * c.sum(v * projected_g)
    return grad_grad_output.to(grad_output.dtype), grad_input.to(input.dtype), _as_parameter(grad_weight, weight)


def _differentiate_inference(v, v_weight, v_bias, grad_output, input, weight, mean, variance, eps):
    """The same where grad_input = weight * rstd * grad_output, and mean and rstd are constants."""
    c = _Channels(input)
    x, g, v = c.whole(input), c.whole(grad_output), c.whole(v)
    gamma, v_weight, v_bias = c.spread(weight, 1.0), c.spread(v_weight, 0.0), c.spread(v_bias, 0.0)
    rstd = (c.spread(variance, None) + eps).rsqrt()
    normalised = (x - c.spread(mean, None)) * rstd
    grad_grad_output = gamma * rstd * v + v_weight * normalised + v_bias
    grad_input = v_weight * rstd * g
    grad_weight = rstd * c.sum(v * g)
    return grad_grad_output.to(grad_output.dtype), grad_input.to(input.dtype), _as_parameter(grad_weight, weight)


def _as_parameter(value, weight):
    return None if weight is None else value.reshape(-1).to(weight.dtype)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    r"""Batch normalisation, for each channel
    :math:`\text{output} = (\text{input} - \mu) / \sqrt{\sigma^2 + \text{eps}} \cdot \text{weight} + \text{bias}`.

    In training :math:`\mu` and :math:`\sigma^2` are the mean and the biased variance of the batch, and the running
    statistics, if given, move towards them, in place: :math:`\text{running} \leftarrow (1 - \text{momentum})
    \, \text{running} + \text{momentum} \, \text{new}`, with the unbiased variance. Else they are the running
    statistics.

    Args:
        input: (N, C, ...), any strides; float32 or float64, on CUDA float16 and bfloat16 too.
        running_mean, running_var: (C) each, or both None, which only training allows.
        weight, bias: (C) each, or None for 1 and 0.
        training: whether to use, and keep a running record of, the statistics of the batch.
        momentum: share of the batch in the running statistics.
        eps: added to the variance; above 0.

    weight and bias, and running_mean and running_var, are of the dtype of `input`, or float32 beside a float16 or
    bfloat16 `input`. Mean and variance are computed without loss where the mean is far larger than the deviation.

    Returns:
        A tensor of the shape and dtype of `input`, channels_last if `input` is, else contiguous.

    Raises:
        TypeError: a tensor is none, `momentum` or `eps` no number, or `training` no bool.
        ValueError: training with one value per channel, or with only one of the running statistics; `eps` is not
            above 0.
        RuntimeError: not training, and a running statistic is None; `input` is not floating point or has less than
            2 dimensions; another tensor has the wrong shape, dtype or device; a running statistic requires grad.
        NotImplementedError: `input` is float16 or bfloat16 on the CPU.

    Differentiable any number of times with respect to input, weight and bias; beyond the first time by a composition
    of PyTorch's operations.

    Example:
        >>> cuda_ops.functional.batch_norm(torch.tensor([[1.0], [3.0]]), None, None, training=True)
        tensor([[-1.0000],
                [ 1.0000]])
    """
    check_tensors("batch_norm", input=input)
    check_tensors_or_none("batch_norm", running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    if not isinstance(momentum, (int, float, torch.SymFloat)):
        raise TypeError(f"batch_norm: expected momentum to be a number, got {momentum!r}")
    training = flag("batch_norm", "training", training)
    if number("batch_norm", "eps", eps) <= 0.0:
        raise ValueError(f"batch_norm: expected eps to be positive, got {eps}")
    for name, statistic in (("running_mean", running_mean), ("running_var", running_var)):
        if statistic is None and not training:
            raise RuntimeError(f"batch_norm: {name} must be defined in evaluation mode")
        if statistic is not None and statistic.requires_grad:
            raise RuntimeError(f"batch_norm: not differentiable with respect to {name}, which requires grad")
    if not training:
        return BatchNormInferenceFunction.apply(input, weight, bias, running_mean, running_var, eps)
    if (running_mean is None) != (running_var is None):
        raise ValueError("batch_norm: running_mean and running_var must either both be None or neither be None")
    count = 1  # values of a channel
    for size in (*input.shape[:1], *input.shape[2:]):
        count *= size
    if input.dim() >= 2 and count == 1:
        raise ValueError(
            f"batch_norm: Expected more than 1 value per channel when training, got input size {tuple(input.shape)}"
        )
    if running_mean is not None:
        _check_running("running_mean", running_mean, input)
        _check_running("running_var", running_var, input)
    output, mean, variance = BatchNormTrainingFunction.apply(input, weight, bias, eps)
    if running_mean is not None:
        # Outside of the Function, which so writes into none of its inputs.
        ops.batch_norm_update(running_mean, running_var, mean, variance, momentum, count)
    return output


def _check_running(name, statistic, input):
    """What the op of evaluation demands, so that a module which trains does evaluate."""
    if input.dim() < 2:
        return  # refused by the op
    if statistic.dim() != 1 or statistic.shape[0] != input.shape[1]:
        raise RuntimeError(
            f"batch_norm: expected {name} to have one element for each channel of input, {input.shape[1]}, "
            f"got shape {list(statistic.shape)}"
        )
    half = input.dtype in (torch.float16, torch.bfloat16)
    if statistic.dtype != input.dtype and not (half and statistic.dtype == torch.float32):
        raise RuntimeError(
            f"batch_norm: expected {name} to have the dtype of input, {str(input.dtype)[6:]}, "
            f"got {str(statistic.dtype)[6:]}"
        )


class _Forward:
    """The forward pass of torch.nn's batch normalisations, with our functional in its place."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        tracks = self.training and self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the average over all batches so far
                momentum = 1.0 / float(self.num_batches_tracked)
        # Without running statistics those of the batch are used in evaluation as well.
        training = self.training or (self.running_mean is None and self.running_var is None)
        uses_running = tracks or not self.training
        return batch_norm(
            input,
            self.running_mean if uses_running else None,
            self.running_var if uses_running else None,
            self.weight,
            self.bias,
            training,
            momentum,
            self.eps,
        )


class BatchNorm1d(_Forward, torch.nn.BatchNorm1d):
    """torch.nn.BatchNorm1d by :func:`cuda_ops.functional.batch_norm`: same arguments, repr and state_dict."""


class BatchNorm2d(_Forward, torch.nn.BatchNorm2d):
    """torch.nn.BatchNorm2d by :func:`cuda_ops.functional.batch_norm`: same arguments, repr and state_dict."""


class BatchNorm3d(_Forward, torch.nn.BatchNorm3d):
    """torch.nn.BatchNorm3d by :func:`cuda_ops.functional.batch_norm`: same arguments, repr and state_dict."""
