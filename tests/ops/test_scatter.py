"""index_add and scatter_add beyond their specifications: bad indices, sums of values of very different sizes, tensors
in place, determinism on CUDA."""

import pytest
import torch
from support.opspec import assert_close

from cuda_ops.functional import index_add, index_add_, scatter_add, scatter_add_


def adders(rows, cols, device="cpu", dtype=torch.float32):
    """Both functions, of indices that name rows, in the three ways in which they go there."""

    def expanded(x, index, source):
        return scatter_add(x, 0, index.view(-1, 1).expand(source.shape), source)

    def of_elements(x, index, source):
        return scatter_add(x, 0, index.view(-1, 1).repeat(1, source.shape[1]), source)

    x = torch.zeros(rows, cols, device=device, dtype=dtype)
    return x, {
        "index_add": lambda x, i, s: index_add(x, 0, i, s),
        "scatter_add, rows": expanded,
        "scatter_add": of_elements,
    }


@pytest.mark.parametrize("cols", [1, 20, 300])
@pytest.mark.parametrize("alpha", [2.0, float("inf"), float("nan")])
def test_rows_that_no_index_names_stay_as_they_are(cols, alpha, device_dtype):
    """Also the signs of zeros, and beside an alpha that is no number."""
    device, dtype = device_dtype
    x = torch.tensor([[-0.0], [1.0], [-0.0], [3.0]], device=device, dtype=dtype).repeat(1, cols)
    source = torch.ones(2, cols, device=device, dtype=dtype)
    y = index_add(x, 0, torch.tensor([1, 1], device=device), source, alpha=alpha)
    for row in (0, 2, 3):
        assert torch.equal(y[row], x[row])
        assert torch.equal(y[row].signbit(), x[row].signbit())
    assert torch.equal(y[1].isfinite(), torch.full_like(y[1], alpha == 2.0, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1])
def test_bad_index_is_an_error_on_the_cpu(bad, dtype):
    x, functions = adders(3, 2)
    for name, add in functions.items():
        position = 2 if name == "scatter_add" else 1
        message = rf"^{name.split(',')[0]}: expected index to be in \[0, 3\), got {bad} at position {position}$"
        with pytest.raises(IndexError, match=message):
            add(x, torch.tensor([0, bad], dtype=dtype), torch.ones(2, 2))


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [-1, 3, 2**40])
def test_bad_index_on_cuda_is_no_address_and_is_told_later(bad):
    x, functions = adders(3, 20, "cuda")
    source = torch.ones(4, 20, device="cuda", requires_grad=True)
    index = torch.tensor([2, bad, 0, 2], device="cuda")
    for name, add in functions.items():
        output = add(x, index, source)
        torch.cuda.synchronize()
        assert output[:, 7].tolist() == [1, 0, 2]
        op = name.split(",")[0]
        position = r"\d+" if name == "scatter_add" else 1
        message = rf"^{op}: expected index to be in \[0, 3\), got {bad} at position {position} of an earlier call"
        with pytest.raises(IndexError, match=message):
            add(x, index[2:], source[2:])
        add(x, index[2:], source[2:])
    ops, ones = torch.ops.cuda_ops, torch.ones(3, 20, device="cuda")
    assert ops.index_add_backward(ones, 0, index, 2.0)[:, 0].tolist() == [2, 0, 2, 2]
    elements = index.view(-1, 1).repeat(1, 20)
    assert ops.scatter_add_backward(ones, 0, elements, [4, 20])[:, 0].tolist() == [1, 0, 1, 1]


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [-1, 3])
def test_bad_index_on_cuda_reaches_into_no_other_slab(bad):
    # Beside dimension 1 there are slabs before and behind, into which an index out of range would point.
    x = torch.zeros(3, 3, 20, device="cuda")
    source = torch.ones(3, 2, 20, device="cuda")
    index = torch.tensor([bad, 1], device="cuda")
    for add in (
        lambda: index_add(x, 1, index, source),
        lambda: scatter_add(x, 1, index.view(1, 2, 1).expand(source.shape), source),
        lambda: scatter_add(x, 1, index.view(1, 2, 1).repeat(3, 1, 20), source),
    ):
        output = add()
        torch.cuda.synchronize()
        assert output.sum((0, 2)).tolist() == [0, 60, 0]
        with pytest.raises(IndexError, match=rf"got {bad} at position \d+ of an earlier call"):
            add()


@pytest.mark.cuda
def test_bad_index_raises_at_once_where_the_environment_asks(monkeypatch):
    monkeypatch.setenv("CUDA_OPS_CHECK_INDICES", "1")
    x, functions = adders(3, 20, "cuda")
    for add in functions.values():
        with pytest.raises(IndexError, match=r"got 7 at position \d+$"):
            add(x, torch.tensor([7, 0], device="cuda"), torch.ones(2, 20, device="cuda"))


def test_values_that_are_not_finite(device_dtype):
    device, dtype = device_dtype
    inf, nan = float("inf"), float("nan")
    x, functions = adders(5, 3, device, dtype)
    x[4] = inf
    index = torch.tensor([0, 0, 1, 1, 2, 3, 4], device=device)
    values = torch.tensor([inf, 1.0, inf, -inf, -inf, nan, 2.0], device=device, dtype=dtype)
    for name, add in functions.items():
        sums = add(x, index, values.view(-1, 1).repeat(1, 3))
        expected = torch.tensor([inf, nan, -inf, nan, inf], device=device, dtype=dtype)
        torch.testing.assert_close(sums[:, 1], expected, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_places_do_not_disturb_each_other(device, dtype):
    """Sums of values near both ends of the exponents, and a small one beside larger ones that cancel."""
    limits = torch.finfo(dtype)
    values = torch.tensor([limits.max / 8, 1e-20, limits.tiny, limits.smallest_normal / 8, -3.0], dtype=dtype)
    index = torch.arange(5).repeat(3)
    sums = scatter_add(torch.zeros(5, dtype=dtype, device=device), 0, index.to(device), values.repeat(3).to(device))
    torch.testing.assert_close(sums.cpu(), 3 * values, rtol=4 * limits.eps, atol=0)
    big = 2.0 ** (20 if dtype == torch.float32 else 50)
    values = torch.tensor([big, 1.0, -big, 1.0, 0.0], dtype=dtype, device=device)
    sums = scatter_add(torch.ones(2, dtype=dtype, device=device), 0, index[:5].to(device) * 0, values)
    assert sums.tolist() == [3, 1]


def test_sums_of_many_values_are_near_to_exact(device_dtype):
    """A hundred thousand values in three places, in each of the ways."""
    device, dtype = device_dtype
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(3, (100_000,), generator=generator)
    source = torch.rand(100_000, 2, generator=generator, dtype=torch.float64).to(dtype)
    expected = torch.zeros(3, 2, dtype=torch.float64).index_add(0, index, source.double())
    x, functions = adders(3, 2, device, dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}[dtype]
    for name, add in functions.items():
        # The CPU adds scatter_add's elements one after the other, in their dtype, as PyTorch does.
        loose = name == "scatter_add" and device == "cpu" and dtype == torch.float32
        actual = add(x, index.to(device), source.to(device))
        if expected.max() > torch.finfo(dtype).max:
            continue
        assert_close(actual, expected, 2e-4 if loose else tolerance, name)


def test_in_place(device):
    """The tensor itself, whatever its layout; autograd sees it, and what was saved before."""
    index, source = torch.tensor([1, 0, 1], device=device), torch.rand(3, 4, device=device)
    elements = index.view(3, 1).repeat(1, 4)
    for layout in (lambda t: t, lambda t: t.t().contiguous().t(), lambda t: t.repeat(1, 2)[:, ::2]):
        for add, native, i in [(index_add_, torch.index_add, index), (scatter_add_, torch.scatter_add, elements)]:
            x = layout(torch.rand(2, 4, device=device))
            before, address = x.clone(), x.data_ptr()
            assert add(x, 0, i, source) is x and x.data_ptr() == address
            torch.testing.assert_close(x, native(before, 0, i, source))
    leaf = torch.rand(2, 4, device=device, requires_grad=True)
    for add, i in [(index_add_, index), (scatter_add_, elements)]:
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            add(leaf, 0, i, source)
        y = leaf * 1
        z = y * y
        add(y, 0, i, source)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
        with pytest.raises(RuntimeError, match=r"single memory location"):
            add(torch.zeros(1, 4, device=device).expand(2, 4), 0, i, source)


def test_operands_in_the_memory_that_is_written(device):
    memory = torch.zeros(12, dtype=torch.int32, device=device)
    index, x = memory[:2], memory.view(torch.float32)
    source = torch.ones(2, device=device)
    refusal = "expected {} to share no memory with input"
    for add, name in ((index_add_, "source"), (scatter_add_, "src")):
        with pytest.raises(RuntimeError, match=refusal.format("index")):
            add(x, 0, index, source)
        with pytest.raises(RuntimeError, match=refusal.format(name)):
            add(x, 0, torch.tensor([3, 4], device=device), x[1:3])
    assert not memory.any()


def test_a_negative_view_without_gaps(device):
    index, source = torch.tensor([1, 1], device=device), torch._neg_view(torch.rand(2, 3, device=device))
    x = torch.rand(2, 3, device=device)
    expected = x.index_add(0, index, source.clone())
    torch.testing.assert_close(index_add(x, 0, index, source), expected)
    torch.testing.assert_close(index_add_(x, 0, index, source), expected)


def test_an_imaginary_part(device):
    """A view that PyTorch negates as it reads."""
    z = torch.complex(torch.rand(2, 3), torch.rand(2, 3)).to(device)
    x, source = z.conj().imag, torch.complex(torch.rand(2, 3), torch.rand(2, 3)).to(device).conj().imag
    assert x.is_neg()
    index = torch.tensor([1, 1], device=device)
    expected = x.clone().index_add(0, index, source.clone())
    torch.testing.assert_close(index_add(x, 0, index, source), expected)
    index_add_(x, 0, index, source)
    torch.testing.assert_close(x, expected)
    scatter_add_(x, 0, index.view(2, 1).repeat(1, 3), source)
    torch.testing.assert_close(x, expected.index_add(0, index, source.clone()))


def test_forward_mode_in_place_is_that_of_torch_func(device):
    index = torch.tensor([1, 0, 1], device=device)
    x, source = torch.rand(2, device=device), torch.rand(3, device=device)
    value, tangent = torch.func.jvp(lambda x, s: index_add_(x * 1, 0, index, s, alpha=2), (x, source), (x, source))
    torch.testing.assert_close(tangent, value)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("places", [7, 3000])
def test_atomics_where_nobody_asks_for_repetition(places, dtype):
    """Near to the exact sums, with bad indices told and NaN kept; halves are rounded once, and few of them integers."""
    generator = torch.Generator().manual_seed(places)
    torch.use_deterministic_algorithms(False)  # the fixture that poisons outputs has it on
    for count in (5, 6000):
        index = torch.randint(places, (count, 2), generator=generator)
        source = torch.randn(count, 2, generator=generator, dtype=torch.float64).to(dtype)
        x = torch.randn(places, 2, generator=generator, dtype=torch.float64).to(dtype)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        sums = scatter_add(x.cuda(), 0, index.cuda(), source.cuda())
        assert_close(sums, x.double().scatter_add(0, index, source.double()), tolerance, "scatter_add")
        sums = index_add(x.cuda(), 0, index[:, 0].cuda(), source.cuda(), alpha=-0.5)
        expected = x.double().index_add(0, index[:, 0], source.double(), alpha=-0.5)
        assert_close(sums, expected, tolerance, "index_add")
    source[0] = float("nan")
    index[1] = places
    sums = scatter_add(x.cuda(), 0, index.cuda(), source.cuda())
    assert sums[index[0, 0], 0].isnan() and sums.isnan().sum() == 2
    with pytest.raises(IndexError, match=rf"expected index to be in \[0, {places}\), got {places}"):
        torch.cuda.synchronize()
        scatter_add(x.cuda(), 0, index[2:].cuda(), source[2:].cuda())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_more_places_than_a_slice_has(dtype):
    """Of 32 MB of sums: atomics go over the values for each."""
    places, count = (1 << 23) + 5, 1 << 23
    torch.use_deterministic_algorithms(False)
    generator = torch.Generator("cuda").manual_seed(0)
    index = torch.randint(places, (count,), device="cuda", generator=generator)
    index[-2:] = torch.tensor([places - 1, places])  # the last place of the last slice, and none
    source, x = (torch.randn(n, device="cuda", generator=generator).to(dtype) for n in (count, places))
    sums = scatter_add(x, 0, index, source)
    expected = x.double().scatter_add(0, index[:-1], source[:-1].double()).cpu()
    assert_close(sums, expected, {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 8e-3))
    with pytest.raises(IndexError, match=rf"expected index to be in \[0, {places}\), got {places}"):
        torch.cuda.synchronize()
        scatter_add(x, 0, index[:1], source[:1])
    scatter_add(x, 0, index[:1], source[:1])  # told once
    torch.cuda.synchronize()


@pytest.mark.cuda
def test_cuda_repeats_bit_by_bit():
    """Where PyTorch's own depends on who comes first: a thousand values to a place."""
    x, functions = adders(50, 40, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    index = torch.randint(50, (50_000,), device="cuda", generator=generator)
    source = torch.randn(50_000, 40, device="cuda", generator=generator)
    for name, add in functions.items():
        first = add(x, index, source)
        assert all(torch.equal(first, add(x, index, source)) for _ in range(20)), name
    # Integers do not mind the order of the values either.
    order = torch.randperm(50_000, device="cuda")
    add = functions["scatter_add"]
    assert torch.equal(add(x, index, source), add(x, index[order], source[order]))


@pytest.mark.parametrize("sizes", [(4, 50, 3000, 40), (1, 3, 40000, 2), (70, 9, 1, 700)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lines_belong_to_one_thread(sizes, dtype):
    """Lines that are cut in two by threads would be added twice, or to another's."""
    outer, rows, count, inner = sizes
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(rows, (outer, count, inner), generator=generator)
    # Small whole numbers, whose sums are exact in any order.
    source = torch.randint(-2, 3, index.shape, generator=generator).to(dtype)
    x = torch.zeros(outer, rows, inner, dtype=dtype)
    expected = torch.zeros(outer, rows, inner, dtype=torch.float64).scatter_add(1, index, source.double())
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(scatter_add(x, 1, index, source), expected.to(dtype))
            grad = torch.ops.cuda_ops.scatter_add_backward(expected.to(dtype), 1, index, list(index.shape))
            assert torch.equal(grad, expected.to(dtype).gather(1, index))
    finally:
        torch.set_num_threads(before)
