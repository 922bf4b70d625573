"""What is special to conv_bn_relu_pool: its module, bias in training, NaN, mixed dtypes, statistics without loss."""

import copy

import pytest
import torch
from support.devices import cuda_param
from support.opspec import Make, assert_close

import cuda_ops
from cuda_ops.functional import conv_bn_relu_pool

OPTIONS = [
    {},
    {"momentum": None},
    {"momentum": 0.25, "eps": 1e-2, "bias": False},
    {"affine": False, "channels_last": True},
    {"track_running_stats": False},
    {"pool_kernel_size": 3, "pool_stride": 1, "pool_padding": 1, "stride": (1, 2)},
]


def native_of(block):
    """The block's own submodules, called one after the other."""
    pool = torch.nn.MaxPool2d(block.pool_kernel_size, block.pool_stride, block.pool_padding)
    return torch.nn.Sequential(block.conv, block.norm, torch.nn.ReLU(), pool)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_module_is_its_submodules(device, channels, options):
    """The same outputs, gradients and running statistics as its submodules, in training and then in evaluation."""
    torch.manual_seed(0)
    ours = cuda_ops.nn.ConvBNReLUMaxPool2d(channels, 8, 3, padding=1, **options).to(device, torch.float32)
    twin = cuda_ops.nn.ConvBNReLUMaxPool2d(channels, 8, 3, padding=1, **options).to(device, torch.float64)
    with torch.no_grad():
        if ours.norm.affine:
            ours.norm.weight.uniform_(-1, 1)
            ours.norm.bias.uniform_(-1, 1)
    twin.load_state_dict(ours.state_dict())
    native = native_of(twin)
    for training, count in [(True, 3), (False, 2), (True, 1)]:
        ours.train(training)
        native.train(training)
        for _ in range(count):
            images = torch.randn(5, channels, 10, 12, device=device)
            output, expected = ours(images), native(images.double())
            assert_close(output, expected, 1e-5)
            grad = torch.randn_like(output)
            parameters = [p for name, p in ours.named_parameters() if name != "conv.bias"]
            native_parameters = [p for name, p in twin.named_parameters() if name != "conv.bias"]
            grads = torch.autograd.grad(output, parameters, grad)
            for ours_grad, native_grad in zip(
                grads, torch.autograd.grad(expected, native_parameters, grad.double()), strict=True
            ):
                assert_close(ours_grad, native_grad, 2e-5, "gradient")
        for (name, actual), buffer in zip(ours.named_buffers(), twin.buffers(), strict=True):
            assert_close(actual, buffer, 1e-5, name)


def test_geometry_is_not_taken_from_arguments_that_only_look_alike():
    """What is known of the arguments of earlier calls goes by these very objects."""
    image, weight = torch.arange(50.0).reshape(2, 1, 5, 5), torch.ones(2, 1, 1, 1)
    padding, other = [0, 0], (0, 1)
    plain = conv_bn_relu_pool(image, weight, None, None, None, padding=padding)
    assert plain.shape == (2, 2, 2, 2)
    padding[1] = 1
    assert conv_bn_relu_pool(image, weight, None, None, None, padding=padding).shape == (2, 2, 2, 3)
    assert conv_bn_relu_pool(image, weight, None, None, None, padding=other).shape == (2, 2, 2, 3)
    for stride in (1, (1, 1)):
        conv_bn_relu_pool(image, weight, None, None, None, stride=stride)
    for stride in (True, 1.0, (1, True), (1.0, 1.0)):
        with pytest.raises(TypeError, match="conv_bn_relu_pool: expected stride to be an int or two of them, got"):
            conv_bn_relu_pool(image, weight, None, None, None, stride=stride)
    with pytest.raises(TypeError, match="conv_bn_relu_pool: expected channels_last to be a bool or None, got 1"):
        conv_bn_relu_pool(image, weight, None, None, None, channels_last=1)


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("channels", [1, 2])
def test_bias_of_the_convolution_has_gradient_zero_in_training(device, channels, images):
    make = Make(device, torch.float32, requires_grad=True)
    input, weight, bias = make(3, channels, 6, 6, requires_grad=images), make(4, channels, 3, 3), make(4)
    (grad,) = torch.autograd.grad(conv_bn_relu_pool(input, weight, bias, None, None, padding=1).sum(), bias)
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels", [1, 2])
def test_nonfinite_values_travel_as_in_pytorch(device, channels, training, value):
    make = Make(device, torch.float32)
    input, weight, gamma = make(3, channels, 8, 8), make(4, channels, 3, 3), make(4)
    mean, variance = make(4), make(4, low=0.5)
    input[1, 0, 3, 4] = value
    output = conv_bn_relu_pool(input, weight, None, mean.clone(), variance.clone(), gamma, None, training, padding=1)
    functional = torch.nn.functional
    x = functional.conv2d(input.cpu().double(), weight.cpu().double(), padding=1)
    x = functional.batch_norm(x, *(t.cpu().double() for t in (mean, variance, gamma)), None, training)
    expected = functional.max_pool2d(functional.relu(x), 2)
    assert_close(output, expected, 1e-5)


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("batch", [2, 70])
def test_statistics_without_loss(device, batch, offset):
    """Images far from 0, under kernels whose sum is 0 and under others: mean and variance as float64 has them."""
    make = Make(device, torch.float32)
    input, weight = make(batch, 1, 21, 37) + offset, make(40, 1, 3, 3)
    weight[::2] -= weight[::2].mean((1, 2, 3), keepdim=True)
    mean, variance = torch.zeros(40, device=device), torch.zeros(40, device=device)
    conv_bn_relu_pool(input, weight, None, mean, variance, momentum=1.0, padding=1)
    y = torch.nn.functional.conv2d(input.double(), weight.double(), padding=1).transpose(0, 1).flatten(1)
    assert_close(mean, y.mean(1), 1e-5, "mean")
    assert_close(variance, y.var(1), 1e-5, "variance")


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels", [1, 4, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_parameters_beside_halves(device, dtype, channels, training, channels_last):
    """As under autocast: everything but the images in float32, and gradients too. Whole numbers, so small that what is
    convolved of them is exact."""
    make, outputs, largest = Make(device, torch.float32), 32 if channels == 32 else 16, 2 if channels < 32 else 1
    images = make(6, channels, 12, 10, low=-largest - 0.5, high=largest + 0.5).round().to(dtype)
    weight = make(outputs, channels, 3, 3, low=-largest - 0.5, high=largest + 0.5).round().requires_grad_()
    bias = make(outputs, low=-2.5, high=2.5).round().requires_grad_()
    gamma, beta = make(outputs).requires_grad_(), make(outputs).requires_grad_()
    statistics = make(outputs), make(outputs, low=0.5)
    parameters = [weight, gamma, beta]

    def run(images, *statistics, function):
        output = function(images, weight, bias, *statistics, gamma, beta, training, padding=1)
        return output, torch.autograd.grad(output, parameters, torch.ones_like(output))

    def native(images, weight, bias, mean, variance, gamma, beta, training, padding):
        x = torch.nn.functional.conv2d(images, weight, bias, padding=padding)
        x = torch.nn.functional.batch_norm(x, mean, variance, gamma, beta, training)
        return torch.nn.functional.max_pool2d(torch.relu(x), 2)

    def ours(*args, **kwargs):
        return conv_bn_relu_pool(*args, **kwargs, channels_last=channels_last)

    mine, expected = [t.clone() for t in statistics], [t.clone() for t in statistics]
    output, grads = run(images, *mine, function=ours)
    expected_output, expected_grads = run(images.float(), *expected, function=native)
    assert output.dtype == dtype and output.is_contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )
    assert_close(output, expected_output.double(), 1.6e-2)
    for parameter, grad, expected_grad in zip(parameters, grads, expected_grads, strict=True):
        assert grad.dtype == parameter.dtype
        assert_close(grad, expected_grad.double(), 1.6e-2, "gradient")
    for actual, statistic in zip(mine, expected, strict=True):
        assert_close(actual, statistic.double(), 1.6e-2, "running statistic")


# Sizes of the tiled path: the MNIST CNN's second block, in fewer and in more images than multiprocessors, and in more
# than two each; channels that do not fill a block's 64, 32 or 8; several tiles across and down, the last of them a
# column or a row; odd sizes; more channels than Winograd's kernels, and than wgmma's, keep in shared memory.
TILED = [
    ((2, 32, 14, 14), 64),
    ((150, 32, 14, 14), 64),
    ((300, 24, 13, 9), 40),
    ((3, 16, 29, 15), 24),
    ((2, 40, 9, 30), 72),
    ((5, 64, 7, 13), 64),
    ((2, 24, 2, 3), 16),
    ((1, 80, 5, 4), 24),
]


@pytest.mark.cuda
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("how", ["winograd", "exact", "tf32"])
@pytest.mark.parametrize(("size", "channels"), TILED, ids=str)
def test_tiles_in_every_precision(size, channels, how, channels_last, monkeypatch):
    """float32 by Winograd's algorithm, as sums taken as they stand, and in TF32: values and all gradients. What is
    convolved is whole numbers, so that no rounding takes a maximum from elsewhere. Where batch norm's weight is
    negative a window's least value is its maximum, and where it is 0 the first value is."""
    monkeypatch.setenv("CUDA_OPS_CONV2D_WINOGRAD", "0" if how == "exact" else "")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", how == "tf32")
    make = Make("cuda", torch.float32)
    input, weight = (make(*shape, low=-2.5, high=2.5).round() for shape in (size, (channels, size[1], 3, 3)))
    gamma = make(channels, low=0.5).detach()
    gamma[1::3] *= -1
    gamma[2] = 0
    tensors = [t.detach().requires_grad_() for t in (input, weight, gamma, make(channels))]
    grad = make(size[0], channels, size[2] // 2, size[3] // 2)

    def run():
        input, weight, gamma, beta = tensors
        output = conv_bn_relu_pool(input, weight, None, None, None, gamma, beta, padding=1, channels_last=channels_last)
        return output, *torch.autograd.grad(output, tensors, grad)

    results = run()
    for one, other in zip(results, run(), strict=True):
        assert torch.equal(one, other)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    functional = torch.nn.functional
    x = functional.conv2d(doubles[0], doubles[1], padding=1)
    x = functional.batch_norm(x, None, None, doubles[2], doubles[3], True)
    expected = functional.max_pool2d(functional.relu(x), 2)
    assert_close(results[0], expected, 1e-5)
    rounded = 2e-3 if how == "tf32" else 2e-5  # the gradient of the convolution's output is no whole number
    for one, right in zip(results[1:], torch.autograd.grad(expected, doubles, grad.double()), strict=True):
        assert_close(one, right, rounded, "gradient")


# Several images a block, and fewer than multiprocessors; channels of two blocks, and no whole vector of argmax; several
# bands of rows.
@pytest.mark.cuda
@pytest.mark.parametrize(
    ("size", "channels"), [((5, 28, 28), 32), ((70, 9, 13), 40), ((700, 28, 28), 32), ((2, 66, 70), 8)], ids=str
)
def test_one_channel_in_tf32(size, channels, monkeypatch):
    """Values and gradients on tensor cores, with scales of both signs and 0. Pixels and weights are whole numbers,
    which TF32 has."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    make = Make("cuda", torch.float32)
    batch, height, width = size
    input = make(batch, 1, height, width, low=-2.5, high=2.5, requires_grad=False).round()
    weight = make(channels, 1, 3, 3, low=-2.5, high=2.5).round()
    gamma = make(channels, low=0.5).detach()
    gamma[1::3] *= -1
    gamma[2] = 0
    tensors = [t.detach().requires_grad_() for t in (weight, gamma, make(channels))]
    grad = make(batch, channels, height // 2, width // 2, requires_grad=False)

    def run():
        output = conv_bn_relu_pool(input, tensors[0], None, None, None, *tensors[1:], padding=1, channels_last=True)
        return output, *torch.autograd.grad(output, tensors, grad)

    results = run()
    for one, other in zip(results, run(), strict=True):
        assert torch.equal(one, other)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    functional = torch.nn.functional
    x = functional.conv2d(input.double(), doubles[0], padding=1)
    x = functional.batch_norm(x, None, None, *doubles[1:], True)
    expected = functional.max_pool2d(functional.relu(x), 2)
    assert_close(results[0], expected, 1e-5)
    for one, right in zip(results[1:], torch.autograd.grad(expected, doubles, grad.double()), strict=True):
        assert_close(one, right, 2e-3, "gradient")


@pytest.mark.cuda
def test_the_switch_of_winograd_is_obeyed(monkeypatch):
    """0: sums as they stand, which differ in their last bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    make = Make("cuda", torch.float32)
    input, weight = make(4, 32, 14, 14), make(64, 32, 3, 3)
    outputs = []
    for value in ("0", "2", "4", ""):
        monkeypatch.setenv("CUDA_OPS_CONV2D_WINOGRAD", value)
        outputs.append(conv_bn_relu_pool(input, weight, None, None, None, padding=1))
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2]) and torch.equal(outputs[1], outputs[3])
    assert_close(outputs[0], outputs[1].double(), 1e-5)
    monkeypatch.setenv("CUDA_OPS_CONV2D_WINOGRAD", "3")
    with pytest.raises(RuntimeError, match="conv_bn_relu_pool: expected CUDA_OPS_CONV2D_WINOGRAD to be 0, 2 or 4"):
        conv_bn_relu_pool(input, weight, None, None, None, padding=1)


def test_autocast_casts_images_alone(device):
    block = cuda_ops.nn.ConvBNReLUMaxPool2d(1, 32, 3, padding=1, channels_last=True).to(device)
    images = torch.randn(4, 1, 28, 28, device=device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        output = block(images)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in block.parameters())


@pytest.mark.parametrize("where", [("cpu", torch.float64), cuda_param(("cuda", torch.float32))], ids=str)
def test_gradients_of_one_channel_with_and_without_that_of_input(where):
    """The parameters' gradients do not depend on whether input has one, which on the GPU takes another way."""
    device, dtype = where
    make = Make(device, dtype, requires_grad=True)
    input, weight, gamma, beta = make(5, 1, 14, 10), make(8, 1, 3, 3), make(8), make(8)
    results = []
    for x in (input, input.detach()):
        output = conv_bn_relu_pool(x, weight, None, None, None, gamma, beta, padding=1)
        results.append(torch.autograd.grad(output.square().sum(), (weight, gamma, beta)))
    for one, other in zip(*results, strict=True):
        assert_close(one, other.double(), 1e-5)


def test_running_statistics_tell_autograd_that_they_changed(device):
    make = Make(device, torch.float32)
    mean, variance = make(2), make(2, low=0.5)
    before = mean._version, variance._version
    conv_bn_relu_pool(make(2, 1, 4, 4), make(2, 1, 3, 3), None, mean, variance, padding=1)
    assert mean._version > before[0] and variance._version > before[1]


@pytest.mark.parametrize("shape", [(0, 1, 8, 8), (0, 3, 8, 8)], ids=str)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_of_no_images_is_counted(device, shape, momentum):
    """As by the layers: statistics stay, and whoever averages over batches goes on from one more."""
    torch.manual_seed(0)
    block = cuda_ops.nn.ConvBNReLUMaxPool2d(shape[1], 4, 3, padding=1, momentum=momentum).to(device)
    layers = copy.deepcopy(block)
    for images in (torch.empty(shape, device=device), torch.randn(2, *shape[1:], device=device)):
        torch.testing.assert_close(block(images), native_of(layers)(images))
        torch.testing.assert_close(block.state_dict(), layers.state_dict())


@pytest.mark.parametrize("dynamic", [False, True])
def test_module_compiles_to_one_graph_and_counts_its_batches(device, dynamic):
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = cuda_ops.nn.ConvBNReLUMaxPool2d(1, 8, 3, padding=1, channels_last=True).to(device)
    twin = cuda_ops.nn.ConvBNReLUMaxPool2d(1, 8, 3, padding=1, channels_last=True).to(device)
    twin.load_state_dict(block.state_dict())
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    images = torch.randn(3, 1, 8, 8, device=device)
    for _ in range(2):
        compiled(images).sum().backward()
        twin(images).sum().backward()
    for (name, actual), expected in zip(block.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(actual, expected, msg=name)
    for actual, expected in zip(block.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


def test_module_sees_parametrized_weights():
    """A parametrization takes weight out of the module's parameters and computes it anew for each call."""

    class Double(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    block = cuda_ops.nn.ConvBNReLUMaxPool2d(2, 3, 3, padding=1)
    images = torch.randn(4, 2, 6, 6)
    with torch.no_grad():
        block.norm.eval()
        plain, doubled = block(images), native_of(block)
        torch.nn.utils.parametrize.register_parametrization(block.conv, "weight", Double())
        assert_close(block(images), doubled(images).double(), 1e-5)
        assert not torch.equal(block(images), plain)


def test_a_place_outside_of_the_plane_writes_nothing():
    """Float64 keeps the general path, contiguous tensors the kernel that scatters. Forward makes no such positions, but
    the op is open to everyone."""
    ops, geometry = torch.ops.cuda_ops, (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 0)
    make = Make("cpu", torch.float64)
    tensors = make(1, 3, 8, 8), make(4, 3, 3, 3), None, None, None
    output, conv_output, argmax, *saved = ops.conv_bn_relu_pool_forward(*tensors, *[None] * 3, 0.1, 1e-5, geometry)
    grad_output = torch.zeros_like(output)
    grad_output[:, 3] = 1
    argmax.fill_(0)  # of the windows at the edge: in the padding, which is the plane of the channel before
    grads = ops.conv_bn_relu_pool_backward(grad_output, *tensors, conv_output, argmax, *saved, 1e-5, geometry, True)
    assert grads[1][3].any()
    assert not grads[1][:3].any()
