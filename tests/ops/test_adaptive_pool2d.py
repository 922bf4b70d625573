"""adaptive_avg_pool2d and adaptive_max_pool2d against PyTorch over drawn shapes, and what is special to them: ties,
NaN, memory formats, empty outputs, the modules, and what an index that comes from elsewhere does."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.opspec import Make, assert_close

import cuda_ops

F = torch.nn.functional
C = cuda_ops.functional
FORMATS = [torch.contiguous_format, torch.channels_last]
drawn = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@drawn
@given(
    shape=st.tuples(
        st.integers(0, 3), st.sampled_from([1, 3, 8, 33]), st.integers(1, 40), st.sampled_from([1, 5, 8, 33, 40])
    ),
    size=st.tuples(st.one_of(st.none(), st.integers(1, 12)), st.one_of(st.none(), st.integers(1, 12))),
    few_values=st.booleans(),
    memory_format=st.sampled_from(FORMATS),
    seed=st.integers(0, 99),
)
def test_pytorchs(device, shape, size, few_values, memory_format, seed):
    """Maxima and indices exactly, also with ties and NaN; means and gradients up to the order of a sum."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if few_values:
        values = values.mul(1.5).round().clamp(-2, 2)
        values[values == 2], values[values == -2] = float("nan"), float("-inf")
    x = values.contiguous(memory_format=memory_format).to(device).requires_grad_()
    reference = values.clone().requires_grad_()
    output, indices = C.adaptive_max_pool2d(x, size, return_indices=True)
    expected, expected_indices = F.adaptive_max_pool2d(reference, size, return_indices=True)
    assert torch.equal(indices.cpu(), expected_indices)
    assert torch.equal(output.cpu().nan_to_num(nan=123.0), expected.nan_to_num(nan=123.0))
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = [(output, expected)]
    if not few_values:
        pairs.append((C.adaptive_avg_pool2d(x, size), F.adaptive_avg_pool2d(reference, size)))
        assert_close(*pairs[1], 1e-13)
    for ours, theirs in pairs:
        (grad,) = torch.autograd.grad(ours, x, weights.to(device))
        (expected_grad,) = torch.autograd.grad(theirs, reference, weights)
        assert_close(grad, expected_grad, 1e-13)
        if x.is_contiguous() != x.is_contiguous(memory_format=torch.channels_last):  # else it is of both formats
            assert ours.is_contiguous(memory_format=memory_format) and grad.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize(("shape", "size"), [((2, 5, 6, 9), (1, 1)), ((3, 67, 8, 6), (4, 3)), ((2, 3, 7, 5), (7, 5))])
def test_gradients_of_halves_where_windows_do_not_overlap(device, shape, size, memory_format, dtype):
    """Nothing is added up there: the bits are those of a division, rounded once, and of gradients as they are."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype).contiguous(memory_format=memory_format)
    x = x.to(device).requires_grad_()
    grad = torch.randn((*shape[:2], *size), generator=torch.Generator().manual_seed(4)).to(dtype)
    grad[0, 0, 0, 0], grad[-1, -1, -1, -1], grad[0, 1, 0, 0] = -0.0, float("nan"), float("inf")
    windows = [n // o for n, o in zip(shape[2:], size, strict=True)]
    shares = (grad.float() / (windows[0] * windows[1])).to(dtype)
    expected = shares.repeat_interleave(windows[0], 2).repeat_interleave(windows[1], 3)
    (ours,) = torch.autograd.grad(C.adaptive_avg_pool2d(x, size), x, grad.to(device))
    assert torch.equal(ours.cpu().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    output, indices = C.adaptive_max_pool2d(x, size, return_indices=True)
    (ours,) = torch.autograd.grad(output, x, grad.to(device))
    expected = torch.zeros(*shape[:2], shape[2] * shape[3], dtype=dtype)
    expected.scatter_(2, indices.cpu().flatten(2), grad.flatten(2)).add_(0.0)  # 0 + -0 is 0
    assert torch.equal(ours.cpu().flatten(2).nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert not (torch.signbit(ours) & (ours == 0)).any()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 701, 7, 7),
        (64, 433, 5, 5),
        (1, 1061, 15, 15),
        (4, 300, 43, 43),
        (1, 400, 31, 33),
        (2, 264, 56, 56),
        (9, 400, 51, 51),
    ],
    ids=str,
)
def test_planes_to_one_element(shape, offset, dtype):
    """Planes of whole vectors and not, several of a block, a warp's and a block's, and long ones by vectors;
    NaN of one is in no other; the same bits twice."""
    storage = torch.randn(torch.Size(shape).numel() + offset, device="cuda").to(dtype)
    x = storage[offset:].view(shape)
    x[0, 5, -1, -1] = x[0, 9, 0, 0] = float("nan")
    for ours, theirs in [
        (C.adaptive_avg_pool2d, F.adaptive_avg_pool2d),
        (C.adaptive_max_pool2d, F.adaptive_max_pool2d),
    ]:
        output, expected = ours(x, 1), theirs(x.double(), 1)
        assert torch.equal(output.isnan(), expected.isnan()) and output.isnan().sum() == 2
        assert torch.equal(output.nan_to_num(), ours(x, 1).nan_to_num())
        kept = ~expected.isnan()
        if ours is C.adaptive_max_pool2d:
            assert torch.equal(output[kept].double(), expected[kept])
        else:
            assert_close(output[kept], expected[kept], {8: 1e-13, 4: 1e-6, 2: 1e-2}[dtype.itemsize])
    assert torch.equal(
        C.adaptive_max_pool2d(x, 1, return_indices=True)[1], F.adaptive_max_pool2d(x, 1, return_indices=True)[1]
    )


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("shape", [(2, 3, 300, 300), (1, 64, 120, 130), (40, 8, 17, 16), (9, 40, 67, 45)])
def test_large_planes(device_dtype, shape, memory_format):
    """Global, and few windows: means of few planes are cut, of many they are not."""
    device, dtype = device_dtype
    x = Make(device, dtype)(*shape, low=0.5, high=1.5).contiguous(memory_format=memory_format)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.get(dtype, 2e-6)
    for size in (1, (3, 1), (2, 3)):
        assert_close(C.adaptive_avg_pool2d(x, size), F.adaptive_avg_pool2d(x.double().cpu(), size), tolerance)
        output, indices = C.adaptive_max_pool2d(x, size, True)
        expected, expected_indices = F.adaptive_max_pool2d(x.double().cpu().contiguous(), size, True)
        assert torch.equal(output.double().cpu(), expected) and torch.equal(indices.cpu(), expected_indices)


@pytest.mark.parametrize("name", ["adaptive_avg_pool2d", "adaptive_max_pool2d"])
def test_no_windows(device, name):
    """PyTorch's backward refuses them; here the gradient is 0."""
    x = torch.ones(2, 3, 4, 5, device=device, requires_grad=True)
    output = getattr(C, name)(x, (0, 2))
    assert output.shape == (2, 3, 0, 2)
    assert not torch.autograd.grad(output.sum(), x)[0].any()


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("size", [2, 1])
@pytest.mark.parametrize("index", [-1, 64, 1 << 40, -(1 << 62)])
def test_indices_from_elsewhere_touch_nothing(device, index, size, memory_format):
    indices = torch.full((2, 3, size, size), index, device=device).contiguous(memory_format=memory_format)
    grad = torch.ops.cuda_ops.adaptive_max_pool2d_backward(torch.ones(indices.shape, device=device), indices, [8, 8])
    assert torch.equal(grad, torch.zeros_like(grad))


def test_threads_do_not_change_the_bits():
    threads = torch.get_num_threads()
    x = Make().distinct(8, 33, 30, 30)
    try:
        for memory_format in FORMATS:
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                y = x.contiguous(memory_format=memory_format).requires_grad_()
                outputs = [C.adaptive_max_pool2d(y, 7), C.adaptive_avg_pool2d(y, 7)]
                results.append([*outputs, *(torch.autograd.grad(o.square().sum(), y)[0] for o in outputs)])
            for one in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(one, results[0], strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["AdaptiveAvgPool2d", "AdaptiveMaxPool2d"])
@pytest.mark.parametrize("arguments", [(1,), ((2, 3),), ((None, 3),)])
def test_modules_are_drop_in(device, name, arguments):
    ours, theirs = getattr(cuda_ops.nn, name)(*arguments), getattr(torch.nn, name)(*arguments)
    assert isinstance(ours, type(theirs)) and repr(ours) == repr(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(copy.deepcopy(ours).state_dict(), strict=True)
    x = Make(device).distinct(2, 3, 9, 10)
    assert_close(ours(x), theirs(x.cpu()).double(), 2e-6)


def test_convert_finds_the_modules():
    model = torch.nn.Sequential(torch.nn.PReLU(3), torch.nn.AdaptiveMaxPool2d(4), torch.nn.AdaptiveAvgPool2d(1))
    x = Make().distinct(2, 3, 9, 10)
    expected = model(x)
    cuda_ops.convert(model)
    assert [type(layer).__module__.split(".")[0] for layer in model] == ["cuda_ops"] * 3
    assert_close(model(x), expected.double(), 2e-6)
