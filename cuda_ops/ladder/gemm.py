"""Matrix multiplication, rung by rung: `rungs` holds them all, from Python loops to the tensor cores.

    >>> import torch
    >>> from cuda_ops.ladder import gemm
    >>> a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
    >>> gemm.rungs["python"](a, b)
    tensor([[11.]])

Rungs 1 and 2 are in this file, 3 in csrc/cpu/gemm_ladder.c, 4 to 15 in csrc/cuda/gemm/. Each file says what it mends of
the rung before it and what it leaves. `python -m cuda_ops bench gemm` measures them; notebooks/gemm.ipynb walks them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import _library
from .._arguments import expect
from .._fakes import register_fake
from . import simulator

# --- rung 1: Python loops --------------------------------------------------------------------------------------------


def python_loops(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
    """The definition: d[i][j] is the sum over p of a[i][p] * b[p][j]. About 0.1 µs goes into each multiply-add, nearly
    all of it into finding out what `*` and `+` mean for these objects."""
    inner, columns = len(b), len(b[0]) if b else 0
    d = []
    for row in a:
        d_row = []
        for j in range(columns):
            total = 0.0
            for p in range(inner):
                total += row[p] * b[p][j]
            d_row.append(total)
        d.append(d_row)
    return d


# --- rung 2: kernels for the simulator -------------------------------------------------------------------------------
# Written as the .cu files of the same names are; `t` is the thread, `yield` is __syncthreads().


def naive_kernel(t, d, a, b, m, n, k):
    """csrc/cuda/gemm/04_naive.cu: threadIdx.x, which runs fastest in a warp, goes down the rows."""
    row = t.blockIdx.x * t.blockDim.x + t.threadIdx.x
    column = t.blockIdx.y * t.blockDim.y + t.threadIdx.y
    if row >= m or column >= n:
        return
    total = np.float32(0)
    for p in range(k):
        total += a[row * k + p] * b[p * n + column]
    d[row * n + column] = total


def coalesced_kernel(t, d, a, b, m, n, k):
    """csrc/cuda/gemm/05_coalesced.cu: threadIdx.x goes along the columns; nothing else differs."""
    row = t.blockIdx.y * t.blockDim.y + t.threadIdx.y
    column = t.blockIdx.x * t.blockDim.x + t.threadIdx.x
    if row >= m or column >= n:
        return
    total = np.float32(0)
    for p in range(k):
        total += a[row * k + p] * b[p * n + column]
    d[row * n + column] = total


def shared_memory_kernel(t, d, a, b, m, n, k):
    """csrc/cuda/gemm/06_shared_memory.cu: a block of T x T threads brings tiles of T x T of a and b into shared memory
    and multiplies those."""
    tile, x, y = t.blockDim.x, t.threadIdx.x, t.threadIdx.y
    row, column = t.blockIdx.y * tile + y, t.blockIdx.x * tile + x
    a_tile = t.shared("a_tile", tile * tile)
    b_tile = t.shared("b_tile", tile * tile)
    total = np.float32(0)
    for p in range(0, k, tile):
        # Zeros beyond the edges: a thread without an element of d still has to come to the barriers.
        a_tile[y * tile + x] = a[row * k + p + x] if row < m and p + x < k else 0
        b_tile[y * tile + x] = b[(p + y) * n + column] if p + y < k and column < n else 0
        yield
        for q in range(tile):
            total += a_tile[y * tile + q] * b_tile[q * tile + x]
        yield
    if row < m and column < n:
        d[row * n + column] = total


TILE, DEPTH, PER_THREAD = 16, 4, 4


def register_tile_kernel(t, d, a, b, m, n, k):
    """csrc/cuda/gemm/07_register_tile.cu, 2-D, at a size that fits a laptop: 16 threads make 16 x 16 of d, 4 x 4 each,
    from slices of depth 4."""
    threads, x = t.blockDim.x, t.threadIdx.x
    row, column = t.blockIdx.y * TILE, t.blockIdx.x * TILE
    my_row, my_column = x // (TILE // PER_THREAD) * PER_THREAD, x % (TILE // PER_THREAD) * PER_THREAD
    a_tile = t.shared("a_tile", TILE * DEPTH)
    b_tile = t.shared("b_tile", DEPTH * TILE)
    total = np.zeros((PER_THREAD, PER_THREAD), np.float32)
    for p in range(0, k, DEPTH):
        for e in range(x, TILE * DEPTH, threads):
            line, depth = e // DEPTH, e % DEPTH
            a_tile[e] = a[(row + line) * k + p + depth] if row + line < m and p + depth < k else 0
            depth, line = e // TILE, e % TILE
            b_tile[e] = b[(p + depth) * n + column + line] if p + depth < k and column + line < n else 0
        yield
        for q in range(DEPTH):
            left = [a_tile[(my_row + i) * DEPTH + q] for i in range(PER_THREAD)]
            right = [b_tile[q * TILE + my_column + j] for j in range(PER_THREAD)]
            total += np.outer(left, right)  # 16 multiply-adds for 8 loads
        yield
    for i in range(PER_THREAD):
        for j in range(PER_THREAD):
            if row + my_row + i < m and column + my_column + j < n:
                d[(row + my_row + i) * n + column + my_column + j] = total[i, j]


def launch_shape(kernel: Callable, m: int, n: int, tile: int = 8) -> tuple[tuple, tuple]:
    """(grid, block) of one of the kernels above for an m x n result."""

    def blocks(size, step):
        return (size + step - 1) // step

    if kernel is register_tile_kernel:
        return (blocks(n, TILE), blocks(m, TILE)), (TILE * TILE // PER_THREAD**2,)
    if kernel is naive_kernel:
        return (blocks(m, tile), blocks(n, tile)), (tile, tile)
    return (blocks(n, tile), blocks(m, tile)), (tile, tile)


def simulate(kernel: Callable, a: np.ndarray, b: np.ndarray, tile: int = 8) -> tuple[np.ndarray, simulator.Report]:
    """a @ b by one of the kernels above.

    Args:
        kernel: naive_kernel, coalesced_kernel, shared_memory_kernel or register_tile_kernel.
        a, b: float32, m x k and k x n.
        tile: side of a block of threads (of the register-tile kernel: fixed).

    Returns:
        The product, and what the threads asked of memory.
    """
    (m, k), n = a.shape, b.shape[1]
    d = np.full((m, n), np.nan, np.float32)
    grid, block = launch_shape(kernel, m, n, tile)
    operands = (np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32))
    return d, simulator.launch(kernel, grid, block, d, *operands, m, n, k)


# --- all rungs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rung:
    """One way to multiply two matrices; call it with a (m x k) and b (k x n)."""

    number: int
    """The rung of the ladder, 1 to 15. Variants of one rung share it."""
    name: str
    device: str
    """ "cpu" or "cuda": where its tensors have to be."""
    function: Callable[[Tensor, Tensor], Tensor]
    dtypes: tuple[torch.dtype, ...]
    largest: int | None = None
    """Multiply-adds beyond which it is not worth waiting for."""

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return self.function(a, b)

    def runs(self, a: Tensor, b: Tensor) -> bool:
        """Whether this build and this device have the rung for such matrices."""
        if a.device.type != self.device or a.dtype not in self.dtypes:
            return False
        if self.number < 3:
            return True
        return _library.problem is None and _library.ops.gemm_rung_runs(
            a, b, self.code, allow_tf32=torch.backends.cuda.matmul.allow_tf32
        )

    @property
    def code(self) -> int:
        """What torch.ops.cuda_ops.gemm_rung takes for it."""
        return CODES[self.name]


def _loops(a: Tensor, b: Tensor) -> Tensor:
    _check_product(a, b)
    if a.shape[1] == 0:
        return a.new_zeros(a.shape[0], b.shape[1])  # as a list, b has no row left to tell its columns
    d = torch.tensor(python_loops(a.tolist(), b.tolist()), dtype=a.dtype)
    return d.reshape(a.shape[0], b.shape[1])


def _simulated(kernel):
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        _check_product(a, b)
        return torch.from_numpy(simulate(kernel, a.numpy(), b.numpy())[0])

    return multiply


def _check_product(a, b):
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise RuntimeError(f"gemm: expected a of m x k and b of k x n, got shapes {list(a.shape)} and {list(b.shape)}")


def _rung_op(code):
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return _library.ops.gemm_rung(a, b, code, allow_tf32=torch.backends.cuda.matmul.allow_tf32)

    return multiply


if _library.problem is None:

    @register_fake("cuda_ops::gemm_rung")
    def _(a, b, rung, *, allow_tf32=False):
        expect(a.dim() == 2, "gemm_rung", "a to have 2 dimensions, got shape {}", tuple(a.shape))
        expect(b.dim() == 2, "gemm_rung", "b to have 2 dimensions, got shape {}", tuple(b.shape))
        message = "b to have as many rows as a has columns, {}, got shape {}"
        expect(a.shape[1] == b.shape[0], "gemm_rung", message, a.shape[1], list(b.shape))
        return a.new_empty((a.shape[0], b.shape[1]))

    @register_fake("cuda_ops::gemm_planned")
    def _(a, b, plan, *, allow_tf32=False):
        return a.new_empty((*a.shape[:-1], b.shape[-1]))


FLOATS = (torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
# 10 * rung + variant where a rung has several, so that 3 is 31 to 35.
CODES = {
    "c naive": 31,
    "c loop order": 32,
    "c blocked": 33,
    "c packed": 34,
    "c threads": 35,
    "naive": 4,
    "coalesced": 5,
    "shared memory": 6,
    "shared memory, dynamic": 62,
    "register tile, 1-D": 71,
    "register tile": 7,
    "vectorised": 8,
    "warp tile": 9,
    "cp.async": 10,
    "mma.sync": 11,
    "TMA + wgmma": 12,
    "clusters, persistent": 13,
    "skinny": 14,
    "direct": 15,
}

rungs: dict[str, Rung] = {
    rung.name: rung
    for rung in [
        Rung(1, "python", "cpu", _loops, FLOATS, 64**3),
        Rung(2, "simulated naive", "cpu", _simulated(naive_kernel), FLOATS[:1], 35 * 79 * 19),
        Rung(2, "simulated coalesced", "cpu", _simulated(coalesced_kernel), FLOATS[:1], 35 * 79 * 19),
        Rung(2, "simulated shared memory", "cpu", _simulated(shared_memory_kernel), FLOATS[:1], 35 * 79 * 19),
        Rung(2, "simulated register tile", "cpu", _simulated(register_tile_kernel), FLOATS[:1], 35 * 79 * 19),
        *(
            Rung(3, name, "cpu", _rung_op(code), FLOATS, 1024**3 if code == 31 else None)
            for name, code in CODES.items()
            if 30 < code < 40
        ),
        *(
            Rung(number, name, "cuda", _rung_op(code), dtypes)
            for name, code in CODES.items()
            if not 30 < code < 40
            for number in [code // 10 if code > 15 else code]
            for dtypes in [FLOATS if number in (8, 9) else (*FLOATS, *HALVES)]
        ),
    ]
}
