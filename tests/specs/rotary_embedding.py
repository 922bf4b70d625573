import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

rotary_embedding = cuda_ops.functional.rotary_embedding


def reference(input, cos, sin, dtype=None):
    """As transformers' Llama has it."""
    if input.shape[-1] % 2:
        raise RuntimeError("the features are pairs")
    first, second = input.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    output = input * cos + torch.cat((-second, first), -1) * sin
    return output if dtype is None else output.to(dtype)


def tables(make, *shape):
    return make(*shape, requires_grad=False), make(*shape, requires_grad=False)


def samples(make):
    # Halves of whole vectors and not; tables of the whole batch and of each; heads around a block's threads.
    for batch, heads, length, features in [(2, 3, 5, 16), (1, 2, 33, 6), (3, 12, 7, 64), (2, 1, 1, 2), (2, 70, 3, 128)]:
        shape = f"{batch}x{heads}x{length}x{features}"
        for tables_of in {1, batch}:
            args = (make(batch, heads, length, features), *tables(make, tables_of, length, features))
            yield Sample(args, name=f"{shape}, {tables_of} tables")


def small_samples(make):
    yield Sample((make(2, 2, 3, 4), *tables(make, 1, 3, 4)), name="one table")
    yield Sample((make(2, 1, 2, 6), *tables(make, 2, 2, 6)), name="two tables")


def empty_samples(make):
    yield Sample((make(0, 2, 3, 4), *tables(make, 1, 3, 4)))
    yield Sample((make(2, 2, 0, 4), *tables(make, 1, 0, 4)))


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.rotary_embedding_forward, torch.ops.cuda_ops.rotary_embedding_backward
    x, rows = make(2, 3, 5, 8), make(2, 5, 3, 8).detach().transpose(1, 2)
    yield forward, (x, *tables(make, 1, 5, 8), None)
    yield forward, (rows, *tables(make, 2, 5, 8), None)
    yield backward, (x, *tables(make, 1, 5, 8), x.dtype)
    if x.dtype in (torch.float16, torch.bfloat16):
        wide = [table.float() for table in tables(make, 1, 5, 8)]
        yield forward, (x, *wide, None)
        yield forward, (rows, *wide, x.dtype)


SPEC = OpSpec(
    name="rotary_embedding",
    function=rotary_embedding,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        bad(
            "integers",
            lambda ones: rotary_embedding(ones(1, 2, 3, 4).long(), ones(1, 3, 4), ones(1, 3, 4)),
            "rotary_embedding: expected input to be floating point, got int64",
        ),
        bad(
            "three dimensions",
            lambda ones: rotary_embedding(ones(2, 3, 4), ones(1, 3, 4), ones(1, 3, 4)),
            r"rotary_embedding: expected input to have 4 dimensions, got shape \[2, 3, 4\]",
        ),
        bad(
            "an odd number of features",
            lambda ones: rotary_embedding(ones(1, 2, 3, 5), ones(1, 3, 5), ones(1, 3, 5)),
            r"rotary_embedding: expected input to have an even last dimension, of pairs, got shape \[1, 2, 3, 5\]",
        ),
        bad(
            "tables of another length",
            lambda ones: rotary_embedding(ones(2, 2, 3, 4), ones(1, 5, 4), ones(1, 5, 4)),
            r"rotary_embedding: expected cos to have shape \[2 or 1, 3, 4\], the batch, length and features of input, "
            r"got \[1, 5, 4\]",
        ),
        bad(
            "a sine of another shape",
            lambda ones: rotary_embedding(ones(2, 2, 3, 4), ones(2, 3, 4), ones(1, 3, 4)),
            r"rotary_embedding: expected sin to have the shape of cos, \[2, 3, 4\], got \[1, 3, 4\]",
        ),
        bad(
            "no tensor",
            lambda ones: rotary_embedding(ones(2, 2, 3, 4), 1.0, ones(1, 3, 4)),
            "rotary_embedding: expected cos to be a Tensor, got float",
            TypeError,
        ),
    ],
)
