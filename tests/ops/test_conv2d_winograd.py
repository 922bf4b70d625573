"""conv2d's Winograd path: which calls take it, that it is right, and that its error is what is said of it."""

import itertools

import pytest
import torch
from support.conv2d_cases import FORMATS, PASSES, TOLERANCE, is_channels_last, native
from support.opspec import Make, assert_close

import cuda_ops
from cuda_ops import _library
from cuda_ops._errors import UserError
from cuda_ops._library import ops
from cuda_ops.functional import conv2d, conv_transpose2d

needs_tables = pytest.mark.skipif(not _library.has_cuda(), reason="needs a build with CUDA, whose tables these are")
cuda = pytest.mark.cuda


def meta(*size, dtype=torch.float32, channels_last=False):
    tensor = torch.empty(size, dtype=dtype, device="meta")
    return tensor.to(memory_format=torch.channels_last) if channels_last else tensor


def explained(*tensors, capability="9.0", **kwargs):
    return cuda_ops.explain(conv2d, *tensors, show=False, capability=capability, **kwargs).products


def chosen(*tensors, **kwargs):
    return [product.chosen.name for product in explained(*tensors, **kwargs)]


@needs_tables
@pytest.mark.parametrize("channels_last", [False, True])
def test_what_takes_it(channels_last, monkeypatch):
    """float32 with 3x3 kernels and stride 1, where it pays: all three products, in both formats."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for batch, inputs, outputs, size in [(64, 64, 64, 56), (64, 256, 256, 14), (32, 512, 512, 7)]:
        image, weight = meta(batch, inputs, size, size, channels_last=channels_last), meta(outputs, inputs, 3, 3)
        for padding in (0, 1, 2):
            assert chosen(image, weight, padding=padding) == ["winograd"] * 3
        assert "winograd" not in chosen(image, weight, stride=2)
        assert "winograd" not in chosen(image, weight, dilation=2)
        assert "winograd" not in chosen(image.double(), weight.double())
        assert "winograd" not in chosen(image.half(), weight.half())
        # Of groups the grouped path takes some.
        assert "simt" not in chosen(image, meta(outputs, inputs // 2, 3, 3), groups=2)
        assert "winograd" not in chosen(image, meta(outputs, inputs, 5, 5))
        # Transforms of memory that is slow beside the multiply-adds.
        assert "winograd" not in chosen(image, weight, capability="8.6")


@needs_tables
def test_groups_have_whole_vectors(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for channels, whole in ((112, True), (110, False)):
        for product in explained(meta(96, 11 * channels, 18, 18), meta(11 * channels, channels, 3, 3), groups=11):
            (row,) = (path for path in product.paths if path.name == "winograd")
            assert row.supports == whole
            assert whole or row.reason == "a group's channels are no multiple of four"


@needs_tables
def test_of_one_image(monkeypatch):
    """Where simt has long sums for a few multiprocessors alone, another path is taken. Those of the gradient of the
    weight it splits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for channels_last in (False, True):
        image = meta(1, 256, 14, 14, channels_last=channels_last)
        assert set(chosen(image, meta(256, 256, 3, 3), padding=1)[:2]) <= {"winograd", "im2col"}


@needs_tables
def test_what_is_too_small_for_it(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert chosen(meta(2, 5, 9, 9), meta(7, 5, 3, 3), padding=1)[0] != "winograd"
    # Few channels of many pixels and few pixels, of which by the expected times the gradient of the weight alone has
    # enough sums.
    for batch, channels, size in [(64, 8, 56), (1, 32, 7)]:
        image, weight = meta(batch, channels, size, size), meta(channels, channels, 3, 3)
        assert "winograd" not in chosen(image, weight, padding=1)[:2]


@needs_tables
def test_tensor_cores_come_first(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    for channels_last in (False, True):
        image = meta(64, 256, 14, 14, channels_last=channels_last)
        assert chosen(image, meta(256, 256, 3, 3), padding=1) == ["sm90"] * 3
    # Channels that they do not take are padded for them.
    assert chosen(meta(64, 255, 14, 14), meta(255, 255, 3, 3), padding=1) == ["padded"] * 3


@needs_tables
def test_exactness_is_obeyed_by_explain(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    tensors = meta(64, 256, 14, 14), meta(256, 256, 3, 3)
    for value in ("2", "4", ""):
        monkeypatch.setenv("CUDA_OPS_CONV2D_WINOGRAD", value)
        assert chosen(*tensors, padding=1) == ["winograd"] * 3
    monkeypatch.setenv("CUDA_OPS_CONV2D_WINOGRAD", "0")
    assert "winograd" not in chosen(*tensors, padding=1)
    for product in explained(*tensors, padding=1):
        (row,) = (path for path in product.paths if path.name == "winograd")
        assert row.reason == "Winograd's algorithm is not allowed"
    monkeypatch.setenv("CUDA_OPS_CONV2D_WINOGRAD", "3")
    with pytest.raises(UserError, match="conv2d: expected CUDA_OPS_CONV2D_WINOGRAD to be 0, 2 or 4, got 3"):
        explained(*tensors, padding=1)


@pytest.fixture
def winograd(monkeypatch):
    """Forces the path with tiles of this size."""

    def force(tile):
        monkeypatch.setenv("CUDA_OPS_CONV2D_PATH", "winograd")
        monkeypatch.setenv("CUDA_OPS_CONV2D_WINOGRAD", str(tile))

    return force


# F(2x2) rounds as the sums do, F(4x4) twice as much.
TOLERANCES = {2: TOLERANCE[torch.float32], 4: 2 * TOLERANCE[torch.float32]}

# batch, input channels, output channels, size, {top, bottom, left, right} of the padding.
CASES = [
    (2, 64, 64, (9, 9), (1, 1, 1, 1)),  # tiles past the image
    (3, 5, 7, (8, 13), (0, 0, 0, 0)),  # channels that are no whole vectors
    (1, 1, 33, (3, 3), (0, 0, 0, 0)),  # one pixel of output
    (2, 40, 24, (12, 16), (2, 2, 2, 2)),  # rows of whole vectors
    (2, 12, 20, (10, 18), (1, 1, 1, 1)),  # rows of pairs
    (4, 17, 130, (7, 7), (0, 1, 2, 0)),  # paddings of four kinds
    (1, 8, 16, (5, 6), (4, 3, 5, 4)),  # more padding than kernel: some of the output is bias alone
    (16, 256, 128, (14, 14), (1, 1, 1, 1)),
    (1, 96, 96, (1, 40), (1, 1, 1, 1)),  # one row
]


def amid_nan(tensor):
    """The same tensor in the midst of NaN: a kernel that reads beyond its ends shows it."""
    memory = torch.full((tensor.numel() + 2048,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return torch.as_strided(memory, tensor.shape, tensor.stride(), 1024).copy_(tensor)


def products(x, w, b, g, padding):
    """The results of all passes, each in the formats of its tensors."""
    parameters = (1, 1), padding, (1, 1), x.shape[1] // w.shape[1]
    assert all(ops.conv2d_path(x, w, name, *parameters) == "winograd" for name in PASSES)
    return (
        ops.conv2d_forward(x, w, b, *parameters),
        ops.conv2d_backward_input(g, w, x.shape, is_channels_last(x), *parameters),
        ops.conv2d_backward_weight(g, x, w.shape, is_channels_last(w), *parameters),
    )


# And of how many groups: their channels are whole vectors.
GROUPS = [
    (3, 12, 24, (9, 11), (1, 1, 1, 1), 3),
    (2, 132, 36, (7, 8), (0, 1, 2, 0), 3),
    (16, 512, 256, (14, 14), (1, 1, 1, 1), 2),
]


@cuda
@pytest.mark.parametrize("case", [*((*case, 1) for case in CASES), *GROUPS])
@pytest.mark.parametrize("tile", [2, 4])
def test_values(tile, case, winograd):
    """All products in every mix of formats, against float64, the same twice."""
    winograd(tile)
    batch, inputs, outputs, size, padding, groups = case
    for formats in itertools.product(FORMATS, FORMATS, FORMATS):
        make = Make("cuda", torch.float32)
        x = amid_nan(make(batch, inputs, *size).to(memory_format=formats[0]))
        w = amid_nan(make(outputs, inputs // groups, 3, 3).to(memory_format=formats[1]))
        b = amid_nan(make(outputs))
        leaves = [t.double().cpu().contiguous().requires_grad_() for t in (x, w)]
        padded = torch.nn.functional.pad(leaves[0], (*padding[2:], *padding[:2]))
        expected = native(padded, leaves[1], b.double().cpu(), groups=groups)
        g = amid_nan(Make("cuda", torch.float32, seed=1)(*expected.shape).to(memory_format=formats[2]))
        wanted = (expected.detach(), *torch.autograd.grad(expected, leaves, g.double().cpu()))
        results, again = products(x, w, b, g, padding), products(x, w, b, g, padding)
        for name, result, other, right in zip(PASSES, results, again, wanted, strict=True):
            assert_close(result, right, TOLERANCES[tile], f"{name} of {formats}")
            assert torch.equal(result, other)


@cuda
@pytest.mark.parametrize("channels_last", [False, True])
def test_chunks(channels_last, winograd):
    """Transforms of more than the workspace's 256 MB, in several chunks, the last of them shorter."""
    winograd(4)
    make = Make("cuda", torch.float32)
    x, g = make(33, 64, 110, 110), make(33, 64, 110, 110)
    if channels_last:
        x, g = x.to(memory_format=torch.channels_last), g.to(memory_format=torch.channels_last)
    w = make(64, 64, 3, 3)
    results = products(x, w, None, g, (1, 1, 1, 1))
    leaves = [t.double().requires_grad_() for t in (x, w)]
    expected = native(*leaves, padding=1)
    grads = torch.autograd.grad(expected, leaves, g.double())
    for name, result, wanted in zip(PASSES, results, (expected, *grads), strict=True):
        assert_close(result, wanted, TOLERANCES[4], name)


@cuda
def test_workspace_is_bounded(winograd):
    """The transforms of a large batch take at most 256 MB, and those of its weight."""
    winograd(4)
    x, w = torch.randn(64, 128, 112, 112, device="cuda"), torch.randn(128, 128, 3, 3, device="cuda")
    conv2d(x, w, padding=1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = conv2d(x, w, padding=1)
    assert torch.cuda.max_memory_allocated() - before - output.nbytes < 300 << 20


@cuda
def test_error(winograd, monkeypatch):
    """Beside the sums' own, by norm: F(2x2) at most one and a half times as large, F(4x4) at most three times. Of as
    many images as give simt more tiles than it wants blocks, since it makes sums of fewer in parts, with less error."""
    make = Make("cuda", torch.float32)
    for images, inputs, size in ((12, 32, 56), (48, 256, 28), (192, 512, 14)):
        x, w = make(images, inputs, size, size), make(64, inputs, 3, 3)
        expected = native(x.double(), w.double(), padding=1)
        errors = {}
        for tile in (0, 2, 4):
            winograd(tile)
            if tile == 0:
                monkeypatch.setenv("CUDA_OPS_CONV2D_PATH", "simt")
            errors[tile] = ((conv2d(x, w, padding=1).double() - expected).norm() / expected.norm()).item()
        assert errors[2] <= 1.5 * errors[0] and errors[4] <= 3 * errors[0], (inputs, errors)


@cuda
def test_exactness_is_obeyed(monkeypatch, winograd):
    """With CUDA_OPS_CONV2D_WINOGRAD=0 results are another path's, bit by bit; a forced path that is not allowed is
    refused."""
    make = Make("cuda", torch.float32)
    x, w = make(16, 128, 14, 14).detach(), make(128, 128, 3, 3).detach()
    by_default = conv2d(x, w, padding=1)
    assert ops.conv2d_path(x, w, "forward", (1, 1), (1, 1, 1, 1), (1, 1), 1) == "winograd"
    monkeypatch.setenv("CUDA_OPS_CONV2D_WINOGRAD", "0")
    exact = conv2d(x, w, padding=1)
    path = ops.conv2d_path(x, w, "forward", (1, 1), (1, 1, 1, 1), (1, 1), 1)
    assert path != "winograd"
    if path == "simt":  # others take copies in channels_last, which a forced path is not given
        monkeypatch.setenv("CUDA_OPS_CONV2D_PATH", "simt")
        assert torch.equal(exact, conv2d(x, w, padding=1))
    expected = native(x.double(), w.double(), padding=1)
    assert (exact - expected).norm() <= 1e-6 * expected.norm()
    assert not torch.equal(exact, by_default)
    winograd(0)
    with pytest.raises(NotImplementedError, match="CUDA_OPS_CONV2D_PATH=winograd cannot do this convolution"):
        conv2d(x, w, padding=1)
    winograd(3)
    with pytest.raises(RuntimeError, match="conv2d: expected CUDA_OPS_CONV2D_WINOGRAD to be 0, 2 or 4, got 3"):
        conv2d(x, w, padding=1)


@cuda
@pytest.mark.parametrize("tile", [2, 4])
def test_nonfinite_values_stay_in_their_tiles(tile, winograd):
    """NaN where PyTorch has a NaN or an infinity, and in no tile that does not see it."""
    winograd(tile)
    make = Make("cuda", torch.float32)
    for value in (torch.nan, torch.inf, -torch.inf):
        x, w = make(2, 8, 16, 16).detach(), make(8, 8, 3, 3).detach()
        x[1, 3, 9, 6] = value
        result, expected = conv2d(x, w, padding=1), native(x, w, padding=1)
        assert not result[~expected.isfinite()].isfinite().any()
        allowed = torch.zeros(2, 1, 16, 16, dtype=torch.bool, device="cuda")
        first = [(i - 1) // tile * tile for i in (9, 6)]
        last = [(i + 1) // tile * tile + tile for i in (9, 6)]
        allowed[1, :, first[0] : last[0], first[1] : last[1]] = True
        assert result[~allowed.expand_as(result)].isfinite().all()


@cuda
@pytest.mark.parametrize("tile", [2, 4])
def test_second_derivatives(tile, winograd):
    winograd(tile)
    make = Make("cuda", torch.float32)
    results = []
    x, w = make(2, 6, 9, 10).detach(), make(7, 6, 3, 3).detach()
    for function, dtype in ((conv2d, torch.float32), (native, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, w)]
        output = function(*leaves, padding=1)
        grads = torch.autograd.grad((output * output).sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum((g * g).sum() for g in grads), leaves))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, 4 * TOLERANCES[tile])


@cuda
@pytest.mark.parametrize("tile", [2, 4])
def test_transposed_convolution(tile, winograd):
    winograd(tile)
    make = Make("cuda", torch.float32)
    x, w, b = make(3, 20, 9, 11).detach(), make(20, 12, 3, 3).detach(), make(12).detach()
    for padding in (0, 1, 2):
        expected = torch.nn.functional.conv_transpose2d(x.double(), w.double(), b.double(), padding=padding)
        assert_close(conv_transpose2d(x, w, b, padding=padding), expected, TOLERANCES[tile])


@cuda
def test_strided_and_misaligned_tensors(winograd):
    winograd(4)
    make = Make("cuda", torch.float32)
    memory = make(2 * 8 * 12 * 16 + 1).detach()
    weights = make(16 * 8 * 9 + 3).detach()
    x, w = memory[1:].view(2, 8, 12, 16), weights[3:].view(16, 8, 3, 3)
    for image in (x, x.permute(0, 1, 3, 2), x[:, :, ::2], x[:, :1].expand(2, 8, 12, 16)):
        expected = native(image.double(), w.double(), padding=1)
        assert_close(conv2d(image, w, padding=1), expected, TOLERANCES[4])
