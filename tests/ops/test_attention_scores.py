"""attention: scores of any size, which are infinite, NaN or larger than those before them."""

import math

import pytest
import torch
from support.attention import assert_errors_are_small, dropout_factors, operands, reference
from torch.nn.attention import SDPBackend, sdpa_kernel

from cuda_ops.functional import flash_attention, flash_attention_varlen, scaled_dot_product_attention

NATIVE = torch.nn.functional.scaled_dot_product_attention


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
