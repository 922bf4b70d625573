import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops

function = cuda_ops.functional.token_position_embedding


def reference(tokens, token_weight, position_weight, dtype=None):
    if tokens.shape[-1] > len(position_weight):
        raise IndexError("fewer positions than tokens, which would broadcast")
    return torch.nn.functional.embedding(tokens, token_weight) + position_weight[: tokens.shape[-1]]


def sample(make, rows, places, cols, *shape, dtype=torch.int64, name="", **kwargs):
    tables = make(rows, cols), make(places, cols)
    tokens = make.integers(*shape, high=rows).to(dtype)
    return Sample((tokens, *tables), kwargs, name or f"{list(shape)} of {rows} and {places} x {cols}")


def samples(make):
    # Rows as in embedding; batches of one, around a chunk of 64, and of several dimensions; positions to spare and not.
    for cols in [1, 3, 8, 33, 64, 768, 1600]:
        yield sample(make, 11, 7, cols, 3, 5)
    for batch, length in [(1, 1), (1, 65), (63, 3), (65, 2), (200, 7)]:
        yield sample(make, 65, length, 8, batch, length)
    yield sample(make, 65, 9, 16, 9, name="one sequence")
    yield sample(make, 65, 9, 16, 2, 3, 5, name="three dimensions")
    yield sample(make, 65, 9, 16, 2, 5, dtype=torch.int32, name="int32")
    given = sample(make, 65, 9, 16, 2, 5, name="dtype")
    yield Sample(given.args, {"dtype": make.dtype}, given.name)
    strided = sample(make, 12, 20, 8, 14, 6, name="strided tokens")
    yield strided.map(lambda t: t[::2].t() if t.dtype == torch.int64 else t)


def small_samples(make):
    yield sample(make, 4, 3, 2, 2, 3)
    yield sample(make, 4, 5, 3, 3)


def empty_samples(make):
    yield sample(make, 4, 3, 2, 0, 3)
    yield sample(make, 4, 3, 2, 5, 0)
    yield sample(make, 4, 3, 0, 5, 3)


def op_samples(make):
    ops = torch.ops.cuda_ops
    tokens, token_weight, position_weight = make.integers(3, 2, high=5), make(5, 4), make(3, 4)
    yield ops.token_position_embedding_forward, (tokens, token_weight, position_weight, make.dtype)
    yield ops.token_position_embedding_forward, (tokens.int().t()[:2], token_weight, position_weight, make.dtype)
    yield ops.position_embedding_backward, (make(3, 2, 4), [3, 4], make.dtype)
    yield ops.position_embedding_backward, (make(2, 4), [2, 4], make.dtype)


def call(device, tokens=None, token_weight=None, position_weight=None, **kwargs):
    tokens = torch.zeros(2, 3, dtype=torch.int64) if tokens is None else tokens
    token_weight = torch.ones(5, 4) if token_weight is None else token_weight
    position_weight = torch.ones(3, 4) if position_weight is None else position_weight
    return function(tokens.to(device), token_weight.to(device), position_weight.to(device), **kwargs)


SPEC = OpSpec(
    name="token_position_embedding",
    function=function,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    nonfinite=False,  # the first argument has integers; tests/ops/test_embedding.py
    bad=[
        Bad(
            "floating tokens",
            lambda device: call(device, torch.zeros(2, 3)),
            RuntimeError,
            "token_position_embedding: expected tokens to be int64 or int32, got float32",
        ),
        Bad(
            "tokens without a dimension",
            lambda device: call(device, torch.tensor(1)),
            RuntimeError,
            r"token_position_embedding: expected tokens to have a dimension of positions, got shape \[\]",
        ),
        Bad(
            "too many positions",
            lambda device: call(device, torch.zeros(2, 4, dtype=torch.int64)),
            RuntimeError,
            r"expected tokens to have at most 3 positions, the rows of position_weight, got shape \[2, 4\]",
        ),
        Bad(
            "tables of different columns",
            lambda device: call(device, position_weight=torch.ones(3, 5)),
            RuntimeError,
            r"expected position_weight to have the columns of token_weight, 4, got shape \[3, 5\]",
        ),
        Bad(
            "tables of different dtypes",
            lambda device: call(device, position_weight=torch.ones(3, 4, dtype=torch.float64)),
            RuntimeError,
            "expected position_weight to have the dtype of token_weight, float32, got float64",
        ),
        Bad(
            "another dtype",
            lambda device: call(device, dtype=torch.float64),
            NotImplementedError,
            "token_position_embedding: expected dtype to be that of the weights, or float16 or bfloat16",
        ),
        Bad(
            "dtype in words",
            lambda device: call(device, dtype="float32"),
            TypeError,
            "token_position_embedding: expected dtype to be a torch.dtype, got 'float32'",
        ),
        Bad(
            "a gradient of other columns",
            lambda device: torch.ops.cuda_ops.position_embedding_backward(
                torch.ones(2, 3, 4, device=device), [3, 5], torch.float32
            ),
            RuntimeError,
            r"expected grad_output to have at most the rows and the columns of a table of size \[3, 5\]",
        ),
    ],
)
