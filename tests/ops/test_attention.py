"""attention: what is special to it beside the properties that hold for every op (tests/specs): the options of
flash_attention, rows that see nothing, dropout, layouts, and the paths on CUDA."""

import math

import pytest
import torch
from support.devices import needs_hopper
from support.opspec import RELATIVE_NORM
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuda_ops
from cuda_ops import _library
from cuda_ops.functional import flash_attention, flash_attention_varlen, scaled_dot_product_attention

NATIVE = torch.nn.functional.scaled_dot_product_attention
LENGTHS = [(1, 1), (239, 1), (799, 3), (113, 203), (108, 256), (64, 64), (3, 600), (1023, 1024)]


@pytest.fixture
def force(monkeypatch):
    """force(path): attention on CUDA takes that path to the end of the test."""

    def take(path):
        monkeypatch.setenv("CUDA_OPS_ATTENTION_PATH", path)
        torch.ops.cuda_ops.reload_paths()

    yield take
    monkeypatch.undo()
    torch.ops.cuda_ops.reload_paths()


def reference(query, key, value, causal=False, window=(-1, -1), softcap=0.0, alibi_slopes=None, bottom_right=False):
    """In the dtype of its arguments, by the formulas of flash_attention's docstring; (output, logsumexp)."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = scores.shape[-2:]
    i = torch.arange(queries, device=query.device)[:, None] + (keys - queries if bottom_right else 0)
    j = torch.arange(keys, device=query.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores.dtype)[..., None, None] * (i - j).abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(queries, keys, dtype=torch.bool, device=query.device)
    if left >= 0:
        hidden = hidden | (j < i - left)
    if right >= 0:
        hidden = hidden | (j > i + right)
    scores = scores.masked_fill(hidden, -math.inf)
    logsumexp = torch.logsumexp(scores.to(torch.promote_types(scores.dtype, torch.float32)), -1)
    base = logsumexp.masked_fill(logsumexp == -math.inf, 0.0).unsqueeze(-1)
    return torch.exp(scores - base).to(scores.dtype) @ value, logsumexp


def operands(device, dtype, queries, keys, heads=4, key_heads=4, head_dim=64, value_dim=64):
    generator = torch.Generator().manual_seed(1000 * queries + keys)
    shapes = (2, heads, queries, head_dim), (2, key_heads, keys, head_dim), (2, key_heads, keys, value_dim)
    return [torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_() for shape in shapes]


def results(function, tensors, dtype, grads):
    """(output, logsumexp, gradients), of tensors in that dtype; of logsumexp the gradient where it is finite."""
    tensors = [t.detach().to(dtype).requires_grad_() for t in tensors]
    output, logsumexp = function(*tensors)
    finite = torch.where(logsumexp.isfinite(), logsumexp, 0)
    grads = [g.to(o.dtype) for g, o in zip(grads, (output, finite), strict=True)]
    return [t.detach() for t in (output, logsumexp, *torch.autograd.grad((output, finite), tensors, grads))]


def assert_errors_are_small(found, exact, same, dtype):
    """Twice the error that PyTorch's operations have in the same dtype, beside rounding."""
    names = ("output", "logsumexp", "query", "key", "value")[: len(found)]
    for name, a, e, s in zip(names, found, exact, same, strict=True):
        assert torch.equal(a.isfinite(), e.isfinite()), name
        error, allowed = (torch.where(e.isfinite(), x.double() - e, 0).square().mean().sqrt() for x in (a, s))
        size = torch.where(e.isfinite(), e, 0).square().mean().sqrt()
        # 0.5: where gradients cancel, terms of about 1 do.
        allowed = 2 * allowed + RELATIVE_NORM[dtype] / 2 * (size + 0.5)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}, of values of {size:.3g}"


OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "causal, bottom right": {"causal": True, "bottom_right": True},
    "window": {"window": (40, 13), "bottom_right": True},
    "left window": {"window": (7, -1)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "causal": True, "bottom_right": True},
    "all": {
        "alibi_slopes": torch.tensor([[0.5, 0.25, 0.1, 0.0], [0.3, 1.0, 0.2, 0.1]]),
        "softcap": 3.0,
        "window": (100, 5),
    },
}


def check_options(device, dtype, options, queries, keys, **sizes):
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    tensors = operands(device, dtype, queries, keys, **sizes)
    value_dim = tensors[2].shape[-1]
    grads = [torch.randn(2, 4, queries, value_dim), torch.randn(2, 4, queries)]
    grads = [g.to(device, dtype) for g in grads]
    found = results(lambda *t: flash_attention(*t, return_logsumexp=True, **options), tensors, dtype, grads)
    exact = results(lambda *t: reference(*t, **options), tensors, torch.float64, grads)
    same = results(lambda *t: reference(*t, **options), tensors, dtype, grads)
    assert_errors_are_small(found, exact, same, dtype)


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
def test_paths_of_halves(force, dtype, options, path):
    if path == "sm90" and (torch.cuda.get_device_capability() != (9, 0) or options == "all"):
        pytest.skip("of Hopper alone, and without softcap and slopes")
    force(path)
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
def test_short_rows_of_many_heads_on_hopper(force, dtype, option):
    """More tiles than multiprocessors, so that warpgroups go on to the next one without each other: right, and the same
    bits each time; with dropout the weights that it has in any order."""
    needs_hopper()
    force("sm90")
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
def test_forward_of_long_rows_on_hopper(force, dtype, option, dims):
    """Right, the same bits twice, and where heads lie within rows too."""
    needs_hopper()
    force("sm90")
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
def test_backward_of_long_rows_on_hopper(force, dtype, option, dims):
    """Right, the same bits on three streams that run side by side, and where heads lie within rows too."""
    needs_hopper()
    force("sm90")
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
def test_paths_of_float32(force, options, path):
    """Rows of whole vectors: as long as a tile, shorter, and of values shorter than keys. Blocks of keys and tiles of
    queries that are whole, and that are not."""
    force(path)
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
    for operands in (tensors, [t.contiguous() for t in tensors], [t.double().contiguous() for t in tensors]):
        operands = [t.detach().requires_grad_() for t in operands]
        output = scaled_dot_product_attention(*operands)
        found.append([output, *torch.autograd.grad(output, operands, grad.to(output.dtype))])
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


def test_a_mask_that_hides_every_key(device):
    tensors = operands(device, torch.float32, 5, 70)
    mask = torch.zeros(5, 70, dtype=torch.bool, device=device)
    mask[2:] = True
    additive = torch.zeros(5, 70, device=device).masked_fill(~mask, -math.inf).requires_grad_()
    for attn_mask in (mask, additive):
        output = scaled_dot_product_attention(*tensors, attn_mask)
        inputs = [*tensors, additive] if attn_mask is additive else tensors
        grads = torch.autograd.grad(output.sum(), inputs)
        assert torch.equal(output[:, :, :2], torch.zeros_like(output[:, :, :2]))
        assert torch.equal(grads[0][:, :, :2], torch.zeros_like(grads[0][:, :, :2]))
        assert all(grad.isfinite().all() for grad in grads)
        assert output[:, :, 2:].abs().amin() > 0


LOWEST = [torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16, torch.float16)]


def mask_of_lowest_numbers(queries, keys, lowest):
    """As transformers makes them, with the lowest number of a dtype where others have -inf: rows that are hidden
    throughout, in part, and not at all; in the last one half of the keys are hidden by -inf."""
    generator = torch.Generator().manual_seed(queries)
    hidden = torch.rand(queries, keys, generator=generator) < 0.3
    hidden[: queries // 3] = True
    hidden[queries // 2] = False
    mask = torch.randn(queries, keys, generator=generator).masked_fill(hidden, lowest)
    mask[-1] = torch.tensor([lowest, -math.inf]).repeat(keys)[:keys]
    return mask


def composed_with_mask(query, key, value, mask):
    """(output, logsumexp) as PyTorch composes them: halves in float32, rounded at the end. Not by torch.logsumexp, the
    gradient of which is by its rounded result."""
    group, dtype = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    q, k, v = (t.to(dtype) for t in (query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
    scores = q @ k.mT / math.sqrt(query.shape[-1]) + mask.to(dtype)
    largest = scores.detach().amax(-1)
    logsumexp = largest + torch.log(torch.exp(scores - largest.unsqueeze(-1)).sum(-1))
    return (torch.softmax(scores, -1) @ v).to(query.dtype), logsumexp


def ours_with_mask(query, key, value, mask):
    options = 1 / math.sqrt(query.shape[-1]), 0, -1, -1, 0.0, 0.0
    return torch.ops.cuda_ops.attention_forward(query, key, value, mask, None, *options)[:2]


def values_and_gradients(function, tensors, wanted, grads):
    """(output, logsumexp, gradients of as many of the tensors as are wanted)."""
    tensors = [t.detach().requires_grad_(i < wanted) for i, t in enumerate(tensors)]
    outputs = function(*tensors)
    grads = [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, tensors[:wanted], grads)]


def check_lowest_numbers(device, dtype, mask_dtype, lowest, queries, keys, with_mask=(False, True), **sizes):
    """with_mask: whether there is a gradient of the mask's; not all kernels take such a call."""
    tensors = [t.detach() for t in operands(device, dtype, queries, keys, **sizes)]
    mask = mask_of_lowest_numbers(queries, keys, lowest).to(device, mask_dtype)
    shape = tensors[0].shape[:3]
    grads = [torch.randn(*shape, tensors[2].shape[-1]).to(device, dtype), torch.randn(shape).to(device, dtype)]
    for wanted in (4 if mask_too else 3 for mask_too in with_mask):
        found = values_and_gradients(ours_with_mask, [*tensors, mask], wanted, grads)
        same = values_and_gradients(composed_with_mask, [*tensors, mask], wanted, grads)
        exact = values_and_gradients(composed_with_mask, [t.double() for t in (*tensors, mask)], wanted, grads)
        torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-5, atol=1e-2)
        for name, a, e, s in zip(("output", "", "query", "key", "value", "mask"), found, exact, same, strict=False):
            if name:
                error, allowed = ((x.double() - e).norm() / e.norm() for x in (a, s))
                assert error <= 2 * allowed + RELATIVE_NORM[dtype], f"{name}: {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("lowest", LOWEST, ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("lengths", [(70, 130), (5, 1030), (6, 70)], ids=str)
def test_masks_of_the_lowest_number(device_dtype, lengths, lowest):
    """Where a row's scores are all the lowest number, its keys are seen alike: (x + lowest is lowest)."""
    device, dtype = device_dtype
    sizes = {"key_heads": 2, "head_dim": 32, "value_dim": 24}
    check_lowest_numbers(device, dtype, torch.float32, lowest, *lengths, **sizes)
    if dtype != torch.float32 and torch.finfo(dtype).min <= lowest:
        check_lowest_numbers(device, dtype, dtype, lowest, *lengths, **sizes)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("dtype", "path"),
    [
        *((dtype, path) for dtype in (torch.float16, torch.bfloat16) for path in ("sm90", "mma", "simt")),
        *((torch.float32, path) for path in ("mma_3xtf32", "float32", "simt")),
    ],
    ids=str,
)
def test_masks_of_the_lowest_number_on_paths(force, dtype, path):
    if path == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper alone")
    force(path)
    sizes = {"key_heads": 2, "with_mask": (False, True) if dtype != torch.float32 or path == "simt" else (False,)}
    for head_dim in {"mma_3xtf32": (64,), "float32": (64, 128), "sm90": (64, 128)}.get(path, (64, 128, 256)):
        for lowest in LOWEST:
            check_lowest_numbers("cuda", dtype, torch.float32, lowest, 131, 200, head_dim=head_dim, **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_below_the_lowest_number(device, dtype):
    """As in PyTorch, which adds in float32 too: a sum beyond is -inf, and hides its key. Every score is exact."""
    query, key, value = torch.zeros(1, 1, 20, 16), torch.zeros(1, 1, 70, 16), torch.randn(1, 1, 70, 16)
    query[:, :, 1:5, 0], query[:, :, 5:10, 0] = 2.0**54, -(2.0**54)
    key[..., 0] = 2.0**54 * torch.tensor([1.0, -1.0]).repeat(35)
    mask = torch.full((20, 70), LOWEST[0])
    mask[7] = torch.tensor([0.0, -math.inf]).repeat(35)  # no key that is the lowest
    mask[8] = torch.tensor([LOWEST[0], 0.0]).repeat(35)
    mask[9] = torch.tensor([LOWEST[0], -math.inf]).repeat(35)  # no key at all
    tensors = [t.to(device, dtype).requires_grad_() for t in (query, key, value)]
    results = []
    for function in (scaled_dot_product_attention, NATIVE):
        with sdpa_kernel(SDPBackend.MATH):
            output = function(*tensors, mask.to(device))
        # Of the others the gradients are differences of equal numbers.
        grad_query, grad_value = torch.autograd.grad(output, tensors[::2], torch.ones_like(output))
        assert torch.equal(grad_query[:, :, 9], torch.zeros_like(grad_query[:, :, 9]))
        results.append([output, grad_value])
    assert torch.equal(results[0][0][:, :, 9], torch.zeros_like(tensors[0][:, :, 9]))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= 2 * RELATIVE_NORM[dtype] * expected.norm()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_values_travel(device, value):
    """A score that is NaN or +inf makes its row NaN, and no other; -inf hides its key."""
    tensors = [t.detach() for t in operands(device, torch.float32, 70, 70)]
    mask = torch.zeros(70, 70, device=device)
    mask[3, 5] = value
    mask[4, 6] = -math.inf
    output = scaled_dot_product_attention(*tensors, mask)
    rows = torch.arange(70, device=device) == 3
    assert output[:, :, rows].isnan().all() and output[:, :, ~rows].isfinite().all()
    expected = NATIVE(*[t.double() for t in tensors], mask.double())
    torch.testing.assert_close(output[:, :, ~rows].double(), expected[:, :, ~rows], rtol=1e-4, atol=1e-5)


def test_large_scores(device):
    """Nothing overflows, whichever key is the largest."""
    query, keys, value = (t.detach() for t in operands(device, torch.float32, 70, 300))
    for key in (keys.sort(2).values, keys.sort(2, descending=True).values):
        output = scaled_dot_product_attention(query * 100, key, value)
        expected = NATIVE(query.double() * 100, key.double(), value.double())
        assert (output - expected).norm() <= 1e-3 * expected.norm()


# The score of key j, of which the kernel sees the last ones first: what it could miss that looks for maxima only where
# exponentials have become large.
SCORES = {
    "as large": lambda j: 0 * j,
    "one late key of 10000": lambda j: torch.where(j == 3, 1e4, 0.0),
    "all but one of -10000": lambda j: torch.where(j == 3, 0.0, -1e4),
    "all -10000": lambda j: 0 * j - 1e4,
    "all 10000": lambda j: 0 * j + 1e4,
    "larger block by block": lambda j: (j // 64 * -40.0),
    "a little larger each time": lambda j: j * -0.04,
    "smaller block by block": lambda j: (j // 64 * 40.0),
    "one late key of e^9": lambda j: torch.where(j == 70, 9.0, 0.0),
    "one late key of e^14": lambda j: torch.where(j == 70, 14.0, 0.0),
    "one late key of e^20": lambda j: torch.where(j == 70, 20.0, 0.0),
    "late keys beyond float32's exponentials": lambda j: torch.where(j < 200, 300.0, 0.0),
}


def operands_of_scores(dtype, scores, queries, keys, head_dim, value_dim=None, device="cuda"):
    """Operands whose scores are those numbers, roughly, and random ones beside them."""
    sizes = queries, keys, 2, 2, head_dim, value_dim or head_dim
    query, key, value = (t.detach() for t in operands(device, dtype, *sizes))
    query[..., 0] = 8
    numbers = scores(torch.arange(keys, device=device, dtype=torch.float64))
    if dtype == torch.float16:  # PyTorch's products are of it too
        numbers = numbers.clamp(-3000, 3000)
    key[..., 0] = numbers * math.sqrt(head_dim) / 8
    return query, key, value


def as_packed(query, key, value, **options):
    """flash_attention's output and logsumexp of sequences that are packed, each as long as the others."""
    batch, heads = query.shape[:2]
    lengths = query.shape[2], key.shape[2]
    starts = [torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length for length in lengths]
    packed = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)]
    output, logsumexp = flash_attention_varlen(*packed, *starts, *lengths, return_logsumexp=True, **options)
    return (
        output.unflatten(0, (batch, -1)).transpose(1, 2),
        logsumexp.reshape(heads, batch, -1).transpose(0, 1),
    )


def check_scores_that_outgrow_the_first_ones(device, dtype, scores, head_dim, value_dim):
    for queries, keys in ((200, 900), (70, 130)):
        tensors = operands_of_scores(dtype, scores, queries, keys, head_dim, value_dim, device)
        for options in ({}, {"causal": True, "bottom_right": True}, {"window": (300, 20), "bottom_right": True}):
            exact = reference(*(t.double() for t in tensors), **options)
            same = reference(*tensors, **options)
            found = flash_attention(*tensors, return_logsumexp=True, **options)
            assert_errors_are_small(found, exact, same, dtype)
            if max(head_dim, value_dim) <= 128:  # kernels of their own
                assert_errors_are_small(as_packed(*tensors, **options), exact, same, dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_that_outgrow_the_first_ones(dtype, scores, dims):
    """Whatever comes after a query's first block of keys, which may have nothing that the query sees."""
    check_scores_that_outgrow_the_first_ones("cuda", dtype, scores, *dims)


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_scores_that_outgrow_the_first_ones_on_the_cpu(dtype, scores):
    tensors = operands_of_scores(dtype, scores, 70, 330, 64, device="cpu")
    for options in ({}, {"causal": True, "bottom_right": True}):
        found = flash_attention(*tensors, return_logsumexp=True, **options)
        same = reference(*tensors, **options)
        assert_errors_are_small(found, reference(*(t.double() for t in tensors), **options), same, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_query_of_one_key_and_any_score(dtype, device):
    """What comes before a query's first key has no sums that could be scaled, by whatever."""
    scores = torch.arange(-256.0, 256.25, 0.25, device=device)
    query, key, value = (torch.zeros(len(scores), 1, 1, 16, dtype=dtype, device=device) for _ in range(3))
    query[..., :2] = 1
    key[..., 0], key[..., 1] = scores.round()[:, None, None], (scores - scores.round())[:, None, None]
    value += torch.linspace(-1, 1, 16, device=device).to(dtype)
    output, logsumexp = flash_attention(query, key, value, scale=1.0, return_logsumexp=True)
    torch.testing.assert_close(output, value, rtol=8e-3, atol=0)
    torch.testing.assert_close(logsumexp.flatten(), scores, rtol=1e-6, atol=1e-5)


def check_dropout_where_scores_outgrow_the_first_ones(device, dtype, scores, head_dim):
    queries, keys, p, scale = 200, 900, 0.3, 1 / math.sqrt(head_dim)
    tensors = operands_of_scores(dtype, scores, queries, keys, head_dim, device=device)
    torch.manual_seed(11)
    output, logsumexp, state = torch.ops.cuda_ops.attention_forward(
        *tensors, None, None, scale, keys - queries, -1, -1, 0.0, p
    )
    factors = dropout_factors(state, p, (2, 2, queries, keys))

    def dropped(query, key, value):
        scores = query @ key.mT * scale
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return torch.softmax(scores, -1) * factors.to(query.dtype) @ value, torch.logsumexp(wide, -1)

    exact = dropped(*(t.double() for t in tensors))
    assert_errors_are_small((output, logsumexp), exact, dropped(*tensors), dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dropout_where_scores_outgrow_the_first_ones(dtype, scores, head_dim):
    """Weights that are made anew are dropped as the others are, and none is left out of the sums."""
    check_dropout_where_scores_outgrow_the_first_ones("cuda", dtype, scores, head_dim)


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("of_key", [math.nan, math.inf, 1e4, 100.0], ids=str)
def test_a_query_does_not_see_what_others_see(of_key, head_dim):
    """The bits of a row are the same whatever the other rows' scores become."""
    query, key, value = operands_of_scores(torch.bfloat16, lambda j: 0 * j, 128, 600, head_dim)
    query[:, :, 1::2, 0] = 0
    key[:, :, 5, 0] = 4
    expected = flash_attention(query, key, value, return_logsumexp=True)
    query[:, :, 1::2, 0] = of_key
    others = flash_attention(query, key, value, return_logsumexp=True)
    assert torch.equal(others[0][:, :, 1::2].isnan().any(), torch.tensor(not math.isfinite(of_key), device="cuda"))
    for a, b in zip(expected, others, strict=True):
        assert torch.equal(a[:, :, ::2], b[:, :, ::2])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_nonfinite_keys_travel(value, head_dim, device):
    """Of one key, the first or the last that a kernel comes to, and only to queries that see it."""
    for where in (0, 3, 597):
        query, key, values = operands_of_scores(torch.bfloat16, lambda j: 0 * j, 600, 600, head_dim, device=device)
        key[:, :, where, 1:] = value
        output, logsumexp = flash_attention(query, key, values, causal=True, return_logsumexp=True)
        exact = reference(query.double(), key.double(), values.double(), causal=True)
        assert torch.equal(output.isnan(), exact[0].isnan()) and torch.equal(logsumexp.isnan(), exact[1].isnan())
        assert output[:, :, where:].isnan().all() and output[:, :, :where].isfinite().all()


@pytest.mark.parametrize("seen", [1, 2])
def test_few_keys_and_then_larger_ones(device, seen):
    """Of the first thousand keys so many are seen; others, in another block, have a larger score."""
    query, key, value = (t.detach().double() for t in operands(device, torch.float32, 5, 1100, 1, 1, 16, 16))
    mask = torch.zeros(5, 1100, dtype=torch.bool, device=device)
    mask[:, :seen] = mask[:, 1050:] = True
    key[:, :, 1050:] = query[:, :, :1] * torch.linspace(0.5, 1.5, 50, dtype=torch.float64, device=device)[:, None]
    inputs = [t.requires_grad_() for t in (query, key, value)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = NATIVE(*inputs, mask)
    found = scaled_dot_product_attention(*inputs, mask)
    grads = [torch.autograd.grad(o.cos().sum(), inputs) for o in (found, expected)]
    torch.testing.assert_close((found, *grads[0]), (expected, *grads[1]), rtol=1e-10, atol=1e-10)


def test_a_float32_mask_of_any_strides_beside_float64(device):
    query, key, value = (t.detach().double() for t in operands(device, torch.float32, 70, 130, 2, 2, 16, 16))
    wide = torch.randn(130, 140, device=device)
    expected = NATIVE(query, key, value, wide.t()[:70].double())
    for mask in (wide.t()[:70], wide.t()[:70].contiguous(), wide[:, :70].t()[:, :1].expand(70, 130)):
        if mask.stride(1) == 0:
            expected = NATIVE(query, key, value, mask.double())
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value, mask), expected)


def dropout_numbers(seed, offset, batch, heads, queries, keys):
    """By the words of attention.h: Philox of 7 rounds, a block of which has 16 bits for each of 8 weights."""
    index = torch.arange(batch * heads).reshape(batch, heads, 1, 1)
    i, j = torch.arange(queries).reshape(-1, 1), torch.arange(keys)
    row = 32 * (index * ((queries + 15) // 16) + i // 16) + 4 * (i % 8) + j % 8 // 2
    low, high = 0xFFFFFFFF, 32
    counter = [torch.full_like(row, offset // 4 & low), (offset // 4 >> high) + (row >> high), row & low]
    counter.append((j // 16).expand_as(row))
    key = seed & low, seed >> high & low
    for n in range(7):
        # Products of 32 bits by 32, of which int64 holds the lower halves of halves.
        products = []
        for multiplier, word in ((0xD2511F53, counter[0]), (0xCD9E8D57, counter[2])):
            lower, upper = multiplier * (word & 0xFFFF), multiplier * (word >> 16)
            middle = upper + (lower >> 16)
            products.append((middle >> 16 & low, (middle & 0xFFFF) << 16 | lower & 0xFFFF))
        key0, key1 = key[0] + n * 0x9E3779B9 & low, key[1] + n * 0xBB67AE85 & low
        (high0, low0), (high1, low1) = products
        counter = [high1 ^ counter[1] ^ key0, low1, high0 ^ counter[3] ^ key1, low0]
    words = torch.stack(counter)
    word = (i % 16 // 8 + j % 16 // 8 * 2).expand_as(row)
    return words.gather(0, word[None])[0] >> (j % 2 * 16) & 0xFFFF


def dropout_factors(state, dropout, sizes, dtype=torch.float64):
    return torch.ops.cuda_ops.attention_dropout_factors(state, sizes, dropout, dtype)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 33, 70), (1, 2, 200, 130), (3, 1, 5, 300)], ids=str)
def test_which_weights_are_dropped(device_dtype, sizes):
    device, dtype = device_dtype
    seed, offset = 0x1234_5678_9ABC_DEF0, 0x7_0000_0004
    state = torch.tensor([seed, offset], device=device)
    numbers = dropout_numbers(seed, offset, *sizes)
    for p in (0.1, 0.5, 0.999, 1e-6, 1.0, 0.0):
        dropped = int(p * 65536 + 0.5)
        factor = 65536 / (65536 - dropped) if dropped < 65536 else 0.0
        expected = ((numbers >= dropped).double() * factor).to(dtype)
        assert torch.equal(dropout_factors(state, p, sizes, dtype).cpu(), expected)


def test_dropped_weights_are_independent(device):
    """As many as p says, and neighbours in any direction no more alike than chance has it: within five deviations."""
    p, sizes = 0.3, (3, 4, 256, 320)
    kept = dropout_factors(torch.tensor([5, 8], device=device), p, sizes) > 0
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs((~kept).double().mean() - p) < 5 * deviation
    centred = kept.double() - (1 - p)
    steps = [(0, 0, a, b) for a in (0, 1, 7, 8, 9, 16, 64) for b in (0, 1, 2, 7, 8, 9, 16, 128)][1:]
    for step in [*steps, (0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0)]:
        ahead, behind = centred, centred
        for dim, by in enumerate(step):
            ahead = ahead.narrow(dim, by, sizes[dim] - by)
            behind = behind.narrow(dim, 0, sizes[dim] - by)
        correlation = (ahead * behind).mean() / (p * (1 - p))
        assert abs(correlation) < 5 / math.sqrt(ahead.numel()), step
    other = dropout_factors(torch.tensor([5, 12], device=device), p, sizes) > 0
    assert abs(((other.double() - (1 - p)) * centred).mean() / (p * (1 - p))) < 5 / math.sqrt(kept.numel())


def check_dropout(device, dtype, queries, keys, window=(-1, 0), p=0.3, mask=None, **sizes):
    """Forward and backward drop the weights that attention_dropout_factors says, and repeat bit by bit. mask: a boolean
    one, one that is added, which has a gradient if it requires one, or none; with p = 0 it is this alone that is
    compared."""
    tensors = operands(device, dtype, queries, keys, **sizes)
    inputs = [*tensors, mask] if mask is not None and mask.requires_grad else tensors
    group = tensors[0].shape[1] // tensors[1].shape[1]
    forward = torch.ops.cuda_ops.attention_forward
    options = 0.125, keys - queries, *window, 0.0, p
    torch.manual_seed(11)
    output, _, state = forward(*tensors, mask, None, *options)
    factors = dropout_factors(state, p, (2, 4, queries, keys)) if p else torch.ones((), device=device)
    left, right = (10**6 if size < 0 else size for size in window)
    behind = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None] - (keys - queries)
    hidden = (behind > right) | (behind < -left)
    is_added = mask is not None and mask.is_floating_point()
    if mask is not None and not is_added:
        hidden = hidden | ~mask

    def dropped(query, key, value, added):
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = (0.125 * (query @ key.mT) + added).masked_fill(hidden, -math.inf)
        empty = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
        return weights * factors.to(query.dtype) @ value

    grad = torch.randn(output.shape).to(device, dtype)
    found = [output.detach(), *torch.autograd.grad(output, inputs, grad)]
    for other in (torch.float64, dtype):
        copies = [t.detach().to(other).requires_grad_() for t in (*tensors, *([mask] if is_added else []))]
        value = dropped(*copies[:3], copies[3] if is_added else 0)
        gradients = torch.autograd.grad(value, copies[: len(inputs)], grad.to(other))
        if other == torch.float64:
            exact = [value.detach(), *gradients]
        same = [value.detach(), *gradients]
    for a, e, s in zip(found, exact, same, strict=True):
        error, allowed = ((x.double() - e).norm() / e.norm() for x in (a, s))
        assert error <= 2 * allowed + RELATIVE_NORM[dtype]
    torch.manual_seed(11)
    output, _, again = forward(*tensors, mask, None, *options)
    assert device == "cpu" or not p or torch.equal(state, again)
    repeated = [output.detach(), *torch.autograd.grad(output, inputs, grad)]
    assert all(torch.equal(a, b) for a, b in zip(found, repeated, strict=True))


@pytest.mark.parametrize("keys", [64, 203])
@pytest.mark.parametrize("window", [(-1, 0), (30, 5), (-1, -1)], ids=["causal", "window", "full"])
def test_dropout(device_dtype, window, keys):
    check_dropout(*device_dtype, 113, keys, window, key_heads=2)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("dtype", "path"),
    [
        *((dtype, path) for dtype in (torch.float16, torch.bfloat16) for path in ("sm90", "mma", "simt")),
        *((torch.float32, path) for path in ("mma_3xtf32", "float32", "simt")),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_dropout_of_paths(force, dtype, head_dim, path):
    if head_dim > {"mma_3xtf32": 64, "float32": 128}.get(path, 256):
        pytest.skip("of rows of up to 128 elements, mma_3xtf32 of up to 64 with gradients")
    if path == "sm90" and (torch.cuda.get_device_capability() != (9, 0) or head_dim > 128):
        pytest.skip("of Hopper alone, and with dropout of rows of up to 128 elements")
    force(path)
    for lengths, window in [
        ((256, 256), (-1, 0)),
        ((257, 331), (-1, -1)),
        ((300, 45), (70, 9)),
        ((1, 600), (-1, 0)),
    ]:
        sizes = {"head_dim": head_dim, "value_dim": head_dim}
        check_dropout("cuda", dtype, *lengths, window, key_heads=2, **sizes)
    check_dropout("cuda", dtype, 130, 130, p=0.9, head_dim=head_dim, value_dim=head_dim)


# (queries, keys): boolean masks, of what batches, heads and queries share, and of any strides. Rows see no key at all,
# none of the first or of the last blocks, or one.
MASKS = {
    "of keys": lambda queries, keys: torch.rand(2, 1, 1, keys) < 0.7,
    "of queries": lambda queries, keys: torch.rand(1, 1, queries, keys) < 0.5,
    "of heads": lambda queries, keys: torch.rand(2, 4, queries, keys) < 0.9,
    "transposed": lambda queries, keys: (torch.rand(2, 1, keys, queries) < 0.3).mT,
    "one number": lambda queries, keys: torch.ones(1, 1, 1, 1, dtype=torch.bool),
}


def boolean_mask(kind, queries, keys):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(queries)
        mask = MASKS[kind](queries, keys)
    if mask.shape[-2] > 4:
        mask[..., 1, :] = False
        mask[..., 2, : keys // 2] = mask[..., 3, keys // 3 :] = False
        mask[..., 4, :-1] = False
    return mask.expand(2, 4, queries, keys)


@pytest.mark.parametrize("kind", MASKS)
def test_boolean_masks(device_dtype, kind):
    device, dtype = device_dtype
    for window, p in [((-1, -1), 0.0), ((30, 5), 0.2)]:
        check_dropout(device, dtype, 113, 203, window, p, boolean_mask(kind, 113, 203).to(device), key_heads=2)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("dtype", "path"),
    [
        *((dtype, path) for dtype in (torch.float16, torch.bfloat16) for path in ("sm90", "mma", "simt")),
        *((torch.float32, path) for path in ("mma_3xtf32", "float32", "simt")),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 96])
def test_boolean_masks_of_paths(force, dtype, head_dim, path):
    if path == "mma_3xtf32" and head_dim > 64:
        pytest.skip("its gradients are of rows of up to 64 elements")
    if path == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper alone")
    force(path)
    sizes = {"head_dim": head_dim, "value_dim": head_dim, "key_heads": 2}
    for kind in MASKS:
        for lengths, window, p in [
            ((128, 128), (-1, -1), 0.1),  # short tiles
            ((257, 331), (-1, 0), 0.0),
            ((300, 45), (70, 9), 0.1),
            ((1, 600), (-1, -1), 0.0),
            ((700, 1100), (-1, -1), 0.0),  # long ones
        ]:
            check_dropout("cuda", dtype, *lengths, window, p, boolean_mask(kind, *lengths).to("cuda"), **sizes)


# Shapes of masks that are added, by (queries, keys), and how they lie in memory. Hopper's kernels take even numbers of
# keys that are neighbours, of which two are aligned: not the last two layouts.
ADDED = {
    "of one row": lambda queries, keys: (1, 1, 1, keys),
    "of keys": lambda queries, keys: (2, 1, 1, keys),
    "of heads": lambda queries, keys: (1, 4, queries, keys),
    "of batches": lambda queries, keys: (2, 1, queries, keys),
    "of everything": lambda queries, keys: (2, 4, queries, keys),
}
LAYOUTS = {
    "dense": lambda mask: mask,
    "expanded": lambda mask: mask[:1].expand(2, *mask.shape[1:]),
    "of wider rows": lambda mask: torch.nn.functional.pad(mask, (2, 4))[..., 2:-4],
    "transposed": lambda mask: mask.mT.contiguous().mT,
    "of every other key": lambda mask: torch.stack([mask, mask], -1).flatten(-2)[..., ::2],
}


def added_mask(shape, layout, queries, keys, device, dtype):
    """Rows see no key at all, none of the first or of the last blocks, or one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(queries)
        mask = torch.randn(ADDED[shape](queries, keys))
        mask[torch.rand(mask.shape) < 0.1] = -math.inf
    if mask.shape[-2] > 4:
        mask[..., 1, :] = -math.inf
        mask[..., 2, : keys // 2] = mask[..., 3, keys // 3 :] = -math.inf
        mask[..., 4, :-1] = -math.inf
    return LAYOUTS[layout](mask.to(device, dtype)).detach().requires_grad_()


@pytest.mark.parametrize(
    ("shape", "layout"),
    [*((shape, "dense") for shape in ADDED), *(("of everything", layout) for layout in LAYOUTS if layout != "dense")],
)
def test_added_masks(device_dtype, shape, layout):
    device, dtype = device_dtype
    for window, p, keys in [((-1, -1), 0.0, 204), ((30, 5), 0.2, 203)]:
        for mask_dtype in {dtype, torch.float32 if dtype.itemsize < 8 else dtype}:
            mask = added_mask(shape, layout, 113, keys, device, mask_dtype)
            check_dropout(device, dtype, 113, keys, window, p, mask, key_heads=2)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", ["sm90", "mma", "simt"])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_added_masks_of_paths(force, dtype, head_dim, path):
    if path == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper alone")
    force(path)
    sizes = {"head_dim": head_dim, "value_dim": head_dim, "key_heads": 2}
    for shape, layout, mask_dtype in [
        ("of heads", "dense", dtype),
        ("of heads", "expanded", torch.float32),
        ("of everything", "dense", torch.float32),
        ("of everything", "of wider rows", dtype),
        ("of batches", "of wider rows", torch.float32),
        ("of keys", "dense", dtype),
        ("of one row", "dense", torch.float32),
    ]:
        for lengths, window, p in [
            ((128, 128), (-1, -1), 0.1),  # short tiles
            ((257, 332), (-1, 0), 0.0),
            ((300, 46), (70, 9), 0.1),
            ((1, 600), (-1, -1), 0.0),
            ((700, 1100), (-1, -1), 0.0),  # long ones
            *([] if path == "sm90" else [((130, 331), (-1, -1), 0.1)]),
        ]:
            mask = added_mask(shape, layout, *lengths, "cuda", mask_dtype)
            if path == "sm90" and p > 0:  # which makes no gradient of the mask then
                mask = mask.detach()
            check_dropout("cuda", dtype, *lengths, window, p, mask, **sizes)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("length", [78, 128])
def test_added_masks_of_many_heads(dtype, p, length):
    """As many as there are multiprocessors: short rows have tiles of their own then."""
    batch, heads = 37, 6
    tensors = [torch.randn(batch, heads, length, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]
    mask = torch.randn(batch, heads, length, length, device="cuda").to(dtype)
    mask[:, :, 5], mask[:, 2, 6] = -math.inf, torch.finfo(dtype).min
    inputs = [*tensors, mask.requires_grad_()]
    output, _, state = torch.ops.cuda_ops.attention_forward(*inputs, None, 0.125, 0, -1, -1, 0.0, p)
    copies = [t.detach().double().requires_grad_() for t in inputs]
    scores = 0.125 * copies[0] @ copies[1].mT + copies[3]
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    weights = weights * (dropout_factors(state, p, (batch, heads, length, length)) if p else 1.0)
    expected, grad = weights @ copies[2], torch.randn_like(output)
    found = [output.detach(), *torch.autograd.grad(output, inputs, grad)]
    exact = [expected.detach(), *torch.autograd.grad(expected, copies, grad.double())]
    for a, e in zip(found, exact, strict=True):
        assert (a - e).norm() <= (1e-2 if dtype == torch.bfloat16 else 2e-3) * e.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_boolean_masks_of_many_heads(dtype, p):
    """As many as there are multiprocessors: short rows have tiles of their own then."""
    batch, heads, length = 37, 6, 77
    tensors = [torch.randn(batch, heads, length, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]
    mask = torch.rand(batch, 1, length, length, device="cuda") < 0.6
    mask[:, :, 5] = False
    output, _, state = torch.ops.cuda_ops.attention_forward(
        *tensors, mask.expand(batch, heads, length, length), None, 0.125, 0, -1, -1, 0.0, p
    )
    copies = [t.detach().double().requires_grad_() for t in tensors]
    empty = ~mask.any(-1, keepdim=True)
    scores = (0.125 * copies[0] @ copies[1].mT).masked_fill(~mask, -math.inf).masked_fill(empty, 0.0)
    weights = torch.softmax(scores, -1).masked_fill(empty, 0.0)
    weights = weights * (dropout_factors(state, p, (batch, heads, length, length)) if p else 1.0)
    expected, grad = weights @ copies[2], torch.randn_like(output)
    found = [output.detach(), *torch.autograd.grad(output, tensors, grad)]
    exact = [expected.detach(), *torch.autograd.grad(expected, copies, grad.double())]
    for a, e in zip(found, exact, strict=True):
        assert (a - e).norm() <= (1e-2 if dtype == torch.bfloat16 else 2e-3) * e.norm()


@pytest.mark.cuda
def test_dropout_of_replays():
    """Each replay of a graph draws its own numbers, and its backward the same ones as its forward."""
    tensors = operands("cuda", torch.bfloat16, 256, 256)
    grad = torch.randn_like(tensors[0])
    options = 0.125, 0, -1, 0, 0.0, 0.2

    def step():
        output, _, state = torch.ops.cuda_ops.attention_forward(*tensors, None, None, *options)
        return output.detach(), state, *torch.autograd.grad(output, tensors, grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    seen = []
    for _ in range(2):
        graph.replay()
        copies = [t.detach().double().requires_grad_() for t in tensors]
        hidden = torch.ones(256, 256, dtype=torch.bool, device="cuda").triu(1)
        weights = torch.softmax((0.125 * copies[0] @ copies[1].mT).masked_fill(hidden, -math.inf), -1)
        output = weights * dropout_factors(found[1], 0.2, (2, 4, 256, 256)) @ copies[2]
        for a, e in zip(found[2:], torch.autograd.grad(output, copies, grad.double()), strict=True):
            assert (a - e).norm() <= 2e-2 * e.norm()
        assert (found[0] - output).norm() <= 2e-2 * output.norm()
        seen.append(found[0].clone())
    assert not torch.equal(*seen)


def test_what_dropout_factors_refuses():
    factors, state = torch.ops.cuda_ops.attention_dropout_factors, torch.zeros(2, dtype=torch.int64)
    for arguments, message in [
        ((state[:1], [1, 1, 1, 1], 0.5, torch.float32), "state to be 2 int64"),
        ((state.double(), [1, 1, 1, 1], 0.5, torch.float32), "state to be 2 int64"),
        ((state, [1, 1, 1], 0.5, torch.float32), "sizes to be 4 numbers"),
        ((state, [1, 1, -1, 1], 0.5, torch.float32), "sizes to be 4 numbers"),
        ((state, [1, 1, 1, 1], 1.5, torch.float32), "dropout to be between 0 and 1"),
        ((state, [1, 1, 1, 1], 0.5, torch.int64), "floating point"),
    ]:
        with pytest.raises((RuntimeError, NotImplementedError), match=message):
            factors(*arguments)


def test_dropout_repeats_with_the_seed_and_only_then(device):
    tensors = operands(device, torch.float32, 40, 50)

    def run(p):
        return scaled_dot_product_attention(*tensors, dropout_p=p)

    torch.manual_seed(3)
    first, second = run(0.5), run(0.5)
    torch.manual_seed(3)
    assert torch.equal(run(0.5), first) and not torch.equal(first, second)
    assert torch.equal(run(1.0), torch.zeros_like(first))
    assert torch.equal(run(0.0), run(0.0))


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
