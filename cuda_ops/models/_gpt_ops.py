"""What GPT needs beside cuda_ops.functional: linear layers of float32 parameters in half precision, and the loss of its
head."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import functional
from .._library import problem

if problem is None:
    from .._operators import operator
    from ..ops.cross_entropy import cross_entropy_backward, cross_entropy_forward
    from ..ops.linear import linear_backward_bias, linear_backward_input, linear_backward_weight, linear_forward
    from ..ops.linear_gelu import linear_gelu_backward

    gelu_linear_backward = operator("gelu_linear_backward")
    linear_backward_float32_weight = operator("linear_backward_float32_weight")
    linear_gelu_forward = operator("linear_gelu_forward")

MEAN, IGNORED = 1, -100
"""cross_entropy's defaults, as its op takes them."""


MOST_FUSED_CLASSES = 1024
"""On CUDA, but for half precision on Hopper. Beyond it linear_cross_entropy's own products take more time (49 TFLOP/s
on an H200 in bf16, csrc/cuda/linear_cross_entropy/linear_cross_entropy.cu) than linear's and what it costs to store the
logits."""


def is_fused(input, weight):
    """Whether the head is best done by linear_cross_entropy, with a loss that has the digits of float32."""
    if not input.is_cuda or len(weight) <= MOST_FUSED_CLASSES:
        return True
    half = input.dtype in (torch.float16, torch.bfloat16) and weight.dtype == torch.float32
    return half and weight.shape[1] % 8 == 0 and torch.cuda.get_device_capability(input.device) == (9, 0)


def head_loss(input: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of linear(input, weight), as a number in at least float32.

    Args:
        input: (..., features), where it is in half precision beside a float32 weight.
        weight: (classes, features).
        targets: (...), int64; those of -100 have no part in it.
    """
    if is_fused(input, weight):
        return functional.linear_cross_entropy(input, weight, targets)  # in the dtype of weight
    logits = functional.linear(input, weight.to(input.dtype)).flatten(0, -2)
    targets = targets.flatten()
    if input.dtype == weight.dtype:
        return functional.cross_entropy(logits, targets)
    return MeanLoss.apply(logits, targets)


class MeanLoss(torch.autograd.Function):
    """cross_entropy of logits in half precision as a float32 number: the op's has the dtype of the logits, two or three
    digits; here it is made of what the op leaves for backward."""

    @staticmethod
    def forward(ctx, logits, targets):
        _, statistics, total_weight = cross_entropy_forward(logits, targets, None, MEAN, IGNORED, 0.0)
        ctx.save_for_backward(logits, targets, statistics, total_weight)
        # (Bad class indices are the op's to tell.)
        picked = logits.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        # The logsumexp is the sum of the first two.
        losses = statistics[1] + (statistics[0] - picked.to(statistics.dtype))
        return losses.masked_fill(targets == IGNORED, 0.0).sum() / total_weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        logits, targets, statistics, total_weight = ctx.saved_tensors
        grad = cross_entropy_backward(
            grad_output.to(logits.dtype), logits, targets, None, statistics, total_weight, MEAN, IGNORED, 0.0
        )
        return grad, None


class RoundedLinear(torch.autograd.Function):
    """linear of an input in half precision by float32 parameters, which are rounded to it. The gradient of weight is
    what the product has summed in float32, and is not rounded on the way."""

    @staticmethod
    def forward(ctx, input, weight, bias):
        rounded = weight.to(input.dtype)
        ctx.save_for_backward(input, weight, rounded)
        return linear_forward(input, rounded, None if bias is None else bias.to(input.dtype))

    @staticmethod
    def backward(ctx, grad_output):
        input, weight, rounded = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated further
            rounded = weight.to(input.dtype)
        wanted = ctx.needs_input_grad
        grad_input = linear_backward_input(grad_output, rounded) if wanted[0] else None
        return grad_input, *gradients_of_parameters(grad_output, input, *wanted[1:])


class RoundedMLP(torch.autograd.Function):
    """linear(gelu(linear(input))) likewise. Backward goes through the second layer and gelu in one kernel."""

    @staticmethod
    def forward(ctx, input, weight, bias, next_weight, next_bias, approximate):
        def rounded(tensor):
            return None if tensor is None else tensor.to(input.dtype)

        first, second = rounded(weight), rounded(next_weight)
        wanted = any(ctx.needs_input_grad)
        hidden, preactivation = linear_gelu_forward(input, first, rounded(bias), approximate, wanted)
        ctx.approximate = approximate
        ctx.save_for_backward(input, weight, bias, next_weight, first, second, hidden, preactivation)
        return linear_forward(hidden, second, rounded(next_bias))

    @staticmethod
    def backward(ctx, grad_output):
        input, weight, bias, next_weight, first, second, hidden, preactivation = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():  # to be differentiated further: of differentiable ops, from the arguments on
            first, second = weight.to(input.dtype), next_weight.to(input.dtype)
            preactivation = linear_forward(input, first, None if bias is None else bias.to(input.dtype))
            hidden = functional.gelu(preactivation, approximate=ctx.approximate)
            grad_hidden = linear_backward_input(grad_output, second)
            grad, grad_bias = linear_gelu_backward(grad_hidden, preactivation, ctx.approximate, wanted[2])
        else:
            grad, grad_bias = gelu_linear_backward(grad_output, second, preactivation, ctx.approximate, wanted[2])
        grad_input = linear_backward_input(grad, first) if wanted[0] else None
        grad_weight, _ = gradients_of_parameters(grad, input, wanted[1], False)
        next_grads = gradients_of_parameters(grad_output, hidden, *wanted[3:5])
        return grad_input, grad_weight, widened(grad_bias) if wanted[2] else None, *next_grads, None


def gradients_of_parameters(grad_output, input, with_weight, with_bias):
    """Those of a linear layer, of halves in float32; None where they are not wanted."""
    grad_weight = None
    if with_weight and torch.is_grad_enabled():
        grad_weight = widened(linear_backward_weight(grad_output, input))
    elif with_weight:
        grad_weight = linear_backward_float32_weight(grad_output, input)
    return grad_weight, widened(linear_backward_bias(grad_output)) if with_bias else None


def widened(tensor):
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def is_rounded(input: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the two functions above take these."""
    half = input.is_cuda and input.dtype in (torch.float16, torch.bfloat16)
    return half and all(parameter is None or parameter.dtype == torch.float32 for parameter in parameters)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear whose parameters take the dtype of input."""
    if is_rounded(input, weight, bias):
        return RoundedLinear.apply(input, weight, bias)
    dtype = input.dtype
    return functional.linear(input, weight.to(dtype), None if bias is None else bias.to(dtype))


def mlp(
    input: Tensor, weight: Tensor, bias: Tensor | None, next_weight: Tensor, next_bias: Tensor | None, approximate: str
) -> Tensor:
    """linear, gelu and linear, whose parameters take the dtype of input."""
    if is_rounded(input, weight, bias, next_weight, next_bias):
        return RoundedMLP.apply(input, weight, bias, next_weight, next_bias, approximate)
    dtype = input.dtype
    hidden = functional.linear_gelu(input, weight.to(dtype), None if bias is None else bias.to(dtype), approximate)
    return linear(hidden, next_weight, next_bias)
