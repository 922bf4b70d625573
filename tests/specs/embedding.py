import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops

function = cuda_ops.functional.embedding


def reference(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    """PyTorch's second derivative forgets scale_grad_by_freq, so that this is composed: only a part of the weight has a
    gradient, and all of its value goes on."""
    if scale_grad_by_freq:
        counts = torch.bincount(input.flatten(), minlength=weight.shape[0]).clamp(min=1).to(weight.dtype).unsqueeze(1)
        part = weight / counts
        weight = part + (weight - part).detach()
    return torch.nn.functional.embedding(input, weight, padding_idx, max_norm, norm_type)


def sample(make, rows, cols, *shape, dtype=torch.int64, name="", **kwargs):
    weight = make(rows, cols)
    indices = make.integers(*shape, high=rows).to(dtype)
    return Sample((indices, weight), kwargs, name or f"{list(shape)} of {rows} x {cols} {kwargs or ''}")


def samples(make):
    # Rows of one element, of no whole vector, of a part of a warp's vectors, of one segment and of several.
    for cols in [1, 3, 8, 33, 64, 100, 768, 1600]:
        yield sample(make, 11, cols, 3, 5)
    # Bits of an index: one pass of the sort, two, three. Indices: none twice, around a chunk and a round, many of one.
    for rows, count in [(1, 1), (2, 63), (1, 65), (255, 64), (256, 1025), (300, 1000), (70_000, 300), (3, 2100)]:
        yield sample(make, rows, 4, count)
    yield sample(make, 300, 2, 140_000, name="several rounds a tile")
    yield sample(make, 4, 768, 1000, name="long rows of several segments")
    yield sample(make, 7, 8, name="an index without dimensions")
    yield sample(make, 7, 8, 2, 3, 4, dtype=torch.int32, name="int32")
    yield sample(make, 9, 12, 40, padding_idx=3)
    yield sample(make, 9, 12, 200, padding_idx=-1, scale_grad_by_freq=True)
    yield sample(make, 5, 40, 400, scale_grad_by_freq=True)
    strided = sample(make, 12, 8, 14, 6, name="strided indices")
    yield strided.map(lambda t: t[::2].t() if t.dtype == torch.int64 else t)


def small_samples(make):
    # Without padding_idx and scale_grad_by_freq, whose gradients are not those of the function.
    yield sample(make, 4, 3, 2, 3)
    yield sample(make, 3, 2, 7)


def empty_samples(make):
    yield sample(make, 4, 3, 0)
    yield sample(make, 4, 3, 2, 0)
    yield sample(make, 4, 0, 5)
    yield Sample((torch.zeros(0, dtype=torch.int64, device=make.device), make(0, 3)))


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.embedding_forward, torch.ops.cuda_ops.embedding_backward
    weight, indices = make(5, 4), make.integers(3, 2, high=5)
    yield forward, (indices, weight, -1, False)
    yield forward, (indices.int().t(), weight, 2, True)
    yield backward, (make(3, 2, 4), indices, [5, 4], make.dtype, 2, False)
    yield backward, (make(3, 2, 4), indices, [5, 4], make.dtype, -1, True)


def call(device, indices=None, weight=None, **kwargs):
    indices = torch.zeros(2, dtype=torch.int64) if indices is None else indices
    weight = torch.ones(3, 4) if weight is None else weight
    return function(indices.to(device), weight.to(device), **kwargs)


def backward(device, *grad_shape, size=(3, 4), dtype=torch.float32):
    indices = torch.zeros(2, dtype=torch.int64, device=device)
    grad_output = torch.ones(grad_shape, device=device)
    return torch.ops.cuda_ops.embedding_backward(grad_output, indices, size, dtype, -1, False)


SPEC = OpSpec(
    name="embedding",
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
            "floating indices",
            lambda device: call(device, torch.zeros(2)),
            RuntimeError,
            "embedding: expected input to be int64 or int32, got float32",
        ),
        Bad(
            "an integer table",
            lambda device: call(device, weight=torch.ones(3, 4, dtype=torch.int64)),
            RuntimeError,
            "embedding: expected weight to be floating point, got int64",
        ),
        Bad(
            "a table of one dimension",
            lambda device: call(device, weight=torch.ones(3)),
            RuntimeError,
            r"embedding: expected weight to have 2 dimensions, got shape \[3\]",
        ),
        Bad(
            "max_norm",
            lambda device: call(device, max_norm=1.0),
            NotImplementedError,
            "embedding: expected max_norm to be None, got 1.0",
        ),
        Bad(
            "sparse",
            lambda device: call(device, sparse=True),
            NotImplementedError,
            "embedding: expected sparse to be False, got True",
        ),
        Bad(
            "padding_idx beyond the table",
            lambda device: call(device, padding_idx=3),
            ValueError,
            r"embedding: expected padding_idx to be in \[-3, 2\], got 3",
        ),
        Bad(
            "padding_idx below the table",
            lambda device: call(device, padding_idx=-4),
            ValueError,
            r"embedding: expected padding_idx to be in \[-3, 2\], got -4",
        ),
        Bad(
            "a broken padding_idx",
            lambda device: call(device, padding_idx=1.5),
            TypeError,
            "embedding: expected padding_idx to be an int, got 1.5",
        ),
        Bad(
            "grad_output of another shape",
            lambda device: backward(device, 3, 4),
            RuntimeError,
            r"embedding_backward: expected grad_output to have shape \[2, 4\], got \[3, 4\]",
        ),
        Bad(
            "a size of three numbers",
            lambda device: backward(device, 2, 4, size=(3, 4, 5)),
            RuntimeError,
            r"embedding_backward: expected size to be that of a table, two sizes of at least 0, got \[3, 4, 5\]",
        ),
        Bad(
            "a gradient of another dtype",
            lambda device: backward(device, 2, 4, dtype=torch.float64),
            RuntimeError,
            "embedding_backward: expected dtype to be that of grad_output, float32",
        ),
    ],
)
