"""Every rung of the ladder against float64: sizes that no tile divides, all storage orders, outputs poisoned."""

import itertools
import math
import random

import pytest
import torch

import cuda_ops
from cuda_ops._library import ops
from cuda_ops.ladder import gemm

C_RUNGS = [rung for rung in gemm.rungs.values() if rung.number == 3]
CUDA_RUNGS = [rung for rung in gemm.rungs.values() if rung.device == "cuda"]
CORES_RUNGS = [rung for rung in CUDA_RUNGS if rung.number in (*range(11), 15)]  # float32 and float64 on the CUDA cores
CORES_TILES = 6  # of rung 15
# One element; the lecture's odd sizes; primes; a tile of 16 to 128 and one less and more; k over a slice and over the
# splits of k; a row, a column; nothing, and no sum.
SIZES = [(1, 1, 1), (35, 79, 19), (31, 37, 41), (127, 131, 61), (128, 128, 128), (129, 127, 65), (64, 10, 128)]
SIZES += [(17, 33, 700), (1, 257, 130), (257, 1, 130), (3, 5, 2049), (0, 4, 5), (4, 0, 5), (5, 4, 0)]


def odd_sizes(count):
    """Random sizes of up to 300, on a logarithmic scale, so that small ones are not rare."""
    rng = random.Random(0)
    return [tuple(round(math.exp(rng.uniform(0, math.log(300)))) for _ in range(3)) for _ in range(count)]


def operands(m, n, k, dtype, device, transpose_a=False, transpose_b=False):
    generator = torch.Generator().manual_seed(m * 7 + n * 3 + k)
    a = torch.randn(k, m, generator=generator).T if transpose_a else torch.randn(m, k, generator=generator)
    b = torch.randn(n, k, generator=generator).T if transpose_b else torch.randn(k, n, generator=generator)
    # .to keeps the strides of a transposed matrix.
    return a.to(device, dtype), b.to(device, dtype)


def check(rung, a, b, what):
    """Within what rounding k products in any order may do: an elementwise bound on |a| |b|, so that no entry hides."""
    actual = rung(a, b)
    a64, b64 = a.double(), b.double()
    expected, magnitude = a64 @ b64, a64.abs() @ b64.abs()
    assert actual.shape == expected.shape, what
    assert actual.dtype == a.dtype, what
    if a.shape[-1] == 0:
        assert torch.equal(actual.double(), expected), what
        return
    accumulate = torch.finfo(torch.float64 if a.dtype == torch.float64 else torch.float32).eps
    store = torch.finfo(a.dtype).eps if a.dtype.itemsize == 2 else 0
    # A sum of k terms in any order is off by at most (k - 1) eps of their magnitudes; in practice by its root.
    bound = 4 * math.sqrt(a.shape[-1] + 4) * accumulate * magnitude + store * expected.abs()
    # Below the smallest normal number (6e-5 in float16) neighbours are equally far apart: half of that at most is lost.
    bound += torch.finfo(a.dtype).smallest_normal * torch.finfo(a.dtype).eps / 2
    wrong = ~((actual.double() - expected).abs() <= bound)  # and so NaN is wrong
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} elements, the first at {wrong.nonzero()[0]}"


@pytest.mark.parametrize("rung", C_RUNGS, ids=lambda rung: rung.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_c_rungs(rung, dtype):
    for sizes in [*SIZES, *odd_sizes(30)]:
        a, b = operands(*sizes, dtype, "cpu")
        assert rung.runs(a, b)
        check(rung, a, b, f"{rung.name} {sizes}")


@pytest.mark.parametrize("name", ["python", "simulated shared memory", "simulated register tile"])
def test_python_rungs(name):
    for sizes in [(1, 1, 1), (13, 17, 5)]:
        a, b = operands(*sizes, torch.float32, "cpu")
        check(gemm.rungs[name], a, b, f"{name} {sizes}")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rung", CUDA_RUNGS, ids=lambda rung: rung.name)
def test_cuda_rungs(rung, dtype):
    """A hundred sizes. A rung that does not take a dtype, or at some sizes not its alignment, says so, and refuses."""
    ran = 0
    for sizes in [*SIZES, *odd_sizes(100)]:
        a, b = operands(*sizes, dtype, "cuda")
        if 0 not in sizes[:2] and not rung.runs(a, b):
            with pytest.raises((RuntimeError, NotImplementedError)):
                rung(a, b)
            continue
        check(rung, a, b, f"{rung.name} {sizes}")
        ran += 1
    if rung.number in (*range(11), 15) and dtype in rung.dtypes:
        assert ran == len(SIZES) + 100
    elif ran < 10:
        pytest.skip("not for this dtype, or not on this device")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["naive", "cp.async", "mma.sync", "clusters, persistent", "direct"])
def test_storage_orders(name, dtype):
    """A and B each as they are and transposed; these rungs take all four."""
    rung = gemm.rungs[name]
    sizes_list = [
        (35, 79, 19),
        (128, 64, 256),
        (200, 136, 72),
        (1, 33, 65),
        (33, 1, 65),
        (260, 516, 48),
        (64, 64, 3000),
    ]
    ran = 0
    for sizes, (ta, tb) in itertools.product(sizes_list, itertools.product([False, True], repeat=2)):
        a, b = operands(*sizes, dtype, "cuda", ta, tb)
        if rung.number > 10 and not rung.runs(a, b):
            continue
        check(rung, a, b, f"{name} {sizes} {'T' if ta else 'N'}{'T' if tb else 'N'}")
        ran += 1
    if ran == 0:
        pytest.skip("not for this dtype, or not on this device")


# All tiles of the rungs that have several: those of rung 13, with k whole or split over blocks whose sums another
# kernel adds, and the one of them that computes D or D transposed; those of rung 14, with A and B exchanged or not, and
# with k split over the blocks of a cluster; rung 15 on the tensor cores, with k whole and split likewise.
PLANS = [(13, tile, splits, swapped) for tile in range(8) for splits in (1, 3) for swapped in range(1 + (tile == 4))]
# Those without gelu, of 16 bits; the last two are in clusters of eight, 23 for A stored k x m and B k x n alone.
PLANS += [(13, tile, splits, 0) for tile in (10, 11, 13, 15, 23, 24) for splits in (1, 3)]
# Those that make D transposed too, as rows of D by TMA.
EITHER = [(13, tile, 1, 1) for tile in (0, 2, 3, 22)]
PLANS += EITHER
# Those that two blocks make together, and three, and four.
PAIRS = [(13, tile, 1, swapped) for tile in (16, 17, 18, 19, 21) for swapped in range(1 + (tile != 18))]
PAIRS += [(13, tile, 1, 0) for tile in (25, 26)]
PLANS += PAIRS
PLANS += [(14, tile, splits, swapped) for tile in range(3) for splits in (1, 2) for swapped in (0, 1)] + [(14, 0, 8, 1)]
PLANS += [(15, 0, splits, 0) for splits in (1, 4, 8)]
# Rung 15 on the CUDA cores: its tiles, with k whole and cut among the blocks of a cluster.
CORES_PLANS = [(15, tile, splits, 0) for tile in range(CORES_TILES) for splits in (1, 4, 16)]
# Rung 10 in float32: what it chooses by itself, its six tiles, and Hopper's of 128 x 256, which has no splits.
SIMT_PLANS = (
    [(10, 0, 1, 0)] + [(10, tile, splits, 0) for tile in range(1, 7) for splits in (1, 3, 64)] + [(10, 7, 1, 0)]
)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_plans(plan, dtype):
    """Sizes below a tile, no tile's multiple, of many tiles, an odd number of them in a row or a column, of one or of
    several; k of fewer steps than splits, and of many."""
    ran = 0
    for (m, n, k), (ta, tb) in itertools.product(
        [(8, 16, 8), (200, 136, 200), (16, 264, 2048), (328, 24, 72), (64, 8, 3136), (520, 328, 136)],
        itertools.product([False, True], repeat=2),
    ):
        a, b = operands(m, n, k, dtype, "cuda", ta, tb)
        if dtype == torch.float32:  # values that TF32 holds, so that the bound is that of the sums
            a, b = (t.to(torch.bfloat16).to(dtype) for t in (a, b))
        try:
            check(lambda a, b: ops.gemm_planned(a, b, plan, allow_tf32=True), a, b, f"{plan} {(m, n, k)} {ta} {tb}")
        except NotImplementedError:
            continue
        ran += 1
    if ran == 0:
        pytest.skip("not for this dtype, or not on this device")


def batches(batch, m, n, k, dtype, ta, tb):
    """Operands of values that TF32 holds, amid NaN that no kernel may touch."""
    generator = torch.Generator(device="cuda").manual_seed(batch + m)
    for rows, columns, turned in ((m, k, ta), (k, n, tb)):
        rows, columns = (columns, rows) if turned else (rows, columns)
        matrices = torch.full((batch, rows + 1, columns + 8), math.nan, device="cuda", dtype=dtype)[:, :rows, :columns]
        matrices.copy_(torch.randn(batch, rows, columns, generator=generator, device="cuda").bfloat16())
        yield matrices.mT if turned else matrices


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", [p for p in PLANS if p[0] == 13 and (p[3] == 0 or p in EITHER)], ids=str)
def test_plans_of_batches(plan, dtype):
    """More matrices than multiprocessors, each of less than a tile, one, and several: blocks loop over them, and in the
    last two sizes clusters over whole rows of tiles and lone ones in turn. One operand of a batch may be the same for
    all."""
    ran = 0
    for (batch, m, n, k), (ta, tb) in itertools.product(
        [(300, 64, 64, 64), (150, 128, 128, 96), (140, 136, 72, 40), (60, 520, 520, 136), (60, 520, 328, 136)],
        itertools.product([False, True], repeat=2),
    ):
        a, b = batches(batch, m, n, k, dtype, ta, tb)
        for left, right in [(a, b), (a[:1].expand(batch, -1, -1), b), (a, b[:1].expand(batch, -1, -1))]:
            what = f"{plan} {(batch, m, n, k)} {ta} {tb} {left.stride()} {right.stride()}"
            try:
                check(lambda a, b: ops.gemm_planned(a, b, plan, allow_tf32=True), left, right, what)
            except NotImplementedError:
                continue
            ran += 1
    if ran == 0:
        pytest.skip("not for this dtype, or not on this device")


@pytest.mark.cuda
def test_gradients_of_weights_of_many_rows_take_the_tiles_that_were_fastest():
    """On an H200, the fastest and what was chosen before: 103.9 and 123.6 µs; in a step of GPT-2 78.1 and 81.8. Tile
    13 has 192 x 192, and so has 21, a pair's, which is not split."""
    if torch.cuda.get_device_properties(0).multi_processor_count != 132 or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the choice depends on the number of multiprocessors")
    sizes = {(768, 768, 32768): 13, (3072, 768, 16384): 21}
    for (m, n, k), tile in sizes.items():
        a, b = (torch.empty(k, size, device="cuda", dtype=torch.bfloat16) for size in (m, n))
        path, chosen, splits, swapped = ops.gemm_plan(a.T, b)
        assert (path, chosen, swapped) == (13, tile, 0) and (splits > 1) == (tile == 13)


@pytest.mark.cuda
def test_an_odd_number_of_rows_of_tiles_fills_whole_clusters():
    """6304 x 768 is 33 x 4 tiles of 192 x 192, 66 clusters of two: one wave of 132 multiprocessors. On an H200 40.9 µs,
    50.6 by the fastest that there was while the second block of the last row's clusters was idle."""
    if torch.cuda.get_device_properties(0).multi_processor_count != 132 or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the choice depends on the number of multiprocessors")
    a, b = (torch.empty(*size, device="cuda", dtype=torch.bfloat16) for size in ((6304, 3072), (3072, 768)))
    assert tuple(ops.gemm_plan(a, b)) == (13, 13, 1, 0)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_bias_where_the_kernel_makes_d_transposed(dtype):
    """Columns of D are the kernel's rows then. 4728 x 504 is 120 tiles of 160 x 128, which those of 128 x 160 are with
    A and B exchanged, the last ones not whole."""
    rows, outputs, inputs = 4728, 504, 256
    x, weight = operands(rows, outputs, inputs, dtype, "cuda", False, True)
    bias = torch.linspace(-3, 3, outputs, device="cuda").to(dtype)
    if torch.cuda.get_device_capability() == (9, 0):
        assert ops.gemm_plan(x, weight)[3] == 1
    exact = x.double() @ weight.double() + bias.double()
    magnitude = x.double().abs() @ weight.double().abs() + bias.double().abs()
    actual = cuda_ops.functional.linear(x, weight.T, bias)
    assert ((actual.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * magnitude).all()


@pytest.mark.cuda
@pytest.mark.parametrize("tile", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_turns_of_short_tiles(dtype, tile):
    """Warpgroups that alternate between tiles of one step each, with splits stored element by element, which no barrier
    follows: a late warp must not miss a phase. Many times over, since one in thousands was late."""
    k = 3 * 128 // dtype.itemsize
    a, b = batches(150, 256, 128, k, dtype, False, True)
    try:
        for _ in range(200):
            ops.gemm_planned(a, b, (13, tile, 3, 0), allow_tf32=True)
    except NotImplementedError:
        pytest.skip("rung 13 is for GPUs of compute capability 9.0, in a build with 9.0a")
    check(lambda a, b: ops.gemm_planned(a, b, (13, tile, 3, 0), allow_tf32=True), a, b, f"{dtype} {tile}")


FLOAT64_PLANS = [(11, tile, splits, 0) for tile in range(3) for splits in (1, 3)]


@pytest.mark.cuda
@pytest.mark.parametrize("plan", FLOAT64_PLANS, ids=str)
def test_float64_plans(plan):
    """Rung 11's tiles of float64, k whole and cut: less than a tile, one, several; odd sizes; a batch."""
    sizes = [(1, 1, 1), (32, 64, 32), (17, 33, 700), (130, 68, 48), (96, 128, 256), (5, 4, 0)]
    for (m, n, k), (ta, tb) in itertools.product(sizes, itertools.product([False, True], repeat=2)):
        a, b = operands(m, n, k, torch.float64, "cuda", ta, tb)
        check(lambda a, b: ops.gemm_planned(a, b, plan), a, b, f"{plan} {(m, n, k)} {ta} {tb}")
    a, b = batches(300, 40, 72, 200, torch.float64, False, False)
    check(lambda a, b: ops.gemm_planned(a, b, plan), a, b, f"{plan} batch")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("plan", CORES_PLANS, ids=str)
def test_cores_plans(plan, dtype):
    """Sizes below a tile, odd, of rows that 16 bytes fit and of others; k of fewer slices than warps and blocks, of
    more than the rings hold, and none; a batch."""
    sizes = [(1, 1, 1), (17, 33, 19), (64, 10, 128), (36, 132, 700), (3, 65, 2049), (130, 70, 48), (5, 4, 0)]
    for (m, n, k), (ta, tb) in itertools.product(sizes, itertools.product([False, True], repeat=2)):
        a, b = operands(m, n, k, dtype, "cuda", ta, tb)
        check(lambda a, b: ops.gemm_planned(a, b, plan), a, b, f"{plan} {(m, n, k)} {ta} {tb}")
    a, b = torch.randn(7, 20, 50, device="cuda", dtype=dtype), torch.randn(7, 50, 36, device="cuda", dtype=dtype)
    check(lambda a, b: ops.gemm_planned(a, b, plan), a, b, f"{plan} batch")


@pytest.mark.cuda
@pytest.mark.parametrize("plan", SIMT_PLANS, ids=str)
def test_simt_plans(plan):
    """Less than a tile, one, several; k of fewer slices than splits, and none; rows that 16 bytes fit, and others, of
    which only the first two tiles copy elements; a batch, and its epilogue."""
    ran = 0
    sizes = [(1, 1, 1), (132, 260, 64), (200, 68, 1000), (131, 257, 130), (300, 134, 2050), (5, 4, 0)]
    for (m, n, k), (ta, tb) in itertools.product(sizes, itertools.product([False, True], repeat=2)):
        a, b = operands(m, n, k, torch.float32, "cuda", ta, tb)
        try:
            check(lambda a, b: ops.gemm_planned(a, b, plan), a, b, f"{plan} {(m, n, k)} {ta} {tb}")
        except NotImplementedError:
            copies_vectors = (not ta or m % 4 == 0) and (tb or n % 4 == 0)
            # Of a single row or column either order may be taken for its own.
            refused = min(m, n, k) <= 1 or not copies_vectors
            assert plan[1] > 2 and refused, f"{plan} {(m, n, k)} {ta} {tb}"
            continue
        ran += 1
    assert ran
    a, b = torch.randn(7, 20, 52, device="cuda"), torch.randn(7, 52, 36, device="cuda")
    check(lambda a, b: ops.gemm_planned(a, b, plan), a, b, f"{plan} batch")
    for unknown in [(10, 8, 1, 0), (10, 0, 2, 0), (10, 1, 65, 0)]:
        with pytest.raises(NotImplementedError):
            ops.gemm_planned(a, b, unknown)


@pytest.mark.cuda
def test_float64_of_many_tiles():
    """Rung 11's float64 has another kernel where there are more tiles than multiprocessors, and cuts k of the last
    wave's tiles where they are few and k is long."""
    waves = 64 * (torch.cuda.get_device_properties(0).multi_processor_count + 2)
    for ta, tb, odd in itertools.product([False, True], [False, True], [0, 1]):
        for m, n, k in [(1100, 1000, 72), (waves - 6, 100, 520), (waves // 2 - 6, 132, 1030)]:
            a, b = operands(m + odd, n + odd, k + odd, torch.float64, "cuda", ta, tb)
            check(cuda_ops.functional.matmul, a, b, f"{m} {n} {k} {odd} {ta} {tb}")


@pytest.mark.cuda
def test_float32_of_many_tiles():
    """Rung 10's float32 has other tiles where D is large, where tiles of 96 rows fill the GPU better, and for batches
    of 128 x 64 and of 64 x 64."""
    sizes = [(2048, 2048, 64), (2052, 2300, 100), (1024, 1536, 96), (1020, 1540, 68), (2049, 2051, 33)]
    for (m, n, k), (ta, tb) in itertools.product(sizes, itertools.product([False, True], repeat=2)):
        a, b = operands(m, n, k, torch.float32, "cuda", ta, tb)
        check(cuda_ops.functional.matmul, a, b, f"{m} {n} {k} {ta} {tb}")
    a, b = torch.randn(2, 2000, 60, device="cuda"), torch.randn(2, 60, 2300, device="cuda")
    check(cuda_ops.functional.matmul, a, b, "batch")
    sizes = [(300, 128, 64, 96), (300, 124, 60, 68), (600, 64, 64, 64), (600, 60, 61, 50)]
    for (batch, m, n, k), (ta, tb) in itertools.product(sizes, itertools.product([False, True], repeat=2)):
        a, b = batches(batch, m, n, k, torch.float32, ta, tb)
        check(cuda_ops.functional.matmul, a, b, f"{batch} {m} {n} {k} {ta} {tb}")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PAIRS, ids=str)
def test_pairs(plan, dtype):
    """Two blocks of a cluster, each with half of k: one of them without a slice, both with fewer than are multiplied by
    halves, and as many, and one more; more tiles than the GPU holds; batches, one of them with a matrix for all."""
    ran = 0
    for (batch, m, n, k), (ta, tb) in itertools.product(
        [
            *((1, 136, 200, k) for k in (8, 64, 72, 448, 512, 520, 704, 768, 1032)),
            (3, 264, 392, 776),
            (70, 136, 104, 960),
        ],
        itertools.product([False, True], repeat=2),
    ):
        a, b = (
            torch.randn(batch, *(lines if not turned else lines[::-1]), device="cuda").to(dtype)
            for lines, turned in (((m, k), ta), ((k, n), tb))
        )
        a, b = (x.mT if turned else x for x, turned in ((a, ta), (b, tb)))
        try:
            for left in (a, a[:1].expand(batch, -1, -1)):
                check(lambda a, b: ops.gemm_planned(a, b, plan), left, b, f"{plan} {(batch, m, n, k)} {ta} {tb}")
        except NotImplementedError:  # not in this storage order
            continue
        ran += 1
    if ran == 0:
        pytest.skip("rung 13 is for GPUs of compute capability 9.0, in a build with 9.0a")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_own_plan(dtype):
    """What is chosen runs, at sizes for which it is each of the rungs."""
    chosen = set()
    sizes_of_rungs = [(16, 4096, 512), (64, 128, 3136), (64, 10, 128), (1024, 1024, 64), (2048, 2048, 32), (1, 33, 700)]
    for sizes in [*sizes_of_rungs, (30, 31, 33), (777, 1333, 555)]:
        a, b = operands(*sizes, dtype, "cuda", False, True)
        plan = ops.gemm_plan(a, b)
        chosen.add(plan[0])
        assert plan[0] in (10, 11, 13, 14, 15, 16, 18)
        check(lambda a, b, plan=plan: ops.gemm_planned(a, b, plan), a, b, f"{plan} {sizes}")
    if torch.cuda.get_device_capability()[0] == 9:
        assert chosen == {torch.float32: {15, 18}, torch.float64: {11, 15}}.get(dtype, {13, 14, 15, 16})


@pytest.mark.cuda
@pytest.mark.parametrize("rung", CORES_RUNGS, ids=lambda rung: rung.name)
def test_misaligned_and_strided(rung):
    """Pointers that are not aligned to 16 bytes, and rows wider than the matrix: views of a larger one."""
    for dtype in (torch.float32, torch.float64):
        for offset, pitch in [(1, 132), (0, 133), (3, 129), (0, 136)]:
            big_a, big_b = operands(80, pitch, pitch, dtype, "cuda")[0], operands(pitch, pitch, 128, dtype, "cuda")[0]
            a, b = big_a[:77, offset : offset + 100], big_b[:100, offset : offset + 66]
            check(rung, a, b, f"{rung.name} offset {offset} pitch {pitch}")


@pytest.mark.cuda
@pytest.mark.parametrize("rung", CUDA_RUNGS, ids=lambda rung: rung.name)
def test_same_bits_again(rung):
    a, b = operands(130, 70, 5000, torch.float32, "cuda")
    if not rung.runs(a, b):
        pytest.skip("not for float32 without TF32")
    first = rung(a, b)
    assert all(torch.equal(first, rung(a, b)) for _ in range(3))


@pytest.mark.cuda
@pytest.mark.parametrize("rung", CORES_RUNGS, ids=lambda rung: rung.name)
def test_nan_and_infinity_travel(rung):
    a, b = operands(40, 50, 30, torch.float32, "cuda")
    a[3, 4], b[5, 6], a[7, 8] = math.nan, math.inf, -math.inf
    actual, expected = rung(a, b), (a.double() @ b.double()).float()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual[actual.isinf()], expected[expected.isinf()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_opcheck(dtype, device):
    a, b = operands(5, 7, 3, dtype, device)
    torch.library.opcheck(ops.gemm_rung.default, (a, b, 31 if device == "cpu" else 4))


def test_bad_inputs(device):
    a = torch.zeros(2, 3, device=device)
    rung = 31 if device == "cpu" else 4
    with pytest.raises(RuntimeError, match="gemm_rung: expected b to have as many rows as a has columns, 3, got shape"):
        ops.gemm_rung(a, a, rung)
    with pytest.raises(RuntimeError, match="gemm_rung: expected a to have 2 dimensions"):
        ops.gemm_rung(a[0], a, rung)
    with pytest.raises(RuntimeError, match="gemm_rung: expected a to be floating point, got int64"):
        ops.gemm_rung(a.long(), a, rung)
    with pytest.raises(RuntimeError, match="gemm_rung"):
        ops.gemm_rung(a, a.T, 99)


def test_rungs_are_in_order():
    numbers = [rung.number for rung in gemm.rungs.values()]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(1, 16))
