"""logsumexp of infinities and NaN, alone and together, wherever they stand."""

import itertools

import pytest
import torch

from cuda_ops.functional import logsumexp

NAN, INF = float("nan"), float("inf")


# Rows of a part of a warp, a warp, a block and several parts; columns alike.
@pytest.mark.parametrize("cols", [5, 100, 2000, 40_000])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_that_are_not_finite(device, cols, dim):
    rows = []
    places = (0, cols // 2, cols - 1)
    for values in itertools.product([NAN, INF, -INF, 0.0], repeat=3):
        rows.append(torch.zeros(cols))
        for place, value in zip(places, values, strict=True):
            rows[-1][place] = value
    rows += [torch.full((cols,), value) for value in (NAN, INF, -INF)]
    rows += [torch.full((cols,), -INF) for _ in range(2)]
    rows[-1][-1], rows[-2][0] = NAN, INF
    x = torch.stack(rows)
    expected = torch.logsumexp(x.double(), 1)
    for some in (slice(None), slice(0, 3), slice(-2, None)):  # few columns are cut into parts
        ours = (x[some] if dim == 1 else x[some].t().contiguous()).to(device)
        actual = logsumexp(ours, dim).cpu().double()
        torch.testing.assert_close(actual, expected[some], equal_nan=True, rtol=1e-6, atol=0)


def test_nothing_is_minus_infinity(device):
    assert torch.equal(logsumexp(torch.ones(2, 0, device=device), 1).cpu(), torch.full((2,), -INF))
    assert torch.equal(logsumexp(torch.ones(2, 3, device=device), ()).cpu(), torch.logsumexp(torch.ones(6), 0))


def test_a_whole_tensor_in_one_number(device):
    x = torch.randn(300, 1001, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    total = logsumexp(x, (0, 1))
    torch.testing.assert_close(total.double(), torch.logsumexp(x.double(), (0, 1)))
    (grad,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(grad, torch.softmax(x.detach().flatten(), 0).view_as(x), rtol=1e-5, atol=0)
