"""excitation: the two products of a squeeze-and-excitation block, of images that are pooled to a pixel."""

import torch
from torch import Tensor

from .._arguments import check_tensors, check_tensors_or_none, expect
from .._fakes import register_fake
from .._operators import check_tangent, composite, operator
from .batch_norm_act import SLOPES
from .hardswish import hardswish
from .linear import linear_forward
from .matmul import matmul_of_any
from .relu import relu
from .silu import silu

OP = "excitation"
ACTIVATIONS = {"relu": relu, "silu": silu, "hardswish": hardswish}


def _check(input, weight1, bias1, weight2, bias2, activation):
    if activation not in ACTIVATIONS:
        raise ValueError(f"{OP}: expected activation to be 'relu', 'silu' or 'hardswish', got {activation!r}")
    fits = input.dim() >= 2 and input.shape[2:].numel() == 1
    expect(fits, OP, "input to be images of one pixel, got shape {}", list(input.shape))
    depth = input.shape[1]
    for number, weight, bias in ((1, weight1, bias1), (2, weight2, bias2)):
        fits = weight.dim() >= 2 and weight.shape[2:].numel() == 1 and weight.shape[1] == depth
        message = f"weight{number} to be of a convolution of one pixel, of shape [*, {depth}], got {{}}"
        expect(fits, OP, message, list(weight.shape))
        depth = weight.shape[0]
        fits = bias is None or (bias.dim() == 1 and bias.shape[0] == depth)
        expect(fits, OP, f"bias{number} to have shape [{depth}], got {{}}", [] if bias is None else list(bias.shape))


@register_fake("cuda_ops::excitation_forward")
def _(input, weight1, bias1, weight2, bias2, activation):
    _check(input, weight1, bias1, weight2, bias2, activation)
    return input.new_empty([input.shape[0], weight2.shape[0], *input.shape[2:]])


def _rows(input, *tensors):
    """As rows, of the dtype in which the kernels sum: float32 for halves."""
    dtype = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    return [None if t is None else (t.flatten(1) if t.dim() > 1 else t).to(dtype) for t in (input, *tensors)]


@composite("excitation_gradients")
def _(grad_output, input, weight1, bias1, weight2, bias2, activation, wanted):
    """The gradients that are wanted, by ops that are differentiable further, of the first product computed anew."""
    _check(input, weight1, bias1, weight2, bias2, activation)
    for number, bias, want in ((1, bias1, wanted[2]), (2, bias2, wanted[4])):
        expect(bias is not None or not want, OP, f"bias{number}, whose gradient is wanted, to be there")
    fits = grad_output.shape == (input.shape[0], weight2.shape[0], *input.shape[2:])
    expect(fits, OP, "grad_output to have output's shape, got {}", list(grad_output.shape))
    x, w1, b1, w2, grad = _rows(input, weight1, bias1, weight2, grad_output)
    z = linear_forward(x, w1, b1)
    grad_z = SLOPES[activation](matmul_of_any(grad, w2), z) if any(wanted[:3]) else None
    gradients = (
        lambda: matmul_of_any(grad_z, w1).view(input.shape).to(input.dtype),
        lambda: matmul_of_any(grad_z.t(), x).view(weight1.shape).to(weight1.dtype),
        lambda: grad_z.sum(0).to(bias1.dtype),
        lambda: matmul_of_any(grad.t(), ACTIVATIONS[activation](z)).view(weight2.shape).to(weight2.dtype),
        lambda: grad.sum(0).to(bias2.dtype),
    )
    return [gradient() for gradient, want in zip(gradients, wanted, strict=True) if want]


@composite("excitation_tangent")
def _(t_input, t_weight1, t_bias1, t_weight2, t_bias2, input, weight1, bias1, weight2, bias2, activation):
    """The tangent of output, by the same ops."""
    tangents = t_input, t_weight1, t_bias1, t_weight2, t_bias2
    tensors = input, weight1, bias1, weight2, bias2
    for name, tensor, tangent in zip(("input", "weight1", "bias1", "weight2", "bias2"), tensors, tangents, strict=True):
        check_tangent(OP, name, tensor, tangent)
    _check(*tensors, activation)
    x, w1, b1, w2, t_x, t_w1, t_b1, t_w2, t_b2 = _rows(input, weight1, bias1, weight2, *tangents)
    z = linear_forward(x, w1, b1)

    def total(terms):
        return sum((term for term in terms if term is not None), torch.zeros((), dtype=x.dtype, device=x.device))

    def product(rows, weight):
        return None if rows is None or weight is None else linear_forward(rows, weight, None)

    t_z = total([product(t_x, w1), product(x, t_w1), t_b1])
    hidden, t_hidden = ACTIVATIONS[activation](z), SLOPES[activation](t_z.expand_as(z), z)
    tangent = total([product(t_hidden, w2), product(hidden, t_w2), t_b2])
    tangent = tangent.expand(input.shape[0], weight2.shape[0])
    return tangent.reshape(input.shape[0], weight2.shape[0], *input.shape[2:]).to(input.dtype)


excitation_forward = operator("excitation_forward")


def excitation(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str = "relu",
) -> Tensor:
    r"""The two products of a squeeze-and-excitation block, of images whose pixels have been averaged,
    :math:`W_2 \, \delta(W_1 z + b_1) + b_2`: two 1×1 convolutions with an activation between them, for few images
    and channels. The gate is :func:`scale_channels`'s.

    Args:
        input: (N, C) or (N, C, 1, 1), any strides; float32, float64, float16 or bfloat16.
        weight1: (S, C) or (S, C, 1, 1); of the dtype of `input`, or float32 beside a float16 or bfloat16 one.
        bias1: (S), or None.
        weight2: (O, S) or (O, S, 1, 1).
        bias2: (O), or None.
        activation: ``"relu"``, ``"silu"`` or ``"hardswish"``.

    Returns:
        (N, O) or (N, O, 1, 1), of the dtype of `input`.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: `activation` is none of these.
        RuntimeError: `input` is not floating point or has more than a pixel; dtypes, devices or shapes do not fit.

    Under autocast `input` is cast to its dtype, and parameters stay as they are: they are read without a cast. Results
    repeat bit by bit. Differentiable any number of times, by a composition of the ops that are fused here, which
    computes the first product anew.

    Source: Hu, Shen and Sun, "Squeeze-and-Excitation Networks", 2018.

    Example:
        >>> pooled, weight = torch.tensor([[1.0, -2.0]]), torch.eye(2)
        >>> cuda_ops.functional.excitation(pooled, weight, None, weight, torch.ones(2))
        tensor([[2., 1.]])
    """
    if not (isinstance(input, Tensor) and isinstance(weight1, Tensor) and isinstance(weight2, Tensor)):
        check_tensors(OP, input=input, weight1=weight1, weight2=weight2)
    check_tensors_or_none(OP, bias1=bias1, bias2=bias2)
    return excitation_forward(input, weight1, bias1, weight2, bias2, activation)
