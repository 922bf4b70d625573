import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

concat = cuda_ops.functional.concat


def function(*tensors, dim=0):
    """Tensors as arguments, which the tests look for among them."""
    return concat(tensors, dim)


def reference(*tensors, dim=0):
    return torch.cat(tensors, dim)


# (shapes, dim). One tensor; words of 16 bytes and less; runs in each dimension; more of them than a launch takes.
CASES = [
    ([(5,)], 0),
    ([(3,), (5,), (1,)], 0),
    ([(8,), (16,), (4,)], 0),
    ([(2, 3), (4, 3)], 0),
    ([(2, 3), (2, 5)], 1),
    ([(3, 8), (3, 16), (3, 8)], -1),
    ([(2, 3, 5), (2, 1, 5), (2, 4, 5)], 1),
    ([(2, 3, 4, 5), (2, 2, 4, 5)], 1),
    ([(2, 3, 4, 5), (2, 3, 1, 5)], -2),
    ([(2, 3, 4, 4), (1, 3, 4, 4)], 0),
    ([(40, 100), (40, 28)], 1),
]


def samples(make):
    for shapes, dim in CASES:
        yield Sample(tuple(make(*shape) for shape in shapes), {"dim": dim}, name=f"{shapes} along {dim}")
    yield Sample(tuple(make(2, i % 3 + 1) for i in range(70)), {"dim": 1}, name="70 tensors")


def small_samples(make):
    yield Sample((make(2, 3), make(1, 3)))
    yield Sample((make(2, 2), make(2, 1), make(2, 3)), {"dim": 1})
    yield Sample((make(2, 1, 2), make(2, 2, 2)), {"dim": -2})


def empty_samples(make):
    yield Sample((make(0, 3), make(0, 3)))
    yield Sample((make(2, 0), make(2, 3)), {"dim": 1})


def op_samples(make):
    forward = torch.ops.cuda_ops.concat_forward
    yield forward, ([make(2, 3), make(4, 3)], 0)
    yield forward, ([make(2, 3), make(4, 2).t()], -1)
    images = make(2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield forward, ([images, images], 1)
    yield forward, ([images, make(2, 3, 4, 5)], 1)


BAD = [
    bad("no tensors", lambda ones: concat([]), "concat: expected tensors to have elements, got none"),
    bad(
        "a tensor",
        lambda ones: concat(ones(3)),
        "concat: expected tensors to be a tuple or list of Tensors, got Tensor",
        TypeError,
    ),
    bad("a number among them", lambda ones: concat([ones(3), 1.0]), "concat: expected tensors to be a", TypeError),
    bad(
        "integers",
        lambda ones: concat([ones(3, dtype=torch.int64)]),
        r"concat: expected tensors\[0\] to be floating point, got int64",
    ),
    bad(
        "two dtypes",
        lambda ones: concat([ones(3), ones(3, dtype=torch.float64)]),
        r"concat: expected tensors\[1\] to",
    ),
    bad("no dimensions", lambda ones: concat([ones()]), "concat: expected tensors to have dimensions"),
    bad(
        "no such dimension",
        lambda ones: concat([ones(2, 3)], 2),
        r"concat: expected dim to be in \[-2, 1\] for tensors of shape \[2, 3\], got 2",
        IndexError,
    ),
    bad(
        "other shapes",
        lambda ones: concat([ones(2, 3), ones(2, 4)]),
        r"concat: expected tensors\[1\] to have the shape \[2, 3\] but along dimension 0, got \[2, 4\]",
    ),
    bad("no int", lambda ones: concat([ones(2)], 0.5), "concat: expected dim to be an int, got 0.5", TypeError),
    bad("out", lambda ones: concat([ones(2)], out=ones(2)), "concat: out is not supported", NotImplementedError),
]

SPEC = OpSpec(
    name="concat",
    function=function,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=BAD,
)
