"""conv2d's paths for few input channels, for a group a channel and by way of patches in memory, each forced: that it
runs, and is right."""

import pytest
import torch
from support.conv2d_cases import PASSES, TOLERANCE, native
from support.opspec import Make, assert_close

from cuda_ops._library import ops
from cuda_ops.functional import conv2d

pytestmark = pytest.mark.cuda

CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last
DTYPES = [torch.float32, "tf32", torch.float16, torch.bfloat16]

# input, weight, stride, padding (top, bottom, left, right), dilation
FEW_CHANNELS = [
    ((3, 1, 28, 28), (33, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),  # the MNIST CNN's first layer, a tile and a channel
    (
        (2, 3, 37, 45),
        (64, 3, 7, 7),
        (1, 1),
        (3, 3, 3, 3),
        (1, 1),
    ),  # a usual first layer; rows that fill no whole vectors
    ((2, 3, 40, 48), (72, 3, 7, 7), (1, 1), (3, 3, 3, 3), (1, 1)),  # rows of whole vectors, two tiles of channels
    ((2, 3, 40, 48), (64, 3, 7, 7), (2, 2), (3, 3, 3, 3), (1, 1)),  # with its stride
    ((2, 2, 19, 23), (17, 2, 3, 2), (1, 1), (1, 0, 2, 1), (2, 3)),  # padding of four sizes, dilation
    ((2, 4, 19, 26), (40, 4, 5, 3), (1, 1), (0, 0, 1, 0), (1, 1)),
    ((1, 4, 9, 70), (8, 4, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
    ((2, 1, 12, 16), (32, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    ((2, 3, 20, 20), (32, 3, 3, 3), (2, 1), (1, 1, 1, 1), (1, 1)),
    # With strides: other padding before than after, rows of the kernel not written out, pixels that no tap reaches.
    ((2, 3, 31, 33), (24, 3, 7, 7), (2, 2), (2, 3, 4, 1), (1, 1)),
    ((2, 4, 19, 70), (40, 4, 5, 3), (2, 2), (0, 1, 1, 0), (1, 1)),
    ((2, 2, 12, 9), (9, 2, 1, 1), (2, 2), (0, 0, 0, 0), (1, 1)),
    ((2, 3, 70, 150), (24, 3, 3, 3), (2, 2), (1, 0, 0, 1), (1, 1)),  # a tile's columns and rows, and more
    ((40, 3, 66, 70), (66, 3, 7, 7), (2, 2), (3, 3, 3, 3), (1, 1)),  # tiles of eight rows a warp
    ((2, 3, 19, 41), (70, 3, 4, 7), (1, 2), (1, 2, 3, 3), (1, 1)),  # rows of seven taps, two columns apart
    ((2, 1, 6, 5), (8, 1, 3, 3), (2, 2), (5, 4, 4, 5), (1, 1)),
    ((90, 1, 28, 28), (32, 1, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),  # more tiles than blocks
    ((2, 2, 30, 33), (64, 2, 7, 7), (1, 1), (3, 0, 1, 2), (2, 1)),
    ((2, 3, 3, 3), (16, 3, 3, 3), (1, 1), (0, 0, 0, 0), (1, 1)),  # one pixel
    ((300, 1, 28, 28), (32, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),  # more tiles than blocks
    ((2, 4, 61, 37), (70, 4, 4, 4), (1, 1), (2, 1, 0, 3), (1, 1)),  # 64 taps, bands of lines, channels in slices
    ((3, 3, 50, 224), (20, 3, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),  # long lines
    ((400, 2, 28, 28), (32, 2, 5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),  # more bands than blocks
    ((2, 1, 33, 30), (100, 1, 7, 3), (1, 1), (3, 3, 1, 1), (2, 1)),  # a dilated kernel of many taps
    ((2, 1, 7, 9), (16, 1, 3, 3), (1, 1), (4, 3, 5, 4), (1, 1)),  # more padding than kernel
]
DEPTHWISE = [
    ((3, 5, 28, 28), (5, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),  # channels in no whole runs
    ((3, 36, 17, 70), (36, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),  # two tiles of columns and of channels
    ((20, 8, 14, 14), (8, 1, 5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),  # several planes a block
    ((2, 40, 21, 65), (40, 1, 7, 7), (1, 1), (3, 3, 3, 3), (1, 1)),
    ((2, 12, 9, 130), (12, 1, 5, 5), (1, 1), (0, 1, 4, 2), (1, 1)),  # padding of four sizes
    ((3, 132, 25, 19), (132, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),  # three tiles of 64 channels, the last with four
    ((700, 4, 9, 14), (4, 1, 5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),  # more strips than warps at once
    ((2, 72, 13, 11), (72, 1, 7, 7), (1, 1), (3, 3, 3, 3), (1, 1)),
    ((2, 4, 130, 9), (8, 1, 3, 3), (1, 1), (2, 0, 0, 1), (1, 1)),  # two outputs a channel, two tiles of rows
    ((2, 35, 16, 15), (70, 1, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),  # strides
    ((2, 6, 16, 15), (18, 1, 2, 4), (1, 2), (1, 0, 2, 1), (2, 3)),  # dilation
    ((2, 6, 5, 5), (6, 1, 5, 5), (1, 1), (0, 0, 0, 0), (1, 1)),  # one pixel
    ((2, 4, 6, 5), (4, 1, 3, 3), (1, 1), (3, 4, 3, 5), (1, 1)),  # more padding than kernel
    # channels_last by vectors of channels: fours, pairs and single ones; strides of two; whole small images in a block.
    ((2, 228, 21, 18), (228, 1, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
    ((2, 450, 14, 14), (450, 1, 5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
    ((2, 35, 14, 13), (35, 1, 7, 7), (1, 1), (3, 3, 3, 3), (1, 1)),
    ((3, 70, 11, 9), (70, 1, 5, 5), (2, 2), (2, 1, 3, 2), (1, 1)),
    ((3, 33, 13, 9), (33, 1, 7, 7), (2, 2), (3, 2, 4, 1), (1, 1)),
    ((9, 96, 5, 5), (96, 1, 5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
    ((5, 130, 7, 7), (130, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    ((600, 8, 9, 7), (8, 1, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),  # more units than a cluster's threads take at once
    ((2, 8, 3, 4), (8, 1, 5, 5), (2, 2), (3, 4, 5, 2), (1, 1)),  # more padding than image
    # From tiles in shared memory: several a block, small images together, a last tile of eight channels.
    ((33, 264, 30, 27), (264, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    ((300, 200, 7, 7), (200, 1, 5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
    ((40, 136, 31, 20), (136, 1, 5, 5), (2, 2), (2, 1, 3, 2), (1, 1)),
    ((50, 96, 40, 41), (96, 1, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
    ((20, 96, 29, 28), (96, 1, 7, 7), (1, 1), (3, 3, 3, 3), (1, 1)),
    ((2, 20, 16, 15), (20, 1, 5, 5), (1, 1), (4, 4, 4, 4), (2, 2)),  # dilation in whole vectors, and not
    ((2, 21, 16, 15), (21, 1, 5, 5), (1, 1), (4, 4, 4, 4), (2, 2)),
]

PATCHES = [
    ((3, 3, 32, 48), (40, 3, 4, 4), (4, 4), (0, 0, 0, 0), (1, 1)),  # patches side by side, runs of four elements
    ((2, 3, 32, 64), (24, 3, 16, 16), (16, 16), (0, 0, 0, 0), (1, 1)),  # whole vectors
    (
        (2, 3, 64, 100),
        (8, 3, 32, 32),
        (32, 32),
        (0, 0, 0, 0),
        (1, 1),
    ),  # more than a block has threads; columns left out
    ((2, 3, 42, 30), (33, 3, 14, 14), (14, 14), (0, 0, 0, 0), (1, 1)),  # pairs; k in no whole vectors
    ((2, 5, 19, 21), (16, 5, 3, 2), (4, 3), (1, 0, 2, 1), (1, 1)),  # gaps between patches, padding of four sizes
    ((2, 3, 33, 35), (64, 3, 7, 7), (2, 2), (3, 3, 3, 3), (1, 1)),  # patches that share pixels
    ((2, 3, 46, 40), (24, 3, 11, 11), (4, 4), (2, 2, 2, 2), (1, 1)),  # and pixels behind the last, runs of two elements
    ((1, 4, 29, 31), (20, 4, 5, 8), (3, 2), (0, 1, 5, 2), (1, 1)),  # padding of more than a stride
    ((2, 6, 21, 17), (8, 6, 4, 7), (1, 3), (1, 2, 0, 3), (1, 1)),  # a stride along one axis
    ((3, 8, 40, 48), (16, 8, 9, 9), (8, 8), (0, 0, 0, 0), (1, 1)),  # vectors of channels
    ((70, 1, 28, 28), (32, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),  # more pixels than there are threads
    ((2, 4, 19, 23), (17, 4, 3, 1), (2, 1), (1, 1, 0, 0), (2, 3)),  # lines apart; the width of one tap may be too
    ((2, 24, 8, 8), (56, 24, 2, 2), (2, 2), (0, 0, 0, 0), (1, 1)),  # many channels
    ((2, 3, 4, 4), (16, 3, 4, 4), (4, 4), (0, 0, 0, 0), (1, 1)),  # one pixel
]


@pytest.fixture
def force(monkeypatch):
    return lambda path: monkeypatch.setenv("CUDA_OPS_CONV2D_PATH", path)


@pytest.fixture(autouse=True)
def tf32_as_before():
    before = torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32 = before


class Products:
    """The three products of a case, and what they should be."""

    def __init__(self, case, dtype, formats=(CONTIGUOUS,) * 3, change=None):
        input, weight, stride, padding, dilation = case
        self.tolerance = 1e-3 if dtype == "tf32" else TOLERANCE[dtype]
        torch.backends.cudnn.allow_tf32 = dtype == "tf32"
        dtype = torch.float32 if dtype == "tf32" else dtype
        make, groups = Make("cuda", dtype), input[1] // weight[1]
        self.input, self.weight = make(*input), make(*weight)
        self.bias = make(weight[0])
        self.parameters = stride, padding, dilation, groups
        top, bottom, left, right = padding
        height = (input[2] + top + bottom - dilation[0] * (weight[2] - 1) - 1) // stride[0] + 1
        width = (input[3] + left + right - dilation[1] * (weight[3] - 1) - 1) // stride[1] + 1
        self.grad = make(input[0], weight[0], height, width)
        if change:
            change(self)
        leaves = [t.double().cpu().requires_grad_() for t in (self.input, self.weight)]
        padded = torch.nn.functional.pad(leaves[0], (left, right, top, bottom))
        output = native(padded, leaves[1], self.bias.double().cpu(), stride, 0, dilation, groups)
        self.expected = (output.detach(), *torch.autograd.grad(output, leaves, self.grad.double().cpu()))
        self.formats = formats
        self.input, self.weight, self.grad = (
            t.to(memory_format=f) for t, f in zip((self.input, self.weight, self.grad), formats, strict=True)
        )

    def path(self, name):
        return ops.conv2d_path(self.input, self.weight, name, *self.parameters)

    def call(self, name):
        input_last, weight_last, _ = (f == LAST for f in self.formats)
        if name == "forward":
            return ops.conv2d_forward(self.input, self.weight, self.bias, *self.parameters)
        if name == "backward_input":
            return ops.conv2d_backward_input(self.grad, self.weight, self.input.shape, input_last, *self.parameters)
        return ops.conv2d_backward_weight(self.grad, self.input, self.weight.shape, weight_last, *self.parameters)

    def check(self, passes=PASSES):
        for name, expected in zip(PASSES, self.expected, strict=True):
            if name in passes:
                result = self.call(name)
                assert_close(result, expected, self.tolerance, name)
                assert torch.equal(result, self.call(name)) or not result.isfinite().all()


def few_channels_passes(case):
    # The data gradient takes strides of one, and of two without dilation.
    takes = case[2] == (1, 1) or (case[2] == (2, 2) and case[4] == (1, 1))
    return PASSES if takes else ("forward", "backward_weight")


def needs_tensor_cores(dtype):
    if dtype != torch.float32 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU of compute capability 8.0")


MIXES = [(CONTIGUOUS,) * 3, (LAST,) * 3, (LAST, CONTIGUOUS, CONTIGUOUS), (CONTIGUOUS, LAST, LAST)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FEW_CHANNELS, ids=str)
def test_few_channels(case, dtype, force):
    needs_tensor_cores(dtype)
    force("few_channels")
    for formats in MIXES:
        products = Products(case, dtype, formats)
        passes = few_channels_passes(case)
        for name in PASSES:
            assert products.path(name) == ("few_channels" if name in passes else "")
        products.check(passes)


@pytest.mark.parametrize("dtype", ["tf32", torch.float16, torch.bfloat16], ids=str)
def test_few_channels_of_lines_far_longer_than_grad_output(dtype, force):
    needs_tensor_cores(dtype)
    force("few_channels")
    products = Products(((1, 1, 64, 20000), (8, 1, 1, 2), (1, 1), (0, 0, 0, 0), (1, 19999)), dtype)
    assert products.path("backward_input") == "few_channels"
    products.check(["backward_input"])


def patches_passes(case, dtype):
    """In 16 bits; where patches share pixels the data gradient is of rectangles, in float32 too: under a stride, and of
    taps side by side."""
    kernel, stride, dilation = case[1][2:], case[2], case[4]
    spread = any(k > 1 and d > 1 for k, d in zip(kernel, dilation, strict=True))
    apart = all(k <= s for k, s in zip(kernel, stride, strict=True)) and not spread
    halves = dtype in (torch.float16, torch.bfloat16)
    passes = ("forward", "backward_weight") if halves else ()
    takes_input = halves if apart else stride != (1, 1) and not spread
    return (*passes, "backward_input") if takes_input else passes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PATCHES, ids=str)
def test_patches(case, dtype, force):
    """In any order of the tensors, with a bias and without."""
    needs_tensor_cores(dtype)
    force("patches")
    passes = patches_passes(case, dtype)
    for formats in [*MIXES, (LAST, LAST, CONTIGUOUS)]:
        products = Products(case, dtype, formats)
        for name in PASSES:
            assert products.path(name) == ("patches" if name in passes else "")
        products.check(passes)
        if "forward" in passes:
            without = ops.conv2d_forward(products.input, products.weight, None, *products.parameters)
            expected = products.expected[0] - products.bias.double().cpu()[:, None, None]
            assert_close(without, expected, products.tolerance, "without bias")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_stay_where_rectangles_have_them(dtype, force):
    """Phases of fewer taps than others have a tap of zeros, and a pixel that it would reach is no NaN."""
    needs_tensor_cores(dtype)
    force("patches")
    for case in PATCHES:
        kernel, stride = case[1][2:], case[2]
        if "backward_input" in patches_passes(case, dtype) and any(k > s for k, s in zip(kernel, stride, strict=True)):
            for formats in MIXES:
                Products(case, dtype, formats, lambda p: put_infinities(p.grad)).check({"backward_input"})


def test_patches_of_columns_that_lie_apart_are_refused(force):
    needs_tensor_cores(torch.float16)
    force("patches")
    products = Products(((2, 3, 19, 23), (16, 3, 3, 3), (1, 1), (1, 1, 1, 1), (1, 2)), torch.float16)
    assert not any(products.path(name) for name in PASSES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", DEPTHWISE, ids=str)
def test_depthwise(case, dtype, force):
    force("depthwise")
    for formats in MIXES:
        products = Products(case, dtype, formats)
        assert all(products.path(name) == "depthwise" for name in PASSES)
        products.check()


def put_infinities(tensor):
    """In the middle and in the last corner."""
    tensor[0, 0, tensor.shape[2] // 2, tensor.shape[3] // 2] = float("inf")
    tensor[-1, -1, -1, -1] = float("-inf")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("formats", MIXES[:2], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("path, cases", [("few_channels", FEW_CHANNELS), ("depthwise", DEPTHWISE)])
def test_infinities_stay_where_they_are(path, cases, formats, dtype, force):
    """Pixels and taps that fill up a tile or an instruction are not multiplied by zero, which would make NaN.
    (Whether an infinite grad_output meets the zeros of the padding in the weight gradient is left open.)"""
    if dtype == (torch.float64 if path == "few_channels" else "tf32"):
        pytest.skip("not a dtype of this path")
    needs_tensor_cores(dtype)
    force(path)
    for case in cases:
        passes = few_channels_passes(case) if path == "few_channels" else PASSES
        Products(case, dtype, formats, lambda p: put_infinities(p.input)).check({"forward", "backward_weight"})
        Products(case, dtype, formats, lambda p: put_infinities(p.grad)).check({"backward_input"} & set(passes))


@pytest.mark.parametrize("path, cases", [("few_channels", FEW_CHANNELS), ("depthwise", DEPTHWISE)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_off_their_alignment(path, cases, dtype, force):
    """Views that start one element into their storage: vector loads must notice."""
    needs_tensor_cores(dtype)
    force(path)

    def shifted(tensor):
        storage = tensor.new_empty(tensor.numel() + 1)
        view = storage[1:].as_strided(tensor.shape, tensor.stride())
        return view.copy_(tensor)

    for case in cases:
        for formats in MIXES[:2]:
            products = Products(case, dtype, formats)
            products.input, products.grad = shifted(products.input), shifted(products.grad)
            products.check(few_channels_passes(case) if path == "few_channels" else PASSES)


@pytest.mark.parametrize(
    "path, shape, weight", [("few_channels", (3, 12, 11), (9, 3, 3, 3)), ("depthwise", (4, 9, 8), (8, 1, 3, 3))]
)
def test_unbatched_and_empty(path, shape, weight, force):
    force(path)
    make, groups = Make("cuda"), shape[0] // weight[1]
    image, kernel, bias = make(*shape), make(*weight), make(weight[0])
    arguments = {"padding": "same", "groups": groups}
    output = conv2d(image, kernel, bias, **arguments)
    assert_close(output, native(image.double().cpu(), kernel.double().cpu(), bias.double().cpu(), **arguments), 2e-6)
    leaves = [t.requires_grad_() for t in (make(0, *shape), kernel, bias)]
    empty = conv2d(*leaves, **arguments)
    assert empty.shape == (0, weight[0], *shape[1:])
    for grad, leaf in zip(torch.autograd.grad(empty.sum(), leaves), leaves, strict=True):
        assert grad.shape == leaf.shape and not grad.any()


def test_choice():
    """Without force: by channels and groups, in all dtypes and formats that the paths have, of images that fill the
    GPU."""

    def path(dtype, input, weight, name="forward", stride=1, format=CONTIGUOUS, batch=64, size=64):
        image = torch.empty(batch, input, size, size, device="cuda", dtype=dtype).to(memory_format=format)
        kernel = torch.empty(weight, device="cuda", dtype=dtype)
        return ops.conv2d_path(image, kernel, name, (stride,) * 2, (1,) * 4, (1, 1), input // weight[1])

    for format in (CONTIGUOUS, LAST):
        for name in PASSES:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                if dtype == torch.float32 or torch.cuda.get_device_capability() >= (8, 0):
                    columns = dtype == torch.float32 and format == LAST and name == "backward_input"
                    expected = "im2col" if columns else "few_channels"
                    assert path(dtype, 1, (32, 1, 3, 3), name, format=format) == expected
                    assert path(dtype, 3, (64, 3, 7, 7), name, format=format) == expected
                assert path(dtype, 32, (32, 1, 3, 3), name, format=format) == "depthwise"
                assert path(dtype, 32, (64, 1, 3, 3), name, 2, format) == "depthwise"
                assert path(dtype, 1, (1, 1, 3, 3), name, format=format) == "depthwise"
            assert path(torch.float64, 3, (64, 3, 7, 7), name, format=format) == "simt"
            assert path(torch.float64, 32, (32, 1, 3, 3), name, format=format) == "depthwise"
    for tf32 in (False, True):
        torch.backends.cudnn.allow_tf32 = tf32
        assert path(torch.float32, 3, (64, 3, 7, 7), "backward_input", 2) == ("patches" if tf32 else "few_channels")
        for name in PASSES:  # of few output channels
            few = name == "backward_input"
            assert path(torch.float32, 1, (6, 1, 5, 5), name) == ("few_channels" if few else "depthwise")
            assert path(torch.float32, 3, (6, 3, 5, 5), name) == "few_channels"
            assert path(torch.float32, 3, (4, 3, 5, 5), name) == ("few_channels" if few or tf32 else "simt")
    assert path(torch.float32, 4, (64, 2, 3, 3), batch=2, size=30) == "simt"
