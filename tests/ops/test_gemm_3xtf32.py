"""gemm's path sm90_3xtf32: float32 in three products of TF32, as accurate as float32's multiply-adds."""

import itertools
import math

import pytest
import torch
from support.devices import needs_hopper

import cuda_ops
from cuda_ops import _library
from cuda_ops import functional as F
from cuda_ops._library import ops

NAIVE, SIMT, THREE = 4, 10, 18  # the paths' numbers
TILES = {0: 128, 1: 96, 2: 64}  # and their columns
ORDERS = list(itertools.product((False, True), repeat=2))
# Whole tiles; an odd number of rows of them, of which a cluster takes two; a part of one; k of no whole 32 and of less;
# rows of no whole 16 bytes in B, which is copied, and in both.
SIZES = [(256, 192, 64), (388, 200, 100), (1000, 132, 36), (130, 64, 8), (129, 61, 260), (2000, 4, 516), (301, 203, 67)]


@pytest.fixture
def float32(monkeypatch):
    needs_hopper()
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def matrix(rows, columns, turned=False, seed=0, make=torch.randn, batch=()):
    """Stored as the transpose where `turned`."""
    generator = torch.Generator("cuda").manual_seed(seed + rows + 7 * columns)
    sizes = (columns, rows) if turned else (rows, columns)
    found = make(*batch, *sizes, device="cuda", generator=generator)
    return found.mT if turned else found


def wide(*sizes, **options):
    """Of magnitudes between 2^-20 and 2^20."""
    return torch.randn(sizes, **options) * 2.0 ** (40 * torch.rand(sizes, **options) - 20)


def errors(d, a, b):
    """In proportion to the sum of the products' magnitudes: the largest, and the root of the mean square."""
    a, b = a.double(), b.double()
    found = (d.double() - a @ b) / (a.abs() @ b.abs())
    return found.abs().max().item(), found.square().mean().sqrt().item()


def check(d, a, b, what):
    largest, root = errors(d, a, b)
    assert largest < 2**-19, f"{what}: {largest:.2e}"
    assert root < 2**-22, f"{what}: {root:.2e}"


@pytest.mark.cuda
@pytest.mark.parametrize("tile", TILES)
def test_plans(tile, float32):
    """Every tile, all storage orders, k whole and split; the smaller operand is in two parts, whichever it is."""
    for (m, n, k), turned, (left, right), splits in itertools.product(SIZES, (False, True), ORDERS, (1, 3)):
        rows, columns = (n, m) if turned else (m, n)
        a, b = matrix(rows, k, left), matrix(k, columns, right, seed=1)
        what = f"{rows}x{columns}x{k} {left} {right} in {splits}"
        d = ops.gemm_planned(a, b, (THREE, tile, splits, 0))
        check(d, a, b, what)
        assert torch.equal(d, ops.gemm_planned(a, b, (THREE, tile, splits, 0))), what


@pytest.mark.cuda
@pytest.mark.parametrize("tile", TILES)
def test_batches(tile, float32):
    """Also of one matrix for all, and of more tiles than the GPU has room for at once."""
    sizes = [(260, 100, 68), (100, 260, 68), (131, 67, 33)]
    for (m, n, k), shared, (left, right) in itertools.product(sizes, (0, 1, 2), ORDERS):
        a = matrix(m, k, left, batch=(1 if shared == 1 else 60,)).expand(60, m, k)
        b = matrix(k, n, right, seed=1, batch=(1 if shared == 2 else 60,)).expand(60, k, n)
        check(ops.gemm_planned(a, b, (THREE, tile, 1, 0)), a, b, f"{m}x{n}x{k} {shared} {left} {right}")


KINDS = {"normal": torch.randn, "positive": torch.rand, "wide": wide}


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [64, 256, 1024, 8192])
def test_is_as_accurate_as_multiply_adds(kind, k, float32):
    """One after the other, as the first rung has them; sums of few products are off by a little more than these."""
    a, b = matrix(384, k, make=KINDS[kind]), matrix(k, 384, seed=1, make=KINDS[kind])
    largest, root = errors(ops.gemm_rung(a, b, NAIVE), a, b)
    for tile in TILES:
        own_largest, own_root = errors(ops.gemm_planned(a, b, (THREE, tile, 1, 0)), a, b)
        assert own_root <= (1.7 if k == 64 else 1.1) * root, f"{own_root:.2e} {root:.2e}"
        assert own_largest <= (2.0 if k == 64 else 1.3) * largest, f"{own_largest:.2e} {largest:.2e}"


@pytest.mark.cuda
@pytest.mark.parametrize("k", [64, 1024])
def test_lower_parts_of_one_sign(k, float32):
    """Their products, which are left out, add up where all have the same sign and are as large as can be."""
    a, b = (1 + 2**-11 - 2**-13 * matrix(*sizes, make=torch.rand) for sizes in ((256, k), (k, 192)))
    for tile in TILES:
        largest, _ = errors(ops.gemm_planned(a, b, (THREE, tile, 1, 0)), a, b)
        assert largest < 2**-20, f"{largest:.2e}"


@pytest.mark.cuda
def test_sums_that_cancel(float32):
    """What is left of k products, half of which take the other half away, is as near as multiply-adds come to it."""
    for k in (256, 4096):
        a, b = matrix(256, k), matrix(k, 192, seed=1)
        a[:, k // 2 :] = a[:, : k // 2]
        b[k // 2 :] = -b[: k // 2] * (1 + 1e-5 * matrix(k // 2, 192, seed=2))
        _, fma = errors(ops.gemm_rung(a, b, NAIVE), a, b)
        for tile in TILES:
            _, root = errors(ops.gemm_planned(a, b, (THREE, tile, 1, 0)), a, b)
            assert root <= fma, f"{k} {tile}: {root:.2e} {fma:.2e}"


@pytest.mark.cuda
@pytest.mark.parametrize("turned", [False, True])
def test_pairs_of_special_values(turned, float32):
    """A product of one number with one other is what float32's is: infinities, NaN, the largest numbers, small ones,
    zeros."""
    largest, inf = torch.finfo(torch.float32).max, math.inf
    values = [
        inf,
        -inf,
        math.nan,
        0.0,
        -0.0,
        largest,
        -largest,
        largest * (1 - 2**-12),
        3e38,
        2.0**100,
        1.0,
        -1.0000001,
    ]
    values += [0.5, 1 + 2**-11, 1 - 2**-12, 2.0**-60, 2.0**-100, 1e-30]
    count = len(values)
    values = torch.tensor(values, device="cuda")
    a, b = torch.zeros(count * count, 32, device="cuda"), torch.zeros(32, count * count, device="cuda")
    a[:, 3], b[3] = values.repeat_interleave(count), values.repeat(count)
    a = a.mT.contiguous().mT if turned else a
    expected = (values[:, None] * values).flatten()
    for tile in TILES:
        found = ops.gemm_planned(a, b, (THREE, tile, 1, 0)).diagonal()
        assert torch.equal(found.isnan(), expected.isnan())
        finite = ~expected.isnan() & expected.isfinite()
        assert torch.equal(found[~finite & ~expected.isnan()], expected[~finite & ~expected.isnan()])
        near = (found - expected)[finite].abs() <= 2**-22 * expected[finite].abs() + 2.0**-126
        assert near.all(), (found[finite][~near], expected[finite][~near])


@pytest.mark.cuda
def test_special_values_amid_others(float32):
    """Where sums are infinite or NaN is as with multiply-adds, signs as well."""
    specials = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 1e-40, 2.0**60, -(2.0**60)], device="cuda")
    for (left, right), count, tile in itertools.product(ORDERS, (1, 20, 400), TILES):
        a, b = matrix(256, 64, left, seed=count), matrix(64, 192, right, seed=count + 1)
        generator = torch.Generator("cuda").manual_seed(count)
        for x in (a, b):
            at = torch.randint(x.numel(), (count,), device="cuda", generator=generator)
            kind = torch.randint(len(specials), (count,), device="cuda", generator=generator)
            x[at // x.shape[1], at % x.shape[1]] = specials[kind]
        found, expected = ops.gemm_planned(a, b, (THREE, tile, 1, 0)), ops.gemm_planned(a, b, (SIMT, 0, 1, 0))
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isinf(), expected.isinf())
        assert torch.equal(found[found.isinf()], expected[expected.isinf()])


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(700, 132, 200), (200, 132, 700), (390, 64, 61), (33, 260, 500)]
)
def test_layers(rows, inputs, outputs, float32, monkeypatch):
    """linear with bias, relu and gelu, whose preactivation is kept, and the gradients: D as it is and transposed."""
    monkeypatch.setenv("CUDA_OPS_GEMM_PATH", "sm90_3xtf32")
    x, weight, bias = matrix(rows, inputs), matrix(outputs, inputs, seed=1), matrix(1, outputs, seed=2)[0]
    for function, native in [
        (F.linear, torch.nn.functional.linear),
        (F.linear_gelu, lambda *t: torch.nn.functional.gelu(torch.nn.functional.linear(*t))),
        (F.linear_relu, lambda *t: torch.relu(torch.nn.functional.linear(*t))),
    ]:
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        doubles = [t.double().requires_grad_() for t in (x, weight, bias)]
        grad = matrix(rows, outputs, seed=3)
        try:
            y = function(*leaves)
            y.backward(grad)
        except NotImplementedError:
            assert outputs % 4  # neither operand of a gradient has rows of whole 16 bytes
            continue
        z = native(*doubles)
        z.backward(grad.double())
        for found, expected in zip([y, *(t.grad for t in leaves)], [z, *(t.grad for t in doubles)], strict=True):
            error = (found.double() - expected).norm() / expected.norm()
            assert error < 1e-6, f"{function.__name__}: {error:.2e}"


@pytest.mark.cuda
@pytest.mark.parametrize("activation", ["silu", "hardswish"])
def test_activations_are_as_exact_as_the_sums(activation, float32, monkeypatch):
    """Of sums that are exact, also where the result is e^-87 or what is left of 3; in parts of k and whole."""
    monkeypatch.setenv("CUDA_OPS_GEMM_PATH", "sm90_3xtf32")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    channels, eps = 256, 2.0**-10
    eighths = torch.arange(-8 * 87, 8 * 20, device="cuda").repeat(2048)[: 2048 * channels] / 8
    pixels = eighths.reshape(2048, channels)
    weight = torch.eye(channels, device="cuda")[..., None, None].contiguous(memory_format=torch.channels_last)
    mean, variance = torch.zeros(channels, device="cuda"), torch.full((channels,), 1 - eps, device="cuda")
    for height, width in ((32, 64), (8, 8)):
        part = pixels[: height * width].reshape(1, height, width, channels).permute(0, 3, 1, 2)
        found = F.conv_bn_act(part, weight, None, mean, variance, activation=activation, eps=eps).double()
        expected = getattr(torch.nn.functional, activation)(part.double())
        error = ((found - expected) / torch.where(expected == 0, 1, expected)).abs().max().item()
        assert error < 1e-6, f"{height}x{width} pixels: {error:.2e}"


@pytest.mark.cuda
def test_an_address_that_no_query_knew_of(float32, monkeypatch):
    """Operands that begin at no multiple of 16 bytes: the smaller one may, and of the larger one's product another path
    takes it, in the workspace that there is."""
    for moved in (0, 1):
        memory = [torch.randn(2048 * 512 + 1, device="cuda"), torch.randn(512 * 1024 + 1, device="cuda")]
        begins = [int(i == moved) for i in range(2)]
        a = memory[0][begins[0] :][: 2048 * 512].view(2048, 512)
        b = memory[1][begins[1] :][: 512 * 1024].view(512, 1024)
        check(F.matmul(a, b), a, b, f"{moved} is moved")


def chosen(m, n, k, capability="9.0", dtype=torch.float32):
    x, weight = torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(n, k, dtype=dtype, device="meta")
    explanation = cuda_ops.explain(F.linear, x, weight, capability=capability, show=False)
    return {product.name: product.chosen.name for product in explanation.products}


@pytest.mark.skipif(not _library.has_cuda(), reason="a build without CUDA has no tables of paths")
def test_choice(monkeypatch):
    """Large products of float32 on Hopper alone, where TF32 is not allowed and the environment does not say no."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    large = (12608, 3072, 768)
    assert set(chosen(*large).values()) == {"sm90_3xtf32"}
    assert "sm90_3xtf32" not in chosen(*large, capability="8.0").values()
    assert "sm90_3xtf32" not in chosen(*large, capability="10.0").values()
    assert "sm90_3xtf32" not in chosen(*large, dtype=torch.float64).values()
    assert "sm90_3xtf32" not in chosen(64, 64, 64).values()
    # Rows of no whole 16 bytes in both operands, of which the larger one is copied: on an H100 1258 µs for simt's 3089.
    assert chosen(8192, 5004, 1866)["forward"] == "sm90_3xtf32"
    monkeypatch.setenv("CUDA_OPS_3XTF32", "0")
    ops.reload_paths()
    try:
        assert set(chosen(*large).values()) == {"simt"}
    finally:
        monkeypatch.delenv("CUDA_OPS_3XTF32")
        ops.reload_paths()
    assert chosen(*large)["forward"] == "sm90_3xtf32"
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert "sm90_3xtf32" not in chosen(*large).values()


@pytest.mark.cuda
def test_the_environment_turns_it_off(float32, monkeypatch):
    monkeypatch.setenv("CUDA_OPS_3XTF32", "0")
    ops.reload_paths()
    try:
        monkeypatch.setenv("CUDA_OPS_GEMM_PATH", "sm90_3xtf32")
        with pytest.raises(NotImplementedError, match="CUDA_OPS_GEMM_PATH=sm90_3xtf32 cannot"):
            F.matmul(matrix(256, 256), matrix(256, 256))
    finally:
        monkeypatch.delenv("CUDA_OPS_3XTF32")
        ops.reload_paths()
