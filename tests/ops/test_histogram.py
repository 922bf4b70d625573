"""histc and bincount beyond their specifications: NaN, dtypes, weights that are not finite or of very different sizes,
integers that have no bin, what has no gradient, graphs."""

import itertools

import pytest
import torch

from cuda_ops.functional import bincount, histc

forward = torch.ops.cuda_ops.bincount_forward


def test_nan_and_infinities_are_in_no_bin(device_dtype):
    device, dtype = device_dtype
    x = torch.tensor([0.5, float("nan"), float("inf"), 1.5, -float("inf"), 2.0], device=device, dtype=dtype)
    assert histc(x, 2, 0, 2).tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="expected the elements to be finite where min is max, got a range from "):
        histc(x, 2)


def test_counts_are_those_of_every_value(device_dtype):
    """Each bin by comparisons, with ends that are exact in every dtype; many equal elements."""
    device, dtype = device_dtype
    generator = torch.Generator().manual_seed(0)
    x = (torch.randint(-64, 65, (20_000,), generator=generator) / 16).to(dtype)
    x[:5000] = 0.25
    counts = histc(x.to(device), 16, -2, 2)
    assert counts.dtype == dtype and counts.device.type == device
    edges = torch.linspace(-2, 2, 17)
    for bin, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = (x >= low) & ((x <= high) if bin == 15 else (x < high))
        assert counts[bin].item() == torch.tensor(inside.sum().item()).to(dtype).item()


def test_multiples_of_a_bins_width_are_in_pytorchs_bins(device):
    """Of float32: multiplied first and divided then, they are rounded to other bins than the other way round."""
    for high, bins in itertools.product((1.0, 3.0, 7.0, 0.1), (7, 20, 33, 50)):
        x = torch.arange(bins + 1) * (torch.tensor(high) / bins)
        assert torch.equal(histc(x.to(device), bins, 0, high).cpu(), torch.histc(x, bins, 0, high)), (high, bins)


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30])
def test_ranges_at_the_ends_of_float32(device, scale):
    """Where a product with the reciprocal of the range would not be the quotient."""
    x = torch.tensor([0.0, 0.1, 0.35, 0.6, 0.9, 1.0], dtype=torch.float64).mul(scale).float()
    assert histc(x.to(device), 4, 0, x[-1].item()).tolist() == [2, 1, 1, 2]


def test_a_range_that_overflows_is_in_some_bins(device):
    x = torch.tensor([-3e38, 0.0, 3e38], device=device)
    assert histc(x, 4).sum().item() == 3


def test_bins_of_quotients_on_cuda_are_those_of_the_cpu(device):
    """A float32 quotient is rounded alike on both, whatever the range."""
    generator = torch.Generator().manual_seed(1)
    for low, high, bins in [(0.0, 1.0, 100), (-0.3, 0.7, 33), (1.1, 1.7, 1000), (-5.5, 123.4, 999)]:
        x = torch.rand(20_000, generator=generator) * (high - low) + low
        assert torch.equal(histc(x.to(device), bins, low, high).cpu(), histc(x, bins, low, high))
        place = (x - low) * bins / torch.tensor(high - low)
        near = (place - place.round()).abs() > 1e-3 * bins  # away from the edges of bins
        expected = torch.histc(x[near].double(), bins, low, high)
        assert torch.equal(histc(x[near].to(device), bins, low, high).cpu().double(), expected)


@pytest.mark.parametrize("count", [1, 5, 16, 1000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_the_largest_integer_may_stand_anywhere(dtype, count, device):
    """At the end, and at the beginning; and so may a negative one."""
    for place in (0, count // 2, count - 1):
        x = torch.zeros(count, dtype=dtype, device=device)
        x[place] = 9
        assert bincount(x).tolist() == [count - 1, *[0] * 8, 1]
        if dtype != torch.uint8:
            x[place] = -1
            with pytest.raises(RuntimeError, match="expected input to be of integers of at least 0, got -1"):
                bincount(x)


def test_counts_have_no_gradient(device):
    x = torch.rand(10, device=device, requires_grad=True)
    assert not histc(x, 4, 0, 1).requires_grad
    assert not torch.histc(x.detach().cpu().requires_grad_(), 4, 0, 1).requires_grad
    n, w = torch.tensor([1, 2, 1], device=device), torch.rand(3, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="bincount: expected no gradient to be asked for"):
        bincount(n, w).sum().backward()


def test_weights_of_another_shape(device):
    keys, weights = torch.tensor([1, 0], device=device), torch.ones(1, 2, device=device)
    with pytest.raises(
        RuntimeError, match=r"bincount: expected weights to have the shape of input, \[2\], got \[1, 2\]"
    ):
        forward(keys, weights, 2)


@pytest.mark.parametrize("ends", [(0.0, float("inf")), (-float("inf"), 0.0), (0.0, float("nan"))], ids=str)
def test_ends_that_are_not_finite(ends, device):
    with pytest.raises(RuntimeError, match="histc: expected min and max to be finite, got"):
        histc(torch.ones(3, device=device), 4, *ends)


def test_dtypes_of_sums(device):
    n = torch.tensor([2, 0, 2], device=device)
    for weights, dtype in [
        (torch.tensor([0.5, 1.0, 2.0]), torch.float32),
        (torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64), torch.float64),
        (torch.tensor([0.5, 1.0, 2.0], dtype=torch.float16), torch.float64),
        (torch.tensor([5, 10, 20]), torch.float64),
    ]:
        sums = bincount(n, weights.to(device))
        assert sums.dtype == dtype
        assert torch.equal(sums.cpu(), torch.bincount(n.cpu(), weights))
    assert bincount(n[:0], torch.rand(0, device=device), 2).dtype == torch.int64


@pytest.mark.parametrize("size", [3, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_are_not_finite(device, size, dtype):
    """In few bins, and in as many as are added up as integers."""
    inf, nan = float("inf"), float("nan")
    n = torch.tensor([0, 0, 1, 1, 2, 2, 2], device=device)
    w = torch.tensor([inf, 1.0, inf, -inf, -inf, 3.0, -inf], device=device, dtype=dtype)
    sums = forward(n, w, size)
    torch.testing.assert_close(sums[:3].tolist(), [inf, nan, -inf], equal_nan=True)
    assert not sums[3:].any()
    assert forward(n, torch.full_like(w, nan), size)[:3].isnan().all()


@pytest.mark.parametrize("size", [7, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_very_different_sizes(device, size, dtype):
    """Bins do not disturb each other, nor does a small weight vanish beside another bin's large ones."""
    limits = torch.finfo(dtype)
    w = torch.tensor([limits.max / 4, 1e-20, limits.tiny, limits.smallest_normal / 8, -3.0, 1.0], dtype=dtype)
    n = torch.arange(6)
    sums = forward(n.repeat(3).to(device), w.repeat(3).to(device), size)
    torch.testing.assert_close(sums[:6].cpu(), 3 * w, rtol=4 * limits.eps, atol=0)
    cancel = forward(
        torch.zeros(5, dtype=torch.int64, device=device),
        torch.tensor([1e10, 1.0, -1e10, 1.0, 0.0], device=device, dtype=torch.float64),
        size,
    )
    assert cancel[0].item() == 2


@pytest.mark.parametrize("size", [0, 3, 5000])
def test_integers_without_a_bin_are_left_out(device, size):
    """The registered op takes any size."""
    n = torch.tensor([-1, 0, 2**40, 2, -(2**33), 2], device=device)
    w = torch.ones(6, device=device)
    expected = [1.0, 0.0, 2.0, *[0.0] * (size - 3)][:size]
    assert forward(n, None, size).tolist() == expected
    assert forward(n, w, size).tolist() == expected
    assert forward(n, w.double(), size).tolist() == expected


def test_negative_numbers_are_found_wherever_they_are(device):
    for dtype in (torch.int16, torch.int32, torch.int64):
        for place in (0, 1500, 3000):
            n = torch.arange(100, device=device, dtype=dtype).repeat(31)
            n[place] = -7
            with pytest.raises(RuntimeError, match="at least 0, got -7"):
                bincount(n)


def test_threads_do_not_change_sums():
    n, w = torch.arange(200_000) % 77, torch.rand(200_000)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append((bincount(n), bincount(n, w), histc(w, 10, 0, 1)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(results[0][0], torch.bincount(n))


@pytest.mark.cuda
def test_sizes_that_are_known_can_be_captured():
    """The op that is given the number of bins does not wait for the device."""
    n, w = torch.arange(1000, device="cuda") % 10, torch.rand(1000, device="cuda")
    calls = lambda: (forward(n, None, 10), forward(n, w, 10), forward(n, w, 3000), histc(w, 8, 0, 1))  # noqa: E731
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls()
    n.copy_(torch.arange(1000, device="cuda") % 7)
    w.mul_(0.5)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, calls(), strict=True))


@pytest.mark.cuda
def test_under_deterministic_algorithms():
    """PyTorch's own refuse; these have no other way."""
    n, w = torch.randint(300, (100_000,), device="cuda"), torch.rand(100_000, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        sums = [bincount(n * scale, w) for scale in (1, 1, 50, 50)]
        counts = histc(w, 10, 0, 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[2], sums[3])
    assert counts.sum().item() == 100_000
    torch.testing.assert_close(sums[2][::50], sums[0])
    torch.testing.assert_close(bincount(n * 50, w), sums[2])  # by atomics
