"""log_softmax: what is special to it beside the properties that hold for every op."""

import math

import pytest
import torch
from support.opspec import RELATIVE_NORM, assert_close

import cuda_ops
from cuda_ops.functional import log_softmax

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("inner", [1, 3])
@pytest.mark.parametrize("cols", [3, 16, 40, 1030, 1200])
def test_rows_of_infinities(device, cols, inner):
    """Where PyTorch has NaN, -inf and finite values, with the odd value at the start, in the middle and at the end."""
    rows = []
    for column in (0, cols // 2, cols - 1):
        for value in (NAN, INF, -INF):
            row = torch.linspace(-1, 1, cols, dtype=torch.float64)
            row[column] = value
            rows.append(row)
    rows += [torch.full((cols,), -INF, dtype=torch.float64), torch.full((cols,), INF, dtype=torch.float64)]
    rows += [torch.tensor([-INF] * (cols - 1) + [1.0], dtype=torch.float64)]
    input = torch.stack(rows)[..., None].expand(-1, -1, inner).contiguous()
    for dtype in (torch.float32, torch.float64):
        output = log_softmax(input.to(device, dtype), 1)
        assert_close(output, torch.log_softmax(input.to(dtype).double(), 1), 2e-6)


# A part of a warp, a warp and a block a row, in registers and not; rows that start anywhere against 16 bytes.
@pytest.mark.parametrize(
    "cols", [1, 2, 9, 31, 32, 33, 100, 256, 257, 768, 1023, 1024, 1025, 4104, 5003, 33_000, 262_145]
)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_rows_that_start_anywhere(device_dtype, cols, offset):
    device, dtype = device_dtype
    generator = torch.Generator().manual_seed(cols)

    def make():
        storage = torch.rand(5 * cols + offset, generator=generator).sub(0.5).mul(8).to(device, dtype)
        return storage[offset:].view(5, cols)

    input, grad_output = make(), make()
    output = torch.ops.cuda_ops.log_softmax_forward(input, 1)
    exact = torch.log_softmax(input.cpu().double(), 1)
    assert_close(output, exact, RELATIVE_NORM[dtype])
    # An output of its own, at an offset, too: what backward reads and writes then lies alike, or not.
    for known in (output, input.copy_(output)):
        grad = torch.ops.cuda_ops.log_softmax_backward(grad_output, known, 1)
        g = grad_output.cpu().double()
        expected = g - output.cpu().double().exp() * g.sum(1, keepdim=True)
        if cols > 1:  # with one the gradient is nothing but rounding
            assert_close(grad, expected, RELATIVE_NORM[dtype])


def test_gradients_of_rows_of_infinities(device):
    input = torch.tensor([[1.0, -INF, 2.0], [NAN, 0.0, 1.0], [INF, 0.0, 1.0], [-INF, -INF, -INF], [3.0, 2.0, 1.0]])
    grads = []
    for function, x in ((log_softmax, input.to(device)), (torch.log_softmax, input.double())):
        x.requires_grad_()
        grad_output = torch.linspace(-1, 1, 15, dtype=x.dtype, device=x.device).view(5, 3)
        grads += torch.autograd.grad(function(x, 1), x, grad_output)
    assert_close(grads[0], grads[1], 2e-6)


def test_exponentials_sum_to_one(device):
    """Also for fifty thousand classes in float32: the sum is not one long chain of additions."""
    for shape in [(4, 50_257), (50_257, 2)]:
        dim = shape.index(50_257)
        input = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        output = log_softmax(input.to(device), dim)
        assert_close(output, torch.log_softmax(input.double(), dim), 5e-7)
        ones = output.double().exp().sum(dim)
        assert (ones - 1).abs().max() < 4e-6


def test_shift_invariance(device):
    """Adding 2^13 to integers is exact, so that the results must be the same to the last bit."""
    input = torch.randint(-8, 8, (6, 11), generator=torch.Generator().manual_seed(0)).float().to(device)
    assert torch.equal(log_softmax(input, 1), log_softmax(input + 8192, 1))


@pytest.mark.parametrize("dims", [0, 1, 2, 3, 4])
def test_implicit_dimension_warns_and_is_pytorchs(dims):
    input = torch.randn((2,) * dims, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="Implicit dimension choice for log_softmax has been deprecated") as ours:
        output = log_softmax(input)
    with pytest.warns(UserWarning):
        expected = torch.nn.functional.log_softmax(input)
    assert_close(output, expected.double(), 2e-6)
    assert ours[0].filename == __file__
    module = cuda_ops.nn.LogSoftmax()
    with pytest.warns(UserWarning, match="Implicit dimension"):
        assert torch.equal(module(input), output)


def test_dtype_casts_first(device):
    integers = torch.arange(5, device=device)
    output = log_softmax(integers, 0, dtype=torch.float64)
    assert output.dtype == torch.float64
    assert_close(output, torch.log_softmax(integers.cpu().double(), 0), 1e-12)
    # A cast before the op, not after it: 1e300 is an infinity in float32.
    assert log_softmax(torch.tensor([1e300, 0.0], dtype=torch.float64), 0, dtype=torch.float32).isnan().all()


def test_result_is_contiguous():
    input = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert log_softmax(input, 1).is_contiguous()


def test_third_derivative():
    x = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    results = []
    for function in (log_softmax, torch.log_softmax):
        value = function(x, 0)[1]
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = gradient.pow(3).sum()
        results.append(gradient.detach())
    assert_close(*results, 1e-12)


def test_module_is_a_drop_in():
    ours, native = cuda_ops.nn.LogSoftmax(dim=1), torch.nn.LogSoftmax(dim=1)
    assert repr(ours) == repr(native)
    assert ours.state_dict() == native.state_dict() == {}
    input = torch.randn(4, 7)
    assert_close(ours(input), native(input.double()), 2e-6)


def test_one_class_is_zero(device):
    output = log_softmax(torch.tensor([[math.pi], [-1e4]], device=device), 1)
    assert torch.equal(output.cpu(), torch.zeros(2, 1))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_in_float32(dtype):
    values = torch.randn(4, 10, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    results = []
    for function in (log_softmax, torch.nn.functional.log_softmax):
        input = values.clone().requires_grad_()
        with torch.autocast("cuda", dtype=dtype):
            output = function(input, 1)
        output.pow(2).sum().backward()
        results.append((output, input.grad))
    (ours, our_grad), (native, native_grad) = results
    assert ours.dtype == native.dtype == torch.float32
    assert our_grad.dtype == native_grad.dtype == dtype
    assert_close(ours, native.double(), 2e-6)
    assert_close(our_grad, native_grad.double(), 1.6e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_on_the_cpu_keeps_the_dtype(dtype):
    """As PyTorch's does there."""
    input = torch.randn(4, 10, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        output = log_softmax(input, 1)
    assert output.dtype == dtype
    tolerance = 1.6e-2 if dtype == torch.bfloat16 else 2e-3
    assert_close(output, torch.nn.functional.log_softmax(input.double(), 1), tolerance)
    (grad,) = torch.autograd.grad(output.sum(), input)
    assert grad.dtype == dtype


def test_tangents_of_what_backward_saved():
    """Dual numbers through a backward without create_graph: the output that it saved has its tangent."""
    x, tangent = torch.randn(2, 3, 4, dtype=torch.float64)
    results = []
    for function in (log_softmax, torch.nn.functional.log_softmax):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(), tangent)
            (grad,) = torch.autograd.grad(function(dual, 1).square().sum(), dual)
            results.append(torch.autograd.forward_ad.unpack_dual(grad).tangent)
    torch.testing.assert_close(*results)
