"""gemm's path sm90_unaligned: 16 bits whose rows are multiples of 4 or 8 bytes, copied to where wgmma reads."""

import itertools
import math

import pytest
import torch

from cuda_ops import functional as F
from cuda_ops._library import ops

UNALIGNED, TILES = 19, 3  # the path's number, and its tiles
ORDERS = list(itertools.product([False, True], repeat=2))
DTYPES = [torch.float16, torch.bfloat16]

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is of compute capability 9.0")


def matrices(batch, rows, columns, dtype, turned, gap=0, shift=0, seed=0):
    """`gap` elements of NaN after each row, stored as the transpose where `turned`, `shift` elements on in memory."""
    generator = torch.Generator("cuda").manual_seed(seed + rows + 7 * columns)
    rows, columns = (columns, rows) if turned else (rows, columns)
    pitch = columns + gap
    memory = torch.full((shift + batch * rows * pitch,), math.nan, device="cuda", dtype=dtype)
    found = memory[shift:].view(batch, rows, pitch)[..., :columns]
    found.copy_(torch.randn(batch, rows, columns, device="cuda", generator=generator))
    found = found if batch > 1 else found[0]
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
@pytest.mark.parametrize("tile", range(TILES))
def test_plans(tile, dtype):
    """Every order; rows of multiples of 4, 8 and 16 bytes, one element's copy and less than a stage of k, some stages
    and more than the pipeline has; less than a tile, one, several; k whole and split, by more than there is of it."""
    sizes = [(2, 2, 2), (10, 18, 12), (128, 128, 64), (130, 66, 62), (202, 134, 198), (14, 262, 2050), (330, 22, 74)]
    sizes += [(132, 516, 68), (116, 100, 6400), (72, 40, 1000), (256, 192, 320)]
    for (m, n, k), (ta, tb), splits in itertools.product(sizes, ORDERS, (1, 3, 40)):
        a, b = matrices(1, m, k, dtype, ta), matrices(1, k, n, dtype, tb, seed=1)
        plan = (UNALIGNED, tile, splits, 0)
        d = ops.gemm_planned(a, b, plan)
        check(d, a, b, f"{(m, n, k)} {ta} {tb} in {splits}")
        assert torch.equal(d, ops.gemm_planned(a, b, plan))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 5])
def test_layouts(batch, dtype, monkeypatch):
    """Rows that are too far apart, with NaN between them; batches, and one matrix for all of a batch; an odd number of
    columns of D."""
    monkeypatch.setenv("CUDA_OPS_GEMM_PATH", "sm90_unaligned")
    for (ta, tb), gap, other_gap in itertools.product(ORDERS, (0, 2, 4), (0, 2)):
        m, n, k = 68, 100, 132
        a = matrices(batch, m, k, dtype, ta, gap)
        b = matrices(batch, k, n, dtype, tb, other_gap, seed=1)
        what = f"{ta} {tb} {gap} {other_gap}"
        check(F.matmul(a, b), a, b, what)
        if batch > 1:
            check(F.matmul(a[:1].expand(batch, -1, -1), b), a[:1], b, f"shared a {what}")
            check(F.matmul(a, b[:1].expand(batch, -1, -1)), a, b[:1], f"shared b {what}")
    for n in (45, 133):
        a, b = matrices(batch, 300, 92, dtype, False), matrices(batch, 92, n, dtype, True, seed=1)
        check(F.matmul(a, b), a, b, f"{n} columns")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_refuses(dtype):
    """Rows of 2 bytes' multiples, and addresses that the query for the workspace did not know of."""
    for a, b in [
        (matrices(1, 64, 33, dtype, False), matrices(1, 33, 64, dtype, False)),
        (matrices(1, 64, 34, dtype, False), matrices(1, 34, 63, dtype, False)),
        (matrices(1, 64, 34, dtype, False, shift=1), matrices(1, 34, 64, dtype, False)),
        (matrices(1, 64, 34, dtype, False, gap=1), matrices(1, 34, 64, dtype, False)),
    ]:
        with pytest.raises(NotImplementedError):
            ops.gemm_planned(a, b, (UNALIGNED, 0, 1, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers(dtype, monkeypatch):
    """linear and linear_relu with their biases and gradients."""
    monkeypatch.setenv("CUDA_OPS_GEMM_PATH", "sm90_unaligned")
    for rows, outputs, inputs in [(6400, 100, 116), (64, 130, 1002), (1500, 78, 334)]:
        x, weight = matrices(1, rows, inputs, dtype, False), matrices(1, outputs, inputs, dtype, False, seed=1)
        bias, grad = matrices(1, 1, outputs, dtype, False, seed=2)[0], matrices(1, rows, outputs, dtype, False, seed=3)
        what = f"{(rows, outputs, inputs)}"
        check(F.linear(x, weight, bias), x, weight.mT, f"linear {what}", bias)
        check(ops.linear_backward_input(grad, weight), grad, weight, f"gradient of input {what}")
        check(ops.linear_backward_weight(grad, x), grad.mT, x, f"gradient of weight {what}")
        check(F.linear_relu(x, weight, bias), x, weight.mT, f"linear_relu {what}", bias, torch.nn.functional.relu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_choice_is_right(dtype):
    """As it comes, where addresses differ from what sizes say."""
    for (m, n, k), shift in itertools.product([(6400, 100, 116), (116, 100, 6400), (242, 1202, 50)], (0, 1, 2, 4)):
        for ta, tb in ORDERS:
            a = matrices(1, m, k, dtype, ta, shift=shift)
            b = matrices(1, k, n, dtype, tb, shift=shift // 2, seed=1)
            check(F.matmul(a, b), a, b, f"{(m, n, k)} {ta} {tb} {shift}")
