"""attention: what is special to it beside the properties that hold for every op (tests/specs): the options of
flash_attention, rows that see nothing, dropout, layouts, and the paths on CUDA."""

import math

import pytest
import torch
from support.opspec import RELATIVE_NORM
from torch.nn.attention import SDPBackend, sdpa_kernel

from cuda_ops.functional import flash_attention, scaled_dot_product_attention

NATIVE = torch.nn.functional.scaled_dot_product_attention
LENGTHS = [(1, 1), (239, 1), (799, 3), (113, 203), (108, 256), (64, 64), (3, 600), (1023, 1024)]


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
    for name, a, e, s in zip(("output", "logsumexp", "query", "key", "value"), found, exact, same, strict=True):
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


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["sm90", "mma", "simt"])
@pytest.mark.parametrize("options", ["full", "causal", "window", "all"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_paths_of_halves(monkeypatch, dtype, options, path):
    if path == "sm90" and (torch.cuda.get_device_capability() != (9, 0) or options == "all"):
        pytest.skip("of Hopper alone, and without softcap and slopes")
    monkeypatch.setenv("CUDA_OPS_ATTENTION_PATH", path)
    torch.ops.cuda_ops.reload_paths()
    try:
        for head_dim in (64, 96, 128) if path == "sm90" else (64, 128, 256):
            check_options("cuda", dtype, OPTIONS[options], 257, 331, key_heads=2, head_dim=head_dim, value_dim=head_dim)
    finally:
        monkeypatch.undo()
        torch.ops.cuda_ops.reload_paths()


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


def factors_of(state, dropout, shape):
    padded = (shape[-1] + 3) // 4 * 4
    ones = torch.ones(*shape[:-1], padded, dtype=torch.float64, device=state.device)
    return torch.ops.cuda_ops.dropout_backward(ones, state, dropout, ones.stride())[..., : shape[-1]]


@pytest.mark.parametrize("keys", [64, 203])
def test_dropout_is_that_of_dropout(device_dtype, keys):
    """The factors are those that the op dropout has for the same seed, forward and backward."""
    device, dtype = device_dtype
    tensors = operands(device, dtype, 113, keys)
    options = 0.125, keys - 113, -1, 0, 0.0, 0.3
    output, _, state = torch.ops.cuda_ops.attention_forward(*tensors, None, None, *options)
    factors = factors_of(state, 0.3, (2, 4, 113, keys))
    assert abs((factors != 0).double().mean() - 0.7) < 0.01

    def dropped(query, key, value):
        hidden = torch.ones(113, keys, dtype=torch.bool, device=device).triu(1 + keys - 113)
        scores = (0.125 * (query @ key.mT)).masked_fill(hidden, -math.inf)
        empty = hidden.all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
        return weights * factors.to(query.dtype) @ value

    grad = torch.randn(output.shape).to(device, dtype)
    found = [output.detach(), *torch.autograd.grad(output, tensors, grad)]
    for other in (torch.float64, dtype):
        copies = [t.detach().to(other).requires_grad_() for t in tensors]
        value = dropped(*copies)
        gradients = torch.autograd.grad(value, copies, grad.to(other))
        if other == torch.float64:
            exact = [value.detach(), *gradients]
        same = [value.detach(), *gradients]
    for a, e, s in zip(found, exact, same, strict=True):
        error, allowed = ((x.double() - e).norm() / e.norm() for x in (a, s))
        assert error <= 2 * allowed + RELATIVE_NORM[dtype]


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
