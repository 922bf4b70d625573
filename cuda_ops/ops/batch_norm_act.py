"""batch_norm_act: batch normalisation, a residual sum and an activation in the passes of the normalisation."""

import torch
from torch import Tensor

from .._arguments import check_tensors, check_tensors_or_none, expect, flag, number
from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import composite, operator
from .batch_norm import (
    _check_batch,
    _check_channels,
    _empty_like,
    batch_norm_backward,
    batch_norm_forward_inference,
    batch_norm_forward_training,
    module_arguments,
)
from .hardswish import hardswish_backward
from .relu import relu_backward
from .relu6 import relu6_backward
from .silu import silu_backward


def _check_residual(op, input, residual, activation):
    if activation not in (None, *SLOPES):
        names = ", ".join(map(repr, SLOPES))
        raise ValueError(f"{op}: expected activation to be {names} or None, got {activation!r}")
    if residual is not None:
        message = "residual to have the shape of input, {}, got {}"
        fits = residual.dim() == input.dim() and all(a == b for a, b in zip(residual.shape, input.shape, strict=True))
        expect(fits, op, message, list(input.shape), list(residual.shape))


@register_fake("cuda_ops::batch_norm_act_forward_training")
def _(input, weight, bias, residual, activation, eps):
    _check_residual("batch_norm_act", input, residual, activation)
    _check_channels("batch_norm_act", input, weight=weight, bias=bias)
    _check_batch("batch_norm_act", input)
    mean = input.new_empty(input.shape[1], dtype=torch.float64)
    return _empty_like(input), mean, torch.empty_like(mean)


@register_fake("cuda_ops::batch_norm_act_forward_tracking")
def _(input, weight, bias, residual, running_mean, running_var, num_batches_tracked, activation, momentum, eps):
    _check_residual("batch_norm_act", input, residual, activation)
    _check_channels(
        "batch_norm_act", input, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var
    )
    _check_batch("batch_norm_act", input)
    mean = input.new_empty(input.shape[1], dtype=torch.float64)
    return _empty_like(input), mean, torch.empty_like(mean)


@register_fake("cuda_ops::batch_norm_act_forward_inference")
def _(input, weight, bias, residual, running_mean, running_var, activation, eps):
    _check_residual("batch_norm_act", input, residual, activation)
    _check_channels(
        "batch_norm_act", input, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var
    )
    return _empty_like(input)


@register_fake("cuda_ops::batch_norm_act_backward")
def _(grad_output, input, weight, bias, residual, mean, variance, training, activation, eps, wanted):
    channels = input.shape[1] if wanted[1] or wanted[2] else 0
    dtype = weight.dtype if weight is not None else input.dtype if bias is None else bias.dtype
    return (
        _empty_like(input) if wanted[0] else input.new_empty(0),
        input.new_empty(channels, dtype=dtype),
        input.new_empty(channels, dtype=dtype),
        _empty_like(input) if wanted[3] else input.new_empty(0),
    )


@register_fake("cuda_ops::batch_norm_act_backward_of_two")
def _(
    grad_output, added, input, weight, bias, residual, mean, variance, training, activation, eps, wanted
):  # fmt: skip
    arguments = grad_output, input, weight, bias, residual, mean, variance, training, activation, eps, wanted
    return torch.ops.cuda_ops.batch_norm_act_backward(*arguments)


batch_norm_act_forward_training = operator("batch_norm_act_forward_training")
batch_norm_act_forward_tracking = operator("batch_norm_act_forward_tracking")
batch_norm_act_forward_inference = operator("batch_norm_act_forward_inference")
batch_norm_act_backward = operator("batch_norm_act_backward")
BatchNormActTrainingFunction = autograd_function("batch_norm_act_forward_training", "BatchNormActTrainingFunction")
BatchNormActInferenceFunction = autograd_function("batch_norm_act_forward_inference", "BatchNormActInferenceFunction")


# Second derivatives and tangents are composed of ops that are differentiable.
SLOPES = {
    "relu": lambda grad, z: relu_backward(grad, torch.relu(z)),
    "relu6": lambda grad, z: relu6_backward(grad, z.clamp(0, 6)),
    "silu": silu_backward,
    "hardswish": hardswish_backward,
}


def _gate(grad, input, weight, bias, residual, mean, variance, training, activation, eps):
    """grad * f'(z), z the activation's argument."""
    if activation is None:
        return grad
    if training:
        z = batch_norm_forward_training(input, weight, bias, eps)[0]
    else:
        z = batch_norm_forward_inference(input, weight, bias, mean, variance, eps)
    return SLOPES[activation](grad, z if residual is None else z + residual)


@composite("batch_norm_act_gradients")
def _(grad_output, input, weight, bias, residual, mean, variance, training, activation, eps, wanted):
    grad = _gate(grad_output, input, weight, bias, residual, mean, variance, training, activation, eps)
    bias_dtype = None if bias is None else bias.dtype
    grads = batch_norm_backward(grad, input, weight, mean, variance, training, eps, bias_dtype, list(wanted[:3]))
    return (*grads, grad if wanted[3] else grad.new_empty(0))


@composite("batch_norm_act_tangents")
def _(
    t_input, t_weight, t_bias, t_residual, input, weight, bias, residual, mean, variance, training, activation, eps
):  # fmt: skip
    """The tangent of output. A channel's Jacobian is symmetric: input's tangent takes the op of its gradient."""
    total = None
    if t_input is not None:
        wanted = [True, False, False]
        total = batch_norm_backward(t_input, input, weight, mean, variance, training, eps, None, wanted)[0]
    if t_weight is not None:
        if training:
            change = batch_norm_forward_training(input, t_weight, None, eps)[0]
        else:
            change = batch_norm_forward_inference(input, t_weight, None, mean, variance, eps)
        total = change if total is None else total + change
    if t_bias is not None:
        shape = [-1 if d == 1 else 1 for d in range(input.dim())]
        change = t_bias.to(input.dtype).view(shape).expand_as(input)
        total = change if total is None else total + change
    if t_residual is not None:
        total = t_residual if total is None else total + t_residual
    return _gate(total, input, weight, bias, residual, mean, variance, training, activation, eps)


def batch_norm_act(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = "relu",
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    r"""Batch normalisation, a residual sum and an activation:
    :math:`\text{output} = f(\text{batch_norm}(\text{input}) + \text{residual})`.

    As :func:`cuda_ops.functional.batch_norm` and the activation one after the other, in the passes over memory of the
    first: forward reads the residual once more, and backward computes the activation's argument anew.

    Args:
        input: (N, C, ...), any strides; float32 or float64, on CUDA float16 and bfloat16 too.
        running_mean, running_var, weight, bias: as in :func:`cuda_ops.functional.batch_norm`.
        residual: of the shape and dtype of `input`, or None.
        activation: ``"relu"``, ``"relu6"``, ``"silu"``, ``"hardswish"`` or None.
        training, momentum, eps: as in :func:`cuda_ops.functional.batch_norm`.

    Returns:
        A tensor of the shape and dtype of `input`, channels_last if `input` is, else contiguous. The sum is rounded
        once, after the activation.

    Raises:
        TypeError: a tensor is none, `momentum` or `eps` no number, or `training` no bool.
        ValueError: `activation` is none of these; training with one value per channel, or with only one of the running
            statistics; `eps` is not above 0.
        RuntimeError: not training, and a running statistic is None; `input` is not floating point or has less than
            2 dimensions; another tensor has the wrong shape, dtype or device; a running statistic requires grad.
        NotImplementedError: `input` is float16 or bfloat16 on the CPU.

    Differentiable any number of times with respect to input, weight, bias and residual; beyond the first time by a
    composition of batch_norm's and the activation's gradients.

    Example:
        >>> cuda_ops.functional.batch_norm_act(torch.tensor([[1.0], [3.0]]), None, None, training=True)
        tensor([[0.0000],
                [1.0000]])
    """
    return _batch_norm_act(
        input, running_mean, running_var, None, weight, bias, residual, activation, training, momentum, eps
    )


def _batch_norm_act(
    input, running_mean, running_var, num_batches_tracked, weight, bias, residual, activation, training, momentum, eps
):
    """The functional, with the number of batches, which training counts."""
    if (eps if type(eps) is float else number("batch_norm_act", "eps", eps)) <= 0.0:
        raise ValueError(f"batch_norm_act: expected eps to be positive, got {eps}")
    training = flag("batch_norm_act", "training", training)
    if isinstance(running_mean, Tensor) and isinstance(running_var, Tensor):
        if training:
            return batch_norm_act_forward_tracking(
                input,
                weight,
                bias,
                residual,
                running_mean,
                running_var,
                num_batches_tracked,
                activation,
                momentum,
                eps,
            )[0]
        number("batch_norm_act", "momentum", momentum)
        return batch_norm_act_forward_inference(
            input, weight, bias, residual, running_mean, running_var, activation, eps
        )
    check_tensors("batch_norm_act", input=input)
    check_tensors_or_none(
        "batch_norm_act",
        running_mean=running_mean,
        running_var=running_var,
        weight=weight,
        bias=bias,
        residual=residual,
    )
    number("batch_norm_act", "momentum", momentum)
    if not training:
        name = "running_mean" if running_mean is None else "running_var"
        raise RuntimeError(f"batch_norm_act: {name} must be defined in evaluation mode")
    if running_mean is not None or running_var is not None:
        raise ValueError("batch_norm_act: running_mean and running_var must either both be None or neither be None")
    return batch_norm_act_forward_training(input, weight, bias, residual, activation, eps)[0]


# torch.ops parses the list that it returns.
batch_norm_act_forked = torch.ops.cuda_ops.batch_norm_act_forked.default


def batch_norm_act_forked_module(input: Tensor, norm, residual: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """As batch_norm_act_module, and an alias of the output: what reads the one and what reads the other have gradients
    that backward's kernel adds up (csrc/torch/batch_norm_act_forked.cpp)."""
    *statistics, weight, bias, training, momentum = module_arguments(norm)
    arguments = input, weight, bias, residual, *statistics, activation, training, momentum, norm.eps
    output, alias = batch_norm_act_forked(*arguments)
    return output, alias[0] if alias else output


def batch_norm_act_module(input: Tensor, norm, residual: Tensor | None, activation: str | None) -> Tensor:
    """With the parameters and statistics of a module of torch.nn's batch normalisations."""
    *statistics, weight, bias, training, momentum = module_arguments(norm)
    return _batch_norm_act(input, *statistics, weight, bias, residual, activation, training, momentum, norm.eps)
