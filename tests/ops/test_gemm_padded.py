"""gemm's padded path: operands whose rows TMA cannot read are copied, in TF32 also the shorter one that wgmma cannot,
and D's rows are stored where they are."""

import itertools
import math
import re

import pytest
import torch
from support.c_programs import CSRC

from cuda_ops import functional as F
from cuda_ops._library import ops

PADDED, SKINNY = 16, 32  # the path's number, and the first of sm90_skinny's tiles in it


def tiles_of(dtype):
    """sm90's and sm90_skinny's tiles that the choice knows, in padded's numbers."""
    text = (CSRC / "cuda" / "gemm" / "times.h").read_text()
    tables = re.findall(rf"GemmTime {dtype}\w*_TIMES\[\] = {{(.*?)}};", text, re.DOTALL)
    rows = re.findall(r"{ (13|14), +(\d+),", "".join(tables))
    return sorted({int(tile) + (SKINNY if path == "14" else 0) for path, tile in rows})


HALVES_TILES, TF32_TILES = tiles_of("HALVES"), tiles_of("TF32")
ORDERS = list(itertools.product([False, True], repeat=2))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("TMA and wgmma are of compute capability 9.0")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)


def matrices(batch, rows, columns, dtype, turned, shift=0, gap=0, seed=0):
    """Values that TF32 holds, amid NaN: `shift` elements before the first, `gap` after each row, and stored as the
    transpose where `turned`."""
    generator = torch.Generator("cuda").manual_seed(seed + rows + 7 * columns)
    rows, columns = (columns, rows) if turned else (rows, columns)
    pitch = columns + gap
    memory = torch.full((shift + batch * rows * pitch + 16,), math.nan, device="cuda", dtype=dtype)
    found = memory[shift : shift + batch * rows * pitch].view(batch, rows, pitch)[..., :columns]
    found.copy_(torch.randn(batch, rows, columns, device="cuda", generator=generator).bfloat16())
    found = found if batch > 1 else found[0]
    return found.mT if turned else found


def check(actual, a, b, what, bias=None, activation=None):
    """Within what rounding k products in any order may do, element by element."""
    expected, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    if activation is not None:
        expected = activation(expected)
    eps = torch.finfo(torch.float32).eps
    store = 2 * torch.finfo(actual.dtype).eps if actual.dtype.itemsize == 2 else 0
    bound = 4 * math.sqrt(a.shape[-1] + 4) * eps * magnitude + store * (expected.abs() + 1e-3)
    wrong = ~((actual.double() - expected).abs() <= bound)
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} elements, the first at {wrong.nonzero()[0]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", sorted({*HALVES_TILES, *TF32_TILES}))
def test_plans(tile, dtype):
    """Each tile, k whole and split, D as it is and transposed: less than a tile, one, several, in every order."""
    if tile not in (TF32_TILES if dtype == torch.float32 else HALVES_TILES):
        pytest.skip("not of this dtype")
    ran = 0
    sizes = [(9, 17, 11), (201, 137, 199), (15, 263, 2049), (329, 23, 73), (131, 517, 65)]
    for (m, n, k), (ta, tb), splits, swapped in itertools.product(sizes, ORDERS, (1, 2), (0, 1)):
        a, b = matrices(1, m, k, dtype, ta), matrices(1, k, n, dtype, tb, seed=1)
        try:
            d = ops.gemm_planned(a, b, (PADDED, tile, splits, swapped), allow_tf32=True)
        except NotImplementedError:
            continue
        check(d, a, b, f"{(m, n, k)} {ta} {tb} splits {splits} swapped {swapped}")
        ran += 1
    # Of 16 bits, 22 makes D^T alone, of rows that TMA can write; 23, 25 and 26 are for one order of the four, the last
    # two with k whole. TF32's 6 is for operands as no copy is.
    fewer = {6: 0} if dtype == torch.float32 else {22: 0, 23: 10, 25: 5, 26: 5}
    assert ran >= fewer.get(tile, 20)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 5])
def test_layouts(batch, dtype, monkeypatch):
    """Every order, rows that are too far apart, batches that share an operand, addresses beside multiples of 16 bytes;
    one operand unaligned, the other, and both."""
    monkeypatch.setenv("CUDA_OPS_GEMM_PATH", "padded")
    vector = 16 // dtype.itemsize
    for (ta, tb), shift, other_shift, gap in itertools.product(ORDERS, (0, 1, vector - 1), (0, 1), (0, 1, 3)):
        m, n, k = 8 * vector, 12 * vector, 10 * vector  # aligned but for what is done to them
        a = matrices(batch, m, k, dtype, ta, shift, gap)
        b = matrices(batch, k, n, dtype, tb, other_shift, 0, seed=1)
        what = f"{ta} {tb} {shift} {other_shift} {gap}"
        # a is shorter than b; in TF32 it is copied where it alone is not K-major.
        if shift == other_shift == gap == 0 and not (dtype == torch.float32 and ta and tb):
            with pytest.raises(NotImplementedError, match="CUDA_OPS_GEMM_PATH=padded cannot"):
                F.matmul(a, b)
            continue
        check(F.matmul(a, b), a, b, what)
        check(F.matmul(b.mT, a.mT), b.mT, a.mT, f"exchanged {what}")
        if batch > 1 and (shift or gap):
            check(F.matmul(a[:1].expand(batch, -1, -1), b), a[:1], b, f"shared a {what}")
            check(F.matmul(a, b[:1].expand(batch, -1, -1)), a, b[:1], f"shared b {what}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_choice_is_right(dtype):
    """As it comes, products and their gradients of odd sizes, large enough for several waves of tiles."""
    for m, n, k in [(777, 1333, 555), (2051, 1027, 129), (33, 4097, 1025), (4097, 33, 1025), (513, 515, 8193)]:
        for ta, tb in ORDERS:
            a, b = matrices(1, m, k, dtype, ta).requires_grad_(), matrices(1, k, n, dtype, tb, seed=1).requires_grad_()
            d = F.matmul(a, b)
            check(d.detach(), a.detach(), b.detach(), f"{(m, n, k)} {ta} {tb}")
            grad = matrices(1, m, n, dtype, False, seed=2)
            grad_a, grad_b = torch.autograd.grad(d, (a, b), grad)
            check(grad_a, grad, b.detach().mT, f"gradient of a {(m, n, k)} {ta} {tb}")
            check(grad_b, a.detach().mT, grad, f"gradient of b {(m, n, k)} {ta} {tb}")
            assert torch.equal(d, F.matmul(a, b))  # bit by bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_epilogues(bias, dtype):
    """linear, linear_relu and linear_gelu, with what they keep for their gradients."""
    relu, gelu = torch.nn.functional.relu, torch.nn.functional.gelu
    for rows, outputs, inputs in [(777, 1333, 555), (64, 129, 1001), (1000, 77, 333)]:
        x, weight = matrices(1, rows, inputs, dtype, False), matrices(1, outputs, inputs, dtype, False, seed=1)
        weight = (weight / 32).requires_grad_()  # a power of two
        b = matrices(1, 1, outputs, dtype, False, seed=2)[0].requires_grad_() if bias else None
        w, c = weight.detach().mT, b.detach() if bias else None
        what = f"{(rows, outputs, inputs)}"
        check(F.linear(x, weight, b).detach(), x, w, f"linear {what}", c)
        check(F.linear_relu(x, weight, b).detach(), x, w, f"linear_relu {what}", c, relu)
        for with_gradient in (False, True):
            with torch.set_grad_enabled(with_gradient):
                y = F.linear_gelu(x, weight, b).detach()
            # gelu has slopes of up to 1.13, and in halves its own approximation; kept, it is of the rounded sums.
            exact = gelu(x.double() @ w.double() + (0 if c is None else c.double()))
            tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3 if dtype == torch.float16 else 1e-5
            assert ((y.double() - exact).abs() <= tolerance * (exact.abs() + 1)).all(), f"linear_gelu {what}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_linear_relu(dtype):
    """Of more rows than its skinny path takes; the mask and the sums for bias are made without 16-byte vectors."""
    rows, outputs, inputs = 1500, 333, 555
    x, weight = matrices(1, rows, inputs, dtype, False), matrices(1, outputs, inputs, dtype, False, seed=1)
    bias = matrices(1, 1, outputs, dtype, False, seed=2)[0]
    for shift in (0, 1):
        grad = matrices(1, rows, outputs, dtype, False, shift, seed=3)
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias)]
        y = F.linear_relu(*leaves)
        grad_x, grad_weight, grad_bias = torch.autograd.grad(y, leaves, grad)
        masked = torch.where(y.detach() <= 0, 0, grad)
        check(grad_x, masked, weight, f"grad_input {shift}")
        check(grad_weight, masked.mT, x, f"grad_weight {shift}")
        ones = torch.ones(1, rows, device="cuda", dtype=dtype)
        check(grad_bias[None], ones, masked, f"grad_bias {shift}")


@pytest.mark.parametrize("tile", [tile for tile in TF32_TILES if tile != 6])  # for operands as no copy is
def test_tf32_by_a_copy_of_what_is_not_k_major(tile):
    """Rows that TMA can read, either operand the shorter one, batches that share it. The longer one is not copied, nor
    are both."""
    ran = 0
    for (m, n, k), batch, splits in itertools.product(
        [(200, 24, 144), (264, 200, 72), (520, 264, 264)], (1, 3), (1, 2)
    ):
        for order in ("NN", "TT"):
            rows, columns = (m, n) if order == "NN" else (n, m)  # the shorter operand is not K-major
            a = matrices(batch, rows, k, torch.float32, order[0] == "T")
            b = matrices(batch, k, columns, torch.float32, order[1] == "T", seed=1)
            for shared in (False, True) if batch > 1 else (False,):
                left = a[:1].expand(batch, -1, -1) if shared and order == "TT" else a
                right = b[:1].expand(batch, -1, -1) if shared and order == "NN" else b
                for swapped in (0, 1):
                    try:
                        d = ops.gemm_planned(left, right, (PADDED, tile, splits, swapped), allow_tf32=True)
                    except NotImplementedError:
                        continue
                    check(d, left, right, f"{order} {(m, n, k)} {batch} {splits} {swapped} {shared}")
                    ran += 1
    assert ran >= 18
    long, short = matrices(1, 512, 64, torch.float32, True), matrices(1, 64, 32, torch.float32, True, seed=1)
    for a, b in ((long, short), (long, short.contiguous())):
        with pytest.raises(NotImplementedError):
            ops.gemm_planned(a, b, (PADDED, tile, 1, 0), allow_tf32=True)


def test_no_copy_is_made_for_one_row():
    """A workspace as large as the weight would be, beside a product that reads the weight once."""
    x, weight = (matrices(1, rows, 4099, torch.bfloat16, False) for rows in (1, 4099))
    check(F.linear(x, weight), x, weight.mT, "one row")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    F.linear(x, weight)
    assert torch.cuda.max_memory_allocated() - before < weight.numel()
