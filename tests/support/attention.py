"""What the tests of attention share: its formulas, operands, and what is checked of every option and of dropout."""

import math

import torch

from cuda_ops.functional import flash_attention
from support.opspec import RELATIVE_NORM


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


def dropout_factors(state, dropout, sizes, dtype=torch.float64):
    return torch.ops.cuda_ops.attention_dropout_factors(state, sizes, dropout, dtype)


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
