import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

function = cuda_ops.functional.logsumexp


def samples(make):
    # Rows of a part of a warp, a warp, a block; whole vectors and not; in parts.
    for cols in [1, 2, 10, 31, 33, 64, 257, 1000, 1025, 4099, 9000, 40_000]:
        yield Sample((make(3, cols), 1), name=f"rows of {cols}")
    # Columns side by side: few and many, short and long, whole vectors and not.
    for shape in [(3, 5), (40, 33), (5, 64), (300, 7), (1025, 3), (9000, 8), (2, 33, 16)]:
        yield Sample((make(*shape), -2), name=f"columns of {shape}")
    for dim in [0, 1, 2, (1, 2), (0, 1), (0, 2), (2, 0), (-1, -3), (0, 1, 2)]:
        for keepdim in (False, True):
            yield Sample((make(4, 3, 6), dim, keepdim), name=f"dim {dim}, keepdim {keepdim}")
    yield Sample((make(2, 3, 4, 5), (1, 3)), name="two dimensions apart")
    yield Sample((make(), 0), name="no dimensions")
    yield Sample((make(700, 3), 1), name="many short rows")
    # Of the output, which is rounded, the gradient would have but five digits.
    yield Sample((make(3, 100, low=-300.0, high=300.0, requires_grad=False), 1), name="huge")


def small_samples(make):
    yield Sample((make(2, 3), 1))
    yield Sample((make(2, 3), 0, True))
    yield Sample((make(2, 2, 3), (0, 2)))
    yield Sample((make(2, 2, 3), (0, 1, 2)))


def empty_samples(make):
    yield Sample((make(0, 3), 1))
    yield Sample((make(2, 0, 3), 0))


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.logsumexp_forward, torch.ops.cuda_ops.logsumexp_backward
    x = make(3, 4, 5)
    for dim, keepdim in (([1], False), ([-1], True), ([0, 2], False), ([2, 0], True), ([], False)):
        for input in (x, x.transpose(0, 2)):
            output = forward(input, dim, keepdim)
            yield forward, (input, dim, keepdim)
            yield backward, (torch.ones_like(output), input, output.detach(), dim, keepdim)


SPEC = OpSpec(
    name="logsumexp",
    function=function,
    reference=torch.logsumexp,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    # The gradient is e^(input - output) of the output as it is stored, as PyTorch's: of a half near 8 the rounding is
    # that of its digits, times 8.
    relative_norm={torch.float16: 8e-3, torch.bfloat16: 6e-2},
    bad=[
        bad(
            "integers",
            lambda ones: function(ones(3).long(), 0),
            "logsumexp: expected input to be floating point, got int64",
        ),
        bad(
            "no tensor", lambda ones: function(1.0, 0), "logsumexp: expected input to be a Tensor, got float", TypeError
        ),
        bad(
            "no such dimension",
            lambda ones: function(ones(2, 3), 2),
            r"logsumexp: expected dim to be in \[-2, 1\] for an input of shape \[2, 3\], got 2",
            IndexError,
        ),
        bad(
            "a dimension twice",
            lambda ones: function(ones(2, 3), (1, -1)),
            r"logsumexp: expected dim to name each dimension once, got \[1, -1\]",
        ),
        bad(
            "no number of a dimension",
            lambda ones: function(ones(2, 3), 0.5),
            "logsumexp: expected dim to be an int, got 0.5",
            TypeError,
        ),
        bad(
            "keepdim as a number",
            lambda ones: function(ones(2, 3), 0, 1),
            "logsumexp: expected keepdim to be a bool, got 1",
            TypeError,
        ),
        bad(
            "an output of another shape",
            lambda ones: torch.ops.cuda_ops.logsumexp_backward(ones(2), ones(2, 3), ones(3), [1], False),
            r"logsumexp_backward: expected output to have the shape of the output, \[2\], got \[3\]",
        ),
    ],
)
