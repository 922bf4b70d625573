import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops

bincount = cuda_ops.functional.bincount
forward, find_range = torch.ops.cuda_ops.bincount_forward, torch.ops.cuda_ops.bincount_range


def sample(make, count, high, weights=False, dtype=torch.int64, **kwargs):
    """Weights in the dtypes in which they are added up."""
    input = make.integers(count, high=high).to(dtype)
    weighted = weights and make.dtype in (torch.float32, torch.float64)
    if weighted:
        kwargs = {"weights": make(count, requires_grad=False), **kwargs}
    return Sample((input,), kwargs, name=f"{count} below {high}, {dtype}{', weights' if weighted else ''}")


def samples(make):
    for count in [1, 7, 33, 1025, 40_000]:
        yield sample(make, count, 16)
    # Counters of each lane, of several lanes, of a block, of none in shared memory; weights in columns and as integers.
    for high in [1, 100, 1000, 3000, 30_000, 100_000]:
        yield sample(make, 5000, high)
        yield sample(make, 5000, high, weights=True)
    yield sample(make, 40_000, 5, weights=True)
    yield sample(make, 40_000, 700, weights=True)
    yield sample(make, 50, 70_000, weights=True)
    for dtype in [torch.uint8, torch.int8, torch.int16, torch.int32]:
        yield sample(make, 2000, 100, dtype=dtype)
        yield sample(make, 200, 100, weights=True, dtype=dtype)
    yield sample(make, 100, 9, minlength=20)
    yield sample(make, 100, 9, weights=True, minlength=20)
    yield sample(make, 100, 9, minlength=3)
    yield Sample((make.integers(200, high=30)[::2],), name="strided")


def small_samples(make):
    yield sample(make, 12, 4, weights=True)
    yield sample(make, 7, 3)


def empty_samples(make):
    yield sample(make, 0, 1)
    yield sample(make, 0, 1, weights=True, minlength=3)


def op_samples(make):
    input = make.integers(9, high=5)
    yield find_range, (input,)
    yield forward, (input, None, 5)
    yield forward, (input.int(), make(9), 4)  # fives are left out


def call(device, input=(1, 2), weights=None, **kwargs):
    weights = None if weights is None else torch.tensor(weights, device=device)
    return bincount(torch.tensor(input, device=device), weights, **kwargs)


SPEC = OpSpec(
    name="bincount",
    function=bincount,
    reference=torch.bincount,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    nonfinite=False,  # the first argument has integers; tests/ops/test_histogram.py
    waits=True,
    bad=[
        Bad(
            "floats",
            lambda device: call(device, (1.0,)),
            RuntimeError,
            "bincount: expected input to be of integers, got float32",
        ),
        Bad(
            "bools",
            lambda device: call(device, (True,)),
            RuntimeError,
            "bincount: expected input to be of integers, got bool",
        ),
        Bad(
            "a negative number",
            lambda device: call(device, (1, -3)),
            RuntimeError,
            "bincount: expected input to be of integers of at least 0, got -3",
        ),
        Bad(
            "two dimensions",
            lambda device: call(device, ((1, 2),)),
            RuntimeError,
            r"bincount: expected input to have 1 dimension, got shape \[1, 2\]",
        ),
        Bad(
            "fewer weights",
            lambda device: call(device, weights=(1.0,)),
            RuntimeError,
            r"bincount: expected weights to have the shape of input, \[2\], got \[1\]",
        ),
        Bad(
            "a negative length",
            lambda device: call(device, minlength=-1),
            RuntimeError,
            "bincount: expected minlength to be at least 0, got -1",
        ),
        Bad(
            "a broken length",
            lambda device: call(device, minlength=1.5),
            TypeError,
            "bincount: expected minlength to be an int, got 1.5",
        ),
        Bad(
            "no tensor",
            lambda device: bincount([1, 2]),
            TypeError,
            "bincount: expected input to be a Tensor, got list",
        ),
        Bad(
            "weights that are no tensor",
            lambda device: bincount(torch.tensor([1], device=device), [1.0]),
            TypeError,
            "bincount: expected weights to be a Tensor or None, got list",
        ),
    ],
)
