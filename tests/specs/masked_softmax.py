import math

import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops


def reference(input, mask=None, scale=1.0, is_causal=False):
    """Of PyTorch's ops; rows in which nothing takes part are 0, and their gradients."""
    if mask is not None and torch.broadcast_shapes(mask.shape, input.shape) != input.shape:
        raise RuntimeError("the mask has more rows or columns than the input")
    scores = input * scale
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    hidden = torch.zeros(input.shape, dtype=torch.bool, device=input.device)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    if is_causal:
        hidden = hidden | torch.ones(input.shape[-2:], dtype=torch.bool, device=input.device).triu(1)
    scores = scores.masked_fill(hidden, -math.inf)
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0)


def flags(make, *shape):
    """Three of four take part."""
    return make.integers(*shape, high=4) > 0


def samples(make):
    # Whole pieces and not, to the limits of the kernels that keep rows in registers, and beyond.
    for cols in [1, 3, 8, 31, 33, 64, 72, 256, 264, 1000, 1024, 1032, 2056, 4104]:
        yield Sample((make(3, 5, cols), None, 0.5, True), name=f"causal, {cols}")
        yield Sample((make(3, 5, cols), flags(make, 5, cols), 0.5), name=f"boolean, {cols}")
        yield Sample((make(3, 5, cols), make(3, 1, cols)), name=f"additive, {cols}")
    for cols in [16384, 16392]:
        yield Sample((make(2, cols), flags(make, cols), 2.0), name=f"long, {cols}")
    yield Sample((make(70, 70), None, 1.0, True), name="square")
    yield Sample((make(9, 5), None, 1.0, True), name="more queries than keys")
    yield Sample((make(2, 33), None, -1.5), name="no mask")
    # Broadcast along any dimension: rows, columns, several in turns, and more turns than the kernel follows.
    for shape in [(1,), (8,), (4, 1), (4, 8), (3, 1, 1), (2, 1, 1, 8), (2, 1, 4, 1), (1, 3, 4, 8), (2, 3, 4, 8)]:
        yield Sample((make(2, 3, 4, 8), flags(make, *shape), 0.3, True), name=f"boolean of {shape}, causal")
        # What adds the same to a whole row changes nothing: of its gradient there is but rounding.
        varies = None if len(shape) > 1 and shape[-1] > 1 else False
        yield Sample((make(2, 3, 4, 8), make(*shape, requires_grad=varies), 0.3), name=f"additive of {shape}")
    yield Sample((make(2, 3, 2, 3, 2, 3, 2, 5), make(2, 1, 2, 1, 2, 1, 2, 5)), name="four turns")
    yield Sample((make(*[2] * 12), make(*[1, 2] * 6)), name="six turns")
    yield Sample((make(2, 3, 8), flags(make, 2, 8, 3).transpose(1, 2)), name="a transposed mask")
    yield Sample((make(3, 8), torch.zeros(3, 8, dtype=torch.bool, device=make.device)), name="nothing takes part")
    some = torch.ones(3, 9, dtype=torch.bool, device=make.device)
    some[1] = False
    yield Sample((make(3, 9), some), name="nothing takes part in one row")
    yield Sample((make(3, 8, low=-1e4, high=1e4), flags(make, 8)), name="huge")


def small_samples(make):
    yield Sample((make(2, 3), torch.tensor([[True, False, True], [False] * 3], device=make.device), 0.7))
    yield Sample((make(2, 2, 3), make(2, 1, 3), 0.5, True))


def empty_samples(make):
    yield Sample((make(0, 3), None, 1.0, True))
    yield Sample((make(3, 0), flags(make, 1)))


def kernel_samples(make):
    for cols in [3, 8, 33, 72, 264, 1032, 2056, 4104]:
        yield Sample((make(2, 3, cols), flags(make, 3, cols), 0.5, True))
        yield Sample((make(2, 3, cols), make(2, 1, 1)))
    yield Sample((make(*[2] * 12), make(*[2, 1] * 6)))


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.masked_softmax_forward, torch.ops.cuda_ops.masked_softmax_backward
    yield forward, (make(3, 5), None, 0.5, True)
    yield forward, (make(5, 3).t(), flags(make, 5), 1.0, False)
    yield forward, (make(2, 3, 5), make(2, 1, 5), 1.0, False)
    yield backward, (make(3, 5), make(3, 5), 0.5)


def call(device, mask=None, shape=(2, 3), **kwargs):
    return cuda_ops.functional.masked_softmax(torch.ones(shape, device=device), mask, **kwargs)


SPEC = OpSpec(
    name="masked_softmax",
    function=cuda_ops.functional.masked_softmax,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    kernel_samples=kernel_samples,
    op_samples=op_samples,
    gradgrad=True,
    # What travels depends on whether it takes part: tests of its own.
    nonfinite=False,
    bad=[
        Bad(
            "integers",
            lambda device: cuda_ops.functional.masked_softmax(torch.ones(3, device=device, dtype=torch.int64)),
            RuntimeError,
            "masked_softmax: expected input to be floating point, got int64",
        ),
        Bad(
            "a mask of integers",
            lambda device: call(device, torch.ones(3, device=device, dtype=torch.int64)),
            RuntimeError,
            "masked_softmax: expected mask to be bool or of the dtype of input, float32, got int64",
        ),
        Bad(
            "a mask of another dtype",
            lambda device: call(device, torch.ones(3, device=device, dtype=torch.float64)),
            RuntimeError,
            "masked_softmax: expected mask to be bool or of the dtype of input, float32, got float64",
        ),
        Bad(
            "a mask of another shape",
            lambda device: call(device, torch.ones(2, device=device, dtype=torch.bool)),
            RuntimeError,
            r"masked_softmax: expected mask to be of a shape that broadcasts to that of input, \[2, 3\], got \[2\]",
        ),
        Bad(
            "no dimensions",
            lambda device: call(device, shape=()),
            RuntimeError,
            r"masked_softmax: expected input to have 1 dimensions at least, got shape \[\]",
        ),
        Bad(
            "no queries",
            lambda device: call(device, shape=(3,), is_causal=True),
            RuntimeError,
            r"masked_softmax: expected input to have 2 dimensions at least with is_causal, got shape \[3\]",
        ),
    ],
)
