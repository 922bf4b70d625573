"""concat_batch_norm_act: batch normalisation and an activation of tensors that are one behind the other along the
channels, read where they are. The features of a DenseNet's block take it (conversion/fusing.py)."""

import torch

from .._arguments import expect
from .._fakes import register_fake
from .batch_norm import _check_batch, _check_channels, _empty_like

OP = "concat_batch_norm_act"


def _whole(tensors):
    """The concatenation, which stands for its shape."""
    expect(len(tensors) > 0, OP, "tensors to have elements, got none")
    return torch.cat(list(tensors), 1)


@register_fake("cuda_ops::batch_norm_moments")
def _(input):
    return input.new_empty((2, input.shape[1]), dtype=torch.float64)


@register_fake("cuda_ops::concat_batch_norm_act_forward_training")
def _(
    tensors, moments, weight, bias, running_mean, running_var, num_batches_tracked, activation, momentum, eps
):  # fmt: skip
    whole = _whole(tensors)
    _check_channels(OP, whole, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    _check_batch(OP, whole)
    mean = whole.new_empty(whole.shape[1], dtype=torch.float64)
    return _empty_like(whole), mean, torch.empty_like(mean)


@register_fake("cuda_ops::concat_batch_norm_act_forward_inference")
def _(tensors, weight, bias, running_mean, running_var, activation, eps):
    whole = _whole(tensors)
    _check_channels(OP, whole, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    return _empty_like(whole)


@register_fake("cuda_ops::concat_batch_norm_act_backward")
def _(
    grad_output, tensors, grads, weight, bias, mean, variance, training, activation, eps, wanted, wants_parameters
):  # fmt: skip
    whole = _whole(tensors)
    format = torch._prims_common.suggest_memory_format(tensors[0])
    dtype = weight.dtype if weight is not None else whole.dtype if bias is None else bias.dtype
    grad_weight = whole.new_empty(whole.shape[1] if wants_parameters else 0, dtype=dtype)
    grad_tensors = [
        torch.empty_like(tensor, memory_format=format) if wants else tensor.new_empty(0)
        for tensor, wants in zip(tensors, wanted, strict=True)
    ]
    return grad_tensors, grad_weight, torch.empty_like(grad_weight)


# torch.ops parses the lists; the parser of other ops' calls (_operators.py) knows none.
concat_batch_norm_act = torch.ops.cuda_ops.concat_batch_norm_act.default
