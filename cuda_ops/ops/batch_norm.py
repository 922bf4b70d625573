"""batch_norm: normalisation by channel, with the statistics of the batch or with running ones."""

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .._arguments import check_tensors, check_tensors_or_none, expect, flag, number
from .._autograd import autograd_function
from .._fakes import register_fake
from .._modules import buffer, parameter
from .._operators import composite, operator
from ._norm import centered_twice


def _empty_like(input):
    return torch.empty_like(input, memory_format=suggest_memory_format(input))


def _check_channels(op, input, **tensors):
    expect(input.dim() >= 2, op, "input to have at least 2 dimensions, got shape {}", list(input.shape))
    for name, tensor in tensors.items():
        if tensor is not None:
            message = f"{name} to have one element for each channel of input, {{}}, got shape {{}}"
            fits = tensor.dim() == 1 and tensor.shape[0] == input.shape[1]
            expect(fits, op, message, input.shape[1], list(tensor.shape))


def _check_batch(op, input):
    count = 1  # values of a channel
    for size in (*input.shape[:1], *input.shape[2:]):
        count *= size
    if count == 1:
        raise ValueError(
            f"{op}: Expected more than 1 value per channel when training, got input size {tuple(input.shape)}"
        )


@register_fake("cuda_ops::batch_norm_forward_training")
def _(input, weight, bias, eps):
    _check_channels("batch_norm", input, weight=weight, bias=bias)
    _check_batch("batch_norm", input)
    mean = input.new_empty(input.shape[1], dtype=torch.float64)
    return _empty_like(input), mean, torch.empty_like(mean)


@register_fake("cuda_ops::batch_norm_forward_tracking")
def _(input, weight, bias, running_mean, running_var, num_batches_tracked, momentum, eps):
    _check_channels("batch_norm", input, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    _check_batch("batch_norm", input)
    mean = input.new_empty(input.shape[1], dtype=torch.float64)
    return _empty_like(input), mean, torch.empty_like(mean)


@register_fake("cuda_ops::batch_norm_forward_inference")
def _(input, weight, bias, running_mean, running_var, eps):
    _check_channels("batch_norm", input, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    return _empty_like(input)


@register_fake("cuda_ops::batch_norm_backward")
def _(grad_output, input, weight, mean, variance, training, eps, bias_dtype, wanted):
    channels = input.shape[1] if wanted[1] or wanted[2] else 0
    dtype = weight.dtype if weight is not None else input.dtype if bias_dtype is None else bias_dtype
    return (
        _empty_like(input) if wanted[0] else input.new_empty(0),
        input.new_empty(channels, dtype=dtype),
        input.new_empty(channels, dtype=dtype),
    )


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
        """0 of no values, so that sums over nothing are 0 and not NaN."""
        return tensor.mean(self.dims, keepdim=True) if tensor.numel() else self.sum(tensor)


@composite("batch_norm_backward_gradients")
def _(v, v_weight, v_bias, grad_output, input, weight, mean, variance, training, eps, wanted):
    """Those of the gradients of <v, grad_input> + <v_weight, grad_weight> + <v_bias, grad_bias> by grad_output, input
    and weight that are wanted, where v are the incoming ones."""
    differentiate = _differentiate_training if training else _differentiate_inference
    grads = differentiate(v, v_weight, v_bias, grad_output, input, weight, mean, variance, eps)
    return [grad for grad, want in zip(grads, wanted, strict=True) if want]


def _differentiate_training(v, v_weight, v_bias, grad_output, input, weight, mean, variance, eps):
    r"""With :math:`\hat x` the normalised input, :math:`r` one over the deviation, :math:`\gamma` the weight, means
    over the channel, and the projection :math:`P(z) = z - \bar z - \hat x \, \overline{z \hat x}`, which is symmetric:
    grad_input is :math:`\gamma r P(g)` and grad_weight is :math:`\sum g \hat x`. By
    :math:`\partial \langle u, \hat x \rangle / \partial x = r P(u)` and
    :math:`\partial r / \partial x = -r^2 \hat x / n` the rest follows. mean and variance are computed anew, so that
    further derivatives reach input through them too.
    """
    c = _Channels(input)
    x, g, v = c.whole(input), c.whole(grad_output), c.whole(v)
    gamma, v_weight, v_bias = c.spread(weight, 1.0), c.spread(v_weight, 0.0), c.spread(v_bias, 0.0)
    centered = centered_twice(x, c.mean)
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


@composite("batch_norm_backward_tangents")
def _(t_grad, t_input, t_weight, grad_output, input, weight, mean, variance, training, eps, bias_dtype, wanted):
    r"""What grad_input, grad_weight and grad_bias change by where grad_output, input and weight change by t_...: by the
    rules of _differentiate_training, of which :math:`\partial \hat x = r P(t)` and
    :math:`\partial r = -r^2 \, \overline{\hat x t}` for a change t of input."""
    c = _Channels(input)
    x, g, t, t_g = c.whole(input), c.whole(grad_output), c.whole(t_input), c.whole(t_grad)
    gamma, t_gamma = c.spread(weight, 1.0), c.spread(t_weight, 0.0)
    if training:
        centered = centered_twice(x, c.mean)
        rstd = (c.mean(centered * centered) + eps).rsqrt()
    else:
        centered = x - c.spread(mean, None)
        rstd = (c.spread(variance, None) + eps).rsqrt()
    normalised = centered * rstd

    def project(z):
        return z - c.mean(z) - normalised * c.mean(z * normalised) if training else z

    t_normalised = rstd * project(t)
    t_grad_input = t_gamma * rstd * project(g) + gamma * rstd * project(t_g)
    if training:
        t_projected = -t_normalised * c.mean(g * normalised) - normalised * c.mean(g * t_normalised)
        t_rstd = -rstd * rstd * c.mean(normalised * t)
        t_grad_input = t_grad_input + gamma * (t_rstd * project(g) + rstd * t_projected)
    t_grad_weight = c.sum(t_g * normalised + g * t_normalised)
    parameter_dtype = weight.dtype if weight is not None else input.dtype if bias_dtype is None else bias_dtype
    none = input.new_zeros(0)
    with_parameters = wanted[1] or wanted[2]
    return (
        t_grad_input.to(input.dtype) if wanted[0] else none,
        t_grad_weight.reshape(-1).to(parameter_dtype) if with_parameters else none.to(parameter_dtype),
        c.sum(t_g).reshape(-1).to(parameter_dtype) if with_parameters else none.to(parameter_dtype),
    )


batch_norm_forward_training = operator("batch_norm_forward_training")
batch_norm_forward_tracking = operator("batch_norm_forward_tracking")
batch_norm_forward_inference = operator("batch_norm_forward_inference")
batch_norm_backward = operator("batch_norm_backward")
BatchNormTrainingFunction = autograd_function("batch_norm_forward_training", "BatchNormTrainingFunction")
BatchNormInferenceFunction = autograd_function("batch_norm_forward_inference", "BatchNormInferenceFunction")


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
        input: (N, C, ...), any strides; float32, float64, float16 or bfloat16.
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

    Differentiable any number of times with respect to input, weight and bias; beyond the first time by a composition
    of PyTorch's operations.

    Example:
        >>> cuda_ops.functional.batch_norm(torch.tensor([[1.0], [3.0]]), None, None, training=True)
        tensor([[-1.0000],
                [ 1.0000]])
    """
    return _batch_norm(input, running_mean, running_var, None, weight, bias, training, momentum, eps)


def _batch_norm(input, running_mean, running_var, num_batches_tracked, weight, bias, training, momentum, eps):
    """The functional, with the number of batches, which training counts."""
    if (eps if type(eps) is float else number("batch_norm", "eps", eps)) <= 0.0:
        raise ValueError(f"batch_norm: expected eps to be positive, got {eps}")
    training = flag("batch_norm", "training", training)
    if isinstance(running_mean, Tensor) and isinstance(running_var, Tensor):
        if training:
            return batch_norm_forward_tracking(
                input, weight, bias, running_mean, running_var, num_batches_tracked, momentum, eps
            )[0]
        number("batch_norm", "momentum", momentum)
        return batch_norm_forward_inference(input, weight, bias, running_mean, running_var, eps)
    check_tensors("batch_norm", input=input)
    check_tensors_or_none("batch_norm", running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    number("batch_norm", "momentum", momentum)
    if not training:
        name = "running_mean" if running_mean is None else "running_var"
        raise RuntimeError(f"batch_norm: {name} must be defined in evaluation mode")
    if running_mean is not None or running_var is not None:
        raise ValueError("batch_norm: running_mean and running_var must either both be None or neither be None")
    return batch_norm_forward_training(input, weight, bias, eps)[0]


def module_arguments(module):
    """What a module of torch.nn's batch normalisations, as it is now, calls _batch_norm with after input: running
    statistics, number of batches, weight, bias, training and momentum."""
    training, momentum = module.training, module.momentum
    mean, variance = buffer(module, "running_mean"), buffer(module, "running_var")
    batches = None
    if training:
        if module.track_running_stats:
            batches = buffer(module, "num_batches_tracked")
        else:
            mean = variance = None
    else:  # without running statistics those of the batch are used in evaluation as well
        training = mean is None and variance is None
    if momentum is None:  # the average over all batches so far
        momentum = 0.0
        if batches is not None:
            momentum, batches = 1.0 / float(batches.add_(1)), None
    return mean, variance, batches, parameter(module, "weight"), parameter(module, "bias"), training, momentum


class _Forward:
    """The forward pass of torch.nn's batch normalisations, by our functional."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        return _batch_norm(input, *module_arguments(self), self.eps)


class BatchNorm1d(_Forward, torch.nn.BatchNorm1d):
    """torch.nn.BatchNorm1d by :func:`cuda_ops.functional.batch_norm`: same arguments, repr and state_dict."""


class BatchNorm2d(_Forward, torch.nn.BatchNorm2d):
    """torch.nn.BatchNorm2d by :func:`cuda_ops.functional.batch_norm`: same arguments, repr and state_dict."""


class BatchNorm3d(_Forward, torch.nn.BatchNorm3d):
    """torch.nn.BatchNorm3d by :func:`cuda_ops.functional.batch_norm`: same arguments, repr and state_dict."""
