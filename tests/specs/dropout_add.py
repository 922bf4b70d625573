import torch
from support.opspec import Bad, OpSpec, Sample, bad

import cuda_ops

function = cuda_ops.functional.dropout_add


def reference(input, residual, p=0.5, training=True):
    return torch.nn.functional.dropout(input, p, training) + residual


def samples(make):
    # Around one counter's 4 numbers, a vector, a CPU block of 128, a grain of threads. Values: test_dropout.py.
    for shape in [(), (1,), (3,), (4,), (5,), (127,), (129,), (70_001,), (2, 3, 4, 5)]:
        yield Sample((make(*shape), make(*shape)), name=f"{shape}")


def small_samples(make):
    yield Sample((make(2, 3), make(2, 3)), name="p = 0.5")
    yield Sample((make(2, 3, 2), make(2, 3, 2), 0.25), name="p = 0.25")
    yield Sample((make(5), make(5), 1.0), name="p = 1")


def empty_samples(make):
    yield Sample((make(0), make(0)))
    yield Sample((make(2, 0, 3), make(2, 0, 3), 0.2))


def op_samples(make):
    forward = torch.ops.cuda_ops.dropout_add_forward
    x, residual = make(3, 5), make(3, 5)
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[:0]):
        yield forward, (view(x), view(residual), 0.3)
        yield forward, (view(x), view(residual), 0.3, make(0))


SPEC = OpSpec(
    name="dropout_add",
    function=function,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    random=True,
    bad=[
        bad(
            "integers",
            lambda ones: function(ones(3).long(), ones(3).long()),
            "dropout_add: expected input to be floating point, got int64",
        ),
        bad(
            "a residual of another shape",
            lambda ones: function(ones(3), ones(1)),
            r"dropout_add: expected residual to have the shape of input, \[3\], got \[1\]",
        ),
        bad(
            "a residual of another dtype",
            lambda ones: function(ones(3), ones(3).double()),
            "dropout_add: expected residual to have the dtype of input, float32, got float64",
        ),
        bad(
            "no residual",
            lambda ones: function(ones(3), 1.0),
            "dropout_add: expected residual to be a Tensor, got float",
            TypeError,
        ),
        Bad(
            "p above 1",
            lambda device: function(torch.ones(3, device=device), torch.ones(3, device=device), 1.5, training=False),
            ValueError,
            "dropout_add: expected p to be between 0 and 1, got 1.5",
        ),
    ],
)
