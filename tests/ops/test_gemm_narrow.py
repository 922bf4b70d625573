"""gemm's path narrow, for long operands of few columns, and the sums of many splits."""

import itertools
import math

import pytest
import torch
from support.devices import needs_ampere, needs_hopper

from cuda_ops import functional as F
from cuda_ops._library import ops

SM90, NARROW = 13, 17  # the paths' numbers
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NORM = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def matrix(rows, columns, dtype, turned=False, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed + rows + 7 * columns)
    sizes = (columns, rows) if turned else (rows, columns)
    found = torch.randn(sizes, device="cuda", generator=generator).to(dtype)
    return found.mT if turned else found


def check(actual, expected, dtype, what, k=1):
    """A sum of k products of random signs in float32, one after the other, is off by 2^-24 sqrt(k) of its size."""
    expected = expected.double()
    bound = max(NORM[dtype], 2**-24 * math.sqrt(k))
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < bound, f"{what}: {error:.2e}"
    assert (actual.double() - expected).abs().max() <= 8 * bound * expected.abs().max(), what


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(dtype):
    """A long D: rows of every alignment, less than a run of 32, some runs, and more than a wave of blocks has."""
    needs_ampere()
    columns = [(34, 14), (16, 16), (24, 122), (1, 3), (33, 7), (88, 24), (40, 72)]
    for m, (k, n), turned in itertools.product((1, 31, 1000, 100003), columns, (False, True)):
        a, b = matrix(m, k, dtype), matrix(k, n, dtype, turned, seed=1)
        d = ops.gemm_planned(a, b, (NARROW, 0, 1, 0))
        check(d, a.double() @ b.double(), dtype, f"{m}x{n}x{k} {turned}")
        assert torch.equal(d, ops.gemm_planned(a, b, (NARROW, 0, 1, 0)))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns(dtype):
    """A long k: D in one piece and in several, exchanged or not, by one block and by many."""
    needs_ampere()
    # float32 has room for half as many.
    columns = [(14, 34), (34, 14), (48, 52), (3, 1), (24, 80), (80, 24), (17, 65)]
    columns += [(64, 64), (24, 128), (144, 24)] if dtype.itemsize == 2 else []
    for k, (m, n), splits in itertools.product((2, 33, 4097, 60000), columns, (1, 5, 132)):
        a, b = matrix(m, k, dtype, True), matrix(k, n, dtype, seed=1)
        d = ops.gemm_planned(a, b, (NARROW, 0, splits, 0))
        check(d, a.double() @ b.double(), dtype, f"{m}x{n}x{k} in {splits}", k)
        assert torch.equal(d, ops.gemm_planned(a, b, (NARROW, 0, splits, 0)))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_short_k(dtype):
    """Long rows of D and a k of up to 16, or 4 in 16 bits: every storage order, rows of no whole four, more rows than
    blocks have at once, and an address that is no multiple of 16 bytes."""
    needs_ampere()
    sizes = [(1, 257, 1), (33, 512, 2), (31, 1027, 3), (100003, 260, 4)]
    sizes += [(500, 2500, 9), (70, 384, 16), (9, 300, 7)] if dtype.itemsize == 4 else []
    for m, n, k in sizes:
        for left, right in itertools.product((False, True), repeat=2):
            a, b = matrix(m, k, dtype, left), matrix(k, n, dtype, right, seed=1)
            d = ops.gemm_planned(a, b, (NARROW, 0, 1, 0))
            check(d, a.double() @ b.double(), dtype, f"{m}x{n}x{k} {left} {right}")
            assert torch.equal(d, ops.gemm_planned(a, b, (NARROW, 0, 1, 0)))
    moved = torch.randn(40 * 4 + 1, device="cuda").to(dtype)[1:].view(40, 4)
    b = matrix(4, 300, dtype)
    check(ops.gemm_planned(moved, b, (NARROW, 0, 1, 0)), moved.double() @ b.double(), dtype, "moved")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers(dtype, monkeypatch):
    """linear with its bias, its relu and its gradients; a call that the path does not take."""
    needs_ampere()
    monkeypatch.setenv("CUDA_OPS_GEMM_PATH", "narrow")
    x, weight, bias = matrix(5000, 24, dtype), matrix(34, 24, dtype, seed=1), matrix(1, 34, dtype, seed=2)[0]
    y = x.double() @ weight.double().mT + bias.double()
    check(F.linear(x, weight, bias), y, dtype, "linear")
    grad = matrix(5000, 34, dtype, seed=3)
    check(ops.linear_backward_input(grad, weight), grad.double() @ weight.double(), dtype, "gradient of input")
    check(ops.linear_backward_weight(grad, x), grad.double().mT @ x.double(), dtype, "gradient of weight")
    with pytest.raises(NotImplementedError, match="CUDA_OPS_GEMM_PATH=narrow cannot"):
        F.linear(matrix(64, 2000, dtype), matrix(64, 2000, dtype))


@pytest.mark.cuda
def test_an_address_that_no_query_knew_of(monkeypatch):
    """Where the query for the workspace took narrow, padded has no room for its copies. (What lay beyond it is told by
    compute-sanitizer; here results are right.)"""
    needs_hopper()
    monkeypatch.setenv("CUDA_OPS_CONV2D_PATH", "gemm_1x1")
    images, channels, outs = (36, 80, 80), 34, 14
    x, g = matrix(36 * 80 * 80, channels, torch.bfloat16), matrix(36 * 80 * 80, outs, torch.bfloat16, seed=1)
    expected = g.double().mT @ x.double()
    x = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(*images, channels).permute(0, 3, 1, 2)
    assert x.data_ptr() % 16
    g = g.view(*images, outs).permute(0, 3, 1, 2)
    found = ops.conv2d_backward_weight(g, x, (outs, channels, 1, 1), True, (1, 1), (0,) * 4, (1, 1), 1)
    check(found.flatten(1), expected, torch.bfloat16, "gradient of weight")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_many_splits(dtype):
    """Up to 16 are added by a thread each, more by eight warps."""
    needs_hopper()
    for splits in (16, 17, 100, 264):
        a, b = matrix(72, 40000, dtype, True), matrix(40000, 104, dtype, seed=1)
        d = ops.gemm_planned(a, b, (SM90, 6, splits, 0))
        check(d, a.double() @ b.double(), dtype, f"{splits} splits")
        assert torch.equal(d, ops.gemm_planned(a, b, (SM90, 6, splits, 0)))
