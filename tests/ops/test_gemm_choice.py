"""Which path gemm takes at products that it was not tuned for: as the times of all plans on an H200 say, where the best
of another path takes a quarter longer or more. No GPU is needed."""

import random

import pytest
import torch
from support.devices import needs_hopper

import cuda_ops
from cuda_ops import _explain, _library

pytestmark = pytest.mark.skipif(not _library.has_cuda(), reason="a build without CUDA has no tables of paths")

# batch, m, n, k, storage orders (T: the transposed matrix lies in memory), dtype
DIRECT = [
    (1, 8, 8, 1576, "TT", "tf32"),
    (1, 21, 1, 1016, "NN", "bfloat16"),
    (1, 41, 38, 1880, "NN", "float16"),
    (1, 8, 8, 744, "NT", "tf32"),
    (12, 8, 192, 233, "TT", "bfloat16"),
    (1, 8, 2513, 1280, "TN", "bfloat16"),
    (1, 5722, 1, 553, "TT", "float16"),
    (1, 6, 4110, 544, "TN", "tf32"),
    (1, 8, 4911, 2424, "NN", "tf32"),
    (1, 448, 8, 536, "NN", "bfloat16"),
    (1, 41, 171, 8, "TN", "float16"),
]
# A short k and many tiles: direct's are too small, and what its blocks take to start and to end is most of its time.
NOT_DIRECT = [
    (1, 704, 832, 8, "NT", "tf32"),
    (1, 2938, 636, 8, "NN", "bfloat16"),
    (1, 1920, 864, 12, "NN", "float32"),
    (1, 297, 233, 25, "NN", "float16"),
    (1, 405, 632, 8, "TT", "bfloat16"),
    (1, 4, 11008, 4096, "NT", "float16"),  # 90 MB: 49.5 µs, by sm90_skinny 35.1, on an H100
]


def chosen(batch, m, n, k, order, dtype, capability="9.0"):
    def operand(rows, columns, way):
        leading = (batch,) if batch > 1 else ()
        kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        if way == "N":
            return torch.empty(*leading, rows, columns, dtype=kind, device="meta")
        return torch.empty(*leading, columns, rows, dtype=kind, device="meta").mT

    with _explain.tf32(dtype == "tf32"):
        explanation = cuda_ops.explain(
            cuda_ops.functional.matmul,
            operand(m, k, order[0]),
            operand(k, n, order[1]),
            capability=capability,
            show=False,
        )
    return {product.name: product.chosen.name for product in explanation.products}["forward"]


@pytest.mark.parametrize(
    "call", DIRECT, ids=lambda call: f"{call[0]}x{call[1]}x{call[2]}x{call[3]}-{call[4]}-{call[5]}"
)
def test_small_products_wait_for_no_copy(call):
    assert chosen(*call) == "direct"


@pytest.mark.parametrize("call", NOT_DIRECT, ids=lambda c: f"{c[0]}x{c[1]}x{c[2]}x{c[3]}-{c[4]}-{c[5]}")
def test_many_tiles_are_not_for_direct(call):
    assert chosen(*call) != "direct"


def test_a_product_that_is_asked_for_again_is_planned_alike():
    """Plans are remembered, by all that they depend on: of neighbours that differ in one thing each has its own."""
    draw = random.Random(0)
    calls = []
    for _ in range(8):
        m, n, k = (8 * draw.randint(1, 600) for _ in range(3))
        dtype = draw.choice(["bfloat16", "float32"])
        for call in [
            (1, m, n, k, "NN", dtype),
            (2, m, n, k, "NN", dtype),
            (1, m, n, k, "NT", dtype),
            (1, m, n, k + 1, "NN", dtype),
            (1, m, n, k, "NN", "tf32"),
            (1, m, n, k, "NN", "float16"),
        ]:
            calls += [(*call, "9.0"), (*call, "8.0")]
    first = [chosen(*call) for call in calls]
    assert len(set(first)) > 2
    order = list(range(len(calls)))
    draw.shuffle(order)
    assert {i: chosen(*calls[i]) for i in order} == dict(enumerate(first))


# Rows of multiples of 4 or 8 bytes, which are copied to where wgmma reads, not to memory before.
UNALIGNED = [(6400, 116, 100, "NN"), (6400, 100, 116, "NT"), (16, 510, 12800, "TN"), (104, 1212, 16425, "TN")]


@pytest.mark.parametrize("call", UNALIGNED, ids=str)
def test_rows_that_tma_cannot_read_are_not_copied_twice(call):
    m, n, k, order = call
    assert chosen(1, m, n, k, order, "bfloat16") == "sm90_unaligned"
    assert chosen(1, m, n, k, order, "float16") == "sm90_unaligned"


# Many tiles of such rows, whose copies' instructions would be most of the time: on an H200 (32896, 804, 3276) took
# 789 µs by them, and the layer's forward 462 by padded.
LARGE_UNALIGNED = [(32896, 804, 3276, "NN"), (634, 1788, 4096, "TN"), (32896, 3276, 804, "NT")]


@pytest.mark.parametrize("call", LARGE_UNALIGNED, ids=str)
def test_large_products_of_rows_that_tma_cannot_read_are_copied(call):
    m, n, k, order = call
    assert chosen(1, m, n, k, order, "float16") == "padded"


# Rows of 1776 bytes, of which 128 lie in two lines: a 1x1 convolution's gradient of weight, for which sm90_skinny's
# tiles of 64 x 64 load four times what tiles of 128 x 224 do.
NOT_SKINNY = [(1, 888, 888, 4608, "TN", "bfloat16"), (1, 888, 888, 4608, "TN", "float16")]
# float32 on the CUDA cores whose rows do not fit 16 bytes: simt has large tiles for them too.
SIMT = [
    (1, 1734, 560, 23324, "TN", "float32"),
    (1, 837, 1056, 1568, "TN", "float32"),
    (1, 400, 4096, 1024, "NN", "float32"),
]


@pytest.mark.parametrize("call", NOT_SKINNY, ids=lambda c: f"{c[1]}x{c[2]}x{c[3]}-{c[5]}")
def test_rows_in_two_lines_are_loaded_by_large_tiles(call):
    assert chosen(*call) == "sm90"


@pytest.mark.parametrize("call", SIMT, ids=lambda c: f"{c[1]}x{c[2]}x{c[3]}-{c[4]}")
def test_large_products_of_float32_are_for_large_tiles(call, monkeypatch):
    """Of multiply-adds, where the environment wants these, and else of the tensor cores."""
    assert chosen(*call) in ("simt", "sm90_3xtf32")
    monkeypatch.setenv("CUDA_OPS_3XTF32", "0")
    _library.ops.reload_paths()
    try:
        assert chosen(*call) == "simt"
    finally:
        monkeypatch.delenv("CUDA_OPS_3XTF32")
        _library.ops.reload_paths()


# A layer's gradient of input in TF32, whose weight is stored along the columns of D: copied K-major where the rows are
# many enough, which is not so of the last three of those that are not. The first three of these have an odd number of
# rows of tiles, which fill whole clusters: on an H200 23.9 µs by the copy and 19.8, 22.6 and 19.1, 18.2 and 14.7.
COPIED = [
    (1, 32256, 384, 384, "NN", "tf32"),
    (1, 6400, 768, 3072, "NN", "tf32"),
    (1, 5700, 120, 720, "NN", "tf32"),
]
NOT_COPIED = [
    (1, 6272, 608, 560, "NN", "tf32"),
    (1, 25088, 128, 384, "NN", "tf32"),
    (1, 10800, 320, 320, "NN", "tf32"),
    (1, 16384, 1024, 4096, "NN", "tf32"),
    (1, 1024, 768, 3072, "NN", "tf32"),
    (1, 137, 2304, 96, "NN", "tf32"),
]


@pytest.mark.parametrize("call", COPIED, ids=lambda c: f"{c[1]}x{c[2]}x{c[3]}")
def test_a_short_operand_is_copied_k_major(call):
    assert chosen(*call) == "padded"


@pytest.mark.parametrize("call", NOT_COPIED, ids=lambda c: f"{c[1]}x{c[2]}x{c[3]}")
def test_a_long_operand_is_not_copied(call):
    assert chosen(*call) != "padded"


# Long operands of few columns, as 1x1 convolutions between few channels have them; and too wide or too short ones.
NARROW = [
    (1, 230400, 14, 34, "NT", "bfloat16"),
    (1, 230400, 34, 14, "NN", "bfloat16"),
    (1, 14, 34, 230400, "TN", "bfloat16"),
    (1, 802816, 15, 15, "NT", "float16"),
    (1, 574592, 16, 16, "NN", "float32"),
    (1, 16, 16, 574592, "TN", "float32"),
    (1, 24, 72, 387200, "TN", "float16"),
]
# And long rows of D of a short k: the first layer of a network of positions.
NARROW += [(1, 14400, 512, 2, "NT", dtype) for dtype in ("bfloat16", "float16", "tf32", "float32")]
NARROW += [(1, 14400, 512, 3, "NN", "bfloat16"), (1, 14400, 512, 12, "NN", "float32")]
NOT_NARROW = [
    (1, 14400, 512, 12, "NN", "bfloat16"),
    (1, 14400, 512, 16, "NN", "float16"),
    (1, 14400, 512, 16, "NN", "tf32"),
    (1, 512, 2048, 8, "TN", "bfloat16"),
    (1, 206400, 144, 32, "NN", "float16"),
    (1, 1600, 24, 24, "NT", "bfloat16"),
    (1, 96, 48, 277777, "TN", "bfloat16"),
]


@pytest.mark.parametrize("call", NARROW, ids=lambda c: f"{c[1]}x{c[2]}x{c[3]}-{c[4]}-{c[5]}")
def test_long_operands_of_few_columns_stream(call):
    assert chosen(*call) == "narrow"


@pytest.mark.parametrize("call", NOT_NARROW, ids=lambda c: f"{c[1]}x{c[2]}x{c[3]}-{c[4]}-{c[5]}")
def test_wide_or_short_ones_do_not(call):
    assert chosen(*call) != "narrow"


# Products in 16 bits and the tile that was the fastest of all on an H200, where another was chosen that took 8 to 22 %
# longer; and, on an H100, a tile in clusters of eight, which took 9.0 µs for 10.3, and gradients of weights of which
# three or four blocks make a tile.
TILES = {
    (1568, 512, 2048, "NT"): 24,
    (1024, 1024, 4096, "NN"): 18,
    (784, 1536, 512, "NT"): 4,
    (1536, 384, 6272, "TN"): 25,
    (768, 768, 6304, "TN"): 25,
    (640, 640, 6272, "TN"): 26,
}


@pytest.mark.cuda
@pytest.mark.parametrize("call", TILES, ids=lambda c: f"{c[0]}x{c[1]}x{c[2]}-{c[3]}")
def test_tiles(call):
    needs_hopper()
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("times of 132 multiprocessors")
    m, n, k, order = call
    a = torch.empty(m, k) if order[0] == "N" else torch.empty(k, m).mT
    b = torch.empty(k, n) if order[1] == "N" else torch.empty(n, k).mT
    path, tile, splits, _ = _library.ops.gemm_plan(a.cuda().bfloat16(), b.cuda().bfloat16())
    assert (path, tile, splits) == (13, TILES[call], 1)
