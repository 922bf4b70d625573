import functools

import torch
from support.opspec import OpSpec, Sample, bad
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuda_ops

from .scaled_dot_product_attention import op_samples

function = cuda_ops.functional.multi_head_attention_forward


def without_none(call):
    """Its output, with the weights where they are returned."""

    @functools.wraps(call)
    def run(*args, **kwargs):
        output, weights = call(*args, **kwargs)
        return output if weights is None else (output, weights)

    return run


def flags(make, *shape):
    """One of four is hidden, and the first key never."""
    mask = make.integers(*shape, high=4) == 0
    if mask.numel():
        mask[..., 0] = False
    return mask


def rows_of(make, *tensors):
    """One below the other, as a leaf."""
    return torch.cat([t.detach() for t in tensors]).requires_grad_(make.requires_grad)


def operands(make, queries, keys, width=8, heads=2, batch=3, more=False, bias=True, separate=None):
    """Positional arguments up to out_proj_bias, and those by name. Weights are small, so that no score outweighs all
    others."""
    lead = () if batch is None else (batch,)
    k_width, v_width = separate or (width, width)
    query, key, value = make(queries, *lead, width), make(keys, *lead, k_width), make(keys, *lead, v_width)
    small = {"low": -0.4, "high": 0.4}
    q, k, v = (make(width, w, **small) for w in (width, k_width, v_width))
    out, width = make(width, width, **small), query.shape[-1]
    by_name = {"training": False}
    if separate:
        packed, by_name = None, by_name | {"use_separate_proj_weight": True}
        by_name |= {"q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v}
    else:
        packed = rows_of(make, q, k, v)
    biases = [make(width) for _ in range(4)] if bias else None
    packed_bias, out_bias = (rows_of(make, *biases[:3]), biases[3]) if bias else (None, None)
    bias_k, bias_v = (make(1, 1, width), make(1, 1, width)) if more else (None, None)
    heads = heads if width % heads == 0 else 1
    arguments = query, key, value, width, heads, packed, packed_bias, bias_k, bias_v, False, 0.0, out, out_bias
    return arguments, by_name


def sample(make, name, *sizes, masks=None, zero=False, options=None, **more):
    arguments, by_name = operands(make, *sizes, **more)
    given = masks(arguments[0], arguments[1], arguments[4]) if masks else {}
    return Sample((*arguments[:9], zero, *arguments[10:]), by_name | given | (options or {}), name=name)


def shape_of(query, key, heads):
    """(rows of a mask for every head, queries, keys)."""
    return query.shape[1] * heads, query.shape[0], key.shape[0]


def samples(make):
    def boolean(query, key, heads):
        return {"attn_mask": flags(make, *shape_of(query, key, heads)[1:])}

    def of_heads(query, key, heads):
        return {"attn_mask": make(*shape_of(query, key, heads))}

    def both(query, key, heads):
        padding = flags(make, query.shape[1], key.shape[0])
        return boolean(query, key, heads) | {"key_padding_mask": padding}

    without = {"need_weights": False}
    for queries, keys in [(2, 3), (33, 70), (65, 20)]:
        for options in (without, {}):
            yield sample(make, f"{queries} x {keys} {options}", queries, keys, options=options)
    yield sample(make, "weights of heads", 9, 20, options={"average_attn_weights": False})
    for options in (without, {}):
        yield sample(make, f"boolean {options}", 9, 20, masks=boolean, options=options)
        yield sample(make, f"added, of heads {options}", 9, 20, masks=of_heads, options=options)
        yield sample(make, f"two masks, more keys {options}", 9, 20, masks=both, more=True, zero=True, options=options)
        yield sample(make, f"widths {options}", 9, 20, 8, 4, separate=(12, 5), bias=False, options=options)
    yield sample(make, "no batch", 9, 20, 8, 2, None, options=without)


def small_samples(make):
    yield sample(make, "plain", 3, 4, 4, 2, 2, options={"need_weights": False})
    added = {"attn_mask": make(2, 3)}
    yield sample(make, "weights", 2, 3, 4, 2, 1, more=True, masks=lambda *_: added)


def empty_samples(make):
    for queries, keys, batch in [(0, 4, 2), (4, 5, 0)]:
        yield sample(make, "", queries, keys, 8, 2, batch, options={"need_weights": False})


def call(ones, query=(3, 2, 4), key=(5, 2, 4), value=(5, 2, 4), heads=2, weight=(12, 4), dropout=0.0, **kwargs):
    start = (ones(*query), ones(*key), ones(*value), 4, heads, ones(*weight))
    return function(*start, None, None, None, False, dropout, ones(4, 4), None, **kwargs)


def reference(*args, **kwargs):
    """With PyTorch's composition of attention: its kernels have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.multi_head_attention_forward(*args, **kwargs)


SPEC = OpSpec(
    name="multi_head_attention_forward",
    function=without_none(function),
    reference=without_none(reference),
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    cancels=True,
    # Of equal keys all weights are equal, and the gradients of query and key are nothing but rounding.
    expanded_dim=-1,
    # Those of scaled_dot_product_attention, of operands that a product has rounded; in float16 twice the error of
    # PyTorch's flash attention (0.021: the query's gradient of 'no batch' with expanded operands, which cancels).
    relative_norm={torch.float32: 2e-5, torch.float16: 4.2e-2, torch.bfloat16: 1.2e-1},
    # Which of infinity times a weight of 0 are computed depends on the tiles.
    nonfinite=False,
    bad=[
        bad(
            "a list",
            lambda ones: function([1.0], *[ones(2, 4)] * 2, 4, 2, *[None] * 4, False, 0.0, ones(4, 4), None),
            "multi_head_attention_forward: expected query to be a Tensor, got list",
            TypeError,
        ),
        bad(
            "integers",
            lambda ones: function(
                *[ones(3, 2, 4, dtype=torch.int64)] * 3, 4, 2, ones(12, 4), *[None] * 3, False, 0.0, ones(4, 4), None
            ),
            "linear: expected input to be floating point, got int64",
        ),
        bad(
            "weights of another dtype",
            lambda ones: function(
                *[ones(3, 2, 4)] * 3, 4, 2, ones(12, 4).double(), *[None] * 3, False, 0.0, ones(4, 4), None
            ),
            "linear: expected weight to have the dtype of input, float32, got float64",
        ),
        bad(
            "four dimensions",
            lambda ones: call(ones, (1, 3, 2, 4)),
            r"expected query to have 2 or 3 dimensions, got shape \[1, 3, 2, 4\]",
            AssertionError,
        ),
        bad(
            "another width",
            lambda ones: call(ones, (3, 2, 6)),
            r"expected query to have embed_dim, 4, as its last dimension, got shape \[3, 2, 6\]",
            AssertionError,
        ),
        bad(
            "heads that do not divide",
            lambda ones: call(ones, heads=3),
            "expected num_heads to divide embed_dim, 4, got 3",
            AssertionError,
        ),
        bad(
            "no heads",
            lambda ones: call(ones, heads=0),
            r"expected num_heads to divide embed_dim, \d+, got",
            AssertionError,
        ),
        bad(
            "key and value of different lengths",
            lambda ones: call(ones, value=(6, 2, 4)),
            "expected value to have the shape of key",
            AssertionError,
        ),
        bad(
            "key of another batch",
            lambda ones: call(ones, key=(5, 1, 4), value=(5, 1, 4)),
            "expected key to have the batch of query, 2, got 1",
        ),
        bad(
            "weights of another shape",
            lambda ones: call(ones, weight=(8, 4)),
            r"expected in_proj_weight to have shape \[12, 4\], got \[8, 4\]",
        ),
        bad(
            "no weights",
            lambda ones: call(ones, use_separate_proj_weight=True),
            "expected q_proj_weight to be a Tensor with use_separate_proj_weight=True, got None",
            AssertionError,
        ),
        bad(
            "weights of keys for other queries",
            lambda ones: call(
                ones,
                use_separate_proj_weight=True,
                q_proj_weight=ones(4, 4),
                k_proj_weight=ones(3, 4),
                v_proj_weight=ones(4, 4),
            ),
            r"expected k_proj_weight to have shape \[4, any\], got \[3, 4\]",
            AssertionError,
        ),
        bad(
            "static_k of other heads",
            lambda ones: call(ones, static_k=ones(3, 5, 2)),
            r"expected static_k to have shape \[4, any, 2\], got \[3, 5, 2\]",
            AssertionError,
        ),
        bad(
            "a bias alone",
            lambda ones: function(
                *[ones(3, 2, 4)] * 3, 4, 2, ones(12, 4), None, ones(1, 1, 4), None, False, 0.0, ones(4, 4), None
            ),
            "expected bias_v to be a Tensor with bias_k, got None",
            AssertionError,
        ),
        bad(
            "dropout above 1",
            lambda ones: call(ones, dropout=1.5),
            "multi_head_attention_forward: expected dropout_p to be between 0 and 1",
            ValueError,
        ),
        bad(
            "is_causal without a mask",
            lambda ones: call(ones, is_causal=True),
            "expected attn_mask to be the causal mask with is_causal, got None",
        ),
    ],
)
