"""linear_cross_entropy: the last layer of a classifier and its loss, without storing the logits.

Where gradients are wanted, forward computes them along with the loss, since the logits are at hand; backward only
multiplies them by grad_output and by what a mean divides by.
"""

import torch
from torch import Tensor

from .._arguments import expect
from .._autograd import autograd_function
from .._fakes import register_fake
from .._loss import accumulate_dtype, reduction_number
from .._modules import parameter
from .._operators import operator


@register_fake("cuda_ops::linear_cross_entropy_forward")
def _(
    input,
    weight,
    target,
    bias,
    row_scale,
    reduction,
    ignore_index,
    label_smoothing,
    z_loss,
    logit_softcap,
    with_input,
    with_weight,
    with_bias,
):
    op = "linear_cross_entropy"
    expect(weight.dim() == 2, op, "weight to have 2 dimensions, got shape {}", tuple(weight.shape))
    expect(input.dim() >= 1, op, "input to have at least 1 dimension, got a scalar")
    message = (
        "the last dimension of input to be the in_features of weight, {} (weight has shape {}), got input of shape {}"
    )
    fits = input.shape[-1] == weight.shape[1]
    expect(fits, op, message, weight.shape[1], list(weight.shape), list(input.shape))
    if bias is not None:
        fits = bias.dim() == 1 and bias.shape[0] == weight.shape[0]
        message = "bias to have shape [{}], the classes of weight, got {}"
        expect(fits, op, message, weight.shape[0], list(bias.shape))
    leading = input.shape[:-1]
    message = "target to have shape {} for an input of shape {}, got {}"
    shapes = list(leading), list(input.shape), list(target.shape)
    expect(target.dim() == len(leading), op, message, *shapes, check=torch._check_value)
    for size, wanted in zip(target.shape, leading, strict=True):
        expect(size == wanted, op, message, *shapes, check=torch._check_value)
    sums = {"dtype": accumulate_dtype(input)}
    rounded = sums if weight.dtype != torch.bfloat16 else {"dtype": torch.bfloat16}
    return (
        weight.new_empty(leading if reduction == 0 else ()),
        input.new_empty((0,) if reduction == 0 else (), **sums),
        input.new_empty(input.shape if with_input else (0,)),
        input.new_empty(weight.shape if with_weight else (0,), **rounded),
        input.new_empty((weight.shape[0] if with_bias else 0,), **sums),
    )


@register_fake("cuda_ops::linear_cross_entropy_scale")
def _(grad_output, total_weight, grad_input, grad_weight, grad_bias, reduction):
    return (
        torch.empty_like(grad_input, memory_format=torch.contiguous_format),
        grad_output.new_empty(grad_weight.shape),
        grad_output.new_empty(grad_bias.shape),
    )


with_wanted_gradients = operator("linear_cross_entropy")
LinearCrossEntropyFunction = autograd_function("linear_cross_entropy_forward", "LinearCrossEntropyFunction")


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float = 0.0,
) -> Tensor:
    r"""Cross-entropy between class indices and the softmax of :math:`x W^T + b`: like
    ``cross_entropy(linear(input, weight, bias), target)``, but the logits are never stored as a whole.

    Args:
        input: (..., in_features), any strides; float32, float64, float16 or bfloat16.
        weight: (classes, in_features); dtype and device of `input`, or float32 beside an `input` in half precision.
        target: class indices in [0, classes), int64 or uint8, of the leading shape of `input`.
        bias: (classes), like `weight`.
        ignore_index: class indices of this value have no part in loss and gradient; it need not be a class.
        reduction: 'none', 'mean' or 'sum'. The mean is the sum divided by the number of targets that are not ignored;
            over nothing it is NaN, as in PyTorch.
        label_smoothing: in [0, 1]: the part of the target that is spread evenly over the classes.
        z_loss: at least 0: each target's loss is increased by `z_loss` times the square of its logits' log-sum-exp,
            which keeps it from drifting (PaLM). Multiplies gradients and the mean like the rest of the loss.
        logit_softcap: at least 0: above 0 the logits are replaced by `logit_softcap` * tanh(logits / `logit_softcap`)
            (Gemma 2).

    Returns:
        One number, or with reduction 'none' one for each target; in the dtype of `weight`.

    Raises:
        IndexError: a target is neither a class nor `ignore_index`; on CUDA late, as with
            :func:`cuda_ops.functional.cross_entropy`.
        TypeError: `input`, `weight`, `target` or `bias` is no tensor, or `ignore_index` no int.
        ValueError: `target` has another shape than `input` without its features; an unknown reduction.
        RuntimeError: another mismatch of shapes, dtypes or devices; `label_smoothing` outside of [0, 1]; a negative
            `z_loss` or `logit_softcap`.

    Gradients are computed along with the loss, where it has a reduction and something requires grad; without a
    reduction backward computes the loss once more. Under autocast `input` alone is cast. Differentiable any
    number of times; from the second derivative on by other kernels, which store the logits.

    On CUDA the logits of a chunk of rows are in memory at a time: 64 MB of them, and in half precision on Hopper up to
    1 GB (4096 rows), where three matrix products run at the tensor cores' pace; a float32 `weight` is rounded to the
    dtype of `input` there, and in the gradient of `weight` rows of `input` times their factor are rounded once more.

    Example:
        >>> cuda_ops.functional.linear_cross_entropy(torch.ones(2, 3), torch.zeros(4, 3), torch.tensor([3, 0]))
        tensor(1.3863)
    """
    reduction = reduction_number("linear_cross_entropy", None, None, reduction)
    options = reduction, ignore_index, label_smoothing, z_loss, logit_softcap
    return with_wanted_gradients(input, weight, target, bias, *options)


class LinearCrossEntropyLoss(torch.nn.Linear):
    """:class:`torch.nn.Linear` and :class:`torch.nn.CrossEntropyLoss` in one, through
    :func:`cuda_ops.functional.linear_cross_entropy`; weight and bias are those of the former.

    Example:
        >>> head = cuda_ops.nn.LinearCrossEntropyLoss(3, 10, label_smoothing=0.1)
        >>> head(torch.ones(2, 3), torch.tensor([3, 0])).shape
        torch.Size([])
        >>> torch.nn.functional.linear(torch.ones(2, 3), head.weight, head.bias).shape  # the logits, to predict with
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        device=None,
        dtype=None,
        z_loss: float = 0.0,
        logit_softcap: float = 0.0,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.logit_softcap = z_loss, logit_softcap

    def extra_repr(self) -> str:
        """torch.nn.Linear's, and what is not the default."""
        defaults = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
        defaults |= {"z_loss": 0.0, "logit_softcap": 0.0}
        changed = [f"{n}={getattr(self, n)!r}" for n, default in defaults.items() if getattr(self, n) != default]
        return ", ".join([super().extra_repr(), *changed])

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(
            input,
            parameter(self, "weight"),
            target,
            parameter(self, "bias"),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            logit_softcap=self.logit_softcap,
        )
