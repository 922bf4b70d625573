"""What is special to batch_norm: the modules and their running statistics, large means, splits, mixed dtypes, NaN."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import cuda_param
from support.opspec import Make, assert_close

import cuda_ops
from cuda_ops.functional import batch_norm, batch_norm_act

NATIVE = torch.nn.functional.batch_norm
MODULES = [
    ("BatchNorm1d", (6, 5)),
    ("BatchNorm1d", (6, 5, 3)),
    ("BatchNorm2d", (4, 5, 3, 2)),
    ("BatchNorm3d", (2, 5, 2, 3, 2)),
]
OPTIONS = [
    {},
    {"momentum": None},
    {"momentum": 0.25, "eps": 1e-2},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False, "momentum": None},
]


def run(function, dtype, tensors, grad_output, **kwargs):
    """[output, running_mean, running_var, grad_input, grad_weight, grad_bias] in `dtype`."""
    input, mean, var, weight, bias = (t.detach().to(dtype).clone() for t in tensors)
    leaves = [t.requires_grad_() for t in (input, weight, bias)]
    output = function(input, mean, var, weight, bias, **kwargs)
    return [output, mean, var, *torch.autograd.grad(output, leaves, grad_output.to(dtype))]


def randomised(module):
    if module.affine:
        with torch.no_grad():
            module.weight.uniform_(0.5, 1.5)
            module.bias.uniform_(-1, 1)
    return module


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("name", "shape"), MODULES)
def test_modules_are_drop_ins(device, name, shape, options):
    """Same repr and state_dict; after several steps of training the same running statistics, and then the same in
    evaluation."""
    native = randomised(getattr(torch.nn, name)(5, **options, device=device, dtype=torch.float64))
    ours = getattr(cuda_ops.nn, name)(5, **options, device=device, dtype=torch.float64)
    assert isinstance(ours, type(native))
    assert repr(ours) == repr(native)
    ours.load_state_dict(native.state_dict(), strict=True)
    native.load_state_dict(ours.state_dict(), strict=True)
    for training, count in [(True, 4), (False, 2), (True, 1)]:
        ours.train(training)
        native.train(training)
        for _ in range(count):
            a = (torch.randn(shape, dtype=torch.float64, device=device) * 3 + 1).requires_grad_()
            b = a.detach().clone().requires_grad_()
            output, expected = ours(a), native(b)
            grad_output = torch.randn_like(output)
            output.backward(grad_output)
            expected.backward(grad_output)
            torch.testing.assert_close(output, expected)
            torch.testing.assert_close(a.grad, b.grad)
    for actual, expected in zip(ours.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)
    assert ours.state_dict().keys() == native.state_dict().keys()
    for key, expected in native.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], expected, msg=key)


@pytest.mark.parametrize(("name", "shape"), MODULES)
def test_modules_refuse_other_dimensions(name, shape):
    with pytest.raises(ValueError, match="expected"):
        getattr(cuda_ops.nn, name)(5)(torch.ones(2, 5, 1, 1, 1, 1))


def test_weights_are_interchangeable_in_evaluation(device):
    """Train with one, evaluate with the other, both ways."""
    for source, target in [(torch.nn, cuda_ops.nn), (cuda_ops.nn, torch.nn)]:
        trained = source.BatchNorm2d(3, device=device)
        trained(torch.randn(8, 3, 4, 4, device=device) * 2 + 5)
        loaded = target.BatchNorm2d(3, device=device)
        loaded.load_state_dict(trained.state_dict(), strict=True)
        x = torch.randn(2, 3, 4, 4, device=device)
        torch.testing.assert_close(loaded.eval()(x), trained.eval()(x))


# Two splits and more of rows and of planes, odd sizes, planes longer than a segment, one channel, many channels.
LARGE = [(20_011, 3), (4, 5003), (64, 32, 14, 14), (3, 1, 301, 303), (2, 70, 67), (257, 2, 129)]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_large_means_lose_nothing(device, shape, memory_format, offset):
    """In float32, with a deviation of 1 and a mean that leaves it but three digits: against float64, from the same
    rounded input, to the accuracy that there is without a mean."""
    if len(shape) != 4 and memory_format == torch.channels_last:
        pytest.skip("channels_last is for four dimensions")
    make = Make(device, torch.float32)
    x = (make(*shape, low=-1.7, high=1.7) + offset).contiguous(memory_format=memory_format)
    channels = shape[1]
    tensors = (x, make(channels), make(channels, low=0.5), make(channels, low=0.5), make(channels))
    grad_output = make(*shape)
    # Offsets differ by channel, and the gradient of weight is no sum that cancels.
    with torch.no_grad():
        x += torch.arange(channels, device=device).view(-1, *[1] * (len(shape) - 2)) % 7
        grad_output += (x - x.mean([d for d in range(x.dim()) if d != 1], keepdim=True)).sign()
    for training in (True, False):
        actual = run(batch_norm, torch.float32, tensors, grad_output, training=training)
        cpu = [t.cpu() for t in tensors]
        expected = run(NATIVE, torch.float64, cpu, grad_output.cpu(), training=training)
        for name, a, e in zip(("output", "mean", "var", "input", "weight", "bias"), actual, expected, strict=True):
            assert_close(a, e, 2e-6, f"{name}, training={training}")


def test_a_first_value_far_from_the_others(device):
    """What the kernels subtract from a channel, such as its first value, must not be what they rely on."""
    x = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0)).to(device)
    x[0] = 1e4
    tensors = (x, torch.zeros(2), torch.ones(2), torch.ones(2), torch.zeros(2))
    tensors = [t.to(device) for t in tensors]
    grad_output = torch.ones_like(x) + x.sign()
    for shape in [(4000, 2), (4, 2, 1000)]:
        tensors[0] = x.reshape(4, 1000, 2).transpose(1, 2).contiguous() if len(shape) == 3 else x
        g = grad_output.reshape(4, 1000, 2).transpose(1, 2) if len(shape) == 3 else grad_output
        actual = run(batch_norm, torch.float32, tensors, g, training=True)
        expected = run(NATIVE, torch.float64, [t.cpu() for t in tensors], g.cpu(), training=True)
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_close(a, e, 2e-6, f"result {i}")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(9, 3), (300, 3), (5, 3, 7), (4, 3, 20, 20)], ids=str)
def test_nonfinite_values_travel_as_in_pytorch(device_dtype, shape, training, value):
    device, dtype = device_dtype
    make = Make(device, dtype)
    for row in (0, shape[0] // 2):
        x = make(*shape)
        x[row].view(3, -1)[1, -1] = value
        mean, var = torch.zeros(3, dtype=dtype, device=device), torch.ones(3, dtype=dtype, device=device)
        expected_mean, expected_var = mean.double().cpu(), var.double().cpu()
        output = batch_norm(x, mean, var, training=training)
        expected = NATIVE(x.cpu().double(), expected_mean, expected_var, training=training)
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.get(dtype, 2e-6)
        assert_close(output, expected, tolerance)
        # An infinity makes the mean infinite or NaN, by the order of the operations; in the same channels in any case.
        assert torch.equal(mean.isfinite().cpu(), expected_mean.isfinite())
        assert torch.equal(var.isfinite().cpu(), expected_var.isfinite())


def test_gradients_of_inference_do_not_see_an_infinite_input(device):
    x = torch.tensor([[float("inf"), 1.0], [2.0, float("nan")]], device=device, requires_grad=True)
    var = torch.full((2,), 4.0, device=device)
    output = batch_norm(x, torch.zeros(2, device=device), var, eps=1e-12)
    (grad,) = torch.autograd.grad(output, x, torch.ones_like(output))
    assert torch.equal(grad, torch.full_like(grad, 0.5))


def test_equal_grad_outputs(device):
    """From .sum() and .sum(0) come grad_outputs of stride 0; in training the gradient of input is rounding only."""
    for shape, reduce in itertools.product([(33, 5), (4, 5, 6)], [torch.sum, lambda y: y.sum(0).square().sum()]):
        results = []
        for function in (batch_norm, NATIVE):
            x, weight, bias = (
                t.requires_grad_() for t in (Make(device, torch.float64)(*shape), *Make(device, torch.float64)(2, 5))
            )
            output = function(x, None, None, weight, bias, training=True)
            results.append(torch.autograd.grad(reduce(output), (x, weight, bias)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "channels_last_3d", "rows"])
def test_memory_formats_are_those_of_pytorch(device, layout):
    """Of PyTorch on the CPU: its CUDA backends choose by the library they call, and differ among themselves."""
    base = torch.randn(2, 3, 4, 5, device=device)
    if layout == "channels_last":
        base = base.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        base = base.transpose(2, 3)
    elif layout == "channels_last_3d":
        base = torch.randn(2, 3, 4, 5, 2, device=device).contiguous(memory_format=torch.channels_last_3d)
    elif layout == "rows":
        base = torch.randn(2, 5, 3, device=device).transpose(1, 2)
    for training in (True, False):
        results = []
        for function, x in ((batch_norm, base.detach()), (NATIVE, base.detach().cpu())):
            x.requires_grad_()
            y = function(x, torch.zeros(3, device=x.device), torch.ones(3, device=x.device), training=training)
            (grad,) = torch.autograd.grad(y, x, torch.randn_like(y))
            results.append((y.stride(), grad.stride() if layout.startswith("c") else None))
        assert results[0] == results[1]


@pytest.mark.cuda
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_parameters_beside_half_inputs(dtype, memory_format, training):
    """What autocast leads to: the gradients of the parameters are float32, and so accurate."""
    make = Make("cuda", dtype)
    single = Make("cuda", torch.float32, seed=1)
    x = make(16, 5, 9, 7).contiguous(memory_format=memory_format).requires_grad_()
    mean, var = single(5), single(5, low=0.5)
    weight, bias = single(5, requires_grad=True), single(5, requires_grad=True)
    tensors = [t.detach().cpu() for t in (x, mean, var, weight, bias)]
    output = batch_norm(x, mean, var, weight, bias, training)
    grad_output = make(16, 5, 9, 7)
    grads = torch.autograd.grad(output, (x, weight, bias), grad_output)
    assert output.dtype == grads[0].dtype == dtype
    assert grads[1].dtype == grads[2].dtype == torch.float32
    expected = run(NATIVE, torch.float64, tensors, grad_output.cpu(), training=training)
    half = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    tolerances = (half, 2e-6, 2e-6, half, 2e-6, 2e-6)
    for i, (a, e, t) in enumerate(zip((output, mean, var, *grads), expected, tolerances, strict=True)):
        assert_close(a, e, t, f"result {i}")


@pytest.mark.cuda
@pytest.mark.parametrize("given", ["weight", "bias"])
def test_one_float32_parameter_beside_half_inputs(given):
    x = torch.randn(8, 3, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parameter = torch.ones(3, device="cuda", requires_grad=True)
    output = batch_norm(x, None, None, **{given: parameter}, training=True)
    (grad,) = torch.autograd.grad(output, parameter, torch.ones_like(output), create_graph=True)
    assert grad.dtype == torch.float32


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_leaves_the_dtypes_as_pytorch_does(dtype):
    results = []
    for library in (cuda_ops.nn, torch.nn):
        torch.manual_seed(0)
        linear, norm = torch.nn.Linear(6, 5, device="cuda"), library.BatchNorm1d(5, device="cuda")
        x = torch.randn(16, 6, device="cuda")
        with torch.autocast("cuda", dtype):
            output = norm(linear(x))
            loss = output.float().square().mul(torch.arange(5, device="cuda")).sum()
        loss.backward()
        results.append([output, linear.weight.grad, norm.weight.grad, norm.bias.grad, norm.running_var])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        tolerance = {torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_running_statistics_that_are_not_contiguous(device):
    x = torch.randn(7, 3, device=device)
    both = torch.stack([torch.zeros(3, device=device), torch.ones(3, device=device)], 1)
    expected = both.clone()
    batch_norm(x, both[:, 0], both[:, 1], training=True)
    NATIVE(x, expected[:, 0], expected[:, 1], training=True)
    torch.testing.assert_close(both, expected)


def test_a_batch_of_nothing_leaves_the_running_statistics(device):
    mean, var = torch.full((3,), 2.0, device=device), torch.full((3,), 5.0, device=device)
    assert batch_norm(torch.ones(0, 3, 4, device=device), mean, var, training=True).shape == (0, 3, 4)
    assert (mean == 2).all() and (var == 5).all()


def test_no_channels(device):
    x = torch.ones(4, 0, 3, device=device, requires_grad=True)
    for training in (True, False):
        statistics = torch.ones(0, device=device), torch.ones(0, device=device)
        weight = torch.ones(0, device=device, requires_grad=True)
        output = batch_norm(x, *statistics, weight, training=training)
        grads = torch.autograd.grad(output.sum(), (x, weight))
        assert [t.shape for t in (output, *grads)] == [(4, 0, 3), (4, 0, 3), (0,)]


def test_changed_running_statistics_are_noticed_by_backward(device):
    """Evaluation saves them for backward, and training in between writes over them: an error, as in PyTorch."""
    x = torch.randn(4, 3, device=device, requires_grad=True)
    module = cuda_ops.nn.BatchNorm1d(3, device=device).eval()
    output = module(x)
    module.train()(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_running_statistics_tell_autograd_that_they_changed(device):
    """Each of them, and the number of batches."""
    module = cuda_ops.nn.BatchNorm1d(3, device=device)
    before = [buffer._version for buffer in module.buffers()]
    module(torch.randn(4, 3, device=device))
    assert len(before) == 3
    assert all(buffer._version > version for buffer, version in zip(module.buffers(), before, strict=True))
    before = [buffer._version for buffer in module.buffers()]
    module.eval()(torch.randn(4, 3, device=device))
    assert before == [buffer._version for buffer in module.buffers()]


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_some_of_the_tensors(device, training):
    """Each subset of input, weight and bias, frozen otherwise."""
    make = Make(device, torch.float64)
    tensors = (make(5, 3, 4), make(3), make(3, low=0.5), make(3), make(3))
    grad_output = make(5, 3, 4)
    expected = run(NATIVE, torch.float64, tensors, grad_output, training=training)[3:]
    for wanted in itertools.product([False, True], repeat=3):
        if not any(wanted):
            continue
        input, mean, var, weight, bias = (t.detach().clone() for t in tensors)
        leaves = [t.requires_grad_() for t, w in zip((input, weight, bias), wanted, strict=True) if w]
        output = batch_norm(input, mean, var, weight, bias, training)
        grads = torch.autograd.grad(output, leaves, grad_output)
        for a, e in zip(grads, [e for e, w in zip(expected, wanted, strict=True) if w], strict=True):
            torch.testing.assert_close(a, e)


def composed(input, running_mean, running_var, weight, bias, training):
    """The definition, since PyTorch's own batch_norm parts from it in the third derivative."""
    dims = [d for d in range(input.dim()) if d != 1]
    mean, var = (input.mean(dims), input.var(dims, unbiased=False)) if training else (running_mean, running_var)
    shape = [1, -1] + [1] * (input.dim() - 2)
    mean, var, weight, bias = (t.view(shape) for t in (mean, var, weight, bias))
    return (input - mean) / (var + 1e-5).sqrt() * weight + bias


@pytest.mark.parametrize("training", [True, False])
def test_gradient_penalty_and_third_derivative(device, training):
    """Derivatives of the second and third order, with respect to all three tensors."""
    results = []
    for function in (batch_norm, composed):
        make = Make(device, torch.float64, requires_grad=True)
        x, weight, bias = make(6, 2, 3), make(2), make(2)
        mean, var = make(2, requires_grad=False), make(2, low=0.5, requires_grad=False)
        value = function(x, mean, var, weight, bias, training).pow(3).sum()
        orders = []
        for _ in range(3):
            grads = torch.autograd.grad(value, (x, weight, bias), create_graph=True)
            orders += [g.detach() for g in grads]
            value = sum(g.pow(2).sum() for g in grads)
        results.append(orders)
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8 * expected.abs().max().item())


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("activation", ["relu", "relu6", "hardswish"])
def test_slopes_at_the_corners_of_activations(activation, with_residual, layout, device_dtype):
    """Where the input is the mean, it is the bias, or the residual, that is activated: these are the corners."""
    device, dtype = device_dtype
    shape, format = (2, 8, 3, 5), torch.channels_last if layout == "channels_last" else torch.contiguous_format
    corners = torch.tensor([0.0, 6.0, -3.0, 3.0] * 2, device=device, dtype=dtype)
    mean, var = torch.ones_like(corners), torch.ones_like(corners)
    x = torch.ones(shape, device=device, dtype=dtype).contiguous(memory_format=format).requires_grad_()
    residual = torch.zeros_like(x).add_(corners.view(-1, 1, 1)).requires_grad_() if with_residual else None
    bias = (torch.zeros_like(corners) if with_residual else corners).clone().requires_grad_()
    weight = torch.full_like(corners, 2).requires_grad_()
    leaves = [leaf for leaf in (x, weight, bias, residual) if leaf is not None]
    grad = torch.randn(shape, device=device).to(dtype)
    # Not by batch_norm, whose x * scale + (bias - mean * scale) may be beside the corner.
    scale = weight / (var + 1e-5).sqrt()
    z = (x - mean.view(-1, 1, 1)) * scale.view(-1, 1, 1) + bias.view(-1, 1, 1)
    expected = getattr(torch.nn.functional, activation)(z if residual is None else z + residual)
    ours = batch_norm_act(x, mean, var, weight, bias, residual, activation)
    for a, b in zip(
        *([output, *torch.autograd.grad(output, leaves, grad)] for output in (ours, expected)), strict=True
    ):
        assert (a.double() - b.double()).norm() <= 1e-2 * b.double().norm()


@pytest.mark.parametrize("shape", [(64, 32, 7, 7), (9, 5, 301)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_gates_beside_a_large_mean(shape, layout, device):
    """A deviation of some twenty of float32's steps at 1000: the mean lies between two of them, and rounded to one of
    them it would close, or open, the gate of all that are there, some 2 % of the elements."""
    if layout == "channels_last" and len(shape) != 4:
        pytest.skip("channels_last is for four dimensions")
    generator = torch.Generator().manual_seed(0)
    x = 1000 + torch.randn(shape, generator=generator) * 1e-3
    x = x.to(device).contiguous(
        memory_format=torch.channels_last if layout == "channels_last" else torch.contiguous_format
    )
    x.requires_grad_()
    bias = torch.zeros(shape[1], device=device, requires_grad=True)
    grad_output = torch.rand(shape, generator=generator).to(device) + 0.5
    output = batch_norm_act(x, None, None, None, bias, activation="relu", training=True, eps=1e-12)
    output.backward(grad_output)
    axes = [d for d in range(len(shape)) if d != 1]
    exact = x.detach().double()
    opened = exact > exact.mean(axes, keepdim=True)
    assert_close(bias.grad, (grad_output * opened).sum(axes, dtype=torch.float64), 2e-6)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_module_trains_in_one_graph(device, options, dynamic):
    """Two compiled steps of training and one of evaluation, with the buffers written to from the graph."""
    torch.manual_seed(0)
    eager = randomised(cuda_ops.nn.BatchNorm2d(3, **options, device=device))
    module = cuda_ops.nn.BatchNorm2d(3, **options, device=device)
    module.load_state_dict(eager.state_dict())
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for training, memory_format in [(True, torch.contiguous_format), (True, torch.channels_last), (False, None)]:
        eager.train(training)
        module.train(training)
        x = torch.randn(4, 3, 5, 6, device=device)
        x = x.contiguous(memory_format=memory_format or torch.contiguous_format)
        results = []
        for function in (eager, compiled):
            leaf = x.detach().clone().requires_grad_()
            output = function(leaf)
            (grad,) = torch.autograd.grad(output.square().sum(), leaf)
            results.append((output, grad))
        for a, e in zip(*results, strict=True):
            torch.testing.assert_close(a, e)
            assert a.stride() == e.stride()
    for key, expected in eager.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], expected, msg=key)


def test_bits_do_not_depend_on_the_threads():
    make = Make("cpu", torch.float32)
    before = torch.get_num_threads()
    for shape, memory_format in [
        ((2001, 40), torch.contiguous_format),
        ((64, 8, 28, 28), torch.contiguous_format),
        ((64, 8, 28, 28), torch.channels_last),
    ]:
        x = make(*shape).contiguous(memory_format=memory_format)
        tensors = (x, *make(2, shape[1]), *make(2, shape[1]))
        grad_output = make(*shape)
        results = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(run(batch_norm, torch.float32, tensors, grad_output, training=True))
        finally:
            torch.set_num_threads(before)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@st.composite
def cases(draw):
    """Shapes of 2 to 5 dimensions with sizes of 1 and odd ones, and every parameter."""
    dims = draw(st.integers(2, 5))
    shape = [draw(st.sampled_from([1, 2, 3, 5, 8, 17])) for _ in range(dims)]
    training = draw(st.booleans())
    count = shape[0]
    for size in shape[2:]:
        count *= size
    if training and count == 1:
        shape[0] = 3
    formats = {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(dims, [])
    return {
        "shape": tuple(shape),
        "training": training,
        "memory_format": draw(st.sampled_from([torch.contiguous_format, *formats])),
        "statistics": draw(st.booleans()) or not training,
        "weight": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "momentum": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        "eps": draw(st.sampled_from([1e-5, 1e-3, 1.0])),
        "offset": draw(st.sampled_from([0.0, 100.0])),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64])),
        "seed": draw(st.integers(0, 2**16)),
    }


@pytest.mark.parametrize("where", ["cpu", cuda_param("cuda", id="cuda")])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=cases())
def test_any_shape_and_parameters(where, case):
    make = Make("cpu", torch.float64, seed=case["seed"])
    channels = case["shape"][1]
    x = make(*case["shape"]) + case["offset"]
    statistics = (make(channels), make(channels, low=0.25)) if case["statistics"] else (None, None)
    weight = make(channels) if case["weight"] else None
    bias = make(channels) if case["bias"] else None
    grad_output = make(*case["shape"])
    kwargs = {k: case[k] for k in ("training", "momentum", "eps")}

    def results(function, device, dtype):
        def convert(tensor, requires_grad):
            if tensor is None:
                return None
            # Through the dtype of the case in any event: both sides start from the same rounded values.
            copy = tensor.to(case["dtype"]).to(dtype).to(device)
            return copy.contiguous().clone().requires_grad_(requires_grad)

        input = convert(x, False).contiguous(memory_format=case["memory_format"]).requires_grad_()
        mean, var = (convert(s, False) for s in statistics)
        w, b = convert(weight, True), convert(bias, True)
        output = function(input, mean, var, w, b, **kwargs)
        leaves = [t for t in (input, w, b) if t is not None]
        grads = torch.autograd.grad(output, leaves, convert(grad_output, False))
        return [t.detach().cpu() for t in (output, mean, var, *grads) if t is not None]

    actual = results(batch_norm, where, case["dtype"])
    expected = results(NATIVE, "cpu", torch.float64)
    # Few values in a channel make for a large 1 / deviation, and for gradients that cancel: errors are judged against
    # the size of the terms, of which there are as many as a channel has values.
    variance = x.var([d for d in range(x.dim()) if d != 1], unbiased=False) if case["training"] else statistics[1]
    rstd = (variance + case["eps"]).rsqrt().max().item()
    distance = 1 if case["training"] else case["offset"] + 4
    scale = max(1, rstd) * distance * (x.numel() // channels) ** 0.5 * 2
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-13}[case["dtype"]] * scale
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == case["dtype"]
        torch.testing.assert_close(
            a.double(), e, rtol=10 * tolerance, atol=10 * tolerance, msg=lambda m, i=i: f"{i}: {m}"
        )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kilobytes", [8, 60, 90, 180, 300])
def test_channels_that_one_block_keeps_and_larger_ones(dtype, kilobytes):
    """What one block keeps in both passes, in forward alone, and what is too much for it; planes of vectors of
    16 bytes, of 8, of single elements, and misaligned tensors."""
    torch.manual_seed(0)  # a sum of gradients that all but cancel has no digits
    for height, width, offset in [(16, 16, 0), (14, 14, 0), (13, 15, 0), (16, 16, 1)]:
        outer = max(1, kilobytes * 1024 // (height * width * dtype.itemsize))
        shape = outer, 3, height, width
        flat = torch.randn(outer * 3 * height * width + offset, device="cuda", dtype=dtype)
        input = (flat[offset:].view(shape) + 3).detach() if offset == 0 else flat[offset:].view(shape)
        input.requires_grad_()
        weight, bias = (torch.randn(3, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
        grad = torch.randn(shape, device="cuda", dtype=dtype)
        output = batch_norm(input, None, None, weight, bias, True)
        grads = torch.autograd.grad(output, (input, weight, bias), grad)
        tensors = [t.detach().double().cpu().requires_grad_() for t in (input, weight, bias)]
        expected = NATIVE(tensors[0], None, None, *tensors[1:], True)
        expected_grads = torch.autograd.grad(expected, tensors, grad.double().cpu())
        tolerance = {8: 1e-12, 4: 2e-6, 2: 1e-2}[dtype.itemsize]
        for name, a, b in zip(
            ["output", "input", "weight", "bias"], [output, *grads], [expected, *expected_grads], strict=True
        ):
            error = ((a.detach().double().cpu() - b).norm() / b.norm()).item()
            assert error < tolerance, f"{name} of {shape}, offset {offset}: {error}"
        again = torch.autograd.grad(batch_norm(input, None, None, weight, bias, True), (input, weight, bias), grad)
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


# Images; channels, enough of them for several a block, the last block with fewer; planes that are no whole vectors, and
# whose images begin anywhere within one.
NO_WHOLE_VECTORS = [(3, 2501, 5, 5), (16, 2200, 3, 3), (5, 2304, 7, 7), (2, 2113, 13, 13), (2, 1061, 5, 5)]
# Those of which a block's channels nearly fill the shared memory that it may have.
NO_WHOLE_VECTORS += [(512, 2113, 1, 2), (5, 2113, 9, 17)]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", NO_WHOLE_VECTORS, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_planes_that_are_no_whole_vectors(shape, dtype, offset):
    """Against float64, at an address that vectors have and at one that they have not; NaN of one channel is in no
    other; the same bits twice."""
    channels = shape[1]
    storage = torch.randn(torch.Size(shape).numel() + offset, device="cuda").to(dtype)
    input = storage[offset:].view(shape)
    input[0, 7] = float("nan")
    input.requires_grad_()
    weight, bias = (torch.randn(channels, device="cuda").to(dtype).requires_grad_() for _ in range(2))
    mean, var = torch.randn(channels, device="cuda").to(dtype), torch.rand(channels, device="cuda").to(dtype)
    grad = torch.randn(shape, device="cuda").to(dtype)

    def results(function, dtype):
        input_, weight_, bias_ = (t.detach().to(dtype).requires_grad_() for t in (input, weight, bias))
        if dtype == input.dtype:
            input_ = input
        running = mean.to(dtype, copy=True), var.to(dtype, copy=True)
        output = function(input_, *running, weight_, bias_, True, 0.25)
        return [output, *running, *torch.autograd.grad(output, (input_, weight_, bias_), grad.to(dtype))]

    names = ["output", "running_mean", "running_var", "input", "weight", "bias"]
    ours, again = results(batch_norm, dtype), results(batch_norm, dtype)
    expected = results(NATIVE, torch.float64)
    kept = [c for c in range(channels) if c != 7]
    tolerance = {8: 1e-11, 4: 1e-5, 2: 1e-2}[dtype.itemsize]
    for name, a, b, e in zip(names, ours, again, expected, strict=True):
        by_channel = (lambda t: t.detach().transpose(0, 1)) if a.dim() > 1 else (lambda t: t.detach())
        a, b, e = by_channel(a), by_channel(b), by_channel(e).double()
        assert torch.equal(a[kept], b[kept]), name
        assert name == "bias" or a[7].isnan().all(), name
        error = ((a[kept].double() - e[kept]).norm() / e[kept].norm().clamp_min(1e-3)).item()
        assert error < tolerance, f"{name} of {shape}, offset {offset}: {error}"


@pytest.mark.cuda
@pytest.mark.parametrize(
    "shape", [(4, 8, 6, 6), (4, 1061, 5, 5), (4, 8, 5, 5), (600, 8), (20_000, 8), (40, 8, 300, 300)], ids=str
)
def test_running_statistics_come_of_the_forward_pass(shape):
    """On every path: no kernel beside those that normalise, and the batch is counted."""
    ours = cuda_ops.nn.BatchNorm1d if len(shape) == 2 else cuda_ops.nn.BatchNorm2d
    theirs = torch.nn.BatchNorm1d if len(shape) == 2 else torch.nn.BatchNorm2d
    a, b = ours(shape[1], device="cuda"), theirs(shape[1], device="cuda", dtype=torch.float64)
    for _ in range(2):
        x = torch.randn(shape, device="cuda") * 2 + 1
        a(x), b(x.double())
    assert a.num_batches_tracked.item() == 2
    torch.testing.assert_close(a.running_mean.double(), b.running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.running_var.double(), b.running_var, rtol=1e-5, atol=1e-6)


@pytest.fixture
def cluster_path(monkeypatch):
    monkeypatch.setenv("CUDA_OPS_BATCH_NORM_PATH", "cluster")
    torch.ops.cuda_ops.reload_paths()
    yield
    monkeypatch.undo()
    torch.ops.cuda_ops.reload_paths()


# One block and several to a tile, tiles of 64 and 128 bytes, blocks without rows, a last tile of fewer vectors.
TILES = [(3, 8), (9, 24, 1, 1), (39, 288, 5, 5), (16, 40, 7, 7), (128, 64, 5, 5), (3, 24, 21, 21), (200, 1032)]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", TILES, ids=str)
def test_rows_in_the_shared_memory_of_a_cluster(shape, dtype, cluster_path):
    """channels_last images and features of few rows: right, far from 0 too, and the same again."""
    channels = shape[1]
    for middle in (0, 50):
        x = (torch.randn(shape, device="cuda") * 2 + middle).to(dtype)
        x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        parameters = [torch.rand(channels, device="cuda").to(dtype) for _ in range(4)]
        grad_output, options = torch.randn_like(x), {"training": True, "momentum": 0.25}
        ours = run(batch_norm, dtype, (x, *parameters), grad_output, **options)
        again = run(batch_norm, dtype, (x, *parameters), grad_output, **options)
        expected = run(NATIVE, torch.float64, (x, *parameters), grad_output, **options)
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        for a, b, e in zip(ours, again, expected, strict=True):
            assert torch.equal(a, b)
            assert ((a.double() - e).norm() <= tolerance * (e.norm() + 1e-3)).item()


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_constants(training):
    """They have no gradient and no tangent, which is said and not passed over."""
    x, variance = torch.randn(4, 3), torch.ones(3)
    with torch.autograd.forward_ad.dual_level():
        mean = torch.autograd.forward_ad.make_dual(torch.zeros(3), torch.ones(3))
        with pytest.raises(RuntimeError, match="batch_norm: not differentiable with respect to running_mean"):
            batch_norm(x, mean, variance, training=training)
    with pytest.raises(RuntimeError, match="batch_norm: not differentiable with respect to running_mean"):
        torch.func.grad(lambda mean: batch_norm(x, mean, variance, training=training).sum())(torch.zeros(3))


def test_number_of_batches_is_counted_with_the_statistics():
    """Once a batch in training, in place, an empty batch too."""
    norm = cuda_ops.nn.BatchNorm1d(3)
    counter, before = norm.num_batches_tracked, norm.num_batches_tracked._version
    norm(torch.randn(4, 3))
    norm(torch.randn(0, 3))
    assert norm.num_batches_tracked is counter and counter.item() == 2 and counter._version > before
    norm.eval()(torch.randn(4, 3))
    assert counter.item() == 2
