import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops


def samples(make):
    # One element, a warp less and more one, a block less and more one, several blocks; 0 to 4 dimensions.
    for shape in [(), (1,), (31,), (33,), (1023,), (1025,), (3, 5), (70_001,), (2, 3, 4, 5)]:
        yield Sample((make(*shape),), name=f"{shape}")


def small_samples(make):
    # Distinct values lie 1/64 and more away from the kink.
    yield Sample((make.distinct(2, 3),))
    yield Sample((make.distinct(2, 3, 2, 2),))


def empty_samples(make):
    yield Sample((make(0),))
    yield Sample((make(2, 0, 3),))


def op_samples(make):
    yield torch.ops.cuda_ops.relu_forward, (make(3, 5),)
    yield torch.ops.cuda_ops.relu_forward, (make(3, 5).t(),)
    yield torch.ops.cuda_ops.relu_inplace, (make(3, 5),)
    yield torch.ops.cuda_ops.relu_inplace, (make(3, 10)[:, ::2],)
    yield torch.ops.cuda_ops.relu_backward, (make(3, 5), make(3, 5))


SPEC = OpSpec(
    name="relu",
    function=cuda_ops.functional.relu,
    reference=torch.nn.functional.relu,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        Bad(
            "integers",
            lambda device: cuda_ops.functional.relu(torch.arange(3, device=device)),
            RuntimeError,
            "relu: expected input to be floating point, got int64",
        ),
        Bad(
            "integers, in place",
            lambda device: cuda_ops.functional.relu(torch.arange(3, device=device), inplace=True),
            RuntimeError,
            "relu: expected input to be floating point, got int64",
        ),
        Bad(
            "a leaf that requires grad, in place",
            lambda device: cuda_ops.functional.relu(torch.ones(3, device=device, requires_grad=True), inplace=True),
            RuntimeError,
            "a leaf Variable that requires grad is being used in an in-place operation",
        ),
        Bad(
            "elements that share memory, in place",
            lambda device: cuda_ops.functional.relu(torch.ones(1, device=device).expand(3), inplace=True),
            RuntimeError,
            "more than one element of the written-to tensor refers to a single memory location",
        ),
        Bad(
            "grad_output of another shape",
            lambda device: torch.ops.cuda_ops.relu_backward(torch.ones(2, device=device), torch.ones(3, device=device)),
            RuntimeError,
            r"relu_backward: expected grad_output to have the shape of output, \[3\], got \[2\]",
        ),
        Bad(
            "grad_output of another dtype",
            lambda device: torch.ops.cuda_ops.relu_backward(
                torch.ones(3, device=device, dtype=torch.float64), torch.ones(3, device=device)
            ),
            RuntimeError,
            "relu_backward: expected grad_output to have the dtype of output, float32, got float64",
        ),
    ],
)
