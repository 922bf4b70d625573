"""A matrix with rows for columns, rung by rung.

    >>> import torch
    >>> from cuda_ops.ladder import transpose
    >>> transpose.LADDER.rungs["simulated tile"](torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[1.],
            [2.],
            [3.]])

The kernels are in csrc/cuda/transpose/ladder/; `python -m cuda_ops bench ladder transpose` measures them, and
notebooks/transpose.ipynb walks them.
"""

import numpy as np
import torch

from .. import functional
from . import simulator
from ._ladder import Case, Ladder, Simulated

TILE, LINES = 32, 8

# --- kernels for the simulator ---------------------------------------------------------------------------------------
# Written as the .cu files of the same names are; `t` is the thread, `yield` is __syncthreads().


def first_of_tile(t, columns):
    """Where the block's tile begins: row and column."""
    across = -(-columns // TILE)
    return t.blockIdx.x // across * TILE, t.blockIdx.x % across * TILE


def naive_kernel(t, output, input, rows, columns):
    """csrc/cuda/transpose/ladder/01_naive.cu: read along a row, write down a column."""
    row, column = first_of_tile(t, columns)
    row, column = row + t.threadIdx.y, column + t.threadIdx.x
    for line in range(0, TILE, LINES):
        if row + line < rows and column < columns:
            output[column * rows + row + line] = input[(row + line) * columns + column]


def tile_kernel(t, output, input, rows, columns, pitch=TILE, place=lambda y, x: x):
    """csrc/cuda/transpose/ladder/02_tile.cu: rows into shared memory, columns out of it. Element (y, x) of the tile is
    at y * pitch + place(y, x)."""
    tile = t.shared("tile", TILE * pitch)
    row, column = first_of_tile(t, columns)
    x = t.threadIdx.x
    for y in range(t.threadIdx.y, TILE, LINES):
        if row + y < rows and column + x < columns:
            tile[y * pitch + place(y, x)] = input[(row + y) * columns + column + x]
    yield
    for y in range(t.threadIdx.y, TILE, LINES):
        if column + y < columns and row + x < rows:
            output[(column + y) * rows + row + x] = tile[x * pitch + place(x, y)]


def padding_kernel(t, output, input, rows, columns):
    """csrc/cuda/transpose/ladder/03_padding.cu: rung 2 with a word of padding in each row of the tile."""
    yield from tile_kernel(t, output, input, rows, columns, pitch=TILE + 1)


def swizzle_kernel(t, output, input, rows, columns):
    """csrc/cuda/transpose/ladder/04_swizzle.cu: rung 2 with element x of row y at x ^ y."""
    yield from tile_kernel(t, output, input, rows, columns, place=lambda y, x: x ^ y)


def launch(kernel, input: np.ndarray) -> tuple[np.ndarray, simulator.Report]:
    rows, columns = input.shape
    output = np.full((columns, rows), np.nan, np.float32)
    blocks = -(-rows // TILE) * -(-columns // TILE)
    report = simulator.launch(kernel, blocks, (TILE, LINES), output, np.ascontiguousarray(input), rows, columns)
    return output, report


# --- models ----------------------------------------------------------------------------------------------------------


def banks_of_a_column() -> None:
    """Which bank of shared memory each element of a tile's column lies in: plain, with padding, and swizzled. A warp
    that reads the column takes as many passes as its busiest bank has elements."""
    y, x = np.arange(TILE), 3  # the fourth column
    for name, word in (("plain", y * TILE + x), ("padding", y * (TILE + 1) + x), ("swizzle", y * TILE + (x ^ y))):
        banks = word % 32
        passes = np.bincount(banks, minlength=32).max()
        print(f"{name:>8}: {passes:2d} passes, banks {' '.join(map(str, banks))}")


def banks_of_vectors() -> None:
    """Rungs 5 and 6 move 16 bytes, four banks, at a time; eight lanes are served together. Rung 6's tile is permuted by
    TMA: vector v of row r is at v ^ (r % 8). Reading squares of 4 x 4 row by row would be well, and writing them, as
    columns, is not; along diagonals both are."""
    lanes = np.arange(8)

    def passes(rows, vectors):
        return np.bincount((vectors ^ (rows % 8)) % 8, minlength=8).max()

    for name, square in (("in rows", np.zeros(8, int)), ("along diagonals", lanes)):
        read, written = passes(4 * square, lanes), passes(4 * lanes, square)
        print(f"squares {name}: {read} passes to read a row of each, {written} to write one")


# --- the ladder ------------------------------------------------------------------------------------------------------


def matrix(rows: int, columns: int) -> Case:
    return Case(f"{rows}x{columns}", lambda make: (make.normal(rows, columns),), elements=2 * rows * columns)


LADDER = Ladder(
    name="transpose",
    formula=r"\text{output}_{ji} = \text{input}_{ij}",
    introduction="""Nothing is computed: a transposition is a copy to other places, and a copy's speed is what it can
reach. Rows of the one matrix are columns of the other, so that a kernel that reads memory in order writes it out of
order. The way out is a tile in shared memory, and then the trouble is there: its banks.""",
    kernels=["naive", "tile", "padding", "swizzle", "vectors", "tma"],
    dtypes=(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    arguments=lambda input: ([input.new_empty(input.shape[1], input.shape[0])], [input], []),
    reference=lambda input: input.double().T,
    bound=None,
    tests=[
        *(matrix(*sizes) for sizes in [(1, 1), (32, 32), (5, 37), (33, 31)]),
        *(matrix(*sizes) for sizes in [(0, 5), (5, 0), (1, 1000), (1000, 1), (64, 64), (127, 257), (65, 136)]),
        *(matrix(*sizes) for sizes in [(200, 104), (1024, 520), (1003, 777)]),
        Case("misaligned", lambda make: (make.normal(64 * 64 + 1)[1:].view(64, 64),), elements=2 * 64 * 64),
    ],
    cases=[matrix(35, 79), matrix(1024, 1024), matrix(4096, 4096), matrix(8191, 4099), matrix(8192, 8192)],
    shown="8192x8192",
    native={"eager": lambda input: input.T.contiguous()},
    ours=lambda input: functional.permute_contiguous(input, (1, 0)),
    simulated={
        1: Simulated(naive_kernel, launch),
        2: Simulated(tile_kernel, launch),
        3: Simulated(padding_kernel, launch),
        4: Simulated(swizzle_kernel, launch),
    },
    simulated_largest=2 * 35 * 79,
    models=(banks_of_a_column, banks_of_vectors),
)
