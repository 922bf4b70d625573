"""flash_attention_varlen, flash_attention_with_kvcache, sinks, and the path for few queries: what is special to them
beside the properties that hold for every op (tests/specs)."""

import math

import pytest
import torch
from support.opspec import RELATIVE_NORM

import cuda_ops
from cuda_ops import _library
from cuda_ops.functional import flash_attention, flash_attention_varlen, flash_attention_with_kvcache

OPTIONS = {
    "full": {},
    "causal, bottom right": {"causal": True, "bottom_right": True},
    "window": {"window": (40, 13), "bottom_right": True},
    "all": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "softcap": 3.0, "window": (100, 5)},
}


def starts_of(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def random_lengths(seed, count=6, longest=511):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, longest + 1, (count,), generator=generator).tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_sequences_are_those_of_one_call_each(device_dtype, options, seed):
    """Values and gradients, and twice the same bits."""
    device, dtype = device_dtype
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    slopes = options.pop("alibi_slopes", None)
    lengths, key_lengths = [*random_lengths(seed), 0, 1, 3], [*random_lengths(seed + 100), 5, 0, 200]
    generator = torch.Generator().manual_seed(seed)
    sizes = ((sum(lengths), 4), (sum(key_lengths), 2), (sum(key_lengths), 2))
    tensors = [torch.randn(*size, 32, generator=generator).to(device, dtype).requires_grad_() for size in sizes]
    starts, key_starts = starts_of(lengths, device), starts_of(key_lengths, device)
    longest = max(lengths), max(key_lengths)

    def run():
        output, logsumexp = flash_attention_varlen(
            *tensors, starts, key_starts, *longest, alibi_slopes=slopes, return_logsumexp=True, **options
        )
        finite = torch.where(logsumexp.isfinite(), logsumexp, 0)
        grads = torch.autograd.grad(output.square().sum() + finite.square().sum(), tensors)
        return [output.detach(), finite.detach(), *grads]

    found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, run(), strict=True))
    for other in (torch.float64, dtype):
        copies = [t.detach().to(other).requires_grad_() for t in tensors]
        outputs, logsumexps = [], []
        for query, key, value in zip(
            copies[0].split(lengths), copies[1].split(key_lengths), copies[2].split(key_lengths), strict=True
        ):
            parts = [t.transpose(0, 1).unsqueeze(0) for t in (query, key, value)]
            output, logsumexp = flash_attention(*parts, alibi_slopes=slopes, return_logsumexp=True, **options)
            outputs.append(output.squeeze(0).transpose(0, 1))
            logsumexps.append(logsumexp.squeeze(0))
        output, logsumexp = torch.cat(outputs), torch.cat(logsumexps, 1)
        finite = torch.where(logsumexp.isfinite(), logsumexp, 0)
        grads = torch.autograd.grad(output.square().sum() + finite.square().sum(), copies)
        if other == torch.float64:
            exact = [output.detach(), finite.detach(), *grads]
        same = [output.detach(), finite.detach(), *grads]
    for actual, e, s in zip(found, exact, same, strict=True):
        error, allowed = ((x.double() - e).norm() / e.norm() for x in (actual, s))
        assert error <= 2 * allowed + RELATIVE_NORM[dtype]


def packed_results(tensors, grad, starts, longest, **options):
    """Output, logsumexp and gradients."""
    output, logsumexp = flash_attention_varlen(
        *tensors, starts, starts, longest, longest, return_logsumexp=True, **options
    )
    return [output.detach(), logsumexp.detach(), *torch.autograd.grad(output, tensors, grad)]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_neighbour_without_finite_values_changes_no_bit(device_dtype, head_dim, value):
    """What a sequence's last tile has beyond it, be it the next sequence or rows of none, stays out of its products."""
    device, dtype = device_dtype
    lengths = [3, 130, 0, 1, 70, 200]
    starts = starts_of(lengths, device) + 5
    generator = torch.Generator().manual_seed(head_dim)
    rows = 5 + sum(lengths) + 9
    *tensors, grad = (
        torch.randn(rows, heads, head_dim, generator=generator).to(device, dtype) for heads in (2, 1, 1, 2)
    )
    outside = torch.ones(rows, dtype=torch.bool, device=device)
    outside[5 : 5 + sum(lengths)] = False
    before = None
    for changed in ([], [1], [3, 4], [0, 5]):
        bad = outside.clone()
        for b in changed:
            bad[int(starts[b]) : int(starts[b + 1])] = True
        altered = [t.masked_fill(bad[:, None, None], value).requires_grad_() for t in tensors]
        found = packed_results(altered, grad.masked_fill(bad[:, None, None], value), starts, 200, causal=True)
        found[1] = found[1].T
        if before is None:
            before = found
            assert torch.equal(found[0][outside], torch.zeros_like(found[0][outside]))
            assert all(grad[outside].eq(0).all() for grad in found[2:])
        for then, now in zip(before, found, strict=True):
            assert torch.equal(then[~bad], now[~bad])


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_a_long_sequence_among_short_ones(head_dim, causal):
    """Its blocks of keys add to the queries' gradients in turns: right, and the same bits each time."""
    lengths = [*[100] * 20, 3000, *[100] * 20, 1]
    starts = starts_of(lengths, "cuda")
    shapes = [(sum(lengths), heads, head_dim) for heads in (4, 2, 2, 4)]
    *tensors, grad = (torch.randn(*shape, device="cuda").bfloat16() for shape in shapes)
    copies = [t.double().requires_grad_() for t in tensors]
    tensors = [t.requires_grad_() for t in tensors]
    found = packed_results(tensors, grad, starts, 3000, causal=causal)
    parts = [[t.transpose(0, 1).unsqueeze(0) for t in copy.split(lengths)] for copy in copies]
    outputs = [flash_attention(*part, causal=causal).squeeze(0).transpose(0, 1) for part in zip(*parts, strict=True)]
    output = torch.cat(outputs)
    expected = [output.detach(), *torch.autograd.grad(output, copies, grad.double())]
    for actual, exact in zip([found[0], *found[2:]], expected, strict=True):
        assert (actual - exact).norm() <= 6e-3 * exact.norm()
    for _ in range(20):
        for first, again in zip(found, packed_results(tensors, grad, starts, 3000, causal=causal), strict=True):
            assert torch.equal(first, again)


def test_more_sequences_than_threads_look_for_their_tiles(device_dtype):
    """2500 sequences, a long one among them: those of a few are what they are by themselves, bit by bit."""
    device, dtype = device_dtype
    lengths = [*random_lengths(7, 2499, 3), 700]
    starts = starts_of(lengths, device)
    generator = torch.Generator().manual_seed(7)
    *tensors, grad = (torch.randn(sum(lengths), 1, 16, generator=generator).to(device, dtype) for _ in range(4))
    found = packed_results([t.clone().requires_grad_() for t in tensors], grad, starts, 700)
    for first, last in ((0, 30), (1010, 1040), (2040, 2060), (2470, 2500)):
        rows = slice(int(starts[first]), int(starts[last]))
        some = [t[rows].clone().requires_grad_() for t in tensors]
        alone = packed_results(some, grad[rows], starts[first : last + 1] - starts[first], 700)
        found_alone = [found[0][rows], found[1][:, rows], *(t[rows] for t in found[2:])]
        for ours, theirs in zip(found_alone, alone, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("numbers", [[5, -3, 100, 7], [0, 10**9, -(10**9), 3], [0, 2, 1, 3]], ids=str)
def test_starts_that_are_wrong_read_and_write_nothing_else(device, numbers):
    """The rows around the tensors are NaN, and none comes into results."""
    starts = torch.tensor(numbers, dtype=torch.int32, device=device)
    whole = torch.full((30, 2, 8), math.nan, device=device)
    whole[10:20] = 1
    tensors = [whole[10:20].detach().requires_grad_() for _ in range(3)]
    before = whole.clone()
    output = flash_attention_varlen(*tensors, starts, starts, 100, 100)
    grads = torch.autograd.grad(output.sum(), tensors)
    assert torch.equal(whole[:10].isnan(), before[:10].isnan()) and torch.equal(whole[20:].isnan(), before[20:].isnan())
    # Of ones every weighted mean is 1; rows of no sequence are 0. Where sequences overlap, either may win.
    assert ((output - 1).abs().minimum(output.abs()) < 1e-5).all()
    assert all(grad.isfinite().all() for grad in grads)


def test_composed_derivatives_check_what_they_index_by(device):
    """An index out of range, of slopes of fewer sequences, would end a process on a GPU."""
    x = torch.ones(5, 4, 8, device=device)
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=device)
    right = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "alibi_slopes": None}
    ops = torch.ops.cuda_ops

    def gradients(**wrong):
        return ops.attention_varlen_gradients_composed(
            x, None, x, x, x, *(right | wrong).values(), 3, 3, 0.5, -1, -1, 0.0, False
        )

    def tangents(**wrong):
        return ops.attention_varlen_tangents(x, x, x, x, x, x, *(right | wrong).values(), 3, 3, 0.5, -1, -1, 0.0, False)

    for name, op in (("gradients", gradients), ("tangents", tangents)):
        for wrong, message in [
            ({"alibi_slopes": torch.ones(1, 4)}, r"alibi_slopes to have shape \[4\] or \[3, 4\], got \[1, 4\]"),
            ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes to have shape \[4\] or \[3, 4\], got \[3\]"),
            ({"cu_seqlens_q": starts.long().cpu()}, "cu_seqlens_q to be "),
            ({"cu_seqlens_k": starts[:2].cpu()}, r"cu_seqlens_k to have the shape of cu_seqlens_q, \[4\], got \[2\]"),
            ({"cu_seqlens_k": starts[:0].cpu()}, r"cu_seqlens_k to have shape \[sequences \+ 1\], got \[0\]"),
        ]:
            with pytest.raises(RuntimeError, match=f"attention_varlen_{name}: expected {message}"):
                op(**{key: value.to(device) for key, value in wrong.items()})
        assert all(found.isfinite().all() for found in op(alibi_slopes=torch.ones(3, 4, device=device)))


def test_rows_of_no_sequence(device):
    query, key, value = (torch.randn(10, 2, 8, device=device, requires_grad=True) for _ in range(3))
    starts = torch.tensor([2, 5, 9], dtype=torch.int32, device=device)
    # The second sequence has a row more than max_seqlen says.
    output, logsumexp = flash_attention_varlen(query, key, value, starts, starts, 3, 3, return_logsumexp=True)
    outside = torch.tensor([0, 1, 8, 9], device=device)
    assert torch.equal(output[outside], torch.zeros_like(output[outside]))
    assert (logsumexp[:, outside] == -math.inf).all() and logsumexp[:, 2:8].isfinite().all()
    for grad in torch.autograd.grad(output.sum(), (query, key, value)):
        assert torch.equal(grad[outside], torch.zeros_like(grad[outside]))


@pytest.mark.cuda
def test_packed_sequences_wait_for_nothing():
    """No copy to the host, and none of an operand."""
    query, key, value = torch.randn(4096, 3, 4, 64, device="cuda", dtype=torch.bfloat16).unbind(1)
    starts = starts_of([1000, 96, 2000, 1000], "cuda")
    flash_attention_varlen(query, key, value, starts, starts, 2000, 2000)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = flash_attention_varlen(query, key, value, starts, starts, 2000, 2000, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 1.5 * output.numel() * output.element_size()


def cache_case(device, dtype, page=16, lengths=(100, 0, 37), capacity=128, key_heads=2, head_dim=64):
    generator = torch.Generator().manual_seed(page)
    batch, columns = len(lengths), capacity // page
    caches = [
        torch.randn(batch * columns + 1, page, key_heads, head_dim, generator=generator).to(device, dtype)
        for _ in range(2)
    ]
    table = torch.randperm(batch * columns, generator=generator).reshape(batch, columns).to(device, torch.int32)
    return caches, table, torch.tensor(lengths, dtype=torch.int32, device=device)


@pytest.mark.parametrize("page", [1, 16, 128])
def test_a_cache_grows_key_by_key(device_dtype, page):
    """Step by step the same as all queries at once, causal."""
    device, dtype = device_dtype
    (key_cache, value_cache), table, lengths = cache_case(device, dtype, page)
    query, key, value = (torch.randn(3, 5, heads, 64, device=device).to(dtype) for heads in (4, 2, 2))
    caches = [t.clone() for t in (key_cache, value_cache)]
    at_once = flash_attention_with_kvcache(
        query, *caches, key, value, cache_seqlens=lengths, block_table=table, causal=True
    )
    steps = []
    for t in range(5):
        new = [x[:, t : t + 1] for x in (query, key, value)]
        steps.append(
            flash_attention_with_kvcache(
                new[0], key_cache, value_cache, *new[1:], cache_seqlens=lengths + t, block_table=table, causal=True
            )
        )
    assert torch.equal(key_cache, caches[0]) and torch.equal(value_cache, caches[1])
    difference = (torch.cat(steps, 1).double() - at_once.double()).norm() / at_once.double().norm()
    assert difference <= 2 * RELATIVE_NORM[dtype]


@pytest.mark.parametrize("left", [3, 20, 37])
def test_windows_begin_within_pages(device_dtype, left):
    """Pages lie in any order: what is behind a window's first one in memory is not what comes after it."""
    device, dtype = device_dtype
    caches, table, lengths = cache_case(device, dtype)
    query = torch.randn(3, 2, 4, 64, device=device).to(dtype)
    together = [cache[table.long()].flatten(1, 2) for cache in caches]
    options = {"cache_seqlens": lengths, "window": (left, 0)}
    found = flash_attention_with_kvcache(query, *caches, block_table=table, **options)
    expected = flash_attention_with_kvcache(query, *together, **options)
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    assert difference <= 2 * RELATIVE_NORM[dtype]


@pytest.mark.parametrize("apart", ["key", "value"])
def test_new_keys_and_values_have_strides_of_their_own(apart, device_dtype):
    """Rows of one of them are no whole vectors apart, those of the other are."""
    device, dtype = device_dtype
    caches = [torch.zeros(2, 8, 2, 16, device=device, dtype=dtype) for _ in range(2)]
    new = [
        torch.randn(2, 3, 2, 17 if name == apart else 16, device=device).to(dtype)[..., :16]
        for name in ("key", "value")
    ]
    query = torch.randn(2, 1, 2, 16, device=device).to(dtype)
    flash_attention_with_kvcache(query, *caches, *new, cache_seqlens=4)
    for cache, rows in zip(caches, new, strict=True):
        assert torch.equal(cache[:, 4:7], rows)
        assert cache[:, :4].eq(0).all() and cache[:, 7:].eq(0).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("batch, key_heads, keys", [(1, 2, 700), (1, 1, 30000), (5, 3, 3000)])
def test_keys_that_several_blocks_have(device_dtype, batch, key_heads, keys, head_dim):
    """Few and many of one sequence, and of sequences whose lengths differ, one of them empty: the shares of blocks end
    anywhere. Results repeat bit by bit."""
    device, dtype = device_dtype
    generator = torch.Generator().manual_seed(keys)
    query = torch.randn(batch, 1, 4 * key_heads, head_dim, generator=generator).to(device, dtype)
    caches = [torch.randn(batch, keys, key_heads, head_dim, generator=generator).to(device, dtype) for _ in range(2)]
    lengths = torch.randint(1, keys + 1, (batch,), generator=generator, dtype=torch.int32)
    lengths[batch // 2] = 0 if batch > 1 else keys
    call = {"cache_seqlens": lengths.to(device), "return_logsumexp": True}
    output, logsumexp = flash_attention_with_kvcache(query, *caches, **call)
    again = flash_attention_with_kvcache(query, *caches, **call)
    assert torch.equal(again[0], output) and torch.equal(again[1], logsumexp)
    expected, sums = torch.zeros_like(output, dtype=torch.float64), torch.empty_like(logsumexp, dtype=torch.float64)
    for b, length in enumerate(lengths.tolist()):
        q = query[b, 0].double().view(key_heads, 4, head_dim)
        k, v = (cache[b, :length].double().transpose(0, 1) for cache in caches)
        scores = q @ k.transpose(1, 2) / math.sqrt(head_dim)
        sums[b, :, 0] = scores.logsumexp(-1).flatten()
        expected[b, 0] = (scores.softmax(-1) @ v).flatten(0, 1)
    assert (output.double() - expected).norm() <= 2 * RELATIVE_NORM[dtype] * expected.norm()
    assert torch.allclose(logsumexp.double(), sums, rtol=2 * RELATIVE_NORM[dtype], atol=2 * RELATIVE_NORM[dtype])


def test_what_lies_behind_the_lengths_is_not_read(device):
    (key_cache, value_cache), table, lengths = cache_case(device, torch.float32)
    query = torch.randn(3, 2, 4, 64, device=device)
    expected = flash_attention_with_kvcache(query, key_cache, value_cache, cache_seqlens=lengths, block_table=table)
    seen = torch.zeros(key_cache.shape[:2], dtype=torch.bool, device=device)
    for b, length in enumerate(lengths.tolist()):
        for j in range(length):
            seen[table[b, j // 16], j % 16] = True
    for cache in (key_cache, value_cache):
        cache[~seen] = math.nan
    needed = -(-lengths // 16)
    table[torch.arange(table.shape[1], device=device) >= needed[:, None]] = -1
    found = flash_attention_with_kvcache(query, key_cache, value_cache, cache_seqlens=lengths, block_table=table)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("which", ["length", "page"])
@pytest.mark.parametrize("value", [-1, 129, 2**31 - 1])
def test_lengths_and_pages_that_are_not_there(device, which, value, monkeypatch):
    monkeypatch.setenv("CUDA_OPS_CHECK_INDICES", "1")
    caches, table, lengths = cache_case(device, torch.float32)
    query = torch.randn(3, 2, 4, 64, device=device)
    if which == "length":
        lengths[1] = value
        match = rf"expected cache_seqlens to be in \[0, 129\), got {value} at position 1"
    else:
        table[0, 2] = value
        match = rf"expected block_table to be in \[0, 25\), got {value} at position 2"
    with pytest.raises(IndexError, match="flash_attention_with_kvcache: " + match):
        flash_attention_with_kvcache(query, *caches, cache_seqlens=lengths, block_table=table)
    new = torch.randn(3, 30, 2, 64, device=device)
    before = [cache.clone() for cache in caches]
    with pytest.raises(IndexError):
        flash_attention_with_kvcache(query, *caches, new, new, cache_seqlens=lengths + 0, block_table=table)
    if not query.is_cuda:
        assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


def test_a_cache_has_no_gradient(device):
    query = torch.randn(1, 1, 2, 8, device=device, requires_grad=True)
    cache = torch.randn(1, 4, 2, 8, device=device)
    with pytest.raises(RuntimeError, match="attention_cache: not differentiable with respect to query"):
        flash_attention_with_kvcache(query, cache, cache)
    assert flash_attention_with_kvcache(query.detach(), cache, cache).shape == query.shape


def test_slopes_of_a_cache_have_no_gradient(device):
    query, cache = torch.randn(1, 1, 2, 8, device=device), torch.randn(1, 4, 2, 8, device=device)
    slopes = torch.rand(2, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="attention_cache: not differentiable with respect to alibi_slopes"):
        flash_attention_with_kvcache(query, cache, cache, alibi_slopes=slopes)


@pytest.mark.parametrize("shared", ["value_cache", "cache_seqlens", "block_table", "key"])
def test_what_lies_in_a_cache_is_not_appended_to_it(device, shared):
    memory = torch.zeros(2, 4, 2, 8, device=device)
    numbers = memory.view(torch.int32).view(-1)
    new = torch.ones(1, 1, 2, 8, device=device)
    arguments = {
        "key_cache": memory,
        "value_cache": torch.zeros_like(memory),
        "key": new,
        "value": new,
        "cache_seqlens": torch.zeros(1, dtype=torch.int32, device=device),
        "block_table": torch.zeros(1, 2, dtype=torch.int32, device=device),
    }
    same = {
        "value_cache": memory,
        "cache_seqlens": numbers[:1],
        "block_table": numbers[None, :2],
        "key": memory[:1, :1],
    }
    arguments[shared] = same[shared]
    with pytest.raises(RuntimeError, match=f"attention_cache: expected {shared} to share no memory with key_cache"):
        torch.ops.cuda_ops.attention_cache_append(*arguments.values())
    assert not memory.any()


def test_packed_sequences_whose_starts_have_gaps(device):
    query, key, value = (torch.randn(9, 2, 8, device=device) for _ in range(3))
    starts, key_starts = (torch.tensor(s, dtype=torch.int32, device=device) for s in ([0, 4, 9], [0, 6, 9]))
    expected = flash_attention_varlen(query, key, value, starts, key_starts, 5, 6)
    gaps = [torch.stack([s, s + 1000], 1)[:, 0] for s in (starts, key_starts)]
    assert torch.equal(flash_attention_varlen(query, key, value, *gaps, 5, 6), expected)


def test_the_gradient_of_logsumexp_alone(device):
    query, key, value = (torch.randn(5, 2, 8, device=device, requires_grad=True) for _ in range(3))
    starts = starts_of([5], device)
    _, logsumexp = flash_attention_varlen(query, key, value, starts, starts, 5, 5, return_logsumexp=True)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(8)
    grads = torch.autograd.grad(logsumexp.sum(), (query, key, value))
    expected = torch.autograd.grad(scores.logsumexp(-1).sum(), (query, key))
    torch.testing.assert_close(grads[:2], expected)
    assert not grads[2].any()


def test_logsumexp_of_another_dtype_is_refused(device):
    query = torch.randn(5, 2, 8, device=device)
    starts = starts_of([5], device)
    options = 5, 5, 1.0, -1, -1, 0.0, False
    backward = torch.ops.cuda_ops.attention_varlen_backward
    logsumexp = torch.zeros(2, 5, dtype=torch.float64, device=device)
    refusal = "attention_varlen_backward: expected logsumexp to be float32 of shape .*, got float64"
    with pytest.raises(RuntimeError, match=refusal):
        backward(query, None, *[query] * 3, starts, starts, None, query, logsumexp, *options)


def test_sinks_join_the_denominator(device_dtype):
    """As a key more, whose score is the sink and whose value is 0; values, logsumexp and gradients."""
    device, dtype = device_dtype
    tensors = [torch.randn(2, 3, n, 16, device=device).to(dtype).requires_grad_() for n in (40, 70, 70)]
    wide = torch.promote_types(dtype, torch.float32)
    sinks = torch.tensor([0.5, -2.0, 6.0], device=device, dtype=wide, requires_grad=True)
    grad = torch.randn(2, 3, 40, 16, device=device).to(dtype)

    def run(function, tensors):
        output, logsumexp = function(*tensors)
        grads = torch.autograd.grad((output, logsumexp.sum()), tensors, (grad.to(output.dtype), None))
        return [output.detach(), logsumexp.detach(), *grads]

    def ours(query, key, value, sinks):
        return flash_attention(query, key, value, causal=True, sinks=sinks, return_logsumexp=True)

    def composed(query, key, value, sinks):
        hidden = torch.ones(40, 70, dtype=torch.bool, device=device).triu(1)
        scores = (query @ key.mT / 4).masked_fill(hidden, -math.inf)
        scores = torch.cat([scores, sinks.to(scores.dtype).reshape(3, 1, 1).expand(2, 3, 40, 1)], -1)
        return torch.softmax(scores, -1)[..., :-1] @ value, torch.logsumexp(scores, -1)

    found = run(ours, [*tensors, sinks])
    exact, same = (
        run(composed, [t.detach().to(other).requires_grad_() for t in (*tensors, sinks)])
        for other in (torch.float64, dtype)
    )
    for actual, e, s in zip(found, exact, same, strict=True):
        error, allowed = ((x.double() - e).norm() / e.norm() for x in (actual, s))
        assert error <= 2 * allowed + RELATIVE_NORM[dtype]


def test_second_derivatives_of_sinks_where_rows_see_nothing(device):
    """Of logsumexp too, which is the sink there."""
    double = {"dtype": torch.float64, "device": device, "requires_grad": True}
    tensors = [torch.randn(1, heads, n, 4, **double) for heads, n in ((2, 5), (1, 3), (1, 3))]
    sinks = torch.randn(2, **double)

    def call(query, key, value, sinks):
        options = {"causal": True, "bottom_right": True, "return_logsumexp": True}
        return flash_attention(query, key, value, sinks=sinks, **options)

    assert torch.equal(call(*tensors, sinks)[1][:, :, :2], sinks[:, None].expand(1, 2, 2))
    assert torch.autograd.gradcheck(call, (*tensors, sinks))
    assert torch.autograd.gradgradcheck(call, (*tensors, sinks))


@pytest.mark.parametrize(
    "capability, options, path",
    [("9.0", {}, "sm90"), ("9.0", {"window": (40, 0)}, "sm90"), ("9.0", {"softcap": 3.0}, "mma"), ("8.0", {}, "mma")],
)
def test_packed_sequences_take_hoppers_path(capability, options, path):
    if not _library.has_cuda():
        pytest.skip("needs a build with CUDA, whose tables these are")
    half = {"device": "meta", "dtype": torch.bfloat16}
    query, key = torch.empty(5000, 8, 64, **half), torch.empty(5000, 2, 64, **half)
    starts = torch.empty(9, dtype=torch.int32, device="meta")
    explanation = cuda_ops.explain(
        flash_attention_varlen, query, key, key, starts, starts, 4096, 4096, capability=capability, **options
    )
    assert [product.chosen.name for product in explanation.products] == [path, path]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_short_packed_sequences_take_the_mma_path(head_dim):
    if not _library.has_cuda():
        pytest.skip("needs a build with CUDA, whose tables these are")
    rows = torch.empty(5000, 8, head_dim, device="meta", dtype=torch.bfloat16)
    starts = torch.empty(101, dtype=torch.int32, device="meta")
    explanation = cuda_ops.explain(
        flash_attention_varlen, rows, rows, rows, starts, starts, 4096, 4096, capability="9.0"
    )
    assert [product.chosen.name for product in explanation.products] == ["sm90", "mma"]


@pytest.mark.parametrize("queries, path", [(1, "decode"), (16, "decode"), (17, "mma")])
def test_few_queries_take_the_path_for_them(queries, path):
    if not _library.has_cuda():
        pytest.skip("needs a build with CUDA, whose tables these are")
    half = {"device": "meta", "dtype": torch.bfloat16}
    query, key = torch.empty(2, 8, queries, 64, **half), torch.empty(2, 2, 4096, 64, **half)
    explanation = cuda_ops.explain(flash_attention, query, key, key, capability="8.0")
    assert explanation.products[0].chosen.name == path
