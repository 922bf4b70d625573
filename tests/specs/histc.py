import torch
from support.opspec import Bad, OpSpec, Sample, bad

import cuda_ops

histc = cuda_ops.functional.histc
forward = torch.ops.cuda_ops.histc_forward


def sample(make, *shape, values=None, **kwargs):
    """Values of which quotients are exact in float32 for the ends and bins here, so that none is in another bin than in
    the reference's float64. Counts have no gradient."""
    if values == "distinct":
        input = make.distinct(*shape, requires_grad=False)
    else:
        input = ((make.integers(*shape, high=1024) - 512) / 256).to(make.dtype)
    return Sample((input,), kwargs, name=f"{shape} {kwargs}")


def samples(make):
    # Of no vector, one, several in a thread, several blocks.
    for count in [1, 7, 33, 1025, 40_000]:
        yield sample(make, count, bins=16, min=-2, max=2)
    # Counters of each lane, of several lanes, of a block, of none in shared memory.
    for bins in [1, 100, 1000, 3000, 2**15, 2**17]:
        yield sample(make, 5000, bins=bins, min=-2, max=2)
    yield sample(make, 5000, bins=8, min=-1, max=1)  # of which half are outside
    yield sample(make, 3, 50, values="distinct", bins=5)  # the ends of the elements
    yield sample(make, 3, 5, 7, values="distinct")
    yield sample(make, 30, bins=4, min=0.5, max=0.5)
    yield sample(make, 30, bins=4, min=100, max=200)
    yield Sample((torch.full((9,), 3.0, dtype=make.dtype, device=make.device),), {"bins": 3}, "equal elements")
    edges = torch.arange(-8, 9, device=make.device).to(make.dtype) / 4
    yield Sample((edges,), {"bins": 16, "min": -2, "max": 2}, "edges of bins")


def small_samples(make):
    yield sample(make, 2, 5, bins=4, min=-1, max=2)
    yield sample(make, 11, bins=3, min=-2, max=2)


def empty_samples(make):
    yield sample(make, 0, bins=4)
    yield sample(make, 3, 0, bins=2, min=-1, max=1)


def op_samples(make):
    yield forward, (make(3, 5), 4, -1.0, 1.0)
    yield forward, (make(3, 5).t(), 7, 0.0, 1.0)


SPEC = OpSpec(
    name="histc",
    function=histc,
    reference=torch.histc,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    nonfinite=False,  # an error where they decide the ends; tests/ops/test_histogram.py
    bad=[
        Bad(
            "integers",
            lambda device: histc(torch.arange(3, device=device)),
            RuntimeError,
            "histc: expected input to be floating point, got int64",
        ),
        Bad(
            "no tensor",
            lambda device: histc(1.0),
            TypeError,
            "histc: expected input to be a Tensor, got float",
        ),
        bad("no bins", lambda ones: histc(ones(3), 0), "histc: expected bins to be at least 1, got 0"),
        bad(
            "a broken number of bins",
            lambda ones: histc(ones(3), 2.5),
            "histc: expected bins to be an int, got 2.5",
            TypeError,
        ),
        bad(
            "too many bins",
            lambda ones: histc(ones(3), 2**31),
            "histc: expected bins to be less than 2\\^31, got 2147483648",
            NotImplementedError,
        ),
        bad(
            "min above max",
            lambda ones: histc(ones(3), 4, 3, 1),
            "histc: expected max to be at least min, got 3 and 1",
        ),
        bad(
            "an end that is NaN",
            lambda ones: histc(ones(3), 4, float("nan"), 1),
            "histc: expected min and max to be finite, got nan and 1",
        ),
        bad(
            "an infinite end",
            lambda ones: histc(ones(3), 4, 0, float("inf")),
            "histc: expected min and max to be finite, got 0 and inf",
        ),
        bad(
            "infinite elements without ends",
            lambda ones: histc(ones(3) / torch.tensor(0.0), 4),
            "histc: expected the elements to be finite where min is max, got a range from inf to inf",
        ),
        bad(
            "an end that is no number",
            lambda ones: histc(ones(3), 4, "0", 1),
            "histc: expected min to be a number, got '0'",
            TypeError,
        ),
    ],
)
