import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

window_attention = cuda_ops.functional.window_attention


def reference(qkv, bias, num_heads, window_size, shift_size=0, grid=False, scale=None):
    """The chain of torchvision's SwinTransformer and MaxVit: pixels are numbered, and the numbers go its way."""
    n, height, width, channels = qkv.shape
    y, x = (window_size, window_size) if isinstance(window_size, int) else window_size
    shift = (shift_size, shift_size) if isinstance(shift_size, int) else shift_size
    if (grid and any(shift)) or not all(0 <= by < window for by, window in zip(shift, (y, x), strict=True)):
        raise RuntimeError("windows are shifted by less than their size, and grids are not")
    shift = [0 if size == window else by for by, size, window in zip(shift, (height, width), (y, x), strict=True)]
    if bias is not None and bias.shape != (num_heads, y * x, y * x):
        raise RuntimeError("each head has a bias for each pair of a window's pixels")
    numbers = torch.arange(height * width, device=qkv.device).view(height, width)
    numbers = numbers.roll([-by for by in shift], (0, 1))
    if grid:
        numbers = numbers.view(y, height // y, x, width // x).permute(1, 3, 0, 2)
    else:
        numbers = numbers.view(height // y, y, width // x, x).permute(0, 2, 1, 3)
    numbers = numbers.reshape(-1, y * x)
    # Which of three bands of rows and of columns a place of the rolled image is in.
    bands = torch.zeros(height, width, device=qkv.device)
    for dim, (size, window, by) in enumerate(zip((height, width), (y, x), shift, strict=True)):
        places = torch.arange(size, device=qkv.device)
        band = (places >= size - window).long() + (places >= size - by).long() if by else torch.zeros_like(places)
        bands = bands + 3**dim * (band[:, None] if dim == 0 else band)
    bands = bands.roll(list(shift), (0, 1)).flatten()[numbers]
    apart = torch.where(bands[:, None, :] == bands[:, :, None], 0.0, -100.0).to(qkv.dtype)
    head_dim = channels // 3 // num_heads
    rows = qkv.flatten(1, 2)[:, numbers].unflatten(-1, (3, num_heads, head_dim))
    query, key, value = rows.permute(3, 0, 1, 4, 2, 5).unbind(0)
    scores = query @ key.transpose(-2, -1) * (max(head_dim, 1) ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    output = (scores + apart[:, None]).softmax(-1) @ value
    back = numbers.flatten().argsort()
    output = output.transpose(2, 3).reshape(n, height * width, channels // 3)
    return output[:, back].view(n, height, width, channels // 3)


def sample(make, n, height, width, num_heads, head_dim, window, *options, bias=True):
    qkv = make(n, height, width, 3 * num_heads * head_dim)
    table = make(num_heads, window[0] * window[1], window[0] * window[1]) if bias else None
    name = f"{n}x{height}x{width}, {num_heads} heads of {head_dim}, {window}, {options}"
    return Sample((qkv, table, num_heads, window, *options), name=name)


def samples(make):
    # Swin's windows, shifted and not, in images of several and of one; MaxViT's grid.
    yield sample(make, 2, 14, 21, 3, 32, (7, 7))
    yield sample(make, 2, 14, 21, 2, 32, (7, 7), (3, 3))
    yield sample(make, 1, 14, 14, 2, 32, (7, 7), 0, True)
    yield sample(make, 2, 7, 14, 2, 32, (7, 7), (3, 3))
    yield sample(make, 3, 7, 7, 1, 32, (7, 7), (3, 3))
    yield sample(make, 1, 16, 24, 1, 64, (8, 8), (4, 4), False, 0.5)
    # Rows of all but 16, one shift alone, heads of eight elements, of more than a tile's half, and of odd sizes.
    yield sample(make, 2, 8, 6, 3, 16, (4, 3), (2, 0), False, 0.2)
    yield sample(make, 2, 4, 10, 2, 8, (2, 5), (0, 4))
    yield sample(make, 1, 6, 6, 1, 40, (3, 3), (1, 2), bias=False)
    yield sample(make, 1, 12, 12, 2, 48, (6, 4), 0, True, bias=False)
    yield sample(make, 2, 6, 4, 2, 5, (3, 2), (1, 1))
    yield sample(make, 1, 4, 4, 2, 1, (1, 1))
    # More pixels than a tile has, than a warp takes at once, and of rows that leave shared memory.
    yield sample(make, 1, 18, 9, 2, 16, (9, 9), (4, 4))
    yield sample(make, 1, 16, 32, 1, 24, (16, 16), (8, 0))
    yield sample(make, 1, 24, 24, 1, 4, (24, 24))
    yield sample(make, 1, 4, 4, 1, 260, (4, 4))


def small_samples(make):
    yield sample(make, 1, 4, 2, 1, 2, (2, 2), (1, 0))
    yield sample(make, 1, 2, 4, 2, 1, (1, 2), 0, True, 0.7)
    yield sample(make, 1, 2, 2, 1, 2, (2, 1), bias=False)


def empty_samples(make):
    yield sample(make, 0, 4, 4, 2, 3, (2, 2))
    yield sample(make, 2, 0, 4, 2, 3, (2, 2))
    yield sample(make, 2, 4, 4, 2, 0, (2, 2), 0, False, 1.0)


def op_samples(make):
    ops = torch.ops.cuda_ops
    for shape, size, shift, grid in [((2, 4, 6), [2, 3], [1, 1], False), ((1, 4, 4), [2, 2], [0, 0], True)]:
        qkv, bias = make(*shape, 12), make(2, size[0] * size[1], size[0] * size[1])
        for table in (bias, None):
            yield ops.window_attention_forward, (qkv, table, 2, size, shift, grid, 0.5)
            grad = make(*shape, 4, requires_grad=False)
            tensors = qkv.detach(), None if table is None else table.detach()
            yield ops.window_attention_backward, (grad, *tensors, 2, size, shift, grid, 0.5, table is not None)


def refused(name, match, shape=(1, 4, 4, 6), *arguments, error=RuntimeError, **options):
    return bad(name, lambda ones: window_attention(ones(*shape, **options), *arguments), match, error)


SPEC = OpSpec(
    name="window_attention",
    function=window_attention,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    cancels=True,
    own_sizes=True,
    # Scores of large sums are rounded before their exponential.
    relative_norm={torch.float32: 4e-6},
    # Which of infinity times a weight of 0 are computed depends on the tiles, as in scaled_dot_product_attention.
    nonfinite=False,
    bad=[
        bad(
            "integers",
            lambda ones: window_attention(ones(1, 4, 4, 6).long(), None, 2, 2),
            "window_attention: expected qkv to be floating point, got int64",
        ),
        refused("three dimensions", "expected qkv to have 4 dimensions, .*, got 3", (4, 4, 6), None, 2, 2),
        refused(
            "heads that do not divide",
            "expected qkv to have queries, keys and values of 4 heads, got 6 channels",
            (1, 4, 4, 6),
            None,
            4,
            2,
        ),
        refused("no heads", "expected num_heads to be positive, got 0", (1, 4, 4, 6), None, 0, 2),
        refused(
            "a window that does not divide",
            r"window_size to divide \[4, 4\], got \[3, 2\]",
            (1, 4, 4, 6),
            None,
            2,
            (3, 2),
        ),
        refused(
            "a shift of a window",
            r"expected shift_size to be in \[0, window_size\), got \[2, 0\]",
            (1, 4, 4, 6),
            None,
            2,
            2,
            (2, 0),
        ),
        refused(
            "a shifted grid", r"expected shift_size to be 0 with grid, got \[1, 1\]", (1, 4, 4, 6), None, 2, 2, 1, True
        ),
        refused(
            "a large window",
            r"expected window_size to be of at most 1024 pixels, got \[64, 32\]",
            (1, 64, 32, 6),
            None,
            2,
            (64, 32),
            error=NotImplementedError,
        ),
        bad(
            "a bias of another shape",
            lambda ones: window_attention(ones(1, 4, 4, 6), ones(2, 4, 5), 2, 2),
            r"window_attention: expected bias to have shape \[2, 4, 4\], got \[2, 4, 5\]",
        ),
        bad(
            "no tensor",
            lambda ones: window_attention(1.0, None, 2, 2),
            "window_attention: expected qkv to be a Tensor, got float",
            TypeError,
        ),
    ],
)
