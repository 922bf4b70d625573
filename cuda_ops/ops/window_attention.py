"""window_attention: attention among the pixels of each window of an image, shifted or not, or of a grid."""

import torch
from torch import Tensor

from .._arguments import check_tensors, check_tensors_or_none, expect, flag, integer, pair
from .._autograd import autograd_function
from .._fakes import register_fake
from .._operators import check_tangent, composite, operator

OP = "window_attention"
POSITIONS = 1024  # of the largest window (csrc/include/cuda_ops/window_attention.h)
APART = -100.0


def _check(op, qkv, bias, num_heads, window_size, shift_size, grid):
    message = "qkv to have 4 dimensions, images, height, width and channels, got {}"
    expect(qkv.dim() == 4, op, message, qkv.dim())
    expect(num_heads > 0, op, "num_heads to be positive, got {}", num_heads)
    message = "qkv to have queries, keys and values of {} heads, got {} channels"
    channels = qkv.shape[3]
    expect(channels % 3 == 0 and channels // 3 % num_heads == 0, op, message, num_heads, channels)
    message = "window_size and shift_size to have 2 values, got {} and {}"
    expect(len(window_size) == len(shift_size) == 2, op, message, list(window_size), list(shift_size))
    for size, window, shift in zip(qkv.shape[1:3], window_size, shift_size, strict=True):
        fits = window > 0 and size % window == 0
        expect(fits, op, "window_size to divide {}, got {}", list(qkv.shape[1:3]), list(window_size))
        expect(0 <= shift < window, op, "shift_size to be in [0, window_size), got {}", list(shift_size))
        expect(not grid or shift == 0, op, "shift_size to be 0 with grid, got {}", list(shift_size))
    positions = window_size[0] * window_size[1]
    if positions > POSITIONS:
        raise NotImplementedError(
            f"{op}: expected window_size to be of at most {POSITIONS} pixels, got {list(window_size)}"
        )
    if bias is not None:
        shape = [num_heads, positions, positions]
        expect(list(bias.shape) == shape, op, f"bias to have shape {shape}, got {{}}", list(bias.shape))


@register_fake("cuda_ops::window_attention_forward")
def _(qkv, bias, num_heads, window_size, shift_size, grid, scale):
    _check(OP, qkv, bias, num_heads, window_size, shift_size, grid)
    return qkv.new_empty([*qkv.shape[:3], qkv.shape[3] // 3])


@register_fake("cuda_ops::window_attention_backward")
def _(grad_output, qkv, bias, num_heads, window_size, shift_size, grid, scale, wants_bias):
    op = "window_attention_backward"
    _check(op, qkv, bias, num_heads, window_size, shift_size, grid)
    shape = [*qkv.shape[:3], qkv.shape[3] // 3]
    expect(list(grad_output.shape) == shape, op, "grad_output to have output's shape, got {}", list(grad_output.shape))
    expect(bias is not None or not wants_bias, op, "bias, whose gradient is wanted, to be a Tensor, got None")
    wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    none = qkv.new_empty(0, dtype=wide if qkv.is_cpu else qkv.dtype)
    grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format) if wants_bias else none
    return qkv.new_empty(qkv.shape), grad_bias


def _windows_of(image, window_size, shift_size, grid):
    """(images * windows, positions, channels) of images whose channels are innermost."""
    n, height, width, channels = image.shape
    if any(shift_size):
        image = image.roll([-shift for shift in shift_size], (1, 2))
    y, x = window_size
    if grid:
        image = image.reshape(n, y, height // y, x, width // x, channels).permute(0, 2, 4, 1, 3, 5)
    else:
        image = image.reshape(n, height // y, y, width // x, x, channels).permute(0, 1, 3, 2, 4, 5)
    return image.reshape(n * (height // y) * (width // x), y * x, channels)


def _image_of(windows, shape, window_size, shift_size, grid):
    """The images of `shape` that _windows_of makes such windows of."""
    n, height, width = shape[:3]
    y, x = window_size
    down, across, channels = height // y, width // x, windows.shape[2]
    windows = windows.reshape(n, down, across, y, x, channels)
    image = windows.permute(0, 3, 1, 4, 2, 5) if grid else windows.permute(0, 1, 3, 2, 4, 5)
    image = image.reshape(n, height, width, channels)
    return image.roll(list(shift_size), (1, 2)) if any(shift_size) else image


def _apart(shape, window_size, shift_size, device, dtype):
    """(windows, positions, positions): what is added to scores of pixels at opposite edges."""
    part = torch.zeros(1, *shape[1:3], 1, device=device, dtype=dtype)
    for dim, shift in enumerate(shift_size):
        if shift > 0:  # of the image as it lies, in which the edge is where it was
            part.narrow(1 + dim, 0, shift).add_(1 + dim)
    part = _windows_of(part, window_size, shift_size, False).flatten(1)
    # In windows that do not cross an edge all are of one part.
    return torch.where(part[:, :, None] == part[:, None, :], 0.0, APART).to(dtype)


class _Windows:
    """Queries, keys, values (images * windows, heads, positions, elements) and weights, in the dtype of the sums."""

    def __init__(self, qkv, bias, num_heads, window_size, shift_size, grid, scale):
        self.shape, self.num_heads, self.arguments = qkv.shape, num_heads, (window_size, shift_size, grid)
        self.dtype = torch.float64 if qkv.dtype == torch.float64 else torch.float32
        self.query, self.key, self.value = self.split(qkv)
        scores = self.query @ self.key.mT * scale
        if bias is not None:
            scores = scores + bias.to(self.dtype)
        if any(shift_size):
            apart = _apart(qkv.shape, window_size, shift_size, qkv.device, self.dtype)
            scores = (scores.unflatten(0, (qkv.shape[0], apart.shape[0])) + apart[:, None]).flatten(0, 1)
        self.weights = scores.softmax(-1)

    def split(self, image):
        """Of images whose channels are several arrays' heads: the windows of each array."""
        rows = _windows_of(image.to(self.dtype), *self.arguments)
        arrays, elements = 3 * image.shape[3] // self.shape[3], self.shape[3] // 3 // self.num_heads
        return rows.reshape(*rows.shape[:2], arrays, self.num_heads, elements).permute(2, 0, 3, 1, 4).unbind(0)

    def image(self, *arrays):
        """The reverse."""
        rows = torch.stack(arrays, 0).permute(1, 3, 0, 2, 4).flatten(2)
        return _image_of(rows, self.shape, *self.arguments)

    def slopes(self, grad_weights):
        return self.weights * (grad_weights - (self.weights * grad_weights).sum(-1, keepdim=True))


@composite("window_attention_gradients")
def _(grad_output, qkv, bias, num_heads, window_size, shift_size, grid, scale, wanted):
    """The gradients that are wanted, by PyTorch's ops, which are differentiable further."""
    op = "window_attention_gradients"
    _check(op, qkv, bias, num_heads, window_size, shift_size, grid)
    expect(bias is not None or not wanted[1], op, "bias, whose gradient is wanted, to be a Tensor, got None")
    fits = list(grad_output.shape) == [*qkv.shape[:3], qkv.shape[3] // 3]
    expect(fits, op, "grad_output to have output's shape, got {}", list(grad_output.shape))
    if qkv.numel() == 0:
        grads = grad_output.repeat(1, 1, 1, 3), None if bias is None else torch.zeros_like(bias)
        return [grad for grad, want in zip(grads, wanted, strict=True) if want]
    of = _Windows(qkv, bias, num_heads, window_size, shift_size, grid, scale)
    (grad,) = of.split(grad_output)
    slopes = of.slopes(grad @ of.value.mT)
    gradients = (
        lambda: of.image(slopes @ of.key * scale, slopes.mT @ of.query * scale, of.weights.mT @ grad).to(qkv.dtype),
        lambda: slopes.sum(0).to(bias.dtype),
    )
    return [gradient() for gradient, want in zip(gradients, wanted, strict=True) if want]


@composite("window_attention_tangent")
def _(t_qkv, t_bias, qkv, bias, num_heads, window_size, shift_size, grid, scale):
    """The tangent of output, by the same ops."""
    check_tangent(OP, "qkv", qkv, t_qkv)
    check_tangent(OP, "bias", bias, t_bias)
    _check(OP, qkv, bias, num_heads, window_size, shift_size, grid)
    if qkv.numel() == 0:
        return qkv.new_zeros([*qkv.shape[:3], qkv.shape[3] // 3])
    of = _Windows(qkv, bias, num_heads, window_size, shift_size, grid, scale)
    t_scores = torch.zeros_like(of.weights) if t_bias is None else t_bias.to(of.dtype).expand_as(of.weights)
    t_output = 0
    if t_qkv is not None:
        t_query, t_key, t_value = of.split(t_qkv)
        t_scores = t_scores + (t_query @ of.key.mT + of.query @ t_key.mT) * scale
        t_output = of.weights @ t_value
    return of.image(t_output + of.slopes(t_scores) @ of.value).to(qkv.dtype)


window_attention_forward = operator("window_attention_forward")
WindowAttentionFunction = autograd_function("window_attention_forward", "WindowAttentionFunction")


def window_attention(
    qkv: Tensor,
    bias: Tensor | None,
    num_heads: int,
    window_size: int | tuple[int, int],
    shift_size: int | tuple[int, int] = 0,
    grid: bool = False,
    scale: float | None = None,
) -> Tensor:
    r"""Attention among the pixels of each window of images whose channels are innermost, as Swin Transformer and MaxViT
    have it: :math:`\text{softmax}(\text{scale} \cdot QK^T + \text{bias}) V` for each window and head. Windows are
    read and written where they lie in the image: nothing is rolled, partitioned or put together again.

    Args:
        qkv: (N, H, W, 3·C), of each pixel the queries of all heads, then the keys, then the values; any strides;
            float32, float64, float16 or bfloat16.
        bias: (num_heads, P, P), for windows of P pixels, row by row; of the dtype of `qkv`, or float32 beside a float16
            or bfloat16 one. None stands for 0.
        num_heads: how many heads the C channels are.
        window_size: height and width of a window; they divide H and W. At most 1024 pixels.
        shift_size: by how many rows and columns the image counts as rolled, up and to the left
            (``torch.roll(x, (-shift, -shift), (1, 2))``), and the result back. To scores of pixels that only come
            together by that, -100 is added. Along a dimension that one window fills it counts as 0.
        grid: a window has every (H / height)-th row and (W / width)-th column instead of neighbouring ones. Not with
            `shift_size`.
        scale: None for :math:`1 / \sqrt{C / \text{num\_heads}}`.

    Returns:
        (N, H, W, C), contiguous, of the dtype of `qkv`. Scores and sums are float32 where that is a half.

    Raises:
        TypeError: an argument is not of its type.
        RuntimeError: `qkv` is not floating point; shapes, dtypes or devices do not fit.
        NotImplementedError: a window has more than 1024 pixels.

    Under autocast `qkv` is cast to its dtype, and `bias` stays as it is. Results repeat bit by bit, gradients too.
    Differentiable any number of times; beyond the first time by a composition of PyTorch's operations. On CUDA windows
    of up to 64 pixels with heads of up to 64 elements (a multiple of 8) in float16 and bfloat16 are computed on the
    tensor cores.

    Source: Liu et al., "Swin Transformer", 2021; Tu et al., "MaxViT", 2022.

    Example:
        >>> qkv = torch.cat([torch.zeros(1, 2, 2, 2), torch.arange(4.0).view(1, 2, 2, 1)], 3)
        >>> cuda_ops.functional.window_attention(qkv, None, num_heads=1, window_size=(1, 2)).flatten()
        tensor([0.5000, 0.5000, 2.5000, 2.5000])
    """
    if not isinstance(qkv, Tensor):
        check_tensors(OP, qkv=qkv)
    check_tensors_or_none(OP, bias=bias)
    num_heads, grid = integer(OP, "num_heads", num_heads), flag(OP, "grid", grid)
    window_size, shift_size = pair(OP, "window_size", window_size), pair(OP, "shift_size", shift_size)
    if qkv.dim() == 4:
        filled = (window == size for window, size in zip(window_size, qkv.shape[1:3], strict=True))
        shift_size = tuple(0 if fills else shift for shift, fills in zip(shift_size, filled, strict=True))
        if scale is None and num_heads > 0:
            scale = max(qkv.shape[3] // 3 // num_heads, 1) ** -0.5
    scale = 1.0 if scale is None else scale
    return window_attention_forward(qkv, bias, num_heads, window_size, shift_size, grid, scale)
