"""softmax and masked_softmax: what is special to them beside the properties that hold for every op."""

import contextlib
import math
import os

import pytest
import torch
from specs.masked_softmax import reference
from support.opspec import RELATIVE_NORM, Make, assert_close

import cuda_ops
from cuda_ops._library import ops
from cuda_ops.functional import log_softmax, masked_softmax, softmax

INF, NAN = float("inf"), float("nan")
# A part of a warp, a warp, a block and a cluster a row, in registers and not; a row in parts.
LENGTHS = [1, 2, 9, 31, 32, 33, 100, 129, 256, 257, 768, 1023, 1024, 1025, 4104, 5003, 16_387, 33_000, 262_144, 524_289]
PATHS = ["unaligned_row", "row", "split", "cluster", "thread_group"]


@pytest.mark.parametrize("inner", [1, 3])
@pytest.mark.parametrize("cols", [3, 16, 40, 1030, 1200])
def test_rows_of_infinities(device, cols, inner):
    """Where PyTorch has NaN, 0 and other values, with the odd value at the start, in the middle and at the end."""
    rows = []
    for column in (0, cols // 2, cols - 1):
        for value in (NAN, INF, -INF):
            row = torch.linspace(-1, 1, cols, dtype=torch.float64)
            row[column] = value
            rows.append(row)
    rows += [torch.full((cols,), -INF, dtype=torch.float64), torch.full((cols,), INF, dtype=torch.float64)]
    rows += [torch.tensor([-INF] * (cols - 1) + [1.0], dtype=torch.float64)]
    input = torch.stack(rows)[..., None].expand(-1, -1, inner).contiguous()
    for dtype in (torch.float32, torch.float64):
        output = softmax(input.to(device, dtype), 1)
        assert_close(output, torch.softmax(input.to(dtype).double(), 1), 2e-6)


@pytest.mark.parametrize("cols", LENGTHS)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_rows_that_start_anywhere(device_dtype, cols, offset):
    device, dtype = device_dtype
    generator = torch.Generator().manual_seed(cols)

    def make():
        storage = torch.rand(5 * cols + offset, generator=generator).sub(0.5).mul(8).to(device, dtype)
        return storage[offset:].view(5, cols)

    input, grad_output = make(), make()
    output = torch.ops.cuda_ops.softmax_forward(input, 1)
    assert_close(output, torch.softmax(input.cpu().double(), 1), RELATIVE_NORM[dtype])
    y, g = output.cpu().double(), grad_output.cpu().double()
    expected = y * (g - (g * y).sum(1, keepdim=True))
    # An output of its own, at an offset, too: what backward reads and writes then lies alike, or not; and an output at
    # an offset alone.
    there = input.copy_(output)
    for incoming, known in ((grad_output, output), (grad_output, there), (grad_output.clone(), there)):
        grad = torch.ops.cuda_ops.softmax_backward(incoming, known, 1)
        if cols > 1:  # with one the gradient is nothing but rounding
            assert_close(grad, expected, RELATIVE_NORM[dtype])


@pytest.mark.parametrize("cols", LENGTHS)
@pytest.mark.parametrize("offset", [0, 1])
def test_masked_rows_that_start_anywhere(device_dtype, cols, offset):
    """The input, the mask, or both off by an element: pieces where they lie alike."""
    device, dtype = device_dtype
    generator = torch.Generator().manual_seed(cols)
    values = torch.rand(3 * cols + offset, generator=generator).sub(0.5).mul(8).to(device, dtype)
    for mask in (
        torch.rand(cols + 1, generator=generator).gt(0.3).to(device),
        torch.rand(cols + 1, generator=generator).to(device, dtype),
    ):
        for begin in (0, 1):
            part = mask[begin : begin + cols]
            input = values[offset:].view(3, cols)
            output = masked_softmax(input, part, 0.5, True)
            expected = reference(
                input.cpu().double(), part.cpu() if mask.dtype == torch.bool else part.cpu().double(), 0.5, True
            )
            assert_close(output, expected, RELATIVE_NORM[dtype])


def test_sums_are_one_and_shifts_change_nothing(device):
    for shape in [(4, 50_257), (50_257, 2)]:
        dim = shape.index(50_257)
        input = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        output = softmax(input.to(device), dim)
        assert_close(output, torch.softmax(input.double(), dim), 1e-6)
        assert (output.double().sum(dim) - 1).abs().max() < 4e-6
    input = torch.randint(-8, 8, (6, 11), generator=torch.Generator().manual_seed(0)).float().to(device)
    assert torch.equal(softmax(input, 1), softmax(input + 8192, 1))


@pytest.mark.parametrize("dims", [0, 1, 2, 3, 4])
def test_implicit_dimension_warns_and_is_pytorchs(dims):
    input = torch.randn((2,) * dims, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="Implicit dimension choice for softmax has been deprecated") as ours:
        output = softmax(input)
    with pytest.warns(UserWarning):
        expected = torch.nn.functional.softmax(input)
    assert_close(output, expected.double(), 2e-6)
    assert ours[0].filename == __file__
    with pytest.warns(UserWarning, match="Implicit dimension"):
        assert torch.equal(cuda_ops.nn.Softmax()(input), output)


def test_dtype_casts_first(device):
    integers = torch.arange(5, device=device)
    output = softmax(integers, 0, dtype=torch.float64)
    assert output.dtype == torch.float64
    assert_close(output, torch.softmax(integers.cpu().double(), 0), 1e-12)
    assert softmax(torch.tensor([1e300, 0.0], dtype=torch.float64), 0, dtype=torch.float32).isnan().all()


def test_third_derivative():
    x = torch.tensor([0.3, -0.7, 1.1, 0.2], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, False, True])
    for ours, native in [
        (lambda: softmax(x, 0), lambda: torch.softmax(x, 0)),
        (lambda: masked_softmax(x, mask, 0.5), lambda: reference(x, mask, 0.5)),
    ]:
        results = []
        for function in (ours, native):
            value = function()[1]
            for _ in range(3):
                (gradient,) = torch.autograd.grad(value, x, create_graph=True)
                value = gradient.pow(3).sum()
            results.append(gradient.detach())
        assert_close(*results, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_second_derivatives_of_large_gradients(device, dtype):
    """Means of 700 and of 300, whose product is beyond float16's range, and of which nothing is left."""
    x = Make(device, dtype, requires_grad=True)(3, 20)
    grad = (Make(device, dtype, seed=1)(3, 20) + 700).requires_grad_()
    other = Make(device, dtype, seed=2)(3, 20) + 300
    mask = Make(device, seed=3)(3, 20) > -1
    for function, native in [
        (lambda x: softmax(x, 1), lambda x: torch.softmax(x, 1)),
        (lambda x: masked_softmax(x, mask.to(x.device), 0.5), lambda x: reference(x, mask.to(x.device), 0.5)),
    ]:
        found = []
        for f, leaves in [
            (function, (x, grad, other)),
            (native, [t.detach().cpu().double().requires_grad_() for t in (x, grad, other)]),
        ]:
            (first,) = torch.autograd.grad(f(leaves[0]), leaves[0], leaves[1], create_graph=True)
            found.append(torch.autograd.grad(first, leaves[:2], leaves[2]))
        for actual, expected in zip(*found, strict=True):
            assert actual.isfinite().all()
            # Of numbers of hundreds, each rounded, differences of ones are left.
            assert (actual.double().cpu() - expected).abs().max() < 400 * torch.finfo(dtype).eps


def test_modules_are_drop_ins():
    ours, native = cuda_ops.nn.Softmax(dim=1), torch.nn.Softmax(dim=1)
    assert repr(ours) == repr(native)
    assert_close(ours(torch.ones(4, 7)), native(torch.ones(4, 7).double()), 2e-6)
    images = torch.randn(2, 3, 4, 5)
    for x in (images, images[0]):
        assert_close(cuda_ops.nn.Softmax2d()(x), torch.nn.Softmax2d()(x.double()), 2e-6)
    assert repr(cuda_ops.nn.Softmax2d()) == repr(torch.nn.Softmax2d())
    with pytest.raises(ValueError, match=r"Softmax2d: expected input to be 3D or 4D, got shape \[2, 3\]"):
        cuda_ops.nn.Softmax2d()(torch.ones(2, 3))


@pytest.mark.parametrize("cols", [6, 8, 40, 1032, 1030])
def test_masked_nonfinite_scores(device, cols):
    """What does not take part is not looked at; of what does, NaN and +inf make the row NaN."""
    for value in (NAN, INF, -INF):
        input = torch.zeros(2, cols, device=device)
        input[0, 3] = value
        mask = torch.ones(cols, dtype=torch.bool, device=device)
        for takes_part in (True, False):
            mask[3] = takes_part
            output = masked_softmax(input, mask).cpu()
            expected = torch.softmax(input.cpu().masked_fill(~mask.cpu(), -INF), -1)
            assert_close(output, expected.double(), 2e-6)
        causal = masked_softmax(input.view(2, cols).expand(cols, 2, cols).transpose(0, 1).contiguous(), None, 1.0, True)
        hidden = torch.ones(cols, cols, dtype=torch.bool).triu(1)
        expected = torch.softmax(input.cpu()[:, None].expand(2, cols, cols).masked_fill(hidden, -INF), -1)
        if value != -INF:
            assert_close(causal, expected.double(), 2e-6)


def test_rows_without_a_score_are_zero_and_so_are_their_gradients(device):
    for cols in (5, 8, 256, 5000):
        input = torch.randn(3, cols, device=device, requires_grad=True)
        mask = torch.ones(3, cols, dtype=torch.bool, device=device)
        mask[1] = False
        output = masked_softmax(input, mask)
        (grad,) = torch.autograd.grad(output, input, torch.randn_like(output))
        assert (output[1] == 0).all() and (grad[1] == 0).all()
        assert (output[0] > 0).all() and grad.isfinite().all()
        additive = torch.zeros(3, 1, device=device)
        additive[1] = -INF
        assert torch.equal(masked_softmax(input, additive), output)


def test_masked_softmax_is_that_of_attention(device):
    query, key, value = torch.randn(3, 2, 3, 7, 8, device=device, dtype=torch.float64)
    mask = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(0)).to(device) > 0.2
    mask |= torch.eye(7, dtype=torch.bool, device=device)
    weights = masked_softmax(query @ key.mT, mask, 1 / math.sqrt(8))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(weights @ value, expected)


@contextlib.contextmanager
def forced(path, *names):
    """CUDA_OPS_<NAME>_PATH for each of the ops."""
    variables = [f"CUDA_OPS_{name}_PATH" for name in names]
    os.environ.update(dict.fromkeys(variables, path))
    ops.reload_paths()
    try:
        yield
    finally:
        for variable in variables:
            del os.environ[variable]
        ops.reload_paths()


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["row", "split", "thread_group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_forced_paths_of_masked_softmax_agree(path, dtype):
    for rows, cols in [(37, 264), (3, 50_257)]:
        if path == "row" and cols > 264:
            continue
        x = torch.randn(rows, cols, device="cuda", dtype=dtype)
        mask = torch.rand(cols, device="cuda") > 0.2
        with forced(path, "MASKED_SOFTMAX"):
            output = masked_softmax(x, mask)
            assert_close(output, reference(x.cpu().double(), mask.cpu()), RELATIVE_NORM[dtype])
            assert torch.equal(masked_softmax(x, mask), output)


@pytest.mark.cuda
@pytest.mark.parametrize("cols", [16_385, 50_257])
def test_long_masked_rows(cols):
    """In parts: causal, without any score in a part or in the row, and with what is not finite."""
    x = torch.randn(5, cols, generator=torch.Generator().manual_seed(cols))
    mask = torch.ones(5, cols, dtype=torch.bool)
    mask[1], mask[2, :9000], mask[3, 1:] = False, False, False
    x[4, 70], x[2, 5], x[0, 10_000] = INF, NAN, -INF
    for causal in (False, True):
        output = masked_softmax(x.cuda(), mask.cuda(), 0.5, causal)
        assert_close(output, reference(x.double(), mask, 0.5, causal), 2e-6)


def takes(path, backward, dtype, rows, cols):
    names, _, _, _, flags = ops.softmax_paths(backward, dtype, rows, cols, 1, [])
    return flags[names.index(path)] & 1


@pytest.mark.cuda
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows, cols", [(1, 37), (35, 264), (3, 1025), (5, 16_387), (2, 50_257), (3, 131_072)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_every_path(path, rows, cols, dtype):
    """Forward and backward of both ops, twice to the same bits; results lie elsewhere within 16 bytes or not."""
    generator = torch.Generator().manual_seed(cols)
    for offset in (0, 1) if path in ("split", "thread_group") else (0,):
        x, g, y = (
            torch.randn(rows * cols + offset, generator=generator).mul(3).to("cuda", dtype)[offset:].view(rows, cols)
            for _ in range(3)
        )
        for op, native in (("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
            forward, backward = getattr(ops, f"{op}_forward"), getattr(ops, f"{op}_backward")
            expected = native(x.cpu().double(), 1)
            y.copy_(expected)
            a, b = g.cpu().double(), y.cpu().double()
            exact = b * (a - (a * b).sum(1, keepdim=True))
            if op == "log_softmax":
                exact = a - b.exp() * a.sum(1, keepdim=True)
            with forced(path, op.upper()):
                for of_gradient, function, arguments, result in (
                    (False, forward, (x, 1), expected),
                    (True, backward, (g, y, 1), exact),
                ):
                    if takes(path, of_gradient, dtype, rows, cols):
                        actual = function(*arguments)
                        assert_close(actual, result, RELATIVE_NORM[dtype])
                        assert torch.equal(function(*arguments), actual)


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["unaligned_row", "split", "cluster"])
@pytest.mark.parametrize("cols", [257, 16_385, 40_003])
def test_rows_of_infinities_by_every_path(path, cols):
    if path == "unaligned_row" and cols > 16_385:
        return
    rows = torch.linspace(-1, 1, cols, dtype=torch.float64).repeat(12, 1)
    for row, column in enumerate((0, cols // 2, cols - 1)):
        rows[3 * row, column], rows[3 * row + 1, column], rows[3 * row + 2, column] = NAN, INF, -INF
    rows[9], rows[10], rows[11, :-1] = -INF, INF, -INF
    with forced(path, "SOFTMAX", "LOG_SOFTMAX"):
        for function, native in ((softmax, torch.softmax), (log_softmax, torch.log_softmax)):
            assert_close(function(rows.to("cuda", torch.float32), 1), native(rows.float().double(), 1), 2e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("shape, dim", [((40_001, 3), 0), ((1, 70_001, 5), 1), ((2, 9000, 33), 1), ((5, 3, 50_257), 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_and_few_along_any_dimension(shape, dim, dtype):
    x, g = (torch.randn(shape, generator=torch.Generator().manual_seed(i)).to("cuda", dtype) for i in range(2))
    for name, native in (("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
        y = getattr(ops, f"{name}_forward")(x, dim)
        assert_close(y, native(x.cpu().double(), dim), RELATIVE_NORM[dtype])
        grad = getattr(ops, f"{name}_backward")(g, y, dim)
        a, b = g.cpu().double(), y.cpu().double()
        exact = b * (a - (a * b).sum(dim, keepdim=True))
        if name == "log_softmax":
            exact = a - b.exp() * a.sum(dim, keepdim=True)
        assert_close(grad, exact, RELATIVE_NORM[dtype])
        transposed = x.transpose(0, dim).contiguous().transpose(0, dim)  # read as it lies, after a copy
        assert torch.equal(getattr(ops, f"{name}_forward")(transposed, dim), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_a_dtype_that_is_asked_for_holds_under_autocast(function, dtype, device):
    for place in (device, "meta"):
        input = torch.randn(3, 5, device=place)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            output = function(input, 1, dtype=dtype)
        assert output.dtype == dtype and output.device == input.device
        if place != "meta":
            exact = getattr(torch, function.__name__)(input.to(dtype).cpu().double(), 1)
            assert_close(output, exact, RELATIVE_NORM[dtype])


@pytest.mark.cuda
def test_more_rows_than_a_grid_has_blocks():
    for rows, cols in ((600_000, 37), (70_000, 1025)):
        x = torch.randn(rows, cols, device="cuda")
        for part in (slice(0, 100), slice(rows - 100, rows)):
            assert_close(softmax(x, 1)[part], torch.softmax(x[part].cpu().double(), 1), 2e-6)


@pytest.mark.cuda
def test_more_elements_than_32_bits_count():
    rows, cols = 32_769, 65_537
    if torch.cuda.mem_get_info()[0] < 4 * rows * cols * 2:
        pytest.skip("needs 18 GB of device memory")
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    y = softmax(x, 1)
    grad = ops.softmax_backward(x, y, 1)
    a, b = x[-2:].cpu().double(), y[-2:].cpu().double()
    assert_close(y[-2:], torch.softmax(a, 1), RELATIVE_NORM[torch.bfloat16])
    assert_close(grad[-2:], b * (a - (a * b).sum(1, keepdim=True)), RELATIVE_NORM[torch.bfloat16])
