"""prelu: what is special to it beside the properties that hold for every op."""

import copy

import pytest
import torch
from support.opspec import Make, assert_close

import cuda_ops

# Planes and rows of more than one part, that vectors divide and not; one weight with a rest.
SHAPES = [((3, 7, 100, 101), 7), ((70_000, 40), 40), ((700, 1030), 1030), ((5, 3, 49), 3), ((100_003,), 1)]


@pytest.mark.parametrize("shape, count", SHAPES)
def test_gradients_repeat_and_are_exact(device_dtype, shape, count):
    """Sums of positive products, which do not cancel."""
    device, dtype = device_dtype
    x = Make(device, dtype)(*shape, low=-1.0, high=0.25).requires_grad_()
    weight = Make(device, dtype)(count, requires_grad=True)
    grad_output = -Make(device, dtype, seed=1)(*shape, low=0.5, high=1.5)

    def gradients():
        return torch.autograd.grad(cuda_ops.functional.prelu(x, weight), (x, weight), grad_output)

    first = gradients()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, gradients(), strict=True))
    exact = [t.detach().double().cpu().requires_grad_() for t in (x, weight)]
    expected = torch.autograd.grad(torch.prelu(*exact), exact, grad_output.double().cpu())
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}.get(dtype, 4e-6)
    for actual, wanted in zip(first, expected, strict=True):
        assert_close(actual, wanted, tolerance)


def test_threads_do_not_change_the_bits():
    threads = torch.get_num_threads()
    try:
        for shape, count in SHAPES[:3]:
            x, weight = Make(requires_grad=True)(*shape), Make(requires_grad=True)(count)
            results = []
            for number in (1, 3):
                torch.set_num_threads(number)
                results.append(torch.autograd.grad(cuda_ops.functional.prelu(x, weight).square().sum(), (x, weight)))
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("arguments", [(), (3,), (3, 0.5)])
def test_module_is_drop_in(device, arguments):
    ours, theirs = cuda_ops.nn.PReLU(*arguments), torch.nn.PReLU(*arguments)
    assert isinstance(ours, torch.nn.PReLU) and repr(ours) == repr(theirs)
    theirs.load_state_dict(copy.deepcopy(ours).state_dict(), strict=True)
    x = Make()(2, 3, 5)
    assert_close(ours.to(device)(x.to(device)), theirs(x).double(), 2e-6)


@pytest.mark.parametrize("shape, count", [((2, 3, 17), 3), ((5, 24), 24), ((33,), 1)])
def test_at_0_the_gradient_has_the_slope_of_the_negative_side(device_dtype, shape, count):
    device, dtype = device_dtype
    x = torch.zeros(shape, device=device, dtype=dtype, requires_grad=True)
    weight = torch.full((count,), 0.25, device=device, dtype=dtype, requires_grad=True)
    grads = torch.autograd.grad(cuda_ops.functional.prelu(x, weight).sum(), (x, weight))
    assert grads[0].eq(0.25).all() and grads[1].eq(0).all()
