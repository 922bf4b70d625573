"""What GPT needs beside cuda_ops.functional: linear layers of float32 parameters in half precision, with the norm that
follows, and the loss of its head."""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from .. import functional
from .._library import problem

if problem is None:
    from .._operators import operator
    from ..ops.add_layer_norm import add_layer_norm_forward, call_of
    from ..ops.attention import attention_packed_forward
    from ..ops.cross_entropy import cross_entropy_backward, cross_entropy_forward
    from ..ops.dropout import dropout_forward
    from ..ops.layer_norm import layer_norm_forward
    from ..ops.linear import linear_backward_bias, linear_backward_input, linear_backward_weight, linear_forward
    from ..ops.linear_gelu import linear_gelu_backward
    from ..ops.round_list import round_list
    from ..ops.token_position_embedding import token_position_embedding_forward

    add_layer_norm_forward_mask = operator("add_layer_norm_forward_mask")
    attention_packed_backward = operator("attention_packed_backward")
    attention_packed_bias = operator("attention_packed_bias")
    attention_packed_gradients = operator("attention_packed_gradients")
    dropout_backward = operator("dropout_backward")
    embedding_backward = operator("embedding_backward")
    embedding_backward_add = operator("embedding_backward_add")
    gelu_linear_backward = operator("gelu_linear_backward")
    layer_norm_backward = operator("layer_norm_backward")
    layer_norm_backward_mask = operator("layer_norm_backward_mask")
    layer_norm_backward_with_sums = operator("layer_norm_backward_with_sums")
    linear_backward_float32_bias = operator("linear_backward_float32_bias")
    linear_backward_float32_weight = operator("linear_backward_float32_weight")
    linear_gelu_forward = operator("linear_gelu_forward")
    position_embedding_backward = operator("position_embedding_backward")

MEAN, IGNORED = 1, -100
"""cross_entropy's defaults, as its op takes them."""


MOST_FUSED_CLASSES = 1024
"""On CUDA, but for half precision on Hopper. Beyond it linear_cross_entropy's own products take more time (49 TFLOP/s
on an H200 in bf16, csrc/cuda/linear_cross_entropy/linear_cross_entropy.cu) than linear's and what it costs to store the
logits."""


MOST_MASKED_FEATURES = 8192
"""Of rows that layer_norm's kernel in registers takes, which the mask of dropout is for."""


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


# The functions below come in pairs, forward and gradients, so that a layer can be an autograd.Function of its own, or
# one with the residual sum and the norm that follow it. `halves` are a layer's parameters in half precision, in their
# order, where they have been made before; what forward saves is a list of tensors and None.


def rounded(parameters, dtype: torch.dtype, halves=()) -> list[Tensor | None]:
    """The parameters in half precision."""
    if halves:
        return list(halves)
    return [None if parameter is None else parameter.to(dtype) for parameter in parameters]


def linear_and_saved(input, weight, bias, *halves):
    first, first_bias = rounded((weight, bias), input.dtype, halves)
    return linear_forward(input, first, first_bias), [input, weight, first]


def linear_gradients(grad_output, saved, wanted, grad_bias=None):
    """Those of input, weight and bias; of the last one `grad_bias`, where it is known."""
    input, weight, first = saved
    if torch.is_grad_enabled():  # to be differentiated further
        first = weight.to(input.dtype)
    grad_input = linear_backward_input(grad_output, first) if wanted[0] else None
    return grad_input, *gradients_of_parameters(grad_output, input, *wanted[1:], grad_bias)


def mlp_and_saved(wanted, keeps, approximate, input, weight, bias, next_weight, next_bias, *halves):
    parameters = weight, bias, next_weight, next_bias
    first, first_bias, second, second_bias = rounded(parameters, input.dtype, halves)
    hidden, preactivation = linear_gelu_forward(input, first, first_bias, approximate, wanted)
    output = linear_forward(hidden, second, second_bias)
    return output, [input, weight, bias, next_weight, first, second, hidden if keeps else None, preactivation]


def mlp_gradients(grad_output, saved, approximate, wanted, grad_next_bias=None):
    """Those of input and the four parameters; of the last one `grad_next_bias`, where it is known. Goes through the
    second layer and gelu in one kernel."""
    input, weight, bias, next_weight, first, second, hidden, preactivation = saved
    if torch.is_grad_enabled():  # to be differentiated further: of differentiable ops, from the arguments on
        first, first_bias, second = rounded((weight, bias, next_weight), input.dtype)
        preactivation = linear_forward(input, first, first_bias)
        hidden = functional.gelu(preactivation, approximate=approximate)
        grad_hidden = linear_backward_input(grad_output, second)
        grad, grad_bias = linear_gelu_backward(grad_hidden, preactivation, approximate, wanted[2])
    else:
        grad, grad_bias = gelu_linear_backward(grad_output, second, preactivation, approximate, wanted[2])
        if hidden is None and wanted[3]:
            hidden = functional.gelu(preactivation, approximate=approximate)
    next_grads = gradients_of_parameters(grad_output, hidden, *wanted[3:], grad_next_bias)
    grad_input = linear_backward_input(grad, first) if wanted[0] else None
    grad_weight, _ = gradients_of_parameters(grad, input, wanted[1], False)
    return grad_input, grad_weight, widened(grad_bias) if wanted[2] else None, *next_grads


def gradients_of_parameters(grad_output, input, with_weight, with_bias, grad_bias=None):
    """Those of a linear layer, of halves in float32, as they were summed; None where they are not wanted."""
    grad_weight, differentiated = None, torch.is_grad_enabled()
    if with_weight:
        product = linear_backward_weight if differentiated else linear_backward_float32_weight
        grad_weight = widened(product(grad_output, input))
    if with_bias and grad_bias is None:
        sums = linear_backward_bias if differentiated else linear_backward_float32_bias
        grad_bias = widened(sums(grad_output))
    return grad_weight, grad_bias if with_bias else None


def widened(tensor):
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def add_norm_and_saved(added, residual, weight, bias, eps, p=0.0):
    """(norm, sum), and what is saved."""
    rest = residual.shape[-1:], weight, bias, eps
    if p == 0.0:
        output, total, mean, rstd, state = add_layer_norm_forward(added, residual, *rest, p, None)
        mask = None
    else:
        output, total, mean, rstd, state, mask = add_layer_norm_forward_mask(added, residual, *rest, p)
    return (output, total), [total, weight, mean, rstd, state, mask]


def add_norm_gradients(grad_output, grad_sum, saved, eps, p, with_weight, with_bias, with_sums):
    """Those of the residual and of what was added to it, of weight and of bias; and the sums of the second over its
    rows, which are the gradient of a bias that was added last, or None where they are not known."""
    total, weight, mean, rstd, state, mask = saved
    if grad_output is None:
        grad_output = torch.zeros_like(total)
    # Of gradients for parameters that there are not.
    shape, dtype = total.shape[-1:], widened(total[:0]).dtype
    both = grad_output, grad_sum, total, shape, weight, mean, rstd
    if p > 0.0 and not torch.is_grad_enabled():
        return *layer_norm_backward_mask(*both, mask, p, dtype, with_weight, with_bias), None
    if torch.is_grad_enabled() or not with_sums:
        grad, *parameters = layer_norm_backward(*both, eps, dtype, [True, with_weight, with_bias])
        return grad, dropout_backward(grad, state, p, grad.stride()) if p > 0.0 else grad, *parameters, None
    grad, *rest = layer_norm_backward_with_sums(*both, dtype, with_weight, with_bias)
    return grad, grad, *rest


class RoundedLinear(torch.autograd.Function):
    """linear of an input in half precision by float32 parameters, which are rounded to it."""

    @staticmethod
    def forward(ctx, input, weight, bias, *halves):
        output, saved = linear_and_saved(input, weight, bias, *halves)
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        return *linear_gradients(grad_output, ctx.saved_tensors, ctx.needs_input_grad[:3]), None, None


class RoundedMLP(torch.autograd.Function):
    """linear(gelu(linear(input))) likewise. Unless it `keeps` gelu's output, backward makes it again."""

    @staticmethod
    def forward(ctx, input, weight, bias, next_weight, next_bias, approximate, keeps=True, *halves):
        ctx.approximate, wanted = approximate, any(ctx.needs_input_grad)
        parameters = weight, bias, next_weight, next_bias
        output, saved = mlp_and_saved(wanted, keeps, approximate, input, *parameters, *halves)
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        grads = mlp_gradients(grad_output, ctx.saved_tensors, ctx.approximate, ctx.needs_input_grad[:5])
        return *grads, *(None,) * 6


class RoundedLinearAddNorm(torch.autograd.Function):
    """add_layer_norm, with dropout, of RoundedLinear's output and a residual: (norm, sum)."""

    @staticmethod
    def forward(ctx, residual, norm_weight, norm_bias, eps, p, input, weight, bias, *halves):
        added, saved = linear_and_saved(input, weight, bias, *halves)
        outputs, of_norm = add_norm_and_saved(added, residual, norm_weight, norm_bias, eps, p)
        ctx.eps, ctx.p = eps, p
        ctx.set_materialize_grads(False)  # nothing comes for the last sum
        ctx.save_for_backward(*of_norm, *saved)
        return outputs

    @staticmethod
    def backward(ctx, grad_output, grad_sum):
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad
        grad, grad_added, grad_weight, grad_bias, sums = add_norm_gradients(
            grad_output, grad_sum, saved[:6], ctx.eps, ctx.p, *wanted[1:3], wanted[7]
        )
        grads = linear_gradients(grad_added, saved[6:], wanted[5:8], sums)
        return *where(wanted, grad, grad_weight, grad_bias), None, None, *grads, None, None


class RoundedAttentionAddNorm(torch.autograd.Function):
    """add_layer_norm of what attention's two layers make of an input, with attention between them, causal and without
    dropout, and a residual: (norm, sum). Of the first layer's bias only the queries' part is summed over the rows of a
    gradient (see attention_packed_bias)."""

    @staticmethod
    def forward(ctx, residual, norm_weight, norm_bias, eps, heads, input, *parameters):
        """parameters: two weights and biases, and the halves of these, if they are there."""
        weight, bias, next_weight, next_bias, *halves = parameters
        first, first_bias, second, second_bias = rounded((weight, bias, next_weight, next_bias), input.dtype, halves)
        qkv = packed(linear_forward(input, first, first_bias), heads)
        output, logsumexp, state = attention_packed_forward(qkv, *options_of(qkv), None)
        added = linear_forward(output.flatten(2), second, second_bias)
        outputs, of_norm = add_norm_and_saved(added, residual, norm_weight, norm_bias, eps)
        ctx.eps, ctx.heads = eps, heads
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*of_norm, input, weight, bias, first, next_weight, second, qkv, output, logsumexp, state)
        return outputs

    @staticmethod
    def backward(ctx, grad_output, grad_sum):
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad
        input, weight, bias, first, next_weight, second, qkv, output, *statistics = saved[6:]
        grad, _, grad_weight, grad_bias, sums = add_norm_gradients(
            grad_output, grad_sum, saved[:6], ctx.eps, 0.0, *wanted[1:3], wanted[9]
        )
        if torch.is_grad_enabled():  # to be differentiated further: of the arguments, as above
            qkv = packed(linear_forward(input, *rounded((weight, bias), input.dtype)), ctx.heads)
            output, *statistics = attention_packed_forward(qkv, *options_of(qkv), None)
        mixed = output.flatten(2)
        grad_mixed, *next_grads = linear_gradients(grad, (mixed, next_weight, second), (True, *wanted[8:10]), sums)
        backward = attention_packed_gradients if torch.is_grad_enabled() else attention_packed_backward
        alibi, *options = options_of(qkv)
        grad_qkv = backward(grad_mixed.view(output.shape), None, qkv, alibi, output, *statistics, *options)
        sums = attention_packed_bias(grad_qkv, sums, second) if sums is not None and wanted[7] else None
        grads = linear_gradients(grad_qkv.flatten(2), (input, weight, first), wanted[5:8], sums)
        return *where(wanted, grad, grad_weight, grad_bias), None, None, *grads, *next_grads, *(None,) * 4


def packed(projected, heads):
    """What c_attn makes as attention's packed ops take it."""
    batch, length, features = projected.shape
    return projected.view(batch, length, 3, heads, features // (3 * heads))


def options_of(qkv):
    """Those of the packed ops, of slopes on: causal, without dropout."""
    return None, 1.0 / math.sqrt(qkv.shape[-1]), -1, 0, 0.0, 0.0


class RoundedMLPAddNorm(torch.autograd.Function):
    """add_layer_norm, with dropout, of RoundedMLP's output and a residual: (norm, sum)."""

    @staticmethod
    def forward(ctx, residual, norm_weight, norm_bias, eps, p, input, *parameters):
        """parameters: RoundedMLP's arguments behind input."""
        weight, bias, next_weight, next_bias, approximate, keeps, *halves = parameters
        wanted, layers = any(ctx.needs_input_grad), (weight, bias, next_weight, next_bias)
        added, saved = mlp_and_saved(wanted, keeps, approximate, input, *layers, *halves)
        outputs, of_norm = add_norm_and_saved(added, residual, norm_weight, norm_bias, eps, p)
        ctx.eps, ctx.p, ctx.approximate = eps, p, approximate
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*of_norm, *saved)
        return outputs

    @staticmethod
    def backward(ctx, grad_output, grad_sum):
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad
        grad, grad_added, grad_weight, grad_bias, sums = add_norm_gradients(
            grad_output, grad_sum, saved[:6], ctx.eps, ctx.p, *wanted[1:3], wanted[9]
        )
        grads = mlp_gradients(grad_added, saved[6:], ctx.approximate, wanted[5:10], sums)
        return *where(wanted, grad, grad_weight, grad_bias), None, None, *grads, *(None,) * 6


class TiedEmbedding(torch.autograd.Function):
    """token_position_embedding, and the table of tokens for the head, whose gradient of it is a tensor of its own:
    backward adds what the embedding gives to that, which touches the rows of the tokens that there are alone."""

    @staticmethod
    def forward(ctx, tokens, table, positions, dtype):
        ctx.of_table, ctx.of_positions = (table.shape, table.dtype), (positions.shape, positions.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tokens)
        return token_position_embedding_forward(tokens, table, positions, dtype), table.view_as(table)

    @staticmethod
    def backward(ctx, grad_output, grad_table):
        (tokens,) = ctx.saved_tensors
        if grad_output is None:
            return None, grad_table, None, None
        if grad_table is None or torch.is_grad_enabled() or not grad_table.is_contiguous():
            grad = embedding_backward(grad_output, tokens, *ctx.of_table, -1, False)
            grad_table = grad if grad_table is None else grad_table + grad
        else:
            embedding_backward_add(grad_table, grad_output, tokens)
        grad_positions = (
            position_embedding_backward(grad_output, *ctx.of_positions) if ctx.needs_input_grad[2] else None
        )
        return None, grad_table, grad_positions, None


class DroppedNorm(torch.autograd.Function):
    """layer_norm of dropout's output, and that output: (norm, dropped). The norm's backward adds the gradients of the
    two."""

    @staticmethod
    def forward(ctx, input, weight, bias, eps, p):
        # The mask goes by the offset in memory.
        if p > 0.0:
            dropped, state = dropout_forward(input.contiguous(), p, call_of(input, p))
        else:
            dropped, state = input.view_as(input), None
        output, mean, rstd = layer_norm_forward(dropped, dropped.shape[-1:], weight, bias, eps)
        ctx.eps, ctx.p, ctx.bias_dtype = eps, p, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dropped, weight, mean, rstd, state)
        return output, dropped

    @staticmethod
    def backward(ctx, grad_output, grad_dropped):
        dropped, weight, mean, rstd, state = ctx.saved_tensors
        _, *parameters = ctx.needs_input_grad[:3]
        if grad_output is None:
            grad_output = torch.zeros_like(dropped)
        rest = dropped, dropped.shape[-1:], weight, mean, rstd
        grad, *grads = layer_norm_backward(
            grad_output, grad_dropped, *rest, ctx.eps, ctx.bias_dtype, [True, *parameters]
        )
        if ctx.p > 0.0:
            grad = dropout_backward(grad, state, ctx.p, grad.stride())
        return *where(ctx.needs_input_grad, grad, *grads), None, None


def where(wanted, *gradients):
    """None for those that are not wanted."""
    return [gradient if one else None for one, gradient in zip(wanted, gradients, strict=False)]


def is_rounded(input: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the functions above take these."""
    half = input.is_cuda and input.dtype in (torch.float16, torch.bfloat16)
    return half and all(parameter is None or parameter.dtype == torch.float32 for parameter in parameters)


def halves_of(like: Tensor, layers: list) -> list:
    """Of a list of blocks of layers of parameters (tensors and None) the same in half precision, made in one launch; of
    each layer nothing, unless all are such as is_rounded takes, beside `like`."""
    there = [tensor for block in layers for layer in block for tensor in layer if tensor is not None]
    if not is_rounded(like, *there) or any(tensor.device != like.device for tensor in there):
        return [[() for _ in block] for block in layers]
    made = iter(round_list(there, like.dtype))
    return [[tuple(None if t is None else next(made) for t in layer) for layer in block] for block in layers]


def embedding(tokens: Tensor, table: Tensor, positions: Tensor, dtype: torch.dtype | None, is_tied: bool) -> tuple:
    """token_position_embedding, and the table as the head is to take it, whose weight it is where it `is_tied`."""
    halves = table.is_cuda and table.dtype == torch.float32 and dtype in (torch.float16, torch.bfloat16)
    if is_tied and halves and table.requires_grad and torch.is_grad_enabled() and not is_compiling():
        return TiedEmbedding.apply(tokens, table, positions, dtype)
    return functional.token_position_embedding(tokens, table, positions, dtype), table


def dropped_norm(input: Tensor, norm: tuple, p: float) -> tuple[Tensor, Tensor]:
    """layer_norm of dropout's output, and that output; `norm` is what layer_norm takes behind its input."""
    shape, weight, bias, eps = norm
    if len(shape) == 1 and is_rounded(input, weight, bias):
        return DroppedNorm.apply(input, weight, bias, eps, p)
    dropped = functional.dropout(input, p) if p else input
    return functional.layer_norm(dropped, *norm), dropped


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, halves: tuple = ()) -> Tensor:
    """linear whose parameters take the dtype of input."""
    if is_rounded(input, weight, bias):
        return RoundedLinear.apply(input, weight, bias, *halves)
    dtype = input.dtype
    return functional.linear(input, weight.to(dtype), None if bias is None else bias.to(dtype))


def mlp(input: Tensor, parameters: tuple, approximate: str, keeps: bool = True, halves: tuple = ()) -> Tensor:
    """linear, gelu and linear, whose parameters, two weights and biases, take the dtype of input. Unless it `keeps`
    gelu's output, backward makes it again, in half precision on CUDA."""
    if is_rounded(input, *parameters):
        return RoundedMLP.apply(input, *parameters, approximate, keeps, *halves)
    weight, bias, next_weight, next_bias = parameters
    dtype = input.dtype
    hidden = functional.linear_gelu(input, weight.to(dtype), None if bias is None else bias.to(dtype), approximate)
    return linear(hidden, next_weight, next_bias)


def finds_bias(input: Tensor, residual: Tensor, norm: tuple, p: float, *parameters: Tensor | None) -> bool:
    """Whether the backward of the norm behind a layer is to find the gradient of the layer's last bias."""
    _, weight, bias, _ = norm
    alike = residual.dtype == input.dtype and residual.device == input.device
    there = parameters[-1] is not None and parameters[-1].requires_grad and torch.is_grad_enabled()
    return p == 0.0 and there and alike and len(norm[0]) == 1 and is_rounded(input, *parameters, weight, bias)


def keeps_mask(input: Tensor, residual: Tensor, norm: tuple, p: float, *parameters: Tensor | None) -> bool:
    """Whether the norm behind a layer, with dropout between them, is to keep the mask for a backward that gives the
    gradients of both summands."""
    shape, weight, bias, _ = norm
    alike = residual.dtype == input.dtype and residual.device == input.device
    if not (0.0 < p < 1.0 and alike and len(shape) == 1 and is_rounded(input, *parameters, weight, bias)):
        return False
    rows = shape[0] % 8 == 0 and shape[0] <= MOST_MASKED_FEATURES and input.is_cuda
    return rows and torch.is_grad_enabled() and not is_compiling()


def linear_add_norm(
    input: Tensor, parameters: tuple, residual: Tensor, norm: tuple, p: float, halves: tuple = ()
) -> tuple[Tensor, Tensor]:
    """add_layer_norm of linear's output and a residual; `norm` is what add_layer_norm takes behind them, `p` the
    probability of dropout."""
    there = input, residual, norm, p, *parameters
    if not (finds_bias(*there) or keeps_mask(*there)):
        return functional.add_layer_norm(linear(input, *parameters, halves), residual, *norm, p)
    return RoundedLinearAddNorm.apply(residual, *norm[1:], p, input, *parameters, *halves)


def mlp_add_norm(
    input: Tensor,
    parameters: tuple,
    approximate: str,
    residual: Tensor,
    norm: tuple,
    p: float,
    keeps: bool,
    halves: tuple = (),
) -> tuple[Tensor, Tensor]:
    """The same of mlp's output."""
    there = input, residual, norm, p, *parameters
    if not (finds_bias(*there) or keeps_mask(*there)):
        return functional.add_layer_norm(mlp(input, parameters, approximate, keeps, halves), residual, *norm, p)
    return RoundedMLPAddNorm.apply(residual, *norm[1:], p, input, *parameters, approximate, keeps, *halves)


def attention_add_norm(
    input: Tensor, parameters: tuple, heads: int, residual: Tensor, norm: tuple, halves: tuple = ()
) -> tuple[Tensor, Tensor]:
    """add_layer_norm of what attention, causal and without dropout, and the layers before and behind it make of input,
    by their parameters, two weights and biases, and a residual; where finds_bias says so."""
    return RoundedAttentionAddNorm.apply(residual, *norm[1:], heads, input, *parameters, *halves)
