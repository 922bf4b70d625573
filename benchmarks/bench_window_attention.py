"""The attention of Swin-T's four stages, shifted, and of MaxViT-T's grids, of 64 images: beside the copies, products
and softmax that torchvision has for it."""

import torch
from harness import Bench, Case, Implementation, compiled_on_cuda

import cuda_ops


def chain(qkv, bias, num_heads, window, shift, grid):
    n, height, width, channels = qkv.shape
    y, x = window
    if shift:
        qkv = qkv.roll((-shift, -shift), (1, 2))
    if grid:
        rows = qkv.view(n, y, height // y, x, width // x, channels).permute(0, 2, 4, 1, 3, 5)
    else:
        rows = qkv.view(n, height // y, y, width // x, x, channels).permute(0, 1, 3, 2, 4, 5)
    rows = rows.reshape(-1, y * x, 3, num_heads, channels // 3 // num_heads).permute(2, 0, 3, 1, 4)
    query, key, value = rows.unbind(0)
    scores = query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1) + bias
    if shift:
        part = torch.zeros(1, height, width, 1, device=qkv.device)
        part[:, -shift:] += 1
        part[:, :, -shift:] += 2
        part = part.view(1, height // y, y, width // x, x, 1).permute(0, 1, 3, 2, 4, 5).reshape(-1, y * x)
        apart = torch.where(part[:, :, None] == part[:, None], 0.0, -100.0)
        scores = (scores.unflatten(0, (-1, len(apart))) + apart[:, None]).flatten(0, 1)
    output = scores.softmax(-1).to(value.dtype) @ value
    output = output.transpose(1, 2).reshape(n, height // y, width // x, y, x, channels // 3)
    output = output.permute(0, 3, 1, 4, 2, 5) if grid else output.permute(0, 1, 3, 2, 4, 5)
    output = output.reshape(n, height, width, channels // 3)
    return output.roll((shift, shift), (1, 2)) if shift else output


def ours(qkv, bias, num_heads, window, shift, grid):
    return cuda_ops.functional.window_attention(qkv, bias, num_heads, window, shift, grid)


def case(size, heads, window, shift, grid, batch=64, devices=("cuda",)):
    def make_arguments(make):
        positions = window[0] * window[1]
        return make(batch, size, size, 96 * heads), make(heads, positions, positions), heads, window, shift, grid

    elements, positions = batch * size * size * 32 * heads, window[0] * window[1]
    name = f"{batch}×{size}×{size}, {heads} heads, {'grid' if grid else f'shift {shift}'}"
    products = 4 * elements * positions
    return Case(
        name, make_arguments, elements=(4 * elements, 7 * elements), flops=(products, 2.5 * products), devices=devices
    )


BENCH = Bench(
    op="window_attention",
    ours=Implementation("ours", ours),
    native=[Implementation("eager", chain)],
    cases=[
        *[
            case(size, heads, (7, 7), 3 if size > 7 else 0, False)
            for size, heads in ((56, 3), (28, 6), (14, 12), (7, 24))
        ],
        *[case(size, heads, (7, 7), 0, True) for size, heads in ((56, 2), (28, 4), (14, 8))],
        case(28, 6, (7, 7), 3, False, 2, ("cpu",)),
    ],
    beside=compiled_on_cuda(chain),
)
