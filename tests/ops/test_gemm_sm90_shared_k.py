"""gemm's path sm90_shared_k: the blocks of a cluster multiply a share of k each, and add their sums."""

import itertools
import math

import pytest
import torch

from cuda_ops import functional as F
from cuda_ops._library import ops

# The path's number, and the blocks of a cluster, which a plan has for its tile, with 16 more for tiles of 64 columns.
SHARED_K, TILES = 19, (*range(2, 9), *range(18, 25))
ORDERS = list(itertools.product([False, True], repeat=2))
DTYPES = [torch.float16, torch.bfloat16]

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("clusters and wgmma are of compute capability 9.0")


def matrix(rows, columns, dtype, turned=False, batch=(), seed=0):
    generator = torch.Generator("cuda").manual_seed(seed + rows + 7 * columns)
    sizes = (columns, rows) if turned else (rows, columns)
    found = torch.randn(*batch, *sizes, device="cuda", generator=generator).to(dtype)
    return found.mT if turned else found


def check(actual, a, b, what, bias=None, activation=None):
    """Within what rounding k products in any order may do, element by element."""
    expected, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    if activation is not None:
        expected = activation(expected)
    bound = 4 * math.sqrt(a.shape[-1] + 4) * torch.finfo(torch.float32).eps * magnitude
    bound += torch.finfo(actual.dtype).eps * (expected.abs() + 1e-3)
    wrong = ~((actual.double() - expected).abs() <= bound)
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} elements, the first at {wrong.nonzero()[0]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_plans(tile, dtype):
    """Every order; less than a tile, one, several, more than the GPU has room for; less k than blocks, more stages than
    the pipeline has; k split before or not."""
    sizes = [(8, 8, 8), (128, 128, 1024), (136, 72, 1160), (264, 200, 2056), (576, 576, 5688), (16, 264, 20000)]
    sizes += [(2000, 1000, 640)]
    for (m, n, k), (ta, tb), splits in itertools.product(sizes, ORDERS, (1, 3)):
        a, b = matrix(m, k, dtype, ta), matrix(k, n, dtype, tb, seed=1)
        plan = (SHARED_K, tile, splits, 0)
        d = ops.gemm_planned(a, b, plan)
        check(d, a, b, f"{(m, n, k)} {ta} {tb} in {splits}")
        assert torch.equal(d, ops.gemm_planned(a, b, plan))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype, monkeypatch):
    """Batches, one matrix for all of a batch, and a D whose rows begin at odd elements."""
    monkeypatch.setenv("CUDA_OPS_GEMM_PATH", "sm90_shared_k")
    for ta, tb in ORDERS:
        a, b = matrix(136, 1032, dtype, ta, (3,)), matrix(1032, 200, dtype, tb, (3,), seed=1)
        check(F.matmul(a, b), a, b, f"batch {ta} {tb}")
        check(F.matmul(a[:1].expand(3, -1, -1), b), a[:1], b, f"shared a {ta} {tb}")
    for n in (45, 130):
        a, b = matrix(136, 1032, dtype), matrix(1032, n, dtype, True, seed=1)
        check(F.matmul(a, b), a, b, f"{n} columns")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers(dtype, monkeypatch):
    """linear and linear_relu with their biases and gradients."""
    monkeypatch.setenv("CUDA_OPS_GEMM_PATH", "sm90_shared_k")
    x, weight = matrix(1504, 328, dtype), matrix(72, 328, dtype, seed=1)
    bias, grad = matrix(1, 72, dtype, seed=2)[0], matrix(1504, 72, dtype, seed=3)
    check(F.linear(x, weight, bias), x, weight.mT, "linear", bias)
    check(ops.linear_backward_input(grad, weight), grad, weight, "gradient of input")
    check(ops.linear_backward_weight(grad, x), grad.mT, x, "gradient of weight")
    check(F.linear_relu(x, weight, bias), x, weight.mT, "linear_relu", bias, torch.nn.functional.relu)
