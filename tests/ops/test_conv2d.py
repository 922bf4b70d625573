"""What is special to conv2d: formats, drawn shapes, module, autocast, threads. Its CUDA paths: test_conv2d_paths.py."""

import warnings

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.conv2d_cases import FORMATS, TOLERANCE, is_channels_last, native
from support.opspec import Make, assert_close
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode

import cuda_ops
from cuda_ops.functional import conv2d


@pytest.fixture(autouse=True)
def without_the_native_warning():
    # The native 'same' warns of a copy of its own.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using padding='same'")
        yield


def tensors_of(device, dtype, input, weight, formats=(torch.contiguous_format,) * 2, bias=True):
    make = Make(device, dtype)
    tensors = [make(*input).to(memory_format=formats[0]) if len(input) == 4 else make(*input)]
    tensors.append(make(*weight).to(memory_format=formats[1]))
    if bias:
        tensors.append(make(weight[0]))
    return [t.requires_grad_() for t in tensors]


def check_against_native(tensors, arguments, grad_format=torch.contiguous_format):
    """Output and gradients against the native ones in float64 on the CPU; returns ours."""
    dtype = tensors[0].dtype
    expected_tensors = [t.detach().cpu().double().requires_grad_() for t in tensors]
    output = conv2d(*tensors, **arguments)
    expected = native(*expected_tensors, **arguments)
    assert_close(output, expected, TOLERANCE[dtype])
    grad_output = Make(output.device, dtype, seed=1)(*output.shape)
    if output.dim() == 4:
        grad_output = grad_output.to(memory_format=grad_format)
    grads = torch.autograd.grad(output, tensors, grad_output)
    expected_grads = torch.autograd.grad(expected, expected_tensors, grad_output.cpu().double())
    for name, grad, expected_grad in zip(("input", "weight", "bias"), grads, expected_grads, strict=False):
        assert_close(grad, expected_grad, TOLERANCE[dtype], f"gradient of {name}")
    return output, grads


@st.composite
def convolutions(draw):
    """Shapes and arguments of a convolution that is possible, small, and anything else."""
    integer = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    groups = integer(1, 3)
    kernel = (integer(1, 4), integer(1, 4))
    dilation = (integer(1, 3), integer(1, 3))
    padding = draw(st.sampled_from(["same", "valid", "numbers"]))
    stride = (1, 1) if padding == "same" else (integer(1, 5), integer(1, 3))
    if padding == "numbers":
        padding = (integer(0, 4), integer(0, 3))
    size = (integer(1, 17), integer(1, 17))
    for i in (0, 1):
        extra = {"valid": 0, "same": dilation[i] * (kernel[i] - 1)}[padding] if isinstance(padding, str) else 0
        extra = extra if isinstance(padding, str) else 2 * padding[i]
        assume(size[i] + extra >= dilation[i] * (kernel[i] - 1) + 1)
    in_channels, out_channels = integer(1, 5), integer(1, 20)
    batch = draw(st.sampled_from([(), (1,), (3,)]))
    return {
        "input": (*batch, in_channels * groups, *size),
        "weight": (out_channels * groups, in_channels, *kernel),
        "bias": draw(st.booleans()),
        "formats": (draw(st.sampled_from(FORMATS)), draw(st.sampled_from(FORMATS))),
        "grad_format": draw(st.sampled_from(FORMATS)),
        "arguments": {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups},
    }


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=convolutions())
def test_drawn_convolutions(device, drawn):
    tensors = tensors_of(
        device, torch.float64, drawn["input"], drawn["weight"], formats=drawn["formats"], bias=drawn["bias"]
    )
    check_against_native(tensors, drawn["arguments"], drawn["grad_format"])


@pytest.mark.parametrize("grad_format", FORMATS)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("input_format", FORMATS)
def test_formats(device_dtype, input_format, weight_format, grad_format):
    """Output is channels_last if input or weight is, as in PyTorch; a gradient is what its tensor is."""
    device, dtype = device_dtype
    formats = (input_format, weight_format)
    for arguments in ({"padding": 1}, {"stride": 2}, {"groups": 2}):
        groups = arguments.get("groups", 1)
        tensors = tensors_of(device, dtype, (3, 6, 9, 8), (10, 6 // groups, 3, 3), formats)
        output, grads = check_against_native(tensors, arguments, grad_format)
        expected = native(*[t.cpu().double() for t in tensors], **arguments)
        assert output.stride() == expected.stride()
        assert is_channels_last(output) == (torch.channels_last in formats)
        for grad, tensor in zip(grads, tensors, strict=True):
            assert grad.stride() == tensor.stride()


@pytest.mark.parametrize("channels, size", [(1, (5, 4)), (3, (1, 1)), (1, (1, 1)), (3, (1, 4))])
def test_format_of_tensors_that_are_in_both(device, channels, size):
    """One channel or one pixel: strides of size 1 decide, and the same way in the fake kernel and the native op."""
    for image_format in FORMATS:
        for weight_format in FORMATS:
            image = torch.randn(2, channels, *size).to(memory_format=image_format)
            weight = torch.randn(4, channels, 1, 1).to(memory_format=weight_format)
            expected = native(image, weight)
            image, weight = image.to(device), weight.to(device)
            output = conv2d(image, weight)
            assert output.stride() == expected.stride()
            arguments = (image, weight, None, (1, 1), (0, 0, 0, 0), (1, 1), 1)
            torch.library.opcheck(torch.ops.cuda_ops.conv2d_forward, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("pixels", [64, 2048])
def test_strides_that_tell_no_format(device, pixels):
    """Rows of pixels as an image of one row, as they come of a sequence: in channels_last but for the stride of the
    dimension of 1, by which PyTorch takes them for contiguous. Also of the weight, and for gradients."""
    channels = 256
    rows, weight = (
        torch.randn(n, channels, generator=torch.Generator().manual_seed(n)).to(device) for n in (pixels, channels)
    )
    image = rows.as_strided((1, channels, 1, pixels), (channels, 1, pixels * channels, channels)).requires_grad_()
    filters = weight[..., None, None].clone().requires_grad_()
    assert is_channels_last(image) and suggest_memory_format(image) == torch.contiguous_format
    for bias in (None, torch.ones(channels, device=device)):
        output = conv2d(image, filters, bias)
        grad = rows.flip(0).as_strided(image.shape, image.stride())
        grads = torch.autograd.grad(output, (image, filters), grad)
        expected = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert_close(output[0, :, 0].T, expected, 1e-5)
        assert_close(grads[0][0, :, 0].T, rows.double().flip(0) @ weight.double(), 1e-5)
        assert_close(grads[1][..., 0, 0], rows.double().flip(0).T @ rows.double(), 1e-5)


def test_mixes_of_formats_twice_differentiated(device):
    """The second derivatives, too, are right in every mix."""
    for input_format in FORMATS:
        for weight_format in FORMATS:
            for grad_format in FORMATS:
                results = []
                for function in (conv2d, native):
                    tensors = tensors_of(
                        device, torch.float64, (2, 3, 6, 5), (4, 3, 3, 2), (input_format, weight_format)
                    )
                    output = function(*tensors, padding=1, stride=(2, 1))
                    grad = Make(device, torch.float64, seed=1)(*output.shape).to(memory_format=grad_format)
                    grad.requires_grad_()
                    grads = torch.autograd.grad(output, tensors, grad, create_graph=True)
                    total = sum((g * g).sum() for g in grads)
                    results.append(torch.autograd.grad(total, [*tensors[:2], grad]))
                for ours, theirs in zip(*results, strict=True):
                    assert_close(ours, theirs, 1e-12)


class RecordedOps(TorchDispatchMode):
    """The names of the registered ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "cuda_ops":
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_only_the_gradients_that_are_asked_for(device):
    """The input of a first layer needs no gradient, and none is computed."""
    image, weight, bias = tensors_of(device, torch.float32, (2, 3, 5, 5), (4, 3, 3, 3))
    with RecordedOps() as ops:
        conv2d(image.detach(), weight, bias).sum().backward()
    assert ops.names == ["conv2d_forward", "conv2d_backward_weight", "conv2d_backward_bias"]
    with RecordedOps() as ops:
        conv2d(image, weight.detach()).sum().backward()
    assert ops.names == ["conv2d_forward", "conv2d_backward_input"]


def test_results_do_not_depend_on_the_number_of_threads():
    tensors = tensors_of("cpu", torch.float32, (5, 3, 30, 20), (20, 3, 3, 3))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            output = conv2d(*tensors, padding=1)
            results.append([output, *torch.autograd.grad(output, tensors, torch.ones_like(output))])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_strides_beyond_the_input(device):
    """A stride much greater than the input, and taps that all meet padding: one output, or a gradient of zeros."""
    for arguments in ({"stride": 10**6}, {"stride": 5, "padding": 1}, {"stride": (7, 10**9), "padding": (2, 1)}):
        tensors = tensors_of(device, torch.float64, (2, 3, 3, 4), (4, 3, 1, 1))
        check_against_native(tensors, arguments)


def test_large_kernels_and_depths(device):
    for input, weight, arguments in [
        ((2, 3, 40, 33), (5, 3, 11, 13), {"stride": 4, "padding": 5}),  # as the first layer of AlexNet
        ((2, 3, 32, 32), (20, 3, 8, 8), {"stride": 8}),  # patches that do not overlap
        ((1, 300, 4, 4), (40, 300, 3, 3), {"padding": 1}),
        ((2, 64, 9, 9), (64, 1, 3, 3), {"groups": 64, "padding": 1, "stride": 2}),
        ((1, 1, 3, 5000), (2, 1, 2, 3), {"dilation": (1, 1000)}),
    ]:
        check_against_native(tensors_of(device, torch.float32, input, weight), arguments)


@pytest.mark.parametrize("taps", [13, 14, 15, 16])
def test_weight_gradients_of_many_places_and_few_channels(device, taps):
    """Gathered in blocks: one that was rounded up over its buffer read the gradient's memory for the input's."""
    for dtype in (torch.float32, torch.float64):
        check_against_native(tensors_of(device, dtype, (64, 15, 1, 79), (2, 15, 1, taps)), {"padding": (0, taps // 2)})


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_follows_sizes(device, dynamic):
    """One compiled function for several sizes and both formats, forward and backward."""

    def step(*tensors):
        return conv2d(*tensors, stride=(2, 1), padding=(1, 2), dilation=(1, 2))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in ((2, 3, 9, 8), (5, 3, 12, 11), (3, 3, 7, 20)):
        for image_format in FORMATS:
            tensors = tensors_of(device, torch.float32, size, (4, 3, 3, 3), (image_format, torch.contiguous_format))
            results = []
            for function in (step, compiled):
                output = function(*tensors)
                results.append([output, *torch.autograd.grad(output, tensors, torch.ones_like(output))])
            for eager, traced in zip(*results, strict=True):
                assert eager.stride() == traced.stride()
                # Not the same bits: the traced backward may meet a grad_output of another format, summed in its order.
                assert_close(traced, eager.double(), 2e-6)


MODULES = [
    ((3, 6, 3), {}),
    ((4, 6, (3, 2)), {"stride": 2, "padding": (1, 0), "dilation": (1, 2), "groups": 2, "bias": False}),
    ((3, 6, 4), {"padding": "same"}),
    ((3, 6, 3), {"padding": "valid", "stride": 2}),
    ((3, 6, 3), {"padding": 1, "padding_mode": "reflect"}),
    ((3, 6, (3, 4)), {"padding": "same", "padding_mode": "replicate", "dilation": 2}),
    ((3, 6, 3), {"padding": (2, 1), "padding_mode": "circular", "stride": 2}),
]


@pytest.mark.parametrize("arguments, keywords", MODULES, ids=str)
def test_module_is_drop_in(device, arguments, keywords):
    torch.manual_seed(0)
    theirs = torch.nn.Conv2d(*arguments, **keywords).double()
    ours = cuda_ops.nn.Conv2d(*arguments, **keywords).double()
    assert repr(ours) == repr(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.nn.Conv2d(*arguments, **keywords).double().load_state_dict(ours.state_dict(), strict=True)
    ours, theirs = ours.to(device), theirs.to(device)
    for shape in ((2, arguments[0], 9, 8), (arguments[0], 9, 8)):
        image = Make(device, torch.float64)(*shape)
        assert_close(ours(image), theirs(image), 1e-12)


def test_module_constructor_checks_as_the_native_one():
    for keywords in ({"padding": "same", "stride": 2}, {"padding": "full"}, {"groups": 2}, {"padding_mode": "none"}):
        for module in (torch.nn.Conv2d, cuda_ops.nn.Conv2d):
            with pytest.raises(ValueError):
                module(3, 6, 3, **keywords)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cuda_autocast(dtype):
    tensors = tensors_of("cuda", torch.float32, (3, 4, 9, 8), (6, 4, 3, 3))
    results = []
    for function in (conv2d, native):
        with torch.autocast("cuda", dtype=dtype):
            output = function(*tensors, padding=1)
        assert output.dtype == dtype
        grads = torch.autograd.grad(output.float().square().sum(), tensors)
        assert all(grad.dtype == torch.float32 for grad in grads)
        results.append([output, *grads])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs.double(), 3 * TOLERANCE[dtype])


@pytest.mark.cuda
@pytest.mark.large
def test_more_elements_than_32_bits_count():
    """Offsets past 2^31 in one image, and in the batch."""
    for shape in ((1, 3, 30000, 30000), (3000, 1, 900, 900)):
        image = torch.zeros(shape, device="cuda", dtype=torch.float16)
        image[-1, -1, -3:, -3:] = 1
        weight = torch.ones(1, shape[1], 3, 3, device="cuda", dtype=torch.float16, requires_grad=True)
        output = conv2d(image, weight)
        assert output[-1, 0, -1, -1] == 9
        assert output.count_nonzero() == 9
        # Output is a 3 x 3 corner of 1 2 3, 2 4 6, 3 6 9, and a tap sees as much of it as the ones that it lies on.
        (grad,) = torch.autograd.grad(output, weight, output.detach())
        assert grad[0, -1].tolist() == [[9, 15, 18], [15, 25, 30], [18, 30, 36]]


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 70, 70), (1, 33, 64, 65), (3, 1, 64, 64), (2, 40, 1, 4097)], ids=str)
def test_bias_gradient_of_many_places(shape, memory_format, device_dtype):
    """More than the 4096 rows of channels that the CPU adds at a time. Small integers, whose sums are exact."""
    device, dtype = device_dtype
    values = Make(seed=1).integers(*shape, low=-1, high=2).to(device, dtype).contiguous(memory_format=memory_format)
    expected = values.double().sum((0, 2, 3)).to(dtype)
    assert torch.equal(torch.ops.cuda_ops.conv2d_backward_bias(values), expected)


@pytest.mark.parametrize("padding", [(1, 0), (0, 1), (2, 0)])
@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
def test_depthwise_strips_are_padded_on_one_axis(padding, memory_format, device_dtype):
    """The last of several strips of rows has zeros below it, where it has none above or beside it."""
    device, dtype = device_dtype
    tensors = tensors_of(device, dtype, (1, 16, 150, 40), (16, 1, 3, 3), (memory_format,) * 2)
    exact = [t.detach().double().cpu() for t in tensors]
    output = conv2d(*tensors, padding=padding, groups=16)
    assert_close(output.detach(), native(*exact, padding=padding, groups=16), TOLERANCE[dtype])
