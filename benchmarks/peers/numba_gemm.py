"""Matrix multiplication in Numba-CUDA: shared-memory tiles of 32 x 32, as the lectures have it (rung 6 in Python)."""

import os

import numpy
import torch

# numba-cuda up to 0.30 asks for this other name of vstack, which NumPy 2.5 has dropped, when it compiles a kernel.
if not hasattr(numpy, "row_stack"):
    numpy.row_stack = numpy.vstack
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")  # small products are meant

from numba import cuda, float32, float64
from torch import Tensor

TILE = 32


def _make(element):
    @cuda.jit
    def kernel(d, a, b):
        a_tile = cuda.shared.array((TILE, TILE), element)
        b_tile = cuda.shared.array((TILE, TILE), element)
        column, row = cuda.grid(2)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        total = element(0)
        for p in range(0, a.shape[1], TILE):
            a_tile[y, x] = a[row, p + x] if row < a.shape[0] and p + x < a.shape[1] else element(0)
            b_tile[y, x] = b[p + y, column] if p + y < b.shape[0] and column < b.shape[1] else element(0)
            cuda.syncthreads()
            for q in range(TILE):
                total += a_tile[y, q] * b_tile[q, x]
            cuda.syncthreads()
        if row < d.shape[0] and column < d.shape[1]:
            d[row, column] = total

    return kernel


KERNELS = {torch.float32: _make(float32), torch.float64: _make(float64)}


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of contiguous CUDA matrices; float32 or float64."""
    d = a.new_empty((a.shape[0], b.shape[1]))
    grid = ((d.shape[1] + TILE - 1) // TILE, (d.shape[0] + TILE - 1) // TILE)
    stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
    arrays = [cuda.as_cuda_array(t.detach(), sync=False) for t in (d, a, b)]
    KERNELS[a.dtype][grid, (TILE, TILE), stream](*arrays)
    return d
