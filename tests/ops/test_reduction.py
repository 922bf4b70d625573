"""Reductions: what is special to them beside the properties that hold for every op."""

import itertools
import math

import pytest
import torch
from support.devices import CUDA_DTYPES
from support.opspec import RELATIVE_NORM, assert_close

from cuda_ops import functional as F

INF, NAN = float("inf"), float("nan")
NAMED = {
    "sum": (F.sum, torch.sum),
    "mean": (F.mean, torch.mean),
    "amax": (F.amax, lambda x, dim, keepdim: torch.amax(x, () if dim is None else dim, keepdim)),
    "var": (
        lambda x, dim, keepdim: F.var(x, dim, correction=0, keepdim=keepdim),
        lambda x, dim, keepdim: torch.var(x, dim, correction=0, keepdim=keepdim),
    ),
    "norm": (
        lambda x, dim, keepdim: F.norm(x, 1, dim, keepdim),
        lambda x, dim, keepdim: torch.linalg.vector_norm(x, 1, dim, keepdim),
    ),
}
# Rows of a block, of several, of a part of one; columns of one part and of several; of vectors, of single elements, and
# of rows that are taken together for whole vectors.
SHAPES = [((20_011,), 0), ((40_000,), 0), ((3, 40_000), 1), ((30, 1500), 1), ((9, 3001), 1)]
SHAPES += [((3000, 7), 0), ((3000, 64), 0), ((2, 700, 12), 1), ((2, 4096, 130), 1)]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 2, 3, 2, 3), (4, 1, 6), (5,), ()])
def test_every_set_of_dimensions(device, name, shape):
    """Of a contiguous tensor, and of one whose dimensions lie in the opposite order."""
    ours, theirs = NAMED[name]
    order = tuple(reversed(range(len(shape))))
    for x in (random(*shape), random(*shape).permute(order).contiguous().permute(order)):
        for count in range(len(shape) + 1):
            for dims in itertools.combinations(range(len(shape)), count):
                for keepdim in (False, True):
                    output = ours(x.to(device), dims, keepdim)
                    assert output.is_contiguous()
                    assert_close(output, theirs(x, dims or None, keepdim), 1e-12, f"along {dims}")


@pytest.mark.parametrize("shape, dim", SHAPES)
def test_means_far_larger_than_the_deviation(device, shape, dim):
    """Mean 1e4, deviation 1e-2: E[x^2] - E[x]^2 has no digit of it in float32."""
    x = (random(*shape) * 1e-2 + 1e4).float()
    assert_close(F.var(x.to(device), dim), torch.var(x.double(), dim), 2e-5)
    assert_close(F.std(x.to(device), dim, correction=0), torch.std(x.double(), dim, correction=0), 2e-5)


@pytest.mark.parametrize("shape, dim", SHAPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 3.0])
def test_the_first_of_equal_elements(device, shape, dim, value):
    """NaN is the largest and the smallest; all are -inf; two are largest."""
    x = random(*shape).float().clamp(-2, 2)
    flat = x.movedim(dim, -1)
    for place in (shape[dim] // 3, shape[dim] // 3 + 1, shape[dim] - 1):
        flat[..., place] = value
    for tensor in (x, torch.full(shape, value), -x):
        for ours, theirs in ((F.argmax, torch.argmax), (F.argmin, torch.argmin)):
            # PyTorch's on the CPU gives the first one.
            assert torch.equal(ours(tensor.to(device), dim).cpu(), theirs(tensor, dim))
        assert_close(F.amax(tensor.to(device), dim), torch.amax(tensor.double(), dim), 1e-7)
        assert_close(F.amin(tensor.to(device), dim), torch.amin(tensor.double(), dim), 1e-7)


def test_indices_among_all_elements_are_of_their_order(device):
    x = random(5, 6, 7).to(device)
    for view in (x, x.transpose(0, 2), x[:, ::2], x.expand(2, 5, 6, 7)):
        assert F.argmax(view).item() == torch.argmax(view.cpu().contiguous()).item()
        assert torch.equal(F.argmin(view, 1, True).cpu(), torch.argmin(view.cpu(), 1, True))


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("shape, dim", [*SHAPES, ((700, 9), 1), ((9000, 40), 1), ((5, 1030), 1), ((6, 5, 4), (0, 2))])
def test_tensors_that_start_anywhere(device_dtype, shape, dim, offset):
    device, dtype = device_dtype
    storage = random(math.prod(shape) + offset).to(device, dtype)
    x = storage[offset:].view(shape)
    exact = x.double().cpu()
    assert_close(F.norm(x, 2, dim), torch.linalg.vector_norm(exact, 2, dim), RELATIVE_NORM[dtype])
    assert_close(F.sum(x.abs(), dim), exact.abs().sum(dim), RELATIVE_NORM[dtype])
    assert_close(F.var(x, dim), exact.var(dim), 2 * RELATIVE_NORM[dtype])
    assert torch.equal(F.amax(x, dim).double().cpu(), exact.amax(dim))


@pytest.mark.parametrize("function", [F.sum, F.mean, F.prod, F.norm])
def test_dtype(device, function):
    x = random(3, 40).float().to(device).requires_grad_()
    output = function(x, dim=1, dtype=torch.float64)
    assert output.dtype == torch.float64
    assert_close(output, function(x.double(), dim=1), 1e-12)
    assert torch.autograd.grad(output.sum(), x)[0].dtype == torch.float32
    assert function(torch.arange(1, 4, device=device), dtype=torch.float32).dtype == torch.float32


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [d for d in CUDA_DTYPES if d.itemsize == 2])
def test_sums_of_halves_in_float32(dtype):
    x = random(40, 3000).to("cuda", dtype).requires_grad_()
    for function in (F.sum, F.mean, F.norm):
        output = function(x, dim=1, dtype=torch.float32)
        assert output.dtype == torch.float32
        assert_close(output, function(x.double(), dim=1).cpu(), 1e-5)
        assert torch.autograd.grad(output.sum(), x)[0].dtype == dtype


def test_norm_of_p_0_counts(device):
    x = torch.tensor([[0.0, 2.0, NAN], [0.0, -0.0, 0.0]], device=device, requires_grad=True)
    output = F.norm(x, 0, 1)
    assert output.tolist() == [2.0, 0.0]
    assert not torch.autograd.grad(output.sum(), x)[0].any()


def test_norms_of_zeros_have_the_gradient_0(device):
    for p in (0.5, 1, 1.5, 2, 3, INF):
        x = torch.zeros(2, 3, device=device, requires_grad=True)
        assert not torch.autograd.grad(F.norm(x, p, 1).sum(), x)[0].any(), p


def test_gradients_of_products_of_zeros(device):
    x = torch.tensor([[2.0, 0.0, 3.0], [0.0, 0.0, 5.0], [1.0, 2.0, 4.0]], dtype=torch.float64, device=device)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(F.prod(x, 1).sum(), x)
    assert grad.tolist() == [[0, 6, 0], [0, 0, 0], [8, 4, 2]]


def test_the_norm_of_one_element_is_its_absolute_value(device):
    """Though the square of a tiny one is 0."""
    x = torch.tensor([[-1e-30], [0.0], [3.0]], device=device, requires_grad=True)
    norms = F.norm(x, dim=1)
    assert norms.tolist() == x.detach().abs()[:, 0].tolist()
    assert torch.autograd.grad(norms.sum(), x)[0].tolist() == [[-1.0], [0.0], [1.0]]


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom is <= 0")
def test_second_derivatives_of_variances_of_as_many_as_the_correction(device):
    """A divisor of 0, and PyTorch's infinities and NaN of it."""
    x = torch.tensor([[1.0, 2.0, 6.0], [3.0, 3.0, 3.0]], device=device, requires_grad=True)
    grad = torch.tensor([1.0, -2.0], device=device, requires_grad=True)
    found = []
    for var in (F.var, torch.var):
        (first,) = torch.autograd.grad(var(x, dim=1, correction=3), x, grad, create_graph=True)
        weights = torch.tensor([[1.0, 2.0, -0.5], [1.0, 0.0, 0.0]], device=device)
        found.append([first, *torch.autograd.grad(first, (x, grad), weights)])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom is <= 0", "ignore:std.*degrees of freedom is <= 0")
def test_second_derivatives_of_no_elements_are_0(device):
    """Also where the divisor is: PyTorch's are 0 in var, and ours in std too."""
    for function in (F.var, F.std):
        x = torch.ones(0, 3, device=device, requires_grad=True)
        grad = torch.tensor(2.0, device=device, requires_grad=True)
        (first,) = torch.autograd.grad(function(x, correction=0), x, grad, create_graph=True)
        (second,) = torch.autograd.grad(first, grad, torch.ones_like(x))
        assert first.shape == x.shape and second.item() == 0


def test_variances_of_few(device):
    assert F.var(torch.ones(3, 1, device=device), 1).isnan().all()
    assert F.var(torch.ones(3, 1, device=device), 1, correction=0).tolist() == [0, 0, 0]
    for function in (F.var, F.std):  # a divisor below 0 is taken for 0
        assert function(torch.tensor([1.0, 3.0], device=device), correction=5).item() == INF


def test_derivatives_of_the_deviation_of_equal_elements_are_0(device):
    x = torch.ones(2, 4, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(F.std(x, 1).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad[:, 0].sum(), x)
    assert not grad.any() and not second.any()


def test_no_elements(device):
    nothing = torch.ones(3, 0, device=device)
    assert F.sum(nothing, 1).tolist() == [0, 0, 0] and F.prod(nothing, 1).tolist() == [1, 1, 1]
    assert F.mean(nothing, 1).isnan().all() and F.var(nothing, 1).isnan().all()
    assert F.norm(nothing, 2, 1).tolist() == [0, 0, 0]
    assert F.amax(nothing, 0).shape == (0,) and F.argmin(nothing, 0).shape == (0,)


@pytest.mark.parametrize("name", NAMED)
def test_results_repeat(device, name):
    ours, _ = NAMED[name]
    for shape, dim in SHAPES:
        x = random(*shape).float().to(device)
        first = ours(x, dim, False)
        for _ in range(5):
            assert torch.equal(first, ours(x.clone(), dim, False))


def test_the_gradient_of_an_infinite_norm_of_nan(device):
    """As PyTorch's: NaN is the largest, and what has no sign has no gradient."""
    values = torch.tensor([[1.0, NAN, -3.0], [2.0, -2.0, 1.0]], device=device)
    grads = []
    for function in (F.norm, torch.linalg.vector_norm):
        x = values.clone().requires_grad_()
        grads += torch.autograd.grad(function(x, INF, 1).sum(), x)
    torch.testing.assert_close(*grads, equal_nan=True)


def test_backward_of_sums_checks_what_it_expands(device):
    grad, ops = torch.ones(2, device=device), torch.ops.cuda_ops
    with pytest.raises(
        IndexError, match=r"sum_backward: expected dim to be in \[-2, 1\] for an input of shape \[2, 3\]"
    ):
        ops.sum_backward(grad, [2, 3], [7], False, torch.float32)
    with pytest.raises(
        RuntimeError, match=r"mean_backward: expected grad_output to have the dimensions of the output, 2"
    ):
        ops.mean_backward(grad, [2, 3], [1], True, torch.float32)
