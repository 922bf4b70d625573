"""rms_norm: normalisation of the last dimensions by their root mean square."""

import torch
from torch import Tensor

from .._arguments import check_tensors
from .._autograd import autograd_function
from .._fakes import register_fake
from .._modules import parameter
from .._operators import operator
from ._norm import check_shapes, empty_rstd, shape_of


@register_fake("cuda_ops::rms_norm_forward")
def _(input, normalized_shape, weight, eps):
    rows = check_shapes("rms_norm", input, normalized_shape, weight=weight)
    return torch.empty_like(input, memory_format=torch.contiguous_format), empty_rstd(input, rows)


@register_fake("cuda_ops::rms_norm_backward")
def _(grad_output, grad_sum, input, normalized_shape, weight, rstd, eps, wanted):
    dtype = weight.dtype if weight is not None else input.dtype
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format) if wanted[0] else input.new_empty(0),
        input.new_empty(normalized_shape if wanted[1] else 0, dtype=dtype),
    )


rms_norm_forward = operator("rms_norm_forward")
RMSNormFunction = autograd_function("rms_norm_forward", "RMSNormFunction")


def eps_or_default(op: str, input: Tensor, eps: float | None):
    """As PyTorch: the machine epsilon of the dtype that is computed in."""
    if eps is not None:
        return eps
    check_tensors(op, input=input)
    return torch.finfo(torch.float64 if input.dtype == torch.float64 else torch.float32).eps


def rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    r"""Root mean square normalisation over the last dimensions,
    :math:`\text{output} = \text{input} / \sqrt{\overline{\text{input}^2} + \text{eps}} \cdot \text{weight}`, with the
    mean over each row, which is what lies along these dimensions.

    Args:
        input: (\*, `normalized_shape`), any strides; float32, float64, float16 or bfloat16.
        normalized_shape: the sizes of the last dimensions, those to be normalised over.
        weight: of that shape, or None for 1; of the dtype of `input`, or float32 beside a float16 or bfloat16 `input`.
        eps: added to the mean; None for the machine epsilon of the dtype that is computed in, float64 for a float64
            `input`, else float32.

    Returns:
        A contiguous tensor of the shape and dtype of `input`.

    Raises:
        TypeError: a tensor is none, `normalized_shape` is no tuple or list of ints, or `eps` no number.
        RuntimeError: `input` is not floating point, or does not end in `normalized_shape`; weight has the wrong shape,
            dtype or device.

    Differentiable any number of times; beyond the first time by a composition of PyTorch's operations.

    Example:
        >>> cuda_ops.functional.rms_norm(torch.tensor([1.0, 7.0]), (2,))
        tensor([0.2000, 1.4000])
    """
    eps = eps_or_default("rms_norm", input, eps)
    return rms_norm_forward(input, shape_of("rms_norm", normalized_shape), weight, eps)[0]


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm by :func:`cuda_ops.functional.rms_norm`: same arguments, repr and state_dict."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, parameter(self, "weight"), self.eps)
