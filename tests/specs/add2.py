import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops

add2 = cuda_ops.functional.add2


def samples(make):
    # One element, a warp less and more one, a block less and more one, several blocks; 0 to 4 dimensions.
    for shape in [(), (1,), (31,), (33,), (1023,), (1025,), (3, 5), (70_001,), (2, 3, 4, 5)]:
        yield Sample((make(*shape), make(*shape)), name=f"{shape}")
    # Broadcasting: either side, both sides at once, a scalar tensor, one dimension less.
    for left, right in [((3, 5), (5,)), ((1, 5), (3, 5)), ((3, 1), (1, 5)), ((2, 3, 4, 5), (3, 1, 1)), ((4,), ())]:
        yield Sample((make(*left), make(*right)), name=f"{left} and {right}")


def small_samples(make):
    yield Sample((make(2, 3), make(2, 3)))
    yield Sample((make(2, 1), make(3)), name="broadcast")
    yield Sample((make(2, 3), make(2, 3, requires_grad=False)), name="one gradient")


def empty_samples(make):
    yield Sample((make(0), make(0)))
    yield Sample((make(2, 0, 3), make(2, 0, 3)))
    yield Sample((make(2, 0, 3), make(3)), name="broadcast")


def op_samples(make):
    op = torch.ops.cuda_ops.add2_forward
    yield op, (make(3, 5), make(3, 5))
    yield op, (make(3, 5).t(), make(5, 3))
    yield op, (make(5).expand(3, 5), make(3, 5))
    yield op, (make(3, 1).expand(3, 5), make(5).expand(3, 5))
    yield op, (make(3, 10)[:, ::2], make(3, 5))


SPEC = OpSpec(
    name="add2",
    function=add2,
    reference=torch.add,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        Bad(
            "integers",
            lambda device: add2(torch.arange(3, device=device), torch.arange(3, device=device)),
            RuntimeError,
            "add2: expected input to be floating point, got int64",
        ),
        Bad(
            "another dtype",
            lambda device: add2(torch.ones(3, device=device), torch.ones(3, device=device, dtype=torch.float64)),
            RuntimeError,
            "add2: expected other to have the dtype of input, float32, got float64",
        ),
        Bad(
            "shapes that do not broadcast",
            lambda device: add2(torch.ones(3, device=device), torch.ones(2, device=device)),
            RuntimeError,
            r"add2: expected other to have a shape that broadcasts with that of input, \[3\], got \[2\]",
        ),
        Bad(
            "another shape for the op itself",
            lambda device: torch.ops.cuda_ops.add2_forward(torch.ones(3, device=device), torch.ones(2, device=device)),
            RuntimeError,
            r"add2: expected other to have a shape that broadcasts with that of input, \[3\], got \[2\]",
        ),
    ],
)
