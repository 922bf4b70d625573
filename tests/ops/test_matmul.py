"""What is special to matmul: random shapes, the path that the environment forces (of linear too), TF32, autocast."""

import math
import random

import pytest
import torch
from support.opspec import RELATIVE_NORM, Make, assert_close

import cuda_ops
from cuda_ops._library import ops
from cuda_ops.functional import linear, linear_gelu, matmul
from cuda_ops.ladder import gemm

# CUDA_OPS_GEMM_PATH's names for rungs of the ladder, by their number there.
PATHS = {
    "naive": 4,
    "coalesced": 5,
    "shared_memory": 6,
    "shared_memory_dynamic": 62,
    "register_tile_1d": 71,
    "register_tile": 7,
    "vectorised": 8,
    "warp_tile": 9,
    "simt": 10,
    "mma": 11,
    "tma_wgmma": 12,
    "sm90": 13,
    "sm90_skinny": 14,
    "direct": 15,
    "padded": 16,
}


@pytest.fixture
def allow_tf32():
    before = torch.backends.cuda.matmul.allow_tf32

    def allow(allowed):
        torch.backends.cuda.matmul.allow_tf32 = allowed

    yield allow
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def force(monkeypatch):
    yield lambda path: monkeypatch.setenv("CUDA_OPS_GEMM_PATH", path)


def random_shapes(count):
    """Pairs of shapes of 1 to 4 dimensions that torch.matmul takes, sizes of 1 to 70."""
    rng = random.Random(0)
    for _ in range(count):
        m, n, k = (rng.choice([1, 2, 7, 16, 31, 33, 64, 70]) for _ in range(3))
        batch = [rng.randint(1, 3) for _ in range(rng.randint(0, 2))]

        def some_of(batch):
            return [size if rng.random() < 0.7 else 1 for size in batch[rng.randint(0, len(batch)) :]]

        left = [k] if rng.random() < 0.1 else [*some_of(batch), m, k]
        right = [k] if rng.random() < 0.1 else [*some_of(batch), k, n]
        yield left, right


def assert_products_close(actual, expected, magnitude, terms, what):
    """Elementwise: sums of `terms` products whose magnitudes sum to `magnitude` may cancel, and then a relative bound
    would be one on luck. 2 eps for results that are rounded, and, of broadcast batches, summed and rounded again; as
    much of the smallest normal number, below which the distance from one number to the next no longer shrinks."""
    dtype = actual.dtype
    limits, accumulate = torch.finfo(dtype), torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    bound = (2 * limits.eps + 4 * math.sqrt(terms) * accumulate) * magnitude + 2 * limits.eps * limits.smallest_normal
    assert actual.shape == expected.shape, what
    wrong = ~((actual.cpu().double() - expected).abs() <= bound)  # and so NaN is wrong
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} elements"


def products(a, b, grad):
    """The product and its gradients, float64 on the CPU."""
    leaves = [t.detach().cpu().double().requires_grad_() for t in (a, b)]
    output = torch.matmul(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.cpu().double())]


def test_random_shapes(device_dtype):
    device, dtype = device_dtype
    make = Make(device, dtype, requires_grad=True)
    for left, right in random_shapes(80):
        a, b = make(*left), make(*right)
        output = matmul(a, b)
        assert output.is_contiguous()
        grad = make(*output.shape).detach()
        results = [output, *torch.autograd.grad(output, (a, b), grad)]
        magnitudes = products(a.detach().abs(), b.detach().abs(), grad.abs())
        terms = max(left[-1], a.numel(), b.numel())
        for name, *found in zip(("output", "grad a", "grad b"), results, products(a, b, grad), magnitudes, strict=True):
            assert_products_close(*found, terms, f"{left} {right}: {name}")


def empty_views(make, rows, columns):
    """A matrix, in the layouts that an empty one's strides can have."""
    yield make(rows, columns)
    yield make(columns, rows).mT
    yield make(rows, columns + 3)[:, :columns]
    yield make(2 * rows, columns)[::2]
    yield make(1, 1).expand(rows, 1)[:, :columns] if columns < 2 else make(rows, 2 * columns)[:, ::2]


@pytest.mark.parametrize("batch", [None, 0, 3])
def test_empty_dimensions(device_dtype, batch):
    """A sum of no terms is 0, and so are the gradients that such a product has."""
    make = Make(*device_dtype, requires_grad=True)
    for rows, depth, columns in [(14, 0, 31), (32, 9, 0), (0, 9, 4), (1, 0, 1), (0, 0, 0)]:
        for a in empty_views(make, rows, depth):
            for b in empty_views(make, depth, columns):
                left, right = (t if batch is None else t.expand(batch, *t.shape) for t in (a, b))
                output = matmul(left, right)
                assert output.shape == torch.matmul(left, right).shape and not output.any()
                for grad, tensor in zip(torch.autograd.grad(output.sum(), (a, b)), (a, b), strict=True):
                    assert grad.shape == tensor.shape and not grad.any()


def test_only_the_wanted_gradient_is_computed(device):
    make = Make(device, torch.float32)
    for wanted in (0, 1):
        tensors = [make(5, 6), make(6, 7)]
        tensors[wanted].requires_grad_()
        with torch.profiler.profile(acc_events=True) as profile:
            matmul(*tensors).sum().backward()
        calls = sum(e.count for e in profile.key_averages() if e.key == "cuda_ops::matmul_forward")
        assert calls == 2  # the product and one gradient


def check_kept(x, weight, bias, approximate, expected, tolerance):
    """linear_gelu with the preactivation for the gradient: it is linear's, and gelu is computed of it, as rounded."""
    output, preactivation = ops.linear_gelu_forward(x, weight, bias, approximate, True)
    assert_close(preactivation, expected, tolerance, "preactivation")
    wanted = torch.nn.functional.gelu(preactivation.cpu().double(), approximate=approximate)
    assert_close(output, wanted, RELATIVE_NORM[output.dtype], "gelu of the preactivation")


@pytest.mark.cuda
@pytest.mark.parametrize("tf32", [False, True])
def test_gelu_and_what_it_is_computed_from(tf32, allow_tf32, device_dtype):
    """Sizes that take the tiles of simt, sm90 and sm90_skinny, whole and ragged; rows of 333 are not aligned."""
    device, dtype = device_dtype
    if device != "cuda" or (tf32 and dtype != torch.float32):
        pytest.skip("paths are CUDA's, TF32 is float32's")
    allow_tf32(tf32)
    make = Make(device, dtype)
    tolerance = 2e-3 if tf32 else RELATIVE_NORM[dtype]
    for rows, outputs, inputs in [
        (1024, 1536, 384),
        (1000, 520, 64),
        (300, 5000, 256),
        (4100, 328, 128),
        (2100, 2052, 64),
        (700, 333, 72),
        (16, 4096, 1024),
        (64, 64, 256),
        (5, 9, 3),
    ]:
        bound = 2 / inputs**0.5
        x, weight = make(rows, inputs), make(outputs, inputs, low=-bound, high=bound)
        for bias in (make(outputs, low=0, high=4), None):
            expected = x.cpu().double() @ weight.cpu().double().T
            expected += 0 if bias is None else bias.cpu().double()
            for approximate in ("none", "tanh"):
                check_kept(x, weight, bias, approximate, expected, tolerance)
                first, again = (linear_gelu(x, weight, bias, approximate) for _ in range(2))
                assert torch.equal(first, again)
                wanted = torch.nn.functional.gelu(expected, approximate=approximate)
                assert_close(first, wanted, tolerance, f"gelu {approximate} {(rows, outputs, inputs)}")


@pytest.mark.cuda
@pytest.mark.parametrize("path", PATHS)
def test_forced_path(path, force, device_dtype):
    """Products in all storage orders, and linear's with its bias: right by each path, or refused by its name."""
    device, dtype = device_dtype
    if device != "cuda":
        pytest.skip("paths are CUDA's")
    make = Make(device, dtype)
    force(path)
    for m, n, k in [(35, 79, 19), (136, 200, 72), (64, 16, 640)]:
        for transposes in range(4):
            a = make(k, m).T if transposes & 1 else make(m, k)
            b = make(n, k).T if transposes & 2 else make(k, n)
            bias = make(n)
            product = a.cpu().double() @ b.cpu().double()
            try:
                actual = matmul(a, b)
            except NotImplementedError as error:
                assert f"matmul: CUDA_OPS_GEMM_PATH={path} cannot" in str(error)
                assert not ops.gemm_rung_runs(a, b, PATHS[path])
            else:
                assert_close(actual, product, RELATIVE_NORM[dtype], f"{(m, n, k)} {transposes} by {path}")
            try:
                actual = linear(a.contiguous(), b.T.contiguous(), bias)
            except NotImplementedError as error:
                assert f"linear: CUDA_OPS_GEMM_PATH={path} cannot" in str(error)
            else:
                expected = product + bias.cpu().double()
                assert_close(actual, expected, RELATIVE_NORM[dtype], f"linear {(m, n, k)} by {path}")
                for approximate in ("none", "tanh"):  # the epilogue's activations, each path's own
                    actual = linear_gelu(a.contiguous(), b.T.contiguous(), bias, approximate)
                    wanted = torch.nn.functional.gelu(expected, approximate=approximate)
                    assert_close(actual, wanted, RELATIVE_NORM[dtype], f"gelu {approximate} {(m, n, k)} by {path}")
                    check_kept(a.contiguous(), b.T.contiguous(), bias, approximate, expected, RELATIVE_NORM[dtype])


def test_the_paths_are_the_ladders_rungs():
    """But for the copy to rows that TMA reads, which is another rung's product behind it."""
    paths = [code for name, code in PATHS.items() if name != "padded"]
    assert sorted(paths) == sorted(code for code in gemm.CODES.values() if not 30 < code < 40)


@pytest.mark.cuda
@pytest.mark.parametrize("value", ["banana", "13", "sm9", "sm90x"])
def test_unknown_path_is_refused(value, force):
    a = torch.ones(4, 4, device="cuda")
    force(value)
    with pytest.raises(
        RuntimeError, match=rf"matmul: expected CUDA_OPS_GEMM_PATH to be one of naive, .*, direct, .*, got {value}"
    ):
        matmul(a, a)


@pytest.mark.cuda
def test_path_that_cannot_is_refused_by_name(force):
    a = torch.ones(256, 256, device="cuda", dtype=torch.float64)
    force("tma_wgmma")
    for call, op in [(lambda: matmul(a, a), "matmul"), (lambda: linear(a, a), "linear")]:
        message = f"{op}: CUDA_OPS_GEMM_PATH=tma_wgmma cannot do this product on this device: m 256, n 256, k 256"
        with pytest.raises(NotImplementedError, match=message):
            call()


@pytest.mark.cuda
def test_tf32_is_obeyed(allow_tf32):
    """1 + 2^-12 is 1 in TF32, which has 10 bits behind the point."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no TF32 before sm_80")
    x, ones = torch.full((256, 256), 1 + 2**-12, device="cuda"), torch.ones(256, 256, device="cuda")
    for allowed, value in [(False, 256 * (1 + 2**-12)), (True, 256.0)]:
        allow_tf32(allowed)
        for transposed in (x.T.contiguous().T, x):
            assert (matmul(transposed, ones) == value).all()
        assert (linear(x, ones) == value).all()
        assert (ops.linear_backward_input(x, ones) == value).all()
        assert (ops.linear_backward_weight(x, ones) == value).all()


@pytest.mark.cuda
def test_precision_is_obeyed():
    before = torch.get_float32_matmul_precision()
    x, ones = torch.full((64, 64), 1 + 2**-12, device="cuda"), torch.ones(64, 64, device="cuda")
    try:
        torch.set_float32_matmul_precision("highest")
        assert (matmul(x, ones) == 64 * (1 + 2**-12)).all()
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.cuda
def test_autocast_on_cuda():
    make = Make("cuda", torch.float32, requires_grad=True)
    a, b = make(3, 4, 5), make(5, 6)
    with torch.autocast("cuda", torch.bfloat16):
        output = matmul(a, b)
        assert matmul(a.double(), b.double()).dtype == torch.float64
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32


@pytest.mark.cuda
def test_shared_operand_is_not_copied():
    """A matrix that all products of a batch share has a stride of 0."""
    a, b = torch.ones(64, 64, device="cuda"), torch.ones(500, 64, 64, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = cuda_ops.functional.matmul(a, b)
    most = torch.cuda.max_memory_allocated() - before
    assert most < 1.5 * output.numel() * output.itemsize


@pytest.mark.parametrize("rows", [1, 3, 5, 7, 13, 66, 71])
def test_rows_far_apart_in_any_number(device, rows):
    """On the CPU they are packed, the last tile of them with fewer rows."""
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(rows)
        a, b = (torch.randn(size, dtype=dtype, generator=generator) for size in ((rows, 645), (645, 301)))
        a = a[:, :643]  # rows that start at any address
        product = cuda_ops.functional.matmul(a.to(device), b[:643].to(device))
        assert_close(product, a.double() @ b[:643].double(), 1e-5 if dtype == torch.float32 else 1e-13)
