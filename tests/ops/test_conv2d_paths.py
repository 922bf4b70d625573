"""conv2d's paths on CUDA, forced and chosen: which takes which call, and that each is right."""

import itertools

import pytest
import torch
from support.conv2d_cases import FORMATS, PASSES, TOLERANCE, is_channels_last, native
from support.devices import needs_ampere, needs_hopper
from support.opspec import Make, assert_close

from cuda_ops._library import ops
from cuda_ops.functional import conv2d, conv_transpose2d

pytestmark = pytest.mark.cuda

# batch, input channels, output channels, size, kernel, stride, padding, dilation: what the paths differ in.
PATH_CASES = [
    (2, 64, 64, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1)),  # whole rows of 128 bytes in fp16
    (3, 40, 72, (9, 13), (3, 2), (1, 1), (1, 0), (1, 1)),  # channels that fill no row, columns that fill no tile
    (2, 8, 24, (17, 11), (5, 3), (1, 1), (2, 1), (1, 2)),  # dilation
    (5, 264, 136, (7, 7), (3, 3), (1, 1), (1, 1), (1, 1)),  # several tiles of columns; of taps and channels
    (2, 32, 40, (30, 33), (3, 3), (2, 3), (1, 1), (2, 1)),  # strides
    (1, 16, 8, (5, 33), (1, 3), (1, 1), (3, 4), (1, 1)),  # more padding than kernel
    (7, 24, 56, (5, 6), (1, 1), (1, 1), (0, 0), (1, 1)),  # a product of matrices
    (40, 32, 64, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1)),  # more tiles than there are blocks, splits of k
    (2, 12, 20, (8, 7), (3, 3), (1, 1), (1, 1), (1, 1)),  # channels that TF32 can have, and fp16 cannot
    (1, 3, 5, (6, 7), (2, 3), (1, 1), (1, 1), (1, 1)),  # and channels of none
    (1, 32, 40, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1)),  # fewer pixels than one step of k
    (3, 8, 136, (9, 8), (1, 1), (1, 1), (0, 0), (1, 1)),  # channels that do not fill one step of k
]
# Which of the cases each path can do, for 16-bit dtypes: of all passes, or by pass.
CASES_OF_PATHS = {
    "simt": {name: set(range(12)) for name in PASSES},
    "sm90": {name: {*range(8), 10, 11} for name in PASSES},
    "mma": {name: {*range(8), 10, 11} for name in PASSES},
    "padded": {name: {8, 9} for name in PASSES},
    "gemm_1x1": {name: {6, 11} for name in PASSES},
    "sm90_halo": {
        "forward": {0, 1, 2, 5, 6, 7, 10, 11},
        "backward_input": {0, 1, 2, 5, 6, 7, 10, 11},
        "backward_weight": set(),
    },
}


@pytest.fixture
def force(monkeypatch):
    yield lambda path: monkeypatch.setenv("CUDA_OPS_CONV2D_PATH", path)


@pytest.fixture
def allow_tf32():
    before = torch.backends.cudnn.allow_tf32

    def allow(allowed):
        torch.backends.cudnn.allow_tf32 = allowed

    yield allow
    torch.backends.cudnn.allow_tf32 = before


def amid_nan(tensor):
    """The same tensor in the midst of NaN: a kernel that reads beyond its ends shows it."""
    memory = torch.full((tensor.numel() + 2048,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return torch.as_strided(memory, tensor.shape, tensor.stride(), 1024).copy_(tensor)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("path", CASES_OF_PATHS)
def test_forced_paths(path, dtype, force, allow_tf32):
    """Each path takes what it says it takes, is right there, the same twice, and refuses the rest by name."""
    if path in ("sm90", "sm90_halo"):
        needs_hopper()
    if path in ("mma", "padded"):
        needs_ampere()
    allow_tf32(True)
    force(path)
    tf32 = dtype == torch.float32 and path != "simt"
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
                    with pytest.raises(NotImplementedError, match=f"CUDA_OPS_CONV2D_PATH={path} cannot .*{name}"):
                        call()
    for name in PASSES:
        # Twelve channels are a multiple of 16 bytes in float32 alone.
        whole = {8} if tf32 else set()
        more = whole if path in ("sm90", "sm90_halo", "mma") and CASES_OF_PATHS[path][name] else set()
        fewer = whole if path == "padded" else set()
        assert taken[name] == (CASES_OF_PATHS[path][name] | more) - fewer, name


@pytest.mark.parametrize("case", [*PATH_CASES, (3, 20, 33, (9, 8), (1, 1), (2, 3), (0, 0), (1, 1))])
def test_im2col(case, force, allow_tf32):
    """Takes float32 of any kernel, stride, dilation and order of the weight, never rounded to TF32, and of 16 bits the
    gradient of the input."""
    force("im2col")
    allow_tf32(True)
    for weight_format in FORMATS:
        for name, asked, call, expected in products_of_passes(case, torch.float32, weight_format):
            assert asked() == "im2col"
            result = call()
            assert_close(result, expected, TOLERANCE[torch.float32], f"{name} {case}")
            assert torch.equal(result, call())
    for dtype in (torch.float16, torch.bfloat16):
        for weight_format in FORMATS:
            for name, asked, call, expected in products_of_passes(case, dtype, weight_format):
                assert (asked() == "im2col") == (name == PASSES[1])
                if name == PASSES[1]:
                    result = call()
                    assert_close(result, expected, TOLERANCE[dtype], f"{name} {case} {dtype}")
                    assert torch.equal(result, call())
                    continue
                with pytest.raises(NotImplementedError, match=f"CUDA_OPS_CONV2D_PATH=im2col cannot .*{name}"):
                    call()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "case",
    [
        (6, 160, 320, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1)),  # chunks of channels that are not full
        (1, 512, 256, (7, 7), (3, 3), (1, 1), (1, 1), (1, 1)),  # eight blocks a tile
        (2, 192, 200, (9, 7), (1, 7), (1, 1), (0, 3), (1, 1)),  # columns that fill no tile
        (1, 256, 512, (15, 15), (1, 1), (2, 2), (0, 0), (1, 1)),  # one tap
        (9, 64, 72, (20, 20), (3, 3), (1, 1), (1, 1), (2, 1)),  # more pixels than a wave of clusters has
        (3, 136, 200, (12, 12), (3, 3), (1, 1), (1, 1), (1, 1)),  # tiles of 128 x 128 of the gradient of the weight
        (2, 32, 336, (40, 40), (1, 1), (2, 2), (0, 0), (1, 1)),  # and of 128 x 64, whose splits another kernel adds
    ],
)
def test_tiles_shared_by_a_cluster(case, dtype, force, allow_tf32):
    """sm90 where there are few tiles: their k is split over the blocks of a cluster, which add up in their order."""
    needs_hopper()
    allow_tf32(True)
    force("sm90")
    for weight_format in FORMATS:
        for name, asked, call, expected in products_of_passes(case, dtype, weight_format):
            assert asked() == "sm90"
            result = call()
            assert_close(result, expected, 1e-3 if dtype == torch.float32 else TOLERANCE[dtype], f"{name} {case}")
            assert torch.equal(result, call())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "case",
    [
        (2, 128, 32, (12, 13), (3, 3), (1, 1), (1, 1), (1, 1)),
        (2, 32, 128, (12, 13), (3, 3), (1, 1), (1, 1), (1, 1)),
        (3, 72, 24, (17, 9), (5, 3), (1, 1), (2, 0), (1, 2)),
        (90, 136, 8, (14, 14), (3, 2), (1, 1), (1, 0), (1, 1)),  # more tiles than blocks, chunks than stages in TF32
    ],
)
def test_halo_of_few_columns(case, dtype, force, allow_tf32):
    """Of 32 channels of the result or fewer sm90_halo keeps half as much of the weight, so that more of it fits."""
    needs_hopper()
    allow_tf32(True)
    force("sm90_halo")
    taken = set()
    for weight_format in FORMATS:
        for name, asked, call, expected in products_of_passes(case, dtype, weight_format):
            if asked() == "sm90_halo":
                taken.add(name)
                result = call()
                assert_close(result, expected, 1e-3 if dtype == torch.float32 else TOLERANCE[dtype], f"{name} {case}")
                assert torch.equal(result, call())
    assert ("forward" if case[2] < case[1] else "backward_input") in taken


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("outputs", [512, 456])
def test_tiles_of_256_columns_shared_by_a_cluster(outputs, dtype, force):
    """sm90 in 16 bits, where small images have long sums."""
    needs_hopper()
    force("sm90")
    make = Make("cuda", dtype)
    x = amid_nan(make(67, 512, 5, 5).to(memory_format=torch.channels_last))
    w = amid_nan(make(outputs, 512, 3, 3).to(memory_format=torch.channels_last))
    b = amid_nan(make(outputs))
    g = amid_nan(Make("cuda", dtype, seed=1)(67, outputs, 5, 5).to(memory_format=torch.channels_last))
    leaves = [t.detach().double().contiguous().requires_grad_() for t in (x, w)]
    expected = native(*leaves, b.double(), 1, 1)
    grads = torch.autograd.grad(expected, leaves, g.double())
    parameters = (1, 1), (1, 1, 1, 1), (1, 1), 1
    for call, result in (
        (lambda: ops.conv2d_forward(x, w, b, *parameters), expected.detach()),
        (lambda: ops.conv2d_backward_input(g, w, x.shape, True, *parameters), grads[0]),
    ):
        found = call()
        assert_close(found, result.cpu(), TOLERANCE[dtype])
        assert torch.equal(found, call())


# Few tiles and long sums, which simt cuts into parts. With a stride of two and padding the first stride phase has the
# fewest taps; of the last case some phases have none.
LONG_SUMS = [
    ((1, 117, 180, (8, 8), (7, 1), (1, 1), (3, 0), (1, 1)), 1),
    ((2, 160, 33, (9, 9), (3, 3), (2, 2), (1, 1), (1, 1)), 1),
    ((1, 96, 72, (7, 10), (4, 5), (3, 2), (1, 2), (1, 1)), 3),
    ((1, 65, 40, (11, 11), (2, 2), (3, 3), (0, 0), (2, 1)), 1),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("case", "groups"), LONG_SUMS, ids=str)
def test_simt_adds_parts_of_long_sums(case, groups, dtype, force, allow_tf32):
    allow_tf32(False)
    force("simt")
    for weight_format in FORMATS:
        for name, asked, call, expected in products_of_passes(case, dtype, weight_format, groups=groups):
            assert asked() == "simt"
            result = call()
            assert_close(result, expected, TOLERANCE[dtype], f"{name} {case}")
            assert torch.equal(result, call())


def check_depthwise(case, dtype, force, allow_tf32):
    allow_tf32(False)
    force("depthwise")
    for name, asked, call, expected in products_of_passes(case, dtype, groups=case[1]):
        assert asked() == "depthwise"
        result = call()
        assert_close(result, expected, TOLERANCE[dtype], f"{name} {case}")
        assert torch.equal(result, call())


# Beside which an unrolled kernel's tile would be mostly empty, and one image that fills it.
SMALL_IMAGES = [
    (3, 40, 40, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 136, 136, (4, 7), (5, 5), (1, 1), (2, 1), (1, 1)),
    (2, 16, 16, (7, 8), (7, 7), (1, 1), (3, 3), (1, 1)),
    (5, 8, 8, (1, 3), (3, 3), (1, 1), (1, 2), (1, 1)),
    (2, 24, 24, (9, 9), (7, 7), (1, 1), (3, 3), (1, 1)),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", SMALL_IMAGES, ids=str)
def test_depthwise_of_small_images(case, dtype, force, allow_tf32):
    check_depthwise(case, dtype, force, allow_tf32)


# Many pixels whose channels are no whole vectors: odd numbers, of which every other pixel begins amid a word, and even.
APART = [
    (6, 67, 67, (61, 59), (3, 3), (1, 1), (1, 1), (1, 1)),
    (5, 125, 125, (40, 42), (5, 5), (1, 1), (2, 2), (1, 1)),
    (7, 191, 191, (30, 30), (7, 7), (1, 1), (3, 3), (1, 1)),
    (9, 62, 62, (47, 50), (3, 3), (1, 1), (0, 2), (1, 1)),
    (4, 130, 130, (33, 40), (5, 5), (1, 1), (3, 0), (1, 1)),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", APART, ids=str)
def test_depthwise_of_pixels_that_are_no_vectors(case, dtype, force, allow_tf32):
    check_depthwise(case, dtype, force, allow_tf32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_halo_of_many_tiles(dtype, force, allow_tf32):
    """Tiles of one slot, many to a block, again and again: a warpgroup whose warps drift apart once waited for good."""
    needs_hopper()
    allow_tf32(True)
    force("sm90_halo")
    make = Make("cuda", dtype)
    x = make(1024, 32, 14, 14).detach().to(memory_format=torch.channels_last)
    w = make(64, 32, 3, 3).detach().to(memory_format=torch.channels_last)
    first = conv2d(x, w, padding=1)
    for _ in range(200):
        result = conv2d(x, w, padding=1)
    assert torch.equal(result, first)


# Strides, groups, odd channels and long kernels; the groups; and whether the sm90 path can do backward_input.
STRIDED_CASES = [
    ((2, 64, 128, (15, 16), (3, 3), (2, 2), (1, 1), (1, 1)), 1, True),  # residues of 4, 2, 2 and 1 taps
    ((2, 64, 96, (8, 9), (1, 1), (2, 2), (0, 0), (1, 1)), 1, True),  # and of none
    ((1, 32, 32, (20, 20), (3, 3), (3, 2), (2, 1), (2, 3)), 1, True),  # dilation with strides
    ((9, 264, 136, (15, 14), (5, 5), (2, 2), (2, 2), (1, 1)), 1, True),  # several tiles of rows and columns
    ((2, 16, 16, (6, 5), (2, 2), (5, 7), (0, 1), (1, 1)), 1, False),  # strides beyond the kernel and the input
    ((3, 48, 96, (11, 12), (3, 3), (1, 1), (1, 1), (1, 1)), 3, True),
    ((2, 64, 64, (9, 10), (3, 2), (2, 1), (1, 1), (1, 1)), 8, True),  # groups of one 16-byte vector
    ((2, 384, 256, (9, 8), (3, 3), (1, 1), (1, 1), (1, 1)), 2, True),  # of whole rows of 128 bytes
    ((1, 456, 760, (8, 9), (3, 3), (2, 2), (1, 1), (1, 2)), 19, True),  # of parts of them, in several launches
    (
        (2, 8, 21, (9, 10), (3, 3), (1, 1), (1, 1), (1, 1)),
        1,
        False,
    ),  # output channels that fill no vector: forward
    ((2, 21, 8, (9, 10), (3, 3), (2, 2), (1, 1), (1, 1)), 1, True),  # and of input channels: backward_input
    (
        (1, 8, 8, (30, 300), (3, 3), (1, 1), (200, 1), (100, 1)),
        1,
        False,
    ),  # beyond the limits of TMA's im2col descriptors
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case, groups, by_tensor", STRIDED_CASES)
@pytest.mark.parametrize("path", ["mma", "sm90", "grouped"])
def test_strides_and_groups_on_tensor_cores(path, case, groups, by_tensor, dtype, force, allow_tf32):
    needs_hopper() if path == "sm90" else needs_ampere()
    allow_tf32(True)
    force(path)
    # What is read has channels in whole 16-byte vectors.
    channels_read = {"forward": (1,), "backward_input": (2,), "backward_weight": (1, 2)}
    for weight_format in FORMATS:
        for name, asked, call, expected in products_of_passes(case, dtype, weight_format, groups=groups):
            if path == "mma":
                whole = all(case[i] // groups % 8 == 0 for i in channels_read[name])
                assert asked() == ("mma" if whole else ""), name
            elif path == "sm90" and name == "backward_input":
                assert asked() == ("sm90" if by_tensor else "")
            elif path == "grouped":
                assert asked() == ("grouped" if groups > 2 else "")
            if asked() == path:
                result = call()
                tolerance = 1e-3 if dtype == torch.float32 else TOLERANCE[dtype]
                assert_close(result, expected, tolerance, f"{name} {case} of {groups} groups")
                assert torch.equal(result, call())


# Groups of few channels: what the grouped path differs in. Its tiles are of several groups, and of a part of an image.
GROUPED_CASES = [
    ((3, 64, 64, (13, 21), (3, 3), (1, 1), (1, 1), (1, 1)), 8),  # groups of one vector, a whole slab of them
    (
        (2, 88, 88, (20, 33), (3, 3), (2, 2), (1, 1), (1, 1)),
        11,
    ),  # groups that fill no slab; stride phases of 1 to 4 taps
    ((2, 96, 48, (9, 30), (3, 2), (2, 1), (1, 0), (1, 2)), 6),  # more channels than outputs, dilation
    ((2, 40, 200, (30, 7), (1, 3), (1, 2), (0, 2), (1, 1)), 5),  # fewer
    ((5, 128, 128, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1)), 2),  # 64 channels: gradients of weight in parts
    ((2, 48, 48, (11, 12), (5, 5), (1, 1), (2, 2), (1, 1)), 2),
    ((2, 64, 64, (12, 13), (2, 2), (3, 3), (0, 0), (1, 1)), 4),  # strides past the kernel
    ((4, 64, 32, (8, 9), (1, 1), (1, 1), (0, 0), (1, 1)), 4),
    ((70, 64, 64, (28, 28), (3, 3), (1, 1), (1, 1), (1, 1)), 4),  # several tiles a block
    ((1, 32, 16, (3, 4), (3, 3), (1, 1), (1, 1), (1, 1)), 2),  # fewer pixels than an instruction has
    ((13, 88, 88, (9, 10), (3, 3), (2, 2), (1, 1), (1, 1)), 11),  # clusters of more than eight blocks
    ((7, 96, 96, (15, 13), (3, 3), (1, 1), (1, 1), (1, 1)), 6),  # groups of one sector
]


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "tf32", "float32"])
@pytest.mark.parametrize(("case", "groups"), GROUPED_CASES, ids=str)
def test_groups_of_few_channels(case, groups, kind, force, allow_tf32):
    needs_ampere()
    allow_tf32(kind == "tf32")
    force("grouped")
    dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
    for weight_format in FORMATS:
        for name, asked, call, expected in products_of_passes(case, dtype, weight_format, groups=groups):
            assert asked() == "grouped", name
            result = call()
            assert_close(result, expected, 1e-3 if kind == "tf32" else TOLERANCE[dtype], f"{name} {case} of {groups}")
            assert torch.equal(result, call())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_infinities_of_other_pixels_do_not_reach_a_gradient_of_weight(dtype, force, allow_tf32):
    """Tiles that end beyond an image have pixels without a gradient, whose taps read the image."""
    needs_ampere()
    force("grouped")
    for allowed in (True, False):
        allow_tf32(allowed)
        image = torch.ones(2, 32, 15, 37, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
        image[:, :, -1] = image[:, :, :, -1] = torch.inf
        # No output meets the last row and column.
        grad = torch.ones(2, 32, 7, 18, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
        parameters = (2, 2), (0, 0, 0, 0), (1, 1), 4
        result = ops.conv2d_backward_weight(grad, image, (32, 8, 2, 2), False, *parameters)
        assert (result == 2 * 7 * 18).all()


# Channels of a group that are no whole vectors of 16 bytes, and the groups.
ODD_CHANNELS = [
    ((2, 13, 27, (9, 10), (3, 3), (1, 1), (1, 1), (1, 1)), 1),
    ((3, 78, 130, (9, 7), (3, 2), (2, 1), (1, 0), (1, 2)), 13),
    ((2, 132, 396, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1)), 4),
    ((1, 514, 470, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1)), 1),
    ((5, 18, 45, (12, 5), (1, 1), (2, 3), (0, 0), (1, 1)), 9),
    ((40, 70, 66, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1)), 2),  # splits of k
    ((24, 45, 187, (24, 24), (3, 3), (1, 1), (1, 1), (1, 1)), 1),  # sm90's tiles of 192 columns
    ((24, 187, 45, (24, 24), (3, 3), (1, 1), (1, 1), (1, 1)), 1),
]


@pytest.mark.parametrize("formats", itertools.product(FORMATS, FORMATS), ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("case", "groups"), ODD_CHANNELS, ids=str)
def test_odd_channels_of_any_format(case, groups, dtype, formats, force, allow_tf32):
    needs_ampere()
    allow_tf32(True)
    force("padded")
    batch, inputs, outputs, size, kernel, stride, padding, dilation = case
    x = Make("cuda", dtype)(batch, inputs, *size).to(memory_format=formats[0])
    w = Make("cuda", dtype, seed=1)(outputs, inputs // groups, *kernel)
    leaves = [t.double().cpu().contiguous().requires_grad_() for t in (x, w)]
    expected = native(*leaves, None, stride, padding, dilation, groups)
    g = Make("cuda", dtype, seed=2)(*expected.shape).to(memory_format=formats[1])
    grads = torch.autograd.grad(expected, leaves, g.double().cpu())
    parameters = stride, (padding[0], padding[0], padding[1], padding[1]), dilation, groups
    calls = [
        lambda: ops.conv2d_forward(x, w, None, *parameters),
        lambda: ops.conv2d_backward_input(g, w, x.shape, is_channels_last(x), *parameters),
        lambda: ops.conv2d_backward_weight(g, x, w.shape, False, *parameters),
    ]
    for name, call, wanted in zip(PASSES, calls, (expected.detach(), *grads), strict=True):
        result = call()
        assert_close(result, wanted, 1e-3 if dtype == torch.float32 else TOLERANCE[dtype], f"{name} {case}")
        assert torch.equal(result, call())


@pytest.mark.parametrize("path", ["sm90", "mma", "grouped", "padded"])
def test_groups_keep_their_nan(path, force):
    """Neither slices of k that end beyond a group nor padding multiply another group's values, even by zero."""
    needs_hopper() if path == "sm90" else needs_ampere()
    force(path)
    widths = (18, 35) if path == "padded" else (24, 40)
    groups, size, parameters = 5, (9, 9), ((1, 1), (1, 1, 1, 1), (1, 1), 5)
    make = Make("cuda", torch.float16)
    tensors = [
        make(2, groups * widths[0], *size).to(memory_format=torch.channels_last),
        make(groups * widths[1], widths[0], 3, 3).to(memory_format=torch.channels_last),
        make(2, groups * widths[1], *size).to(memory_format=torch.channels_last),
    ]

    def results():
        x, w, g = tensors
        return [
            ops.conv2d_forward(x, w, None, *parameters).split(widths[1], 1),
            ops.conv2d_backward_input(g, w, x.shape, True, *parameters).split(widths[0], 1),
            ops.conv2d_backward_weight(g, x, w.shape, True, *parameters).split(widths[1], 0),
        ]

    clean = results()
    for which, (tensor, width, axis) in enumerate(zip(tensors, (*widths, widths[1]), (1, 0, 1), strict=True)):
        for spoilt in range(groups):
            part = tensor.narrow(axis, spoilt * width, width)
            before = part.clone()
            part.fill_(torch.nan)
            for name, mine, now in zip(PASSES, clean, results(), strict=True):
                for group in range(groups):
                    assert group == spoilt or torch.equal(mine[group], now[group]), f"{name}, tensor {which}"
            part.copy_(before)


@pytest.mark.parametrize(
    "case",
    [
        (2, 64, 96, (8, 9), (1, 1), (2, 2), (0, 0), (1, 1)),
        (3, 8, 136, (9, 8), (1, 1), (3, 2), (0, 0), (1, 1)),  # rows of the copy that are longer than the output
        (1, 4, 5, (7, 6), (1, 1), (2, 1), (0, 0), (1, 1)),
        (40, 132, 200, (14, 13), (1, 1), (1, 2), (0, 0), (1, 1)),  # splits of k, channels past a tile
        (2, 16, 24, (1, 1), (1, 1), (2, 2), (0, 0), (1, 1)),  # one pixel
    ],
)
def test_strides_by_gemm(case, force, allow_tf32):
    """TF32's weight gradient of a 1x1 kernel copies what it reads of the input; no other product takes strides, but of
    one pixel, which is all that there is to read."""
    needs_hopper()
    one_pixel = case[3] == (1, 1)
    force("gemm_1x1")
    for allowed in (True, False):
        allow_tf32(allowed)
        for weight_format in FORMATS:
            for name, asked, call, expected in products_of_passes(case, torch.float32, weight_format):
                takes = one_pixel or (allowed and name == "backward_weight")
                assert asked() == ("gemm_1x1" if takes else ""), name
                if takes:
                    result = call()
                    assert_close(result, expected, 1e-3, name)
                    assert torch.equal(result, call())


@pytest.mark.parametrize(
    ("batch", "channels", "outs", "size"),
    [(1, 24, 40, (7, 9)), (3, 64, 32, (8, 8)), (5, 33, 20, (5, 3)), (2, 3, 96, (12, 14)), (4, 16, 1, (6, 6))],
)
def test_gradients_of_contiguous_images_by_gemm(batch, channels, outs, size, force, allow_tf32):
    """An image at a time; forward's bias is of rows there, which the GEMM adds to none."""
    needs_hopper()
    force("gemm_1x1")
    parameters = (1, 1), (0,) * 4, (1, 1), 1
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        allow_tf32(dtype == torch.float32)
        make = Make("cuda", dtype)
        x, w, g = make(batch, channels, *size), make(outs, channels, 1, 1), make(batch, outs, *size)
        leaves = [t.detach().double().requires_grad_() for t in (x, w)]
        expected = torch.autograd.grad(native(*leaves), leaves, g.double())
        results = [
            lambda x=x, w=w, g=g: ops.conv2d_backward_input(g, w, x.shape, False, *parameters),
            lambda x=x, w=w, g=g: ops.conv2d_backward_weight(g, x, w.shape, False, *parameters),
        ]
        for call, value in zip(results, expected, strict=True):
            assert_close(call(), value, 1e-3 if dtype == torch.float32 else TOLERANCE[dtype], str(dtype))
            assert torch.equal(call(), call())
        with pytest.raises(NotImplementedError):
            ops.conv2d_forward(x, w, None, *parameters)


def off_alignment(tensor):
    """A copy that begins an element behind an address that is aligned."""
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


def test_strides_by_gemm_off_their_alignment(force, allow_tf32):
    """What cannot be copied by 16-byte vectors takes another path, or the product without a copy."""
    needs_hopper()
    allow_tf32(True)
    for path, stride in ((None, 2), ("gemm_1x1", 1)):
        if path:
            force(path)
        make, parameters = Make("cuda", torch.float32), ((stride, stride), (0,) * 4, (1, 1), 1)
        x, w, g = make(2, 9, 9, 8), make(24, 8, 1, 1), make(2, 24, *(2 * [(9 - 1) // stride + 1]))
        x = off_alignment(x).permute(0, 3, 1, 2)
        assert x.data_ptr() % 16 and is_channels_last(x)
        result = ops.conv2d_backward_weight(g.to(memory_format=torch.channels_last), x, w.shape, True, *parameters)
        leaf = w.double().requires_grad_()
        (expected,) = torch.autograd.grad(native(x.double(), leaf, stride=stride), leaf, g.double())
        assert_close(result, expected, 1e-3)


@pytest.mark.parametrize(
    ("name", "sizes", "stride"),
    [
        ("backward_input", (1024, 768, 3072, 1), 1),  # a copy of the weight, which the query took to be read in place
        ("backward_input", (1024, 768, 144, 1), 1),
        ("backward_weight", (32, 256, 256, 28), 2),  # a copy of the input, which the query left to sm90
    ],
    ids=str,
)
def test_an_address_that_no_query_knew_of(name, sizes, stride, allow_tf32):
    """The workspace is of the sizes' choice, so that what is chosen at an odd address is no larger. (What lay beyond it
    is told by compute-sanitizer; here results are right.)"""
    needs_hopper()
    allow_tf32(True)
    batch, channels, outs, side = sizes
    out_side, make = (side - 1) // stride + 1, Make("cuda", torch.float32)
    last = {"memory_format": torch.channels_last}
    x, w, g = make(batch, channels, side, side), make(outs, channels, 1, 1), make(batch, outs, out_side, out_side)
    parameters = ((stride, stride), (0,) * 4, (1, 1), 1)
    if name == "backward_input":
        w = off_alignment(w)  # of one pixel: in either format
        assert w.data_ptr() % 16
        result = ops.conv2d_backward_input(g.to(**last), w, x.shape, True, *parameters)
    else:
        g = off_alignment(g.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2)
        assert g.data_ptr() % 16 and is_channels_last(g)
        result = ops.conv2d_backward_weight(g, x.to(**last), w.shape, True, *parameters)
    leaves = [t.double().requires_grad_() for t in (x, w)]
    expected = torch.autograd.grad(native(*leaves, stride=stride), leaves, g.double())[name == "backward_weight"]
    assert_close(result, expected, 1e-3)


def test_tf32_is_obeyed(allow_tf32):
    """Without torch.backends.cudnn.allow_tf32 results are those of float32, and with it they are not."""
    needs_hopper()
    for case in (PATH_CASES[0], PATH_CASES[6], PATH_CASES[3]):
        for allowed in (False, True):
            allow_tf32(allowed)
            for name, asked, call, expected in products_of_passes(case, torch.float32):
                slow = ("simt", "winograd", "gemm_1x1", "im2col")
                paths = ("sm90", "sm90_halo", "gemm_1x1") if allowed else slow
                assert asked() in paths
                error = (call().double().cpu() - expected).norm() / expected.norm()
                assert (1e-5 < error < 1e-3) if allowed else error < TOLERANCE[torch.float32], f"{name} {case}"


def test_unknown_path_is_refused(force):
    image, weight = torch.ones(1, 1, 3, 3, device="cuda"), torch.ones(1, 1, 2, 2, device="cuda")
    force("banana")
    with pytest.raises(RuntimeError, match=r"conv2d: expected CUDA_OPS_CONV2D_PATH to be one of simt, .*, got banana"):
        conv2d(image, weight)
    with pytest.raises(RuntimeError, match=r"conv2d_path: expected product to be forward, .*, got sideways"):
        ops.conv2d_path(image, weight, "sideways", (1, 1), (0, 0, 0, 0), (1, 1), 1)


def test_choice_of_path(allow_tf32):
    """By dtype, format, groups, size and channels; what no other path can do is simt's."""
    needs_hopper()

    def path(
        dtype, inputs, outputs, size, kernel, name="forward", image_format=torch.channels_last, groups=1, stride=1
    ):
        image = torch.empty(2, inputs, size, size, device="cuda", dtype=dtype).to(memory_format=image_format)
        weight = torch.empty(outputs, inputs // groups, kernel, kernel, device="cuda", dtype=dtype)
        return ops.conv2d_path(image, weight, name, (stride,) * 2, (kernel // 2,) * 4, (1, 1), groups)

    allow_tf32(True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert path(dtype, 64, 64, 56, 3) == "sm90_halo"
        assert path(dtype, 64, 64, 56, 3, "backward_input") == "sm90_halo"
        assert path(dtype, 64, 64, 56, 3, "backward_weight") == "sm90"
        for name in PASSES:
            assert path(dtype, 256, 256, 14, 3, name) == "sm90"
            tf32_weight = dtype == torch.float32 and name == "backward_weight"
            assert path(dtype, 256, 256, 14, 1, name) == "gemm_1x1"
            assert path(dtype, 64, 256, 14, 1, name) == "gemm_1x1"
            # The gradient of input reads whole vectors, the others are worth a copy, of patches where there are few
            # pixels, but for TF32's gradient of weight, which Winograd's makes sooner.
            by_name = {"forward": "patches", "backward_input": "sm90", "backward_weight": "patches"}
            if dtype == torch.float32:
                by_name |= {"forward": "padded", "backward_weight": "winograd"}
            assert path(dtype, 255, 64, 14, 3, name) == by_name[name]
            if dtype != torch.float32:
                assert path(dtype, 255, 64, 56, 3, name) == ("sm90" if name == "backward_input" else "padded")
            assert path(dtype, 256, 64, 14, 3, name, groups=2) == "sm90"
            if name == "backward_input":
                assert path(dtype, 256, 256, 14, 3, name, groups=32) == "grouped"
            assert path(dtype, 256, 64, 14, 3, name, stride=2) == "sm90"
            # Images in the other format are copied where tensor cores save more than that takes.
            contiguous = path(dtype, 256, 64, 14, 3, name, torch.contiguous_format)
            if dtype == torch.float32:
                assert contiguous == ("winograd" if tf32_weight else "sm90")
            else:
                by_name = {"forward": "patches", "backward_input": "sm90_halo", "backward_weight": "sm90"}
                assert contiguous == by_name[name]
        assert path(dtype, 64, 256, 14, 1, "backward_weight", stride=2) == (
            "gemm_1x1" if dtype == torch.float32 else "sm90"
        )
    allow_tf32(False)
    assert path(torch.float32, 256, 256, 14, 3) == "im2col"
    assert path(torch.float32, 256, 256, 14, 3, "backward_input") == "winograd"
    assert path(torch.float32, 256, 256, 14, 3, stride=2) == "im2col"
    assert path(torch.float64, 256, 256, 14, 3) == "simt"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_contiguous_images_are_copied_where_it_pays(dtype, allow_tf32):
    """Large convolutions of contiguous tensors, or of one of each, take tensor cores, and keep their formats."""
    needs_hopper()
    allow_tf32(True)
    parameters = (1, 1), (1, 1, 1, 1), (1, 1), 1
    for formats in itertools.product(FORMATS, FORMATS):
        make = Make("cuda", dtype)
        image = make(16, 128, 14, 14).to(memory_format=formats[0])
        weight = make(128, 128, 3, 3)
        grad = make(16, 128, 14, 14).to(memory_format=formats[1])
        tensor_cores = PASSES[:2] if dtype == torch.float32 else PASSES  # Winograd's may have TF32's gradient of weight
        assert all(ops.conv2d_path(image, weight, name, *parameters) == "sm90" for name in tensor_cores)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_contiguous_images_of_1x1_kernels_are_copied_too(dtype, allow_tf32):
    needs_hopper()
    # Where patches, which reads them as they lie, was measured at three times as long.
    shapes = (128, 1920, 7, 7), (1920, 1920, 1, 1)
    image, weight = (torch.empty(shape, device="cuda", dtype=dtype) for shape in shapes)
    for allowed in (True, False):
        allow_tf32(allowed)
        for name in PASSES:
            assert ops.conv2d_path(image, weight, name, (1, 1), (0,) * 4, (1, 1), 1) == "gemm_1x1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("batch", "channels", "outs", "columns"), [(1, 256, 256, 2048), (4, 64, 16, 300), (1, 24, 8, 5)]
)
def test_strides_of_dimensions_of_one_element(batch, channels, outs, columns, dtype, allow_tf32):
    """Images of one line are channels_last whatever the line's stride is, which PyTorch's suggestion goes by."""
    allow_tf32(False)
    make = Make("cuda", dtype)

    def image(count):
        return make(batch, columns, count).as_strided((batch, count, 1, columns), (columns * count, 1, 1, count))

    x, grad, weight = image(channels), image(outs), make(outs, channels, 1, 3)
    assert is_channels_last(x)
    results = [conv2d(x, weight, padding=(0, 1)), conv_transpose2d(grad, weight, padding=(0, 1))]
    results.append(ops.conv2d_backward_weight(grad, x, weight.shape, False, (1, 1), (0, 0, 1, 1), (1, 1), 1))
    exact = [t.double() for t in (x.contiguous(), grad.contiguous(), weight)]
    expected = [
        torch.nn.functional.conv2d(exact[0], exact[2], padding=(0, 1)),
        torch.nn.functional.conv_transpose2d(exact[1], exact[2], padding=(0, 1)),
        torch.nn.grad.conv2d_weight(exact[0], weight.shape, exact[1], padding=(0, 1)),
    ]
    for name, found, right in zip(("forward", "input", "weight"), results, expected, strict=True):
        assert_close(found, right, TOLERANCE[dtype], name)
