"""What is special to conv2d: formats, drawn shapes, the module, autocast, threads."""

import itertools
import warnings

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from opspec import Make, assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import cuda_ops
from cuda_ops._library import ops
from cuda_ops.functional import conv2d

native = torch.nn.functional.conv2d
FORMATS = [torch.contiguous_format, torch.channels_last]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


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


PASSES = ("forward", "backward_input", "backward_weight")
# batch, input channels, output channels, size, kernel, stride, padding, dilation: what the paths differ in.
PATH_CASES = [
    (2, 64, 64, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1)),  # whole rows of 128 bytes of halves
    (3, 40, 72, (9, 13), (3, 2), (1, 1), (1, 0), (1, 1)),  # channels that fill no row, columns that fill no tile
    (2, 8, 24, (17, 11), (5, 3), (1, 1), (2, 1), (1, 2)),  # dilation
    (5, 264, 136, (7, 7), (3, 3), (1, 1), (1, 1), (1, 1)),  # several tiles of columns; of taps and channels
    (2, 32, 40, (30, 33), (3, 3), (2, 3), (1, 1), (2, 1)),  # strides
    (1, 16, 8, (5, 33), (1, 3), (1, 1), (3, 4), (1, 1)),  # more padding than kernel
    (7, 24, 56, (5, 6), (1, 1), (1, 1), (0, 0), (1, 1)),  # a product of matrices
    (40, 32, 64, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1)),  # more tiles than there are blocks, pieces of the sum
    (2, 12, 20, (8, 7), (3, 3), (1, 1), (1, 1), (1, 1)),  # channels of TF32 that halves cannot have
    (1, 3, 5, (6, 7), (2, 3), (1, 1), (1, 1), (1, 1)),  # and channels of none
    (1, 32, 40, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1)),  # fewer pixels than a slice of the sum over them
    (3, 8, 136, (9, 8), (1, 1), (1, 1), (0, 0), (1, 1)),  # channels that do not fill one slice
]
# Which of the cases each path can do, for 16-bit dtypes: of all passes, or by pass.
CASES_OF_PATHS = {
    "plain": {name: set(range(12)) for name in PASSES},
    "tensor": {name: {*range(8), 10, 11} for name in PASSES},
    "mma": {name: {*range(8), 10, 11} for name in PASSES},
    "gemm": {name: {6, 11} for name in PASSES},
    "window": {
        "forward": {0, 1, 2, 5, 6, 7, 10, 11},
        "backward_input": {0, 1, 2, 5, 6, 7, 10, 11},
        "backward_weight": set(),
    },
}


@pytest.fixture
def force(monkeypatch):
    yield lambda path: monkeypatch.setenv("CUDA_OPS_CONV_PATH", path)


@pytest.fixture
def allow_tf32():
    before = torch.backends.cudnn.allow_tf32

    def allow(allowed):
        torch.backends.cudnn.allow_tf32 = allowed

    yield allow
    torch.backends.cudnn.allow_tf32 = before


def needs_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def needs_ampere():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU of compute capability 8.0")


def amid_nan(tensor):
    """The same tensor in the midst of NaN: a kernel that reads beyond its ends shows it."""
    memory = torch.full((tensor.numel() + 2048,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return torch.as_strided(memory, tensor.shape, tensor.stride(), 1024).copy_(tensor)


def is_channels_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


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


def products_of_passes(case, dtype, weight_format=torch.channels_last, bias=True, groups=1):
    """For each pass: its name, how conv2d_path is asked about it, the call, and the result in float64."""
    batch, inputs, outputs, size, kernel, stride, padding, dilation = case
    make = Make("cuda", dtype)
    x = amid_nan(make(batch, inputs, *size).to(memory_format=torch.channels_last))
    w = amid_nan(make(outputs, inputs // groups, *kernel).to(memory_format=weight_format))
    b = amid_nan(make(outputs)) if bias else None
    leaves = [t.double().cpu().contiguous().requires_grad_() for t in (x, w)]
    expected = native(*leaves, b.double().cpu() if bias else None, stride, padding, dilation, groups)
    g = amid_nan(Make("cuda", dtype, seed=1)(*expected.shape).to(memory_format=torch.channels_last))
    expected_grads = torch.autograd.grad(expected, leaves, g.double().cpu())
    parameters = stride, (padding[0], padding[0], padding[1], padding[1]), dilation, groups
    calls = [
        lambda: ops.conv2d_forward(x, w, b, *parameters),
        lambda: ops.conv2d_backward_input(g, w, x.shape, True, *parameters),
        lambda: ops.conv2d_backward_weight(g, x, w.shape, weight_format == torch.channels_last, *parameters),
    ]
    for name, call, result in zip(PASSES, calls, (expected.detach(), *expected_grads), strict=True):
        yield name, lambda name=name: ops.conv2d_path(x, w, name, *parameters), call, result


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("path", CASES_OF_PATHS)
def test_forced_paths(path, dtype, force, allow_tf32):
    """Each path takes what it says it takes, is right there, the same twice, and refuses the rest by name."""
    if path in ("tensor", "window"):
        needs_hopper()
    if path == "mma":
        needs_ampere()
    allow_tf32(True)
    force(path)
    tf32 = dtype == torch.float32 and path != "plain"
    taken = {name: set() for name in PASSES}
    for index, case in enumerate(PATH_CASES):
        for weight_format in FORMATS:
            for name, asked, call, expected in products_of_passes(case, dtype, weight_format, bias=index % 2 == 0):
                if asked() == path:
                    taken[name].add(index)
                    result = call()
                    assert_close(result, expected, 1e-3 if tf32 else TOLERANCE[dtype], f"{name} {case} by {path}")
                    assert torch.equal(result, call())
                else:
                    assert asked() == ""
                    with pytest.raises(NotImplementedError, match=f"CUDA_OPS_CONV_PATH={path} cannot .*{name}"):
                        call()
    for name in PASSES:
        # Twelve channels are whole pieces of 16 bytes in float32 alone.
        more = {8} if tf32 and path in ("tensor", "window", "mma") and CASES_OF_PATHS[path][name] else set()
        assert taken[name] == CASES_OF_PATHS[path][name] | more, name


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_window_of_many_tiles(dtype, force, allow_tf32):
    """Tiles of one slot, many to a block, again and again: a warpgroup whose warps drift apart once waited for good."""
    needs_hopper()
    allow_tf32(True)
    force("window")
    make = Make("cuda", dtype)
    x = make(1024, 32, 14, 14).detach().to(memory_format=torch.channels_last)
    w = make(64, 32, 3, 3).detach().to(memory_format=torch.channels_last)
    first = conv2d(x, w, padding=1)
    for _ in range(200):
        result = conv2d(x, w, padding=1)
    assert torch.equal(result, first)


# Strides, groups, odd channels and long kernels; the groups; and whether the tensor path can do backward_input.
STRIDED_CASES = [
    ((2, 64, 128, (15, 16), (3, 3), (2, 2), (1, 1), (1, 1)), 1, True),  # residues of 4, 2, 2 and 1 taps
    ((2, 64, 96, (8, 9), (1, 1), (2, 2), (0, 0), (1, 1)), 1, True),  # and of none
    ((1, 32, 32, (20, 20), (3, 3), (3, 2), (2, 1), (2, 3)), 1, True),  # dilation with strides
    ((9, 264, 136, (15, 14), (5, 5), (2, 2), (2, 2), (1, 1)), 1, True),  # several tiles of rows and columns
    ((2, 16, 16, (6, 5), (2, 2), (5, 7), (0, 1), (1, 1)), 1, False),  # strides beyond the kernel and the input
    ((3, 48, 96, (11, 12), (3, 3), (1, 1), (1, 1), (1, 1)), 3, False),
    ((2, 64, 64, (9, 10), (3, 2), (2, 1), (1, 1), (1, 1)), 8, False),  # groups of one piece of 16 bytes
    (
        (2, 8, 21, (9, 10), (3, 3), (1, 1), (1, 1), (1, 1)),
        1,
        False,
    ),  # no whole pieces of output channels: forward
    ((2, 21, 8, (9, 10), (3, 3), (2, 2), (1, 1), (1, 1)), 1, False),  # and of input channels: backward_input
    ((1, 8, 8, (30, 300), (3, 3), (1, 1), (200, 1), (100, 1)), 1, False),  # more than the copy engine's maps can say
]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case, groups, by_tensor", STRIDED_CASES)
@pytest.mark.parametrize("path", ["mma", "tensor"])
def test_strides_and_groups_on_tensor_cores(path, case, groups, by_tensor, dtype, force, allow_tf32):
    needs_hopper() if path == "tensor" else needs_ampere()
    allow_tf32(True)
    force(path)
    # What is read has channels in whole pieces of 16 bytes.
    channels_read = {"forward": (1,), "backward_input": (2,), "backward_weight": (1, 2)}
    for weight_format in FORMATS:
        for name, asked, call, expected in products_of_passes(case, dtype, weight_format, groups=groups):
            if path == "mma":
                whole = all(case[i] // groups % 8 == 0 for i in channels_read[name])
                assert asked() == ("mma" if whole else ""), name
            elif name == "backward_input":
                assert asked() == ("tensor" if by_tensor else "")
            if asked() == path:
                result = call()
                tolerance = 1e-3 if dtype == torch.float32 else TOLERANCE[dtype]
                assert_close(result, expected, tolerance, f"{name} {case} of {groups} groups")
                assert torch.equal(result, call())


@pytest.mark.cuda
@pytest.mark.parametrize(
    "case",
    [
        (2, 64, 96, (8, 9), (1, 1), (2, 2), (0, 0), (1, 1)),
        (3, 8, 136, (9, 8), (1, 1), (3, 2), (0, 0), (1, 1)),  # rows of the copy that are longer than the places
        (1, 4, 5, (7, 6), (1, 1), (2, 1), (0, 0), (1, 1)),
        (40, 132, 200, (14, 13), (1, 1), (1, 2), (0, 0), (1, 1)),  # pieces of the sum, channels past a tile
        (2, 16, 24, (1, 1), (1, 1), (2, 2), (0, 0), (1, 1)),  # one pixel
    ],
)
def test_strides_by_gemm(case, force, allow_tf32):
    """TF32's weight gradient of a 1x1 kernel copies what it reads of the input; no other product takes strides."""
    needs_hopper()
    force("gemm")
    for allowed in (True, False):
        allow_tf32(allowed)
        for weight_format in FORMATS:
            for name, asked, call, expected in products_of_passes(case, torch.float32, weight_format):
                takes = allowed and name == "backward_weight"
                assert asked() == ("gemm" if takes else ""), name
                if takes:
                    result = call()
                    assert_close(result, expected, 1e-3, name)
                    assert torch.equal(result, call())


@pytest.mark.cuda
def test_strides_by_gemm_off_their_alignment(force, allow_tf32):
    """What cannot be copied by pieces of 16 bytes goes where it can: another path, or the product as it lies."""
    needs_hopper()
    allow_tf32(True)
    for path, stride in ((None, 2), ("gemm", 1)):
        if path:
            force(path)
        make, parameters = Make("cuda", torch.float32), ((stride, stride), (0,) * 4, (1, 1), 1)
        x, w, g = make(2, 9, 9, 8), make(24, 8, 1, 1), make(2, 24, *(2 * [(9 - 1) // stride + 1]))
        x = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape).permute(0, 3, 1, 2)
        assert x.data_ptr() % 16 and is_channels_last(x)
        result = ops.conv2d_backward_weight(g.to(memory_format=torch.channels_last), x, w.shape, True, *parameters)
        leaf = w.double().requires_grad_()
        (expected,) = torch.autograd.grad(native(x.double(), leaf, stride=stride), leaf, g.double())
        assert_close(result, expected, 1e-3)


@pytest.mark.cuda
def test_tf32_is_obeyed(allow_tf32):
    """Without torch.backends.cudnn.allow_tf32 results are those of float32, and with it they are not."""
    needs_hopper()
    for case in (PATH_CASES[0], PATH_CASES[6], PATH_CASES[3]):
        for allowed in (False, True):
            allow_tf32(allowed)
            for name, asked, call, expected in products_of_passes(case, torch.float32):
                assert asked() in (("tensor", "window", "gemm") if allowed else ("plain", "gemm"))
                error = (call().double().cpu() - expected).norm() / expected.norm()
                assert (1e-5 < error < 1e-3) if allowed else error < TOLERANCE[torch.float32], f"{name} {case}"


@pytest.mark.cuda
def test_unknown_path_is_refused(force):
    image, weight = torch.ones(1, 1, 3, 3, device="cuda"), torch.ones(1, 1, 2, 2, device="cuda")
    force("banana")
    with pytest.raises(RuntimeError, match=r"conv2d: expected CUDA_OPS_CONV_PATH to be one of plain, .*, got banana"):
        conv2d(image, weight)
    with pytest.raises(RuntimeError, match=r"conv2d_path: expected product to be forward, .*, got sideways"):
        ops.conv2d_path(image, weight, "sideways", (1, 1), (0, 0, 0, 0), (1, 1), 1)


@pytest.mark.cuda
def test_choice_of_path(allow_tf32):
    """By dtype, format, groups, size and channels; what no other path can do is the plain one's."""
    needs_hopper()

    def path(
        dtype, inputs, outputs, size, kernel, name="forward", image_format=torch.channels_last, groups=1, stride=1
    ):
        image = torch.empty(2, inputs, size, size, device="cuda", dtype=dtype).to(memory_format=image_format)
        weight = torch.empty(outputs, inputs // groups, kernel, kernel, device="cuda", dtype=dtype)
        return ops.conv2d_path(image, weight, name, (stride,) * 2, (kernel // 2,) * 4, (1, 1), groups)

    allow_tf32(True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert path(dtype, 64, 64, 56, 3) == "window"
        assert path(dtype, 64, 64, 56, 3, "backward_input") == "window"
        assert path(dtype, 64, 64, 56, 3, "backward_weight") == "tensor"
        for name in PASSES:
            assert path(dtype, 256, 256, 14, 3, name) == "tensor"
            tf32_weight = dtype == torch.float32 and name == "backward_weight"
            assert path(dtype, 256, 256, 14, 1, name) == ("tensor" if tf32_weight else "gemm")
            assert path(dtype, 64, 256, 14, 1, name) == "gemm"
            assert path(dtype, 255, 64, 14, 3, name) == ("mma" if name == "backward_input" else "plain")
            assert path(dtype, 256, 64, 14, 3, name, groups=2) == "mma"
            assert path(dtype, 256, 64, 14, 3, name, stride=2) == "tensor"
            assert path(dtype, 256, 64, 14, 3, name, torch.contiguous_format) == "plain"
        assert path(dtype, 64, 256, 14, 1, "backward_weight", stride=2) == (
            "gemm" if dtype == torch.float32 else "tensor"
        )
    allow_tf32(False)
    assert path(torch.float32, 256, 256, 14, 3) == "plain"
    assert path(torch.float64, 256, 256, 14, 3) == "plain"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_contiguous_pictures_are_copied_where_it_pays(dtype, allow_tf32):
    """Large convolutions of contiguous tensors, or of one of each, take tensor cores, and keep their formats."""
    needs_hopper()
    allow_tf32(True)
    parameters = (1, 1), (1, 1, 1, 1), (1, 1), 1
    for formats in itertools.product(FORMATS, FORMATS):
        make = Make("cuda", dtype)
        image = make(16, 128, 14, 14).to(memory_format=formats[0])
        weight = make(128, 128, 3, 3)
        grad = make(16, 128, 14, 14).to(memory_format=formats[1])
        assert all(ops.conv2d_path(image, weight, name, *parameters) == "tensor" for name in PASSES)
        leaves = [t.double().cpu().contiguous().requires_grad_() for t in (image, weight)]
        expected = native(*leaves, padding=1)
        expected_grads = torch.autograd.grad(expected, leaves, grad.double().cpu())
        results = [
            ops.conv2d_forward(image, weight, None, *parameters),
            ops.conv2d_backward_input(grad, weight, image.shape, formats[0] == torch.channels_last, *parameters),
            ops.conv2d_backward_weight(grad, image, weight.shape, False, *parameters),
        ]
        for name, result, wanted in zip(PASSES, results, (expected.detach(), *expected_grads), strict=True):
            assert_close(result, wanted, 1e-3 if dtype == torch.float32 else TOLERANCE[dtype], name)
        assert [is_channels_last(r) for r in results] == [formats[0] == torch.channels_last] * 2 + [False]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_contiguous_pictures_of_1x1_kernels_are_copied_too(dtype, allow_tf32):
    needs_hopper()
    image, weight = (torch.empty(shape, device="cuda", dtype=dtype) for shape in ((64, 256, 28, 28), (512, 256, 1, 1)))
    for allowed in (True, False):
        allow_tf32(allowed)
        expected = "gemm" if allowed or dtype == torch.float16 else "plain"
        for name in PASSES:
            assert ops.conv2d_path(image, weight, name, (1, 1), (0,) * 4, (1, 1), 1) == expected


def test_cpu_autocast_is_refused():
    image, weight, _ = tensors_of("cpu", torch.float32, (1, 1, 3, 3), (1, 1, 2, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(NotImplementedError, match="conv2d: autocast"):
        conv2d(image, weight)


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
