import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

from . import flash_attention

attention = cuda_ops.functional.flash_attention_qkvpacked


def reference(qkv, **options):
    """Of its three parts, by the formulas of flash_attention's docstring."""
    if qkv.dim() != 5:
        raise ValueError("qkv has other dimensions")
    query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
    return flash_attention.reference(query, key, value, **options).transpose(1, 2)


def samples(make):
    # Within a block of queries, at its edge and beyond.
    for length in (2, 33, 64, 130):
        yield Sample((make(2, length, 3, 2, 16),), {"causal": length > 2}, name=f"length {length}")
    for options in ({"window": (5, 3)}, {"softcap": 2.0, "scale": 0.5}, {"causal": True, "window": (20, -1)}):
        yield Sample((make(1, 70, 3, 2, 20),), options, name=str(options))
    batch_within = make(40, 2, 3, 2, 16).transpose(0, 1).detach().requires_grad_(make.requires_grad)
    yield Sample((batch_within,), name="batch within")
    heads_first = make(2, 40, 2, 3, 16).transpose(2, 3).detach().requires_grad_(make.requires_grad)
    yield Sample((heads_first,), {"causal": True}, name="parts within heads")
    slopes = torch.tensor([0.5, 0.25, 0.125], device=make.device)
    yield Sample((make(2, 40, 3, 3, 16),), {"alibi_slopes": slopes, "causal": True}, name="alibi")


def small_samples(make):
    yield Sample((make(1, 3, 3, 2, 2),), {"causal": True})
    yield Sample((make(2, 3, 3, 1, 2),), {"softcap": 1.5, "window": (1, 1)})


def empty_samples(make):
    yield Sample((make(0, 4, 3, 2, 8),))
    yield Sample((make(2, 0, 3, 2, 8),))
    yield Sample((make(2, 4, 3, 0, 8),))


def op_samples(make):
    forward = torch.ops.cuda_ops.attention_packed_forward
    backward = torch.ops.cuda_ops.attention_packed_backward
    options = 0.5, 3, 1, 0.0
    yield forward, (make(2, 5, 3, 2, 8), None, *options, 0.0)
    yield forward, (make(2, 5, 3, 2, 8), make(2, requires_grad=False), 0.5, -1, -1, 2.0, 0.25)
    for qkv in (make(2, 5, 3, 2, 8).detach(), make(2, 5, 2, 3, 8).detach().transpose(2, 3)):
        output, logsumexp, state = forward(qkv, None, *options, 0.0)
        saved = qkv, None, output, logsumexp, state
        yield backward, (torch.ones_like(output), torch.ones_like(logsumexp), *saved, *options, 0.0)


SPEC = OpSpec(
    name="flash_attention_qkvpacked",
    stem="attention",
    function=attention,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    cancels=True,
    # As of scaled_dot_product_attention.
    expanded_dim=-1,
    relative_norm={torch.float32: 2e-5, torch.float16: 1.5e-2, torch.bfloat16: 1.2e-1},
    nonfinite=False,
    bad=[
        bad(
            "two parts",
            lambda ones: attention(ones(1, 4, 2, 2, 8)),
            r"attention_packed: expected qkv to have shape \[batch, length, 3, heads, head_dim\], got \[1, 4, 2",
        ),
        bad(
            "four dimensions",
            lambda ones: attention(ones(1, 4, 3, 8)),
            r"attention_packed: expected qkv to have shape \[batch, length, 3, heads, head_dim\], got \[1, 4, 3, 8\]",
        ),
        bad(
            "slopes of other heads",
            lambda ones: attention(ones(1, 4, 3, 2, 8), alibi_slopes=ones(3)),
            r"attention: expected alibi_slopes to have shape \[2\] or \[1, 2\], got \[3\]",
        ),
        bad(
            "a list",
            lambda ones: attention([ones(1, 4, 3, 2, 8)]),
            "flash_attention_qkvpacked: expected qkv to be a Tensor",
            TypeError,
        ),
    ],
)
