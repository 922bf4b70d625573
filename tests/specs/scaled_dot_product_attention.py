import torch
from support.opspec import OpSpec, Sample, bad
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuda_ops

attention = cuda_ops.functional.scaled_dot_product_attention


def reference(*args, **kwargs):
    """PyTorch's composition: its kernels have no second derivative. It divides by the number of heads, 0 too."""
    if kwargs.get("enable_gqa") and any(t.dim() > 2 and t.shape[-3] == 0 for t in args[1:3]):
        raise ValueError("no heads of keys or values")
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)


# Within a tile of 64, at its edge and beyond; CPU blocks of 64 queries and 512 keys; more queries than keys.
LENGTHS = [(1, 1), (2, 65), (63, 64), (64, 63), (65, 129), (130, 40), (7, 530), (33, 1030)]


def flags(make, *shape):
    """Three of four take part."""
    return make.integers(*shape, high=4) > 0


def operands(make, lead, queries, keys, head_dim=16, value_dim=None):
    value_dim = head_dim if value_dim is None else value_dim
    return make(*lead, queries, head_dim), make(*lead, keys, head_dim), make(*lead, keys, value_dim)


def samples(make):
    for queries, keys in LENGTHS:
        # Of one key the weight is 1, and what is left of the gradients of query and key is rounding.
        if keys > 1:
            yield Sample(operands(make, (2, 3), queries, keys), name=f"{queries} x {keys}")
            causal = operands(make, (2, 3), queries, keys)
            if queries > 1:
                yield Sample(causal, {"is_causal": True}, name=f"{queries} x {keys}, causal")
    # Of rows in shared memory: 64, 128 and 256 elements, whole vectors and not, and more.
    for head_dim, value_dim in [(8, 24), (20, 5), (64, 64), (80, 96), (128, 64), (130, 17), (256, 256), (300, 264)]:
        # Of this scale scores stay small also where all elements of a row are equal, and weights keep their digits.
        tensors, name = operands(make, (1, 2), 20, 70, head_dim, value_dim), f"{head_dim} and {value_dim} elements"
        yield Sample(tensors, {"scale": 1.0 / head_dim}, name=name)
    for shape in [(9, 70), (1, 70), (9, 1), (2, 1, 1, 70), (1, 3, 9, 70), (2, 3, 9, 70)]:
        yield Sample((*operands(make, (2, 3), 9, 70), flags(make, *shape)), name=f"boolean of {shape}")
        # What adds the same to a whole row changes nothing: of its gradient there is but rounding.
        varies = None if shape[-1] > 1 else False
        additive = make(*shape, requires_grad=varies)
        yield Sample((*operands(make, (2, 3), 9, 70), additive), name=f"additive of {shape}")
    hidden = flags(make, 9, 70)
    hidden[3] = False
    yield Sample((*operands(make, (2, 3), 9, 70), hidden), name="a query that sees no key")
    yield Sample((*operands(make, (2, 3), 9, 40), flags(make, 40, 9).t()), name="a transposed mask")
    query, _, _ = operands(make, (2, 4), 20, 1)
    for heads in (1, 2, 4):
        key, value = make(2, heads, 30, 16), make(2, heads, 30, 16)
        yield Sample((query, key, value), {"enable_gqa": True, "is_causal": True}, name=f"{heads} heads of keys")
    yield Sample((query, make(2, 4, 30, 16), make(2, 2, 30, 16)), {"enable_gqa": True}, name="other heads of values")
    yield Sample((query, make(1, 4, 30, 16), make(4, 30, 16)), name="leading dimensions broadcast")
    yield Sample(operands(make, (), 9, 33), name="two dimensions")
    yield Sample((*operands(make, (3,), 9, 33), flags(make, 3, 9, 33)), name="three dimensions")
    yield Sample((*operands(make, (2, 2, 3), 9, 33), make(2, 1, 9, 33)), name="five dimensions")
    packed = make(2, 33, 3, 2, 16)
    parts = [part.detach().requires_grad_(make.requires_grad) for part in packed.permute(2, 0, 3, 1, 4).unbind()]
    yield Sample(tuple(parts), {"is_causal": True}, name="packed")
    yield Sample(operands(make, (1, 2), 9, 33), {"scale": -0.7}, name="a negative scale")
    yield Sample(
        (*operands(make, (1, 2), 9, 33), None, 0.0, True), {"scale": 0.3, "enable_gqa": False}, name="positional"
    )


def small_samples(make):
    yield Sample(operands(make, (1, 2), 3, 4, 2), {"is_causal": True})
    yield Sample((*operands(make, (2, 1), 2, 3, 2), make(2, 1, 1, 3)), name="additive")
    mask = torch.tensor([[True, False, True], [False] * 3], device=make.device)
    yield Sample((*operands(make, (1, 2), 2, 3, 2, 1), mask), {"scale": 0.5}, name="boolean")
    gqa = make(1, 2, 2, 2), make(1, 1, 3, 2), make(1, 1, 3, 2)
    yield Sample(gqa, {"enable_gqa": True}, name="one head of keys")


def empty_samples(make):
    yield Sample(operands(make, (2, 3), 0, 4))
    yield Sample(operands(make, (2, 3), 4, 0))
    yield Sample(operands(make, (0, 3), 4, 5))
    yield Sample(operands(make, (2, 3), 4, 5, 8, 0))


def kernel_samples(make):
    for queries, keys in LENGTHS:
        yield Sample(operands(make, (2, 2), queries, keys, 24), {"is_causal": True})
    for head_dim, value_dim in [(64, 64), (80, 96), (130, 17), (256, 256), (300, 264)]:
        yield Sample(operands(make, (1, 2), 70, 70, head_dim, value_dim))
    yield Sample((*operands(make, (2, 3), 70, 70), flags(make, 70, 70)))
    yield Sample((*operands(make, (2, 3), 70, 70), make(2, 1, 1, 70)))


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.attention_forward, torch.ops.cuda_ops.attention_backward
    query, key, value = operands(make, (2, 2), 5, 7, 8, 16)
    options = 0.5, 2, 3, 1, 0.0
    yield forward, (query, key, value, None, None, *options, 0.0)
    yield forward, (query, key, value, make(5, 7), make(2, requires_grad=False), 0.5, 0, -1, -1, 2.0, 0.0)
    yield forward, (query, key, value, flags(make, 5, 1), None, *options, 0.25)
    state = torch.tensor([3, 4], device=query.device)
    yield torch.ops.cuda_ops.attention_dropout_factors, (state, [2, 2, 5, 7], 0.25, query.dtype)
    strided = make(2, 5, 2, 8).transpose(1, 2)
    yield forward, (strided, key, value, None, None, *options, 0.0)
    for mask in (None, make(5, 7, requires_grad=False)):
        tensors = [t.detach() for t in (strided, key, value)]
        output, logsumexp, state = forward(*tensors, mask, None, *options, 0.0)
        rest = mask, None, output, logsumexp, state, *options, 0.0, mask is not None
        yield backward, (torch.ones_like(output), torch.ones_like(logsumexp), *tensors, *rest)


def call(ones, query=(1, 2, 3, 4), key=(1, 2, 5, 4), value=(1, 2, 5, 4), mask=None, **kwargs):
    return attention(ones(*query), ones(*key), ones(*value), mask, **kwargs)


SPEC = OpSpec(
    name="scaled_dot_product_attention",
    stem="attention",
    function=attention,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    kernel_samples=kernel_samples,
    op_samples=op_samples,
    gradgrad=True,
    cancels=True,
    # Of equal keys all weights are equal, and the gradients of query and key are nothing but rounding.
    expanded_dim=-1,
    # Gradients of query and key are differences of sums over the keys; the halves' weights, and the gradients of the
    # scores, are rounded before they are multiplied. A weight's relative error is
    # its score's absolute one. The rule of flash-attention's own tests, twice the error of
    # PyTorch's attention in the same dtype, is in tests/ops/test_attention.py.
    # Of expanded operands the scores' gradients all but cancel.
    relative_norm={torch.float32: 2e-5, torch.float16: 1.5e-2, torch.bfloat16: 1.2e-1},
    # Which of infinity times a weight of 0 are computed depends on the tiles.
    nonfinite=False,
    bad=[
        bad(
            "integers",
            lambda ones: attention(*[ones(1, 2, 3, 4, dtype=torch.int64)] * 3),
            "attention: expected query to be floating point, got int64",
        ),
        bad(
            "a list", lambda ones: attention([1.0], ones(2, 3), ones(2, 3)), "expected query to be a Tensor", TypeError
        ),
        bad(
            "other head_dim",
            lambda ones: call(ones, key=(1, 2, 5, 3)),
            "attention: expected key to have the last dimension of query, 4, got 3",
        ),
        bad(
            "other lengths of key and value",
            lambda ones: call(ones, value=(1, 2, 6, 4)),
            r"attention: expected value to have the heads and the length of key, got shapes \[1, 2, 6, 4\]",
        ),
        bad(
            "heads that do not broadcast",
            lambda ones: call(ones, key=(1, 3, 5, 4), value=(1, 3, 5, 4)),
            "scaled_dot_product_attention: expected the leading dimensions of query, key and value to broadcast",
        ),
        bad(
            "heads that do not divide",
            lambda ones: call(ones, (1, 4, 3, 4), (1, 3, 5, 4), (1, 3, 5, 4), enable_gqa=True),
            "expected the heads of key and value to divide those of query, 4, got 3 and 3",
        ),
        bad(
            "one dimension",
            lambda ones: call(ones, (4,), (4,), (4,)),
            r"expected query to have 2 dimensions at least, got \[4\]",
        ),
        bad(
            "a mask of another shape",
            lambda ones: call(ones, mask=ones(3, 4)),
            r"attention: expected mask to be of a shape that broadcasts to \[1, 2, 3, 5\], got \[3, 4\]",
        ),
        bad(
            "a mask of integers",
            lambda ones: call(ones, mask=ones(3, 5, dtype=torch.int64)),
            "attention: expected mask to be bool, float32 or of the dtype of query, float32, got int64",
        ),
        bad(
            "a mask and is_causal",
            lambda ones: call(ones, mask=ones(3, 5), is_causal=True),
            "expected attn_mask to be None with is_causal",
        ),
        bad("dropout above 1", lambda ones: call(ones, dropout_p=1.5), "dropout_p to be between 0 and 1", ValueError),
        bad("a text as scale", lambda ones: call(ones, scale="1"), "expected scale to be a number", TypeError),
        bad(
            "another dtype",
            lambda ones: attention(ones(1, 1, 2, 4), ones(1, 1, 2, 4).double(), ones(1, 1, 2, 4)),
            "attention: expected key to have the dtype of query, float32, got float64",
        ),
        bad(
            "a window below -1",
            lambda ones: cuda_ops.functional.flash_attention(*[ones(1, 1, 2, 4)] * 3, window=(-2, 0)),
            r"attention: expected window to be numbers of keys, or -1 without a bound, got \(-2, 0\)",
        ),
        bad(
            "a negative softcap",
            lambda ones: cuda_ops.functional.flash_attention(*[ones(1, 1, 2, 4)] * 3, softcap=-1.0),
            "attention: expected softcap to be 0 or more and finite, got -1",
        ),
        bad(
            "slopes of another shape",
            lambda ones: cuda_ops.functional.flash_attention(*[ones(1, 1, 2, 4)] * 3, alibi_slopes=ones(2)),
            r"attention: expected alibi_slopes to have shape \[1\] or \[1, 1\], got \[2\]",
        ),
        bad(
            "half a window",
            lambda ones: cuda_ops.functional.flash_attention(*[ones(1, 1, 2, 4)] * 3, window=(1,)),
            "flash_attention: expected window to be two ints",
            TypeError,
        ),
    ],
)
