"""The path of conv_bn_relu_pool for float32, with and without TF32, and which path is taken when."""

import pytest
import torch
from support.opspec import assert_close

import cuda_ops
from cuda_ops._library import build_info, ops
from cuda_ops.functional import conv_bn_relu_pool

CHANNELS_LAST = torch.channels_last
# batch, in_channels, out_channels, height, width
SHAPES = [
    (1, 32, 64, 14, 14),  # the MNIST CNN's second block: one tile an image, one of four warps
    (133, 32, 64, 14, 14),  # a second slot in one block
    (300, 32, 64, 14, 14),  # several tiles a slot
    (3, 40, 72, 28, 30),  # tiles with neighbours on each side; depths and columns that are no whole ones
    (5, 16, 24, 7, 9),  # less than a tile, odd sizes: pixels that no window has
    (2, 64, 32, 33, 17),  # tiles of a row or a column
    (2, 96, 128, 15, 16),  # weights that do not fit at once, forward and backward
    (2, 16, 16, 2, 2),  # one window
]


def path(cuda, dtype, input, weight, geometry=(1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0)):
    return ops.conv_bn_relu_pool_path(cuda, dtype, list(input), list(weight), list(geometry))


def has_tiled():
    """160 KB of shared memory a block: Ampere's and Hopper's large GPUs, not Turing and the small ones of Ampere."""
    return torch.cuda.get_device_properties(0).shared_memory_per_block_optin >= 160 << 10


@pytest.fixture
def allow_tf32():
    def allow(allowed):
        torch.backends.cudnn.allow_tf32 = allowed

    yield allow
    torch.backends.cudnn.allow_tf32 = False


def test_paths_on_the_cpu():
    assert path(False, torch.float32, (4, 32, 14, 14), (64, 32, 3, 3)) in ("cpu_block", "general")
    assert path(False, torch.float64, (4, 32, 14, 14), (64, 32, 3, 3)) == "general"


@pytest.mark.cuda
def test_paths_on_the_gpu(allow_tf32):
    block = (4, 32, 14, 14), (64, 32, 3, 3)
    hopper = torch.cuda.get_device_capability() == (9, 0) and "sm_90a" in build_info()["architectures"]
    for dtype in (torch.bfloat16, torch.float16):
        assert path(True, dtype, *block) == ("sm90" if hopper else "general")
    assert path(True, torch.float64, *block) == "general"
    for dtype in (torch.float32, torch.bfloat16):
        assert path(True, dtype, (4, 1, 28, 28), (32, 1, 3, 3)) == "one_channel"
    for allowed, name in ((True, "tiled_tf32"), (False, "tiled_float32")):
        allow_tf32(allowed)
        assert path(True, torch.float32, *block) == (name if has_tiled() else "general")
    for weight in ((64, 32, 2, 2), (63, 32, 3, 3)):  # another kernel; channels that are no multiple of 8
        assert path(True, torch.float32, (4, 32, 14, 14), weight) == "general"
    for channels in (8, 33, 136):
        assert path(True, torch.float32, (4, channels, 14, 14), (64, channels, 3, 3)) == "general"
    grouped = (1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0, 0)
    assert path(True, torch.float32, (4, 32, 14, 14), (64, 16, 3, 3), grouped) == "general"
    overlapping = (1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 2, 2, 0, 0, 0)
    assert path(True, torch.float32, *block, overlapping) == "general"


def tensors(shape, seed=0):
    batch, in_channels, out_channels, height, width = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size):
        return torch.randn(size, generator=generator, device="cuda")

    return {
        "input": normal(batch, in_channels, height, width),
        "weight": normal(out_channels, in_channels, 3, 3) / (3 * in_channels**0.5),
        "bias": normal(out_channels),
        "running_mean": normal(out_channels),
        "running_var": normal(out_channels).abs(),
        "bn_weight": normal(out_channels).abs() + 0.5,
        "bn_bias": normal(out_channels),
    }, normal(batch, out_channels, height // 2, width // 2)


def run(values, grad_output, channels_last):
    wanted = [values[name] for name in ("input", "weight", "bn_weight", "bn_bias")]
    for tensor in wanted:
        tensor.requires_grad_()
    output = conv_bn_relu_pool(**values, padding=1, channels_last=channels_last)
    grads = torch.autograd.grad(output, wanted, grad_output)
    return [output, *grads, values["running_mean"], values["running_var"]]


def reference(values, grad_output):
    """What `run` returns, by PyTorch in float64."""
    values = {name: tensor.detach().double() for name, tensor in values.items()}
    wanted = [values[name].requires_grad_() for name in ("input", "weight", "bn_weight", "bn_bias")]
    functional = torch.nn.functional
    y = functional.conv2d(values["input"], values["weight"], values["bias"], padding=1)
    statistics = values["running_mean"].clone(), values["running_var"].clone()
    z = functional.batch_norm(y, *statistics, values["bn_weight"], values["bn_bias"], True)
    expected = functional.max_pool2d(torch.relu(z), 2)
    grads = torch.autograd.grad(expected, wanted, grad_output.double())
    return [expected, *grads, *statistics]


@pytest.mark.cuda
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, tf32, channels_last, allow_tf32):
    allow_tf32(tf32)
    values, grad_output = tensors(shape)
    if channels_last:
        values["input"] = values["input"].contiguous(memory_format=CHANNELS_LAST)
        grad_output = grad_output.contiguous(memory_format=CHANNELS_LAST)
    before = {name: tensor.clone() for name, tensor in values.items()}
    results = run(values, grad_output, channels_last)
    assert results[0].is_contiguous(memory_format=CHANNELS_LAST if channels_last else torch.contiguous_format)
    expected = reference(before, grad_output)
    names = ("output", "input", "weight", "bn_weight", "bn_bias", "running_mean", "running_var")
    for name, result, want in zip(names, results, expected, strict=True):
        gradient = name in names[1:5]
        # Where rounding moves a maximum to another pixel of its window, gradients are others: of windows of four normal
        # values one in some thousands has two within TF32's rounding. The next test is of gradients.
        if gradient and tf32:
            continue
        tolerance = 1e-2 if gradient else 1e-3 if tf32 else 2e-6
        error = (result.double() - want).norm() / want.norm()
        assert error <= tolerance, f"{name}: {error}"
    again = run({name: tensor.clone() for name, tensor in before.items()}, grad_output, channels_last)
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))


def whole(generator, *shape):
    return torch.randint(-2, 3, shape, generator=generator, device="cuda").float()


@pytest.mark.cuda
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_where_no_maximum_moves(shape, tf32, allow_tf32):
    """Whole numbers, whose convolution is exact with TF32 too: the maxima are the reference's."""
    allow_tf32(tf32)
    batch, in_channels, out_channels, height, width = shape
    values, grad_output = tensors(shape)
    generator = torch.Generator("cuda").manual_seed(1)
    values["input"] = whole(generator, batch, in_channels, height, width)
    values["weight"] = whole(generator, out_channels, in_channels, 3, 3)
    before = {name: tensor.clone() for name, tensor in values.items()}
    results = run(values, grad_output, False)
    for result, want in zip(results, reference(before, grad_output), strict=True):
        assert_close(result, want, 1e-3 if tf32 else 1e-5)


@pytest.mark.cuda
def test_tf32_is_obeyed(allow_tf32):
    if not has_tiled():
        pytest.skip("needs 160 KB of shared memory a block")
    values, _ = tensors((70, 32, 64, 14, 14))
    exact = reference(values, torch.zeros(70, 64, 7, 7, device="cuda"))[0].detach()
    errors = {}
    for allowed in (False, True):
        allow_tf32(allowed)
        output = conv_bn_relu_pool(**{name: tensor.clone() for name, tensor in values.items()}, padding=1)
        errors[allowed] = ((output.double() - exact).norm() / exact.norm()).item()
    assert errors[False] < 1e-6 < 5e-5 < errors[True] < 1e-3


@pytest.mark.cuda
def test_precision_may_change_before_backward(allow_tf32):
    """What is kept is the same with and without TF32, as for PyTorch's own convolution."""
    values, grad_output = tensors((7, 32, 64, 14, 14))
    values["weight"].requires_grad_()
    allow_tf32(True)
    output = conv_bn_relu_pool(**values, padding=1)
    grads = []
    for allowed in (True, False):
        allow_tf32(allowed)
        grads.append(torch.autograd.grad(output, values["weight"], grad_output, retain_graph=True)[0])
    assert_close(grads[0], grads[1].double(), 1e-3)
    assert not torch.equal(*grads) or not has_tiled()


@pytest.mark.cuda
@pytest.mark.parametrize("tf32", [False, True])
def test_no_gradient_of_input_and_no_parameters(tf32, allow_tf32):
    allow_tf32(tf32)
    x, w = torch.randn(5, 32, 14, 14, device="cuda"), torch.randn(64, 32, 3, 3, device="cuda")
    grads = []
    for needs in (False, True):
        x.requires_grad_(needs)
        weight = w.clone().requires_grad_()
        conv_bn_relu_pool(x, weight, None, None, None, padding=1).square().sum().backward()
        grads.append(weight.grad)
    if tf32:  # one kernel makes both gradients, and another the weight's alone
        assert_close(grads[0], grads[1].double(), 1e-3)
    else:
        assert torch.equal(*grads)


@pytest.mark.cuda
@pytest.mark.parametrize("tf32", [False, True])
def test_nan_reaches_output_and_gradients(tf32, allow_tf32):
    allow_tf32(tf32)
    x = torch.randn(3, 32, 14, 14, device="cuda")
    x[1, 3, 5, 5] = torch.nan
    x.requires_grad_()
    w = torch.randn(64, 32, 3, 3, device="cuda", requires_grad=True)
    output = conv_bn_relu_pool(x, w, None, None, None, padding=1)
    assert output.isnan().all()  # the statistics are NaN
    output.sum().backward()
    assert x.grad.isnan().any() and w.grad.isnan().all()


@pytest.mark.cuda
def test_pointers_that_are_not_aligned():
    block = cuda_ops.functional.conv_bn_relu_pool
    weight = torch.randn(1 + 64 * 32 * 9, device="cuda")[1:].view(64, 32, 3, 3)
    x = torch.randn(1 + 2 * 14 * 14 * 32, device="cuda")[1:].view(2, 14, 14, 32).permute(0, 3, 1, 2)
    assert_close(
        block(x, weight, None, None, None, padding=1),
        block(x.clone(), weight.clone(), None, None, None, padding=1).double(),
        1e-6,
    )
