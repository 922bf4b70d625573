import math

import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

from .scaled_dot_product_attention import op_samples, operands

attention = cuda_ops.functional.flash_attention


def reference(
    query,
    key,
    value,
    *,
    causal=False,
    scale=None,
    window=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    return_logsumexp=False,
    bottom_right=False,
    dropout_p=0.0,
    sinks=None,
):
    """The formulas of the docstring, with all scores; a query that sees no key is 0."""
    if key.shape[-3] and query.shape[-3] % key.shape[-3]:
        raise ValueError("heads that do not divide, of which none would be left")
    if key.shape[-3] and query.shape[-3] != key.shape[-3]:
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = scores.shape[-2:]
    i = torch.arange(queries, device=query.device)[:, None] + (keys - queries if bottom_right else 0)
    j = torch.arange(keys, device=query.device)
    if alibi_slopes is not None:
        if alibi_slopes.shape not in (query.shape[-3:-2], query.shape[:-2]):
            raise ValueError("slopes of other heads, which would broadcast")
        scores = scores - alibi_slopes.to(scores.dtype)[..., None, None] * (i - j).abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(queries, keys, dtype=torch.bool, device=query.device)
    if left >= 0:
        hidden = hidden | (j < i - left)
    if right >= 0:
        hidden = hidden | (j > i + right)
    nothing = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden & ~nothing, -math.inf)
    if sinks is not None:
        # A key more, whose score is the sink and whose value is 0.
        logits = sinks.to(scores.dtype).reshape(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, logits], -1)
    weights = torch.softmax(scores, -1)[..., :keys].masked_fill(nothing, 0)
    return weights @ value


def samples(make):
    options = [
        {"causal": True},
        {"causal": True, "bottom_right": True},
        {"window": (5, 3)},
        {"window": (7, -1), "bottom_right": True},
        {"softcap": 2.0, "scale": 0.5},
        {"causal": True, "window": (20, -1), "softcap": 3.0},
    ]
    for queries, keys in [(33, 70), (70, 33), (65, 129)]:
        for keywords in options:
            yield Sample(operands(make, (2, 3), queries, keys), keywords, name=f"{queries} x {keys}, {keywords}")
    slopes = torch.tensor([0.5, 0.25, 0.125], device=make.device)
    yield Sample(operands(make, (2, 3), 40, 70), {"alibi_slopes": slopes, "causal": True}, name="alibi")
    yield Sample(operands(make, (2, 3), 40, 70), {"sinks": make(3), "causal": True}, name="sinks")
    yield Sample(
        operands(make, (2, 3), 40, 30),
        {"sinks": make(3), "causal": True, "bottom_right": True},
        name="sinks and rows that see nothing",
    )
    # Few queries, whose keys are split on CUDA; rows of one tile of 16 and of several.
    yield Sample((make(1, 4, 1, 64), make(1, 2, 1030, 64), make(1, 2, 1030, 64)), name="1 x 1030")
    yield Sample(
        (make(2, 8, 9, 16), make(2, 2, 600, 16), make(2, 2, 600, 16)),
        {"window": (300, 0), "bottom_right": True},
        name="9 x 600, a window",
    )


def small_samples(make):
    yield Sample(operands(make, (1, 2), 3, 4, 2), {"window": (1, 0)})
    yield Sample(operands(make, (1, 2), 3, 3, 2), {"softcap": 1.5, "causal": True})
    yield Sample(operands(make, (1, 2), 3, 3, 2), {"sinks": make(2), "causal": True})


SPEC = OpSpec(
    name="flash_attention",
    stem="attention",
    function=attention,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    op_samples=op_samples,
    gradgrad=True,
    cancels=True,
    # As of scaled_dot_product_attention.
    relative_norm={torch.float32: 2e-5, torch.float16: 1.5e-2, torch.bfloat16: 1.2e-1},
    nonfinite=False,
    bad=[
        bad(
            "a window of one number",
            lambda ones: attention(*[ones(1, 1, 2, 2)] * 3, window=(1,)),
            "flash_attention: expected window to be two ints",
            TypeError,
        ),
        bad(
            "sinks of other heads",
            lambda ones: attention(*[ones(1, 2, 2, 2)] * 3, sinks=ones(1)),
            r"flash_attention: expected sinks to be floating point of shape \[2\], got",
        ),
    ],
)
