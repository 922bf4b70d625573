"""attention: what is special to it beside the properties that hold for every op (tests/specs): the options of
flash_attention, rows of any length, the paths on CUDA, layouts and second derivatives. What else is special to it:
test_attention_masks.py, _scores.py, _dropout.py and _sequences.py."""

import pytest
import torch
from support.attention import (
    OPTIONS,
    assert_errors_are_small,
    check_options,
    dropout_factors,
    operands,
    reference,
    results,
)
from support.devices import needs_hopper
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuda_ops
from cuda_ops import _library
from cuda_ops.functional import flash_attention, scaled_dot_product_attention

NATIVE = torch.nn.functional.scaled_dot_product_attention
LENGTHS = [(1, 1), (239, 1), (799, 3), (113, 203), (108, 256), (64, 64), (3, 600), (1023, 1024)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(device_dtype, options, lengths):
    device, dtype = device_dtype
    key_heads = (4, 2, 1)[LENGTHS.index(lengths) % 3]
    check_options(device, dtype, options, *lengths, key_heads=key_heads)


@pytest.mark.parametrize("dims", [(128, 128), (256, 256), (40, 72), (8, 200), (33, 20), (150, 260)], ids=str)
@pytest.mark.parametrize("options", ["causal, bottom right", "all"])
def test_rows_of_any_length(device_dtype, options, dims):
    device, dtype = device_dtype
    check_options(device, dtype, OPTIONS[options], 113, 203, key_heads=2, head_dim=dims[0], value_dim=dims[1])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", [(1, 1030), (3, 799), (16, 600), (5, 7)], ids=str)
def test_few_queries(device_dtype, options, lengths):
    device, dtype = device_dtype
    for key_heads, head_dim in ((4, 64), (1, 128)):
        check_options(device, dtype, options, *lengths, key_heads=key_heads, head_dim=head_dim, value_dim=head_dim)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_infinities_of_halves_on_the_cpu(dtype, where):
    """Tile registers take a float16 as the sum of two bfloat16, which an infinity is not."""
    tensors = [t.detach() for t in operands("cpu", dtype, 40, 50, key_heads=4)]
    tensors = dict(zip(("query", "key", "value"), tensors, strict=True))
    tensors[where][0, 1, 3, 2] = -float("inf")
    found = scaled_dot_product_attention(*tensors.values(), is_causal=True)
    exact = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in tensors.values()), is_causal=True)
    # Where a weight is 0, kernels differ in whether they multiply it.
    seen = torch.ones(40, dtype=torch.bool) if where != "value" else torch.arange(40) >= 3
    torch.testing.assert_close(found.double()[:, :, seen], exact[:, :, seen], rtol=0.02, atol=0.02, equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["sm90", "mma", "simt"])
@pytest.mark.parametrize("options", ["full", "causal", "window", "all"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_paths_of_halves(force_attention, dtype, options, path):
    if path == "sm90" and (torch.cuda.get_device_capability() != (9, 0) or options == "all"):
        pytest.skip("of Hopper alone, and without softcap and slopes")
    force_attention(path)
    for head_dim in (64, 96, 128, 160, 256) if path == "sm90" else (64, 128, 256):
        check_options("cuda", dtype, OPTIONS[options], 257, 331, key_heads=2, head_dim=head_dim, value_dim=head_dim)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "paths"),
    [
        (128, 128, ["sm90", "sm90"]),
        (256, 256, ["sm90", "sm90"]),
        (192, 128, ["sm90", "sm90"]),
        (64, 200, ["sm90", "sm90"]),
        (264, 264, ["simt", "simt"]),
    ],
)
def test_long_rows_take_hoppers_path(head_dim, value_dim, paths):
    if not _library.has_cuda():
        pytest.skip("needs a build with CUDA, whose tables these are")
    query, value = (torch.empty(2, 8, 1024, n, device="meta", dtype=torch.bfloat16) for n in (head_dim, value_dim))
    explanation = cuda_ops.explain(flash_attention, query, query, value, causal=True, capability="9.0")
    assert [product.chosen.name for product in explanation.products] == paths
    if paths == ["sm90", "sm90"]:
        explanation = cuda_ops.explain(flash_attention, query, query, value, dropout_p=0.1, capability="9.0")
        with_dropout = "sm90" if max(head_dim, value_dim) <= 128 else "mma"
        assert [product.chosen.name for product in explanation.products] == [with_dropout] * 2


@pytest.mark.cuda
@pytest.mark.parametrize("option", ["full", "causal", "causal, bottom right", "window", "left window"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_short_rows_of_many_heads_on_hopper(force_attention, dtype, option):
    """More tiles than multiprocessors, so that warpgroups go on to the next one without each other: right, and the same
    bits each time; with dropout the weights that it has in any order."""
    needs_hopper()
    force_attention("sm90")
    for i, (queries, keys) in enumerate(
        [(64, 64), (100, 100), (197, 197), (256, 256), (1, 40), (700, 130), (333, 256), (577, 577), (1024, 1024)]
    ):
        batch, heads, key_heads = 200 if queries < 200 else 70, 4, (4, 2, 1)[i % 3]
        head_dim, value_dim = ((64, 64), (40, 40), (64, 40), (40, 64))[i % 4]
        tensors = [
            torch.randn(batch, rows, some, width, device="cuda").to(dtype).transpose(1, 2)
            for some, rows, width in (
                (heads, queries, head_dim),
                (key_heads, keys, head_dim),
                (key_heads, keys, value_dim),
            )
        ]
        tensors[1][:, :, : keys // 3] *= 6  # towards the start, where blocks come last: maxima grow
        found = flash_attention(*tensors, return_logsumexp=True, **OPTIONS[option])
        for _ in range(10):
            again = flash_attention(*tensors, return_logsumexp=True, **OPTIONS[option])
            assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        exact = reference(*(t.double() for t in tensors), **OPTIONS[option])
        assert_errors_are_small(found, exact, reference(*tensors, **OPTIONS[option]), dtype)
        if option in ("full", "causal"):
            # Values of which each row has its own element: the output has the weights.
            query, key = torch.zeros_like(tensors[0]), torch.zeros_like(tensors[1])
            value = torch.zeros_like(tensors[2])
            value[..., torch.arange(keys), torch.arange(keys) % value_dim] = 1
            options = 1.0, 0, -1, 0 if option == "causal" else -1, 0.0, 0.2
            output, _, state = torch.ops.cuda_ops.attention_forward(query, key, value, None, None, *options)
            factors = dropout_factors(state, 0.2, (batch, heads, queries, keys))
            seen = torch.ones(queries, keys, device="cuda", dtype=torch.float64)
            seen = seen.tril() if option == "causal" else seen
            expected = factors * seen / seen.sum(1, keepdim=True) @ value[:, :1].double()
            assert (output - expected).abs().max() <= 2**-7 * expected.abs().max()


@pytest.mark.cuda
@pytest.mark.parametrize("dims", [(256, 256), (192, 192), (192, 128), (136, 248), (72, 160)], ids=str)
@pytest.mark.parametrize("option", ["full", "causal", "causal, bottom right", "window", "left window"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_forward_of_long_rows_on_hopper(force_attention, dtype, option, dims):
    """Right, the same bits twice, and where heads lie within rows too."""
    needs_hopper()
    force_attention("sm90")
    for i, lengths in enumerate([*LENGTHS, (129, 80), (300, 45), (1088, 1088)]):
        sizes = {"key_heads": (4, 2, 1)[i % 3], "head_dim": dims[0], "value_dim": dims[1]}
        tensors = [t.detach() for t in operands("cuda", dtype, *lengths, **sizes)]
        if i % 2:
            tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
        found = flash_attention(*tensors, return_logsumexp=True, **OPTIONS[option])
        again = flash_attention(*tensors, return_logsumexp=True, **OPTIONS[option])
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        exact = reference(*(t.double() for t in tensors), **OPTIONS[option])
        assert_errors_are_small(found, exact, reference(*tensors, **OPTIONS[option]), dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dims", [(256, 256), (192, 192), (192, 128), (136, 248), (72, 160)], ids=str)
@pytest.mark.parametrize("option", ["full", "causal", "causal, bottom right", "window", "left window"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_backward_of_long_rows_on_hopper(force_attention, dtype, option, dims):
    """Right, the same bits on three streams that run side by side, and where heads lie within rows too."""
    needs_hopper()
    force_attention("sm90")
    options = OPTIONS[option]
    for i, lengths in enumerate([*LENGTHS, (129, 80), (300, 45), (1088, 1088)]):
        sizes = {"key_heads": (4, 2, 1)[i % 3], "head_dim": dims[0], "value_dim": dims[1]}
        tensors = operands("cuda", dtype, *lengths, **sizes)
        if i % 2:
            tensors = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
        shape = (*tensors[0].shape[:3], dims[1])
        grads = [torch.randn(shape).to("cuda", dtype), torch.randn(shape[:3]).to("cuda", dtype)]
        exact = results(lambda *t: reference(*t, **options), tensors, torch.float64, grads)
        same = results(lambda *t: reference(*t, **options), tensors, dtype, grads)
        torch.cuda.synchronize()
        found = []
        for _ in range(3):
            with torch.cuda.stream(torch.cuda.Stream()):
                found.append(
                    results(lambda *t: flash_attention(*t, return_logsumexp=True, **options), tensors, dtype, grads)
                )
        torch.cuda.synchronize()
        assert_errors_are_small(found[0], exact, same, dtype)
        for again in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("path", ["mma_3xtf32", "float32", "simt"])
def test_paths_of_float32(force_attention, options, path):
    """Rows of whole vectors: as long as a tile, shorter, and of values shorter than keys. Blocks of keys and tiles of
    queries that are whole, and that are not."""
    force_attention(path)
    for dims in ((64, 64), (36, 20), (12, 64)) if path == "mma_3xtf32" else ((64, 64), (128, 128), (36, 20), (20, 100)):
        sizes = {"key_heads": 2, "head_dim": dims[0], "value_dim": dims[1]}
        check_options("cuda", torch.float32, options, 257, 331, **sizes)
        check_options("cuda", torch.float32, options, 256, 128, **sizes)


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 6e-3), (torch.float32, 5e-6)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "queries", "keys", "options"),
    [
        (11, 60, 60, 130, 270, {}),  # more heads than a section has: blocks of two sections are dealt out in turns
        (9, 80, 40, 270, 270, {"causal": True}),
        (1, 8, 2, 700, 140, {"causal": True, "bottom_right": True}),  # whole blocks of queries see no key,
        (1, 8, 2, 140, 700, {"causal": True}),  # and whole blocks of keys are seen by no query
        (1, 3, 1, 1300, 1100, {"window": (300, 10)}),
    ],
    ids=str,
)
def test_gradients_of_many_blocks(batch, heads, key_heads, queries, keys, options, head_dim, dtype, tolerance):
    """Blocks of keys add to the queries' gradients in turns: right, and the same bits each time."""
    shapes = (heads, queries), (key_heads, keys), (key_heads, keys)
    tensors = [torch.randn(batch, *shape, head_dim, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    output = flash_attention(*tensors, **options)
    grad = torch.randn_like(output)
    gradients = torch.autograd.grad(output, tensors, grad, retain_graph=True)
    copies = [t.detach().double().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(reference(*copies, **options)[0], copies, grad.double())
    for actual, exact in zip(gradients, expected, strict=True):
        assert (actual - exact).norm() <= tolerance * exact.norm()
    for _ in range(20):
        for first, again in zip(gradients, torch.autograd.grad(output, tensors, grad, retain_graph=True), strict=True):
            assert torch.equal(first, again)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_beside_other_work(head_dim, dtype):
    """Blocks wait for each other's sums, but need not be on the GPU at once: here two calls, and more, share it."""
    tensors = [torch.randn(2, 20, 2000, head_dim, device="cuda").to(dtype).requires_grad_() for _ in range(3)]
    grad = torch.randn_like(tensors[0])
    expected = torch.autograd.grad(flash_attention(*tensors, causal=True), tensors, grad)
    found, streams = [], [torch.cuda.Stream() for _ in range(4)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):  # backward runs where forward has run
                found.append(torch.autograd.grad(flash_attention(*tensors, causal=True), tensors, grad))
    torch.cuda.synchronize()
    for gradients in found:
        for actual, alone in zip(gradients, expected, strict=True):
            assert torch.equal(actual, alone)


def test_packed_operands_are_not_copied(device):
    """Views of a packed projection, and a result whose heads lie within rows."""
    packed = torch.randn(2, 70, 3, 4, 64, device=device)
    query, key, value = packed.permute(2, 0, 3, 1, 4).unbind()
    output = scaled_dot_product_attention(query, key, value, is_causal=True)
    expected = scaled_dot_product_attention(*[t.contiguous() for t in (query, key, value)], is_causal=True)
    assert torch.equal(output, expected)
    assert output.transpose(1, 2).is_contiguous()
    if query.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        scaled_dot_product_attention(query, key, value)
        assert torch.cuda.max_memory_allocated() - before < 2 * output.numel() * output.element_size()


@pytest.mark.parametrize("dims", [(-1,), (-2,), (0, 1), (-2, -1)], ids=str)
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_expanded_operands(device_dtype, which, dims):
    """Strides of 0: the bits of copies, but where tensor cores take them by another path than copies: then as near."""
    device, dtype = device_dtype
    tensors = [torch.randn(2, 3, n, 16, device=device, dtype=dtype) for n in (40, 70, 70)]
    shape = tensors[which].shape
    for dim in dims:
        tensors[which] = tensors[which].narrow(dim, 0, 1)
    tensors[which] = tensors[which].expand(shape)
    grad = torch.randn(2, 3, 40, 16, device=device, dtype=dtype)
    found = []
    for given in (tensors, [t.contiguous() for t in tensors], [t.double().contiguous() for t in tensors]):
        given = [t.detach().requires_grad_() for t in given]
        output = scaled_dot_product_attention(*given)
        found.append([output, *torch.autograd.grad(output, given, grad.to(output.dtype))])
    for actual, copies, exact in zip(*found, strict=True):
        if dtype in (torch.float32, torch.float64):
            assert torch.equal(actual, copies)
        else:
            largest = torch.finfo(dtype).eps * exact.abs().max()
            assert (actual - exact).abs().max() <= 2 * (copies - exact).abs().max() + largest / 4


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 1e-6}], ids=["full", "causal", "dropout"])
@pytest.mark.parametrize("lengths", [(9, 70), (130, 300)], ids=str)
def test_gradients_that_all_but_cancel(device, lengths, options):
    """Of rows whose elements are all equal: scores are large, keys are alike in direction, and few of them have the
    weight. The gradient of query is off by the error of delta, unless that fits the weights and their gradients.
    Forward may be another kernel than backward. Of so little dropout no weight is dropped."""
    generator = torch.Generator().manual_seed(0)
    squares = []
    for _ in range(12):
        shapes = (2, 3, lengths[0], 16), (2, 3, lengths[1], 16), (2, 3, lengths[1], 16)
        tensors = [torch.randn(*shape[:-1], 1, generator=generator).to(device).expand(shape) for shape in shapes]
        tensors = [t.requires_grad_() for t in tensors]
        grad = torch.randn(shapes[0], generator=generator).to(device)
        wide = [t.detach().double().requires_grad_() for t in tensors]
        without = {key: value for key, value in options.items() if key != "dropout_p"}
        with sdpa_kernel(SDPBackend.MATH):
            (native,) = torch.autograd.grad(NATIVE(*tensors, **without), tensors[:1], grad)
            (exact,) = torch.autograd.grad(NATIVE(*wide, **without), wide[:1], grad.double())
        (ours,) = torch.autograd.grad(scaled_dot_product_attention(*tensors, **options), tensors[:1], grad)
        squares.append([((t - exact).norm() / exact.norm()).square().item() for t in (ours, native)])
    of_ours, of_native = torch.tensor(squares).mean(0).sqrt()
    # CUDA's kernels take another turn for what is far off alone, where it would take long.
    factor = 2.5 if tensors[0].is_cuda and lengths[0] > 64 else 1.4
    assert of_ours < factor * of_native, (of_ours, of_native)


def test_second_derivatives_where_scores_are_large(device):
    """Of scores that float32 has exactly, near 8100, of which it rounds a logsumexp by 2e-4."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randint(-8, 9, (2, 3, 40, 8), generator=generator) / 8.0 for _ in range(3)]
    tensors[0][..., 0] = tensors[1][..., 0] = 90
    grad, weights = (torch.randn(2, 3, 40, 8, generator=generator) for _ in range(2))
    found = []
    for function, dtype, where in (
        (scaled_dot_product_attention, torch.float32, device),
        (NATIVE, torch.float64, "cpu"),
    ):
        inputs = [t.to(where, dtype).requires_grad_() for t in tensors]
        g = grad.to(where, dtype).requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            output = function(*inputs, scale=1.0)
        firsts = torch.autograd.grad(output, inputs, g, create_graph=True)
        seconds = torch.autograd.grad(firsts, [*inputs, g], [weights.to(where, dtype)] * 3)
        found.append([*firsts, *seconds])
    for actual, expected in zip(*found, strict=True):
        assert (actual.cpu().double() - expected).norm() <= 2e-5 * expected.norm()


def test_second_derivatives_of_no_heads(device):
    """Of a query that has none, beside keys that have: gradients of zeros."""
    query = torch.ones(2, 0, 3, 4, device=device, requires_grad=True)
    key, value = (torch.ones(2, 2, 5, 4, device=device, requires_grad=True) for _ in range(2))
    output = flash_attention(query, key, value, window=(3, 0), bottom_right=True)
    assert output.shape == (2, 0, 3, 4)
    grads = torch.autograd.grad(output, (query, key, value), torch.ones_like(output), create_graph=True)
    seconds = torch.autograd.grad(grads, (query, key, value), [torch.ones_like(g) for g in grads], allow_unused=True)
    for tensor, grad, second in zip((query, key, value), grads, seconds, strict=True):
        assert grad.shape == tensor.shape and not grad.any()
        assert second is None or (second.shape == tensor.shape and not second.any())


def test_any_number_of_threads_gives_the_same_bits():
    tensors = operands("cpu", torch.float32, 300, 530, key_heads=2)
    grad = torch.randn(2, 4, 300, 64)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            output = flash_attention(*tensors, causal=True, bottom_right=True)
            found.append([output, *torch.autograd.grad(output, tensors, grad)])
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_second_derivatives_with_every_option(device):
    slopes = torch.tensor([0.1, 0.3], device=device)
    query, key, value = (
        torch.randn(1, heads, length, 3, dtype=torch.float64, device=device, requires_grad=True)
        for heads, length in ((2, 4), (1, 5), (1, 5))
    )

    def call(query, key, value):
        torch.manual_seed(7)
        return flash_attention(
            query, key, value, window=(3, 1), softcap=1.5, alibi_slopes=slopes, return_logsumexp=True,
            bottom_right=True, dropout_p=0.25,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, (query, key, value))
    assert torch.autograd.gradgradcheck(call, (query, key, value))


def test_slopes_are_constants(device):
    tensors = operands(device, torch.float32, 3, 4)
    with pytest.raises(RuntimeError, match="alibi_slopes"):
        flash_attention(*tensors, alibi_slopes=torch.ones(4, device=device, requires_grad=True))


@pytest.mark.cuda
def test_autocast():
    tensors = operands("cuda", torch.float32, 33, 65)
    with torch.autocast("cuda", torch.bfloat16):
        output = flash_attention(*tensors, alibi_slopes=torch.full((4,), 0.3, device="cuda"))
    assert output.dtype == torch.bfloat16
    halves = [t.bfloat16() for t in tensors]
    assert torch.equal(output, flash_attention(*halves, alibi_slopes=torch.full((4,), 0.3, device="cuda")))


@pytest.mark.cuda
def test_long_rows_take_no_memory_for_scores():
    """16384 queries and keys, whose scores would be 512 MiB for each head."""
    query, key, value = (torch.randn(1, 2, 16384, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.cuda.max_memory_allocated() - before < 32 << 20
    expected = NATIVE(query[:, :, :300], key[:, :, :300], value[:, :, :300], is_causal=True)
    assert (output[:, :, :300] - expected).norm() <= 1e-2 * expected.norm()
