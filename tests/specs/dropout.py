import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops

function = cuda_ops.functional.dropout


def samples(make):
    # Around one counter's 4 numbers, a vector, a CPU block of 64, a grain of threads. Values: test_dropout.py.
    for shape in [(), (1,), (3,), (4,), (5,), (63,), (65,), (70_001,), (2, 3, 4, 5)]:
        yield Sample((make(*shape),), name=f"{shape}")


def small_samples(make):
    yield Sample((make(2, 3),), name="p = 0.5")
    yield Sample((make(2, 3, 2), 0.25), name="p = 0.25")
    yield Sample((make(5), 1.0), name="p = 1")


def empty_samples(make):
    yield Sample((make(0),))
    yield Sample((make(2, 0, 3), 0.2))


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.dropout_forward, torch.ops.cuda_ops.dropout_backward
    x = make(3, 5)
    for input in (x, x.t(), x[:, ::2], x[:0]):
        output, state = forward(input, 0.3)
        yield forward, (input, 0.3)
        yield forward, (input, 0.3, make(0))
        yield backward, (torch.ones_like(input), state, 0.3, list(output.stride()))


def bad_backward(state, stride, p=0.5):
    return lambda device: torch.ops.cuda_ops.dropout_backward(
        torch.ones(2, 3, device=device), state.to(device), p, stride
    )


STATE = torch.zeros(2, dtype=torch.int64)

SPEC = OpSpec(
    name="dropout",
    function=function,
    reference=torch.nn.functional.dropout,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    random=True,
    bad=[
        Bad(
            "integers",
            lambda device: function(torch.arange(3, device=device)),
            RuntimeError,
            "dropout: expected input to be floating point, got int64",
        ),
        Bad(
            "p below 0",
            lambda device: function(torch.ones(3, device=device), -0.1),
            ValueError,
            "dropout: expected p to be between 0 and 1, got -0.1",
        ),
        Bad(
            "p above 1",
            lambda device: function(torch.ones(3, device=device), 1.5, training=False),
            ValueError,
            "dropout: expected p to be between 0 and 1, got 1.5",
        ),
        Bad(
            "p is NaN",
            lambda device: function(torch.ones(3, device=device), float("nan")),
            ValueError,
            "dropout: expected p to be between 0 and 1, got nan",
        ),
        Bad(
            "p above 1 in the op",
            lambda device: torch.ops.cuda_ops.dropout_forward(torch.ones(3, device=device), 1.5),
            RuntimeError,
            "dropout: expected p to be between 0 and 1, got 1.5",
        ),
        Bad(
            "a leaf in place",
            lambda device: function(torch.ones(3, device=device, requires_grad=True), inplace=True),
            RuntimeError,
            "leaf Variable that requires grad is being used in an in-place operation",
        ),
        Bad(
            "state of another shape",
            bad_backward(STATE[:1], [3, 1]),
            RuntimeError,
            r"dropout_backward: expected state to be 2 int64, got int64 of shape \[1\]",
        ),
        Bad(
            "strides with gaps",
            bad_backward(STATE, [6, 2]),
            RuntimeError,
            r"dropout_backward: expected stride to be that of a dense tensor of shape \[2, 3\], got \[6, 2\]",
        ),
        Bad(
            "strides of another rank",
            bad_backward(STATE, [1]),
            RuntimeError,
            "dropout_backward: expected stride to have one element a dimension",
        ),
    ],
)
