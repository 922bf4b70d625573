"""Matrix multiplication in Triton: blocked, pipelined by the compiler, tiles ordered in bands."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import fastest


@triton.jit
def gemm_kernel(
    a_pointer,
    b_pointer,
    d_pointer,
    m,
    n,
    k,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    tile = tl.program_id(0)
    first = tile // (BAND * tiles_n) * BAND
    height = min(tiles_m - first, BAND)
    inside = tile % (BAND * tiles_n)
    rows = (first + inside % height) * TILE_M + tl.arange(0, TILE_M)
    columns = inside // height * TILE_N + tl.arange(0, TILE_N)
    depths = tl.arange(0, DEPTH)
    a = a_pointer + rows[:, None].to(tl.int64) * k + depths[None, :]
    b = b_pointer + depths[:, None].to(tl.int64) * n + columns[None, :]
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for p in range(0, k, DEPTH):
        left = tl.load(a, mask=(rows[:, None] < m) & (p + depths[None, :] < k), other=0.0)
        right = tl.load(b, mask=(p + depths[:, None] < k) & (columns[None, :] < n), other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        a += DEPTH
        b += DEPTH * n
    d = d_pointer + rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(d, total.to(d_pointer.dtype.element_ty), mask=(rows[:, None] < m) & (columns[None, :] < n))


# (TILE_M, TILE_N, DEPTH of 16-bit elements, warps, stages), as Triton's tutorial has them.
CONFIGS = [(128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 32, 4, 4), (64, 128, 32, 4, 4), (64, 64, 32, 4, 4)]


def launch(d, a, b, config):
    m, k = a.shape
    n = b.shape[1]
    tile_m, tile_n, depth, warps, stages = config
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    grid = (triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n),)
    depth = depth * 2 // a.element_size()
    gemm_kernel[grid](a, b, d, m, n, k, tile_m, tile_n, depth, 8, precision, num_warps=warps, num_stages=stages)
    return d


@functools.cache
def choice(m, n, k, dtype, tf32, device):
    """The fastest of CONFIGS; those that are not twice as large as d in a direction, as each has to be compiled."""
    fit = [config for config in CONFIGS if config[0] < max(2 * m, 128) and config[1] < max(2 * n, 128)]
    if dtype == torch.float32 and not tf32:  # no tensor cores: the sums of the largest alone would fill the registers
        fit = [config for config in fit if config[0] * config[1] <= 128 * 128]
    too_large = triton.runtime.errors.OutOfResources
    return fastest(fit, lambda config, d, a, b: launch(d, a, b, config), m, n, k, dtype, device, too_large)


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of contiguous CUDA matrices; float32, float16 or bfloat16."""
    config = choice(a.shape[0], b.shape[1], a.shape[1], a.dtype, torch.backends.cuda.matmul.allow_tf32, str(a.device))
    return launch(a.new_empty((a.shape[0], b.shape[1])), a, b, config)
