import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops


def samples(make):
    # One element, a warp less and more one, a block less and more one, several blocks; 0 to 4 dimensions.
    for shape in [(), (1,), (31,), (33,), (1023,), (1025,), (3, 5), (70_001,), (2, 3, 4, 5)]:
        yield Sample((make(*shape),), name=f"{shape}")


def small_samples(make):
    yield Sample((make(2, 3),))


def empty_samples(make):
    yield Sample((make(0),))
    yield Sample((make(2, 0, 3),))


def op_samples(make):
    yield torch.ops.cuda_ops.square_forward, (make(3, 5),)
    yield torch.ops.cuda_ops.square_forward, (make(3, 5).t(),)
    yield torch.ops.cuda_ops.square_backward, (make(3, 5), make(3, 5))


SPEC = OpSpec(
    name="square",
    function=cuda_ops.functional.square,
    reference=torch.square,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        Bad(
            "integers",
            lambda device: cuda_ops.functional.square(torch.arange(3, device=device)),
            RuntimeError,
            "square: expected input to be floating point, got int64",
        ),
        Bad(
            "grad_output of another shape",
            lambda device: torch.ops.cuda_ops.square_backward(
                torch.ones(2, device=device), torch.ones(3, device=device)
            ),
            RuntimeError,
            r"square_backward: expected grad_output to have the shape of input, \[3\], got \[2\]",
        ),
        Bad(
            "grad_output of another dtype",
            lambda device: torch.ops.cuda_ops.square_backward(
                torch.ones(3, device=device, dtype=torch.float64), torch.ones(3, device=device)
            ),
            RuntimeError,
            "square_backward: expected grad_output to have the dtype of input, float32, got float64",
        ),
    ],
)
