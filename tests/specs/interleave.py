import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

interleave = cuda_ops.functional.interleave


def reference(input, other, dim=1):
    if input.shape != other.shape or input.dtype != other.dtype:
        raise RuntimeError("stack expects tensors that are alike")
    if not -input.dim() <= dim < input.dim():
        raise IndexError("input has no such dimension")
    dim %= input.dim()
    return torch.stack((input, other), dim + 1).flatten(dim, dim + 1)


def samples(make):
    # Runs of images' planes, and single elements: around whole vectors.
    for shape in [(2, 8, 5, 4), (3, 7, 2, 3), (2, 33, 1, 1)]:
        yield Sample((make(*shape), make(*shape)), name=f"{shape}")
    for shape, dim in [((3, 5), -1), ((1025,), 0), ((4, 3, 6), 0), ((2, 58), 1), ((2, 3, 4, 5, 6), 2)]:
        yield Sample((make(*shape), make(*shape), dim), name=f"{shape} along {dim}")


def small_samples(make):
    yield Sample((make(2, 3, 2), make(2, 3, 2)))
    yield Sample((make(3), make(3), -1))


def empty_samples(make):
    yield Sample((make(0, 3), make(0, 3)))
    yield Sample((make(2, 0, 3), make(2, 0, 3)))


def op_samples(make):
    ops = torch.ops.cuda_ops
    for layout in (torch.contiguous_format, torch.channels_last):
        pair = [make(2, 4, 3, 5).detach().contiguous(memory_format=layout).requires_grad_() for _ in range(2)]
        yield ops.interleave_forward, (*pair, 1)
        yield ops.interleave_backward, (make(2, 4, 3, 5).detach().contiguous(memory_format=layout).requires_grad_(), 1)


SPEC = OpSpec(
    name="interleave",
    function=interleave,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        bad(
            "integers",
            lambda ones: interleave(ones(3, 2).long(), ones(3, 2).long()),
            "interleave: expected input to be floating point, got int64",
        ),
        bad(
            "another shape",
            lambda ones: interleave(ones(3, 2), ones(3, 1)),
            r"interleave: expected other to have the shape of input, \[3, 2\], got \[3, 1\]",
        ),
        bad(
            "another dimension",
            lambda ones: interleave(ones(3, 2), ones(3, 2), 2),
            r"interleave: expected dim to be in \[-2, 1\] for a tensor of shape \[3, 2\], got 2",
            IndexError,
        ),
        bad(
            "no tensor",
            lambda ones: interleave(ones(3, 2), 1.0),
            "interleave: expected other to be a Tensor, got float",
            TypeError,
        ),
    ],
)
