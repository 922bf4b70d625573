"""max_pool2d and avg_pool2d against PyTorch over drawn shapes and parameters, and what is special to them: ties, NaN,
memory formats, the modules, and what an index that comes from elsewhere does."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.opspec import Make, assert_close

import cuda_ops

F = torch.nn.functional
C = cuda_ops.functional
CHANNELS_LAST = torch.channels_last

drawn = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
pairs = st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def windows(draw, dilated):
    """(shape, kernel_size, stride, padding, dilation, ceil_mode) with at least one window along each axis."""
    kernel, stride = draw(pairs), draw(pairs)
    dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 3))) if dilated else (1, 1)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    plane = [draw(st.integers(max(1, s - 2 * p), 20)) for s, p in zip(span, padding, strict=True)]
    batch = draw(st.sampled_from([(), (0,), (1,), (3,)]))
    # One channel, and some around the CPU kernel's 32 lanes.
    channels = draw(st.sampled_from([1, 2, 5, 31, 32, 33]))
    return (*batch, channels, *plane), kernel, stride, padding, dilation, draw(st.booleans())


def in_format(x, channels_last):
    return x.contiguous(memory_format=CHANNELS_LAST) if channels_last and x.dim() == 4 else x


def random_like(output):
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(output, x):
    (grad,) = torch.autograd.grad(output, x, random_like(output).to(output))
    return grad


@drawn
@given(window=windows(dilated=True), few_values=st.booleans(), channels_last=st.booleans(), seed=st.integers(0, 99))
def test_max_pool2d_is_pytorchs(device, window, few_values, channels_last, seed):
    """Maxima and indices exactly, also with ties and NaN; gradients up to the order of a sum."""
    shape, *arguments = window
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if few_values:  # five values, of which one is NaN and one an infinity, so that most windows have ties
        values = values.mul(1.5).round().clamp(-2, 2)
        values[values == 2], values[values == -2] = float("nan"), float("-inf")
    x = in_format(values, channels_last).to(device).requires_grad_()
    reference = in_format(values, channels_last)
    output, indices = C.max_pool2d(x, *arguments, return_indices=True)
    expected, expected_indices = F.max_pool2d(reference, *arguments, return_indices=True)
    # A window of nothing but padding has an index that leads elsewhere in PyTorch, whose backward follows it, even out
    # of the plane; so the expected gradients are added up here. Such a window shows by the minus infinity in zeros.
    empty = F.max_pool2d(torch.zeros(shape), *arguments) == float("-inf")
    assert torch.equal(indices.cpu(), expected_indices.masked_fill(empty, -1))
    assert torch.equal(output.cpu().nan_to_num(nan=123.0), expected.nan_to_num(nan=123.0))
    grad_output = random_like(output)
    (grad,) = torch.autograd.grad(output, x, grad_output.to(output))
    weights = grad_output.masked_fill(empty, 0).flatten(-2)
    expected_grad = torch.zeros(shape, dtype=torch.float64).flatten(-2)
    expected_grad.scatter_add_(-1, expected_indices.masked_fill(empty, 0).flatten(-2), weights)
    assert_close(grad, expected_grad.view(shape), 2e-6)


@drawn
@given(
    window=windows(dilated=False),
    count_include_pad=st.booleans(),
    divisor=st.sampled_from([None, None, 1, 7, -2]),
    channels_last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_avg_pool2d_is_pytorchs(device, window, count_include_pad, divisor, channels_last, seed):
    shape, kernel, stride, padding, _, ceil_mode = window
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    arguments = (kernel, stride, padding, ceil_mode, count_include_pad, divisor)
    x = in_format(values, channels_last).to(device).requires_grad_()
    reference = in_format(values, channels_last).requires_grad_()
    output, expected = C.avg_pool2d(x, *arguments), F.avg_pool2d(reference, *arguments)
    assert_close(output, expected, 1e-13)
    assert_close(gradients(output, x), gradients(expected, reference), 1e-13)


@drawn
@given(
    size=st.integers(1, 12),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 5),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 3),
    ceil_mode=st.booleans(),
)
def test_refused_and_accepted_as_by_pytorch(size, kernel, stride, padding, dilation, ceil_mode):
    """The same geometries are errors, and the others have the same shape."""
    x = torch.randn(1, 1, size, 2 * size)
    calls = [
        (C.max_pool2d, F.max_pool2d, (kernel, stride, padding, dilation, ceil_mode)),
        (C.avg_pool2d, F.avg_pool2d, (kernel, stride, padding, ceil_mode)),
    ]
    for ours, theirs, arguments in calls:
        try:
            expected = theirs(x, *arguments)
        except RuntimeError:
            with pytest.raises(RuntimeError, match=r"pool2d: expected"):
                ours(x, *arguments)
        else:
            assert_close(ours(x, *arguments), expected.double(), 2e-6)


@pytest.mark.parametrize("channels_last", [False, True])
def test_first_of_equals_and_last_nan(device, channels_last):
    nan = float("nan")
    plane = torch.tensor([[1.0, 1.0, nan, 2.0], [1.0, 1.0, nan, 3.0]])
    x = in_format(plane.expand(1, 40, 2, 4).contiguous(), channels_last).to(device)
    output, indices = C.max_pool2d(x, 2, return_indices=True)
    assert (output[..., 0] == 1).all() and output[..., 1].isnan().all()
    assert (indices[..., 0] == 0).all() and (indices[..., 1] == 6).all()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("op", ["max_pool2d", "avg_pool2d"])
def test_memory_format_is_kept(device, op, channels_last):
    x = in_format(torch.randn(2, 3, 6, 8), channels_last).to(device).requires_grad_()
    memory_format = CHANNELS_LAST if channels_last else torch.contiguous_format
    output = getattr(C, op)(x, 2)
    assert output.is_contiguous(memory_format=memory_format)
    # grad_outputs in either format, and one with no strides at all.
    for grad_output in (
        torch.ones_like(output),
        torch.ones(output.shape, device=device),
        torch.ones((), device=device),
    ):
        (grad,) = torch.autograd.grad(output, x, grad_output.expand(output.shape), retain_graph=True)
        assert grad.is_contiguous(memory_format=memory_format)


def test_fakes_have_the_strides_of_the_real_ones():
    """Shapes in which both memory formats have the same strides, or nearly: the fake must choose as the kernel does."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    shapes = [
        (2, 3, 4, 4),
        (2, 1, 4, 4),
        (1, 3, 4, 4),
        (1, 1, 4, 4),
        (4, 3, 1, 1),
        (4, 1, 1, 1),
        (1, 3, 1, 4),
        (0, 3, 4, 4),
    ]
    ops = torch.ops.cuda_ops
    for shape in shapes:
        x = torch.randn(shape)
        kernel = [min(2, shape[2]), min(2, shape[3])]
        transposed = x.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
        reversed_ = x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        for input in (x, x.contiguous(memory_format=CHANNELS_LAST), transposed, reversed_, x[:1].expand(shape)):
            real = ops.max_pool2d_forward(input, kernel, kernel, [0, 0], [1, 1], False)
            average = ops.avg_pool2d_forward(input, kernel, kernel, [0, 0], False, True, None)
            grad = ops.max_pool2d_backward(*real, list(shape[2:]), kernel, kernel, [0, 0], [1, 1], False)
            with FakeTensorMode() as mode:
                fake_input, *fake_real = (mode.from_tensor(t) for t in (input, *real))
                fake = ops.max_pool2d_forward(fake_input, kernel, kernel, [0, 0], [1, 1], False)
                fake_average = ops.avg_pool2d_forward(fake_input, kernel, kernel, [0, 0], False, True, None)
                fake_grad = ops.max_pool2d_backward(*fake_real, list(shape[2:]), kernel, kernel, [0, 0], [1, 1], False)
            for r, f in zip((*real, average, grad), (*fake, fake_average, fake_grad), strict=True):
                assert (r.shape, r.stride()) == (f.shape, f.stride()), (shape, input.stride())


@pytest.mark.parametrize("channels_last", [False, True])
def test_window_without_any_position(device, channels_last):
    """Only dilation with ceil_mode makes one: minus infinity, and no gradient, the second time round neither."""
    for shape in [(1, 2, 1, 4), (1, 2, 4, 1), (1, 2, 1, 1)]:  # too low, too narrow, both
        x = in_format(torch.randn(shape, dtype=torch.float64), channels_last).to(device).requires_grad_()
        output, indices = C.max_pool2d(x, 2, 2, 1, 3, ceil_mode=True, return_indices=True)
        expected = F.max_pool2d(x.detach().cpu(), 2, 2, 1, 3, ceil_mode=True)
        assert torch.equal(output.cpu(), expected)
        full = output > float("-inf")
        assert not full.all() and torch.equal(full, indices >= 0)
        grad_output = torch.ones_like(output).requires_grad_()
        (grad,) = torch.autograd.grad(output, x, grad_output, create_graph=True)
        assert grad.sum() == full.sum()
        (grad_grad,) = torch.autograd.grad(grad.sum(), grad_output)
        assert torch.equal(grad_grad, full.to(grad_grad.dtype))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("index", [-1, 16, 1 << 40, -(1 << 62)])
def test_indices_from_elsewhere_touch_nothing(device, index, channels_last):
    indices = in_format(torch.full((2, 3, 2, 2), index), channels_last).to(device)
    window = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    grad = torch.ops.cuda_ops.max_pool2d_backward(torch.ones(2, 3, 2, 2, device=device), indices, [4, 4], *window)
    assert torch.equal(grad, torch.zeros_like(grad))


def test_threads_do_not_change_the_bits():
    threads = torch.get_num_threads()
    x = Make().distinct(8, 33, 30, 30)
    try:
        for channels_last in (False, True):
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                y = in_format(x, channels_last).requires_grad_()
                outputs = [*C.max_pool2d(y, 3, 2, 1, return_indices=True), C.avg_pool2d(y, 3, 2, 1)]
                grads = [gradients(o, y) for o in outputs if o.requires_grad]
                results.append([*outputs, *grads])
            for one in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(one, results[0], strict=True))
    finally:
        torch.set_num_threads(threads)


MODULES = [
    ("MaxPool2d", (2,), {}),
    ("MaxPool2d", (3, 2, 1, 2), {"ceil_mode": True, "return_indices": True}),
    ("MaxPool2d", ((3, 2),), {"stride": (2, 1), "padding": (1, 0)}),
    ("AvgPool2d", (2,), {}),
    ("AvgPool2d", (3, 2, 1, True, False), {}),
    ("AvgPool2d", ((3, 2),), {"stride": (2, 1), "divisor_override": 4}),
]


@pytest.mark.parametrize("name, arguments, kwargs", MODULES)
def test_modules_are_drop_in(device, name, arguments, kwargs):
    ours = getattr(cuda_ops.nn, name)(*arguments, **kwargs)
    theirs = getattr(torch.nn, name)(*arguments, **kwargs)
    assert isinstance(ours, type(theirs)) and repr(ours) == repr(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(copy.deepcopy(ours).state_dict(), strict=True)
    x = Make(device).distinct(2, 3, 9, 10)
    actual, expected = ours(x), theirs(x.cpu())
    if isinstance(expected, tuple):
        assert torch.equal(actual[1].cpu(), expected[1])
        actual, expected = actual[0], expected[0]
    assert_close(actual, expected.double(), 2e-6)


@pytest.mark.large
@pytest.mark.cuda
def test_more_than_two_to_the_31_elements():
    """Offsets need 64 bits: the last image of a batch of 2^31 + 4096 elements."""
    for channels_last in (False, True):
        x = torch.zeros((1 << 19) + 1, 64, 8, 8, dtype=torch.float16, device="cuda")
        x = x.contiguous(memory_format=CHANNELS_LAST) if channels_last else x
        x[-1] = torch.rand(64, 8, 8)
        x.requires_grad_()
        output, indices = C.max_pool2d(x, 2, return_indices=True)
        expected, expected_indices = F.max_pool2d(x[-1:].detach(), 2, return_indices=True)
        assert torch.equal(output[-1:], expected) and torch.equal(indices[-1:], expected_indices)
        (grad,) = torch.autograd.grad(output, x, torch.ones_like(output))
        assert (grad[-1].sum((1, 2)) == 16).all()
        average = C.avg_pool2d(x, 2)
        assert_close(average[-1], F.avg_pool2d(x[-1].double(), 2), 2e-3)
        (grad,) = torch.autograd.grad(average, x, torch.ones_like(average))
        assert (grad[-1] == 0.25).all()
        del x, output, indices, average, grad
