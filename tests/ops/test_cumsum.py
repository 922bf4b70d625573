"""cumsum: what is special to it beside the properties that hold for every op."""

import math

import pytest
import torch
from support.opspec import RELATIVE_NORM, Make, assert_close

from cuda_ops import functional as F

forward = torch.ops.cuda_ops.cumsum_forward
# Rows of one part, of several, and of more than a tile each; many rows, of a block each; several rows in a chunk;
# columns in one part, in a group of them (16 at the least) and in several; rows and columns that no vector divides.
LONG = [
    ((70_001,), 0),
    ((3_000_017,), 0),
    ((3, 100_003), 1),
    ((100, 5003), 1),
    ((140, 9001), 1),
    ((7, 3001), 1),
    ((2, 40_000, 16), 1),
    ((300_000, 4), 0),
    ((70_000, 5), 0),
    ((3000, 1030), 0),
]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape, dim", LONG)
def test_long(device_dtype, shape, dim, reverse):
    device, dtype = device_dtype
    storage = Make(device, dtype)(math.prod(shape) + 1)
    for offset in (0, 1):  # aligned and not
        x = storage[offset : offset + math.prod(shape)].view(shape)
        exact = x.double().cpu()
        expected = exact.flip(dim).cumsum(dim).flip(dim) if reverse else exact.cumsum(dim)
        output = forward(x, dim, None, reverse)
        assert_close(output, expected, 2 * RELATIVE_NORM[dtype])
        assert all(torch.equal(output, forward(x, dim, None, reverse)) for _ in range(3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shape, dim", LONG[:5] + LONG[6:8])
def test_nonfinite_values_stay_behind(device, shape, dim, value):
    """To all sums behind them, and to none before."""
    x = Make(device)(*shape)
    x.view(-1)[x.numel() // 2] = value
    assert_close(F.cumsum(x, dim), x.double().cpu().cumsum(dim), 4e-6)


def test_every_dimension_of_any_dense_layout(device):
    x = Make(device, torch.float64)(3, 4, 5, 6)
    for view in (x, x.permute(3, 1, 0, 2), x.to(memory_format=torch.channels_last), x[:, ::2], x.expand(2, 3, 4, 5, 6)):
        for dim in range(-view.dim(), view.dim()):
            assert_close(F.cumsum(view, dim), view.cpu().cumsum(dim), 1e-13)


def test_dtype(device):
    x = Make(device, requires_grad=True)(3, 40)
    output = F.cumsum(x, 1, dtype=torch.float64)
    assert output.dtype == torch.float64
    assert_close(output, x.detach().double().cpu().cumsum(1), 1e-13)
    assert torch.autograd.grad(output.sum(), x)[0].dtype == torch.float32
    assert F.cumsum(torch.arange(4, device=device), 0, dtype=torch.float32).tolist() == [0, 1, 3, 6]


def test_gradient_of_a_long_row(device):
    x = Make(device, torch.float64, requires_grad=True)(70_001)
    weights = Make(device, torch.float64, seed=1)(70_001)
    (grad,) = torch.autograd.grad(F.cumsum(x, 0), x, weights)
    assert_close(grad, weights.cpu().flip(0).cumsum(0).flip(0), 1e-12)


def test_threads_do_not_change_the_bits():
    threads = torch.get_num_threads()
    x = Make()(40, 3000)
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append([F.cumsum(x, 0), F.cumsum(x, 1)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    finally:
        torch.set_num_threads(threads)
