"""attention: masks, boolean and added, of the lowest numbers and of everything, and their gradients."""

import math

import pytest
import torch
from support.attention import check_dropout, dropout_factors, operands
from support.opspec import RELATIVE_NORM
from torch.nn.attention import SDPBackend, sdpa_kernel

from cuda_ops.functional import scaled_dot_product_attention

NATIVE = torch.nn.functional.scaled_dot_product_attention


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
def test_masks_of_the_lowest_number_on_paths(force_attention, dtype, path):
    if path == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper alone")
    force_attention(path)
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
    both = []
    for function in (scaled_dot_product_attention, NATIVE):
        with sdpa_kernel(SDPBackend.MATH):
            output = function(*tensors, mask.to(device))
        # Of the others the gradients are differences of equal numbers.
        grad_query, grad_value = torch.autograd.grad(output, tensors[::2], torch.ones_like(output))
        assert torch.equal(grad_query[:, :, 9], torch.zeros_like(grad_query[:, :, 9]))
        both.append([output, grad_value])
    assert torch.equal(both[0][0][:, :, 9], torch.zeros_like(tensors[0][:, :, 9]))
    for found, expected in zip(*both, strict=True):
        assert (found - expected).norm() <= 2 * RELATIVE_NORM[dtype] * expected.norm()


def test_a_float32_mask_of_any_strides_beside_float64(device):
    query, key, value = (t.detach().double() for t in operands(device, torch.float32, 70, 130, 2, 2, 16, 16))
    wide = torch.randn(130, 140, device=device)
    expected = NATIVE(query, key, value, wide.t()[:70].double())
    for mask in (wide.t()[:70], wide.t()[:70].contiguous(), wide[:, :70].t()[:, :1].expand(70, 130)):
        if mask.stride(1) == 0:
            expected = NATIVE(query, key, value, mask.double())
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value, mask), expected)


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
def test_boolean_masks_of_paths(force_attention, dtype, head_dim, path):
    if path == "mma_3xtf32" and head_dim > 64:
        pytest.skip("its gradients are of rows of up to 64 elements")
    if path == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper alone")
    force_attention(path)
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
def test_added_masks_of_paths(force_attention, dtype, head_dim, path):
    if path == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper alone")
    force_attention(path)
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
