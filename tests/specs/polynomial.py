import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops


def reference(input, coefficients=(1.0, 1.0, 1.0)):
    """Horner's rule in PyTorch. Another order of the operations would part from it at infinities."""
    *lower, highest = coefficients
    value = torch.full_like(input, highest)
    for coefficient in reversed(lower):
        value = value * input + coefficient
    return value


def samples(make):
    # One element, a warp less and more one, a block and a tile less and more one, several blocks; 0 to 4 dimensions.
    for shape in [(), (1,), (31,), (33,), (511,), (513,), (1023,), (1025,), (3, 5), (70_001,), (2, 3, 4, 5)]:
        yield Sample((make(*shape),), name=f"{shape}")
    for coefficients in [(0.5, -2.0), (0.0, 0.0, 0.0, 1.0), [3, 1, -2, 1, 1], (0.5,) * 64]:
        # Below 1 in size, where 63 powers neither overflow nor vanish.
        yield Sample((make(33, low=-0.9, high=0.9), coefficients), name=f"{coefficients}")


def small_samples(make):
    yield Sample((make(2, 3),))
    yield Sample((make(2, 3),), {"coefficients": (1.0, -2.0, 0.5, 0.25)})


def empty_samples(make):
    yield Sample((make(0),))
    yield Sample((make(2, 0, 3),))


def op_samples(make):
    coefficients = [1.0, -2.0, 0.5]
    yield torch.ops.cuda_ops.polynomial_forward, (make(3, 5), coefficients)
    yield torch.ops.cuda_ops.polynomial_forward, (make(3, 5).t(), coefficients)
    yield torch.ops.cuda_ops.polynomial_backward, (make(3, 5), make(3, 5), coefficients)


SPEC = OpSpec(
    name="polynomial",
    function=cuda_ops.functional.polynomial,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        Bad(
            "integers",
            lambda device: cuda_ops.functional.polynomial(torch.arange(3, device=device)),
            RuntimeError,
            "polynomial: expected input to be floating point, got int64",
        ),
        Bad(
            "no coefficients",
            lambda device: cuda_ops.functional.polynomial(torch.ones(3, device=device), ()),
            RuntimeError,
            "polynomial: expected coefficients to have 1 to 64 elements, got 0",
        ),
        Bad(
            "too many coefficients",
            lambda device: cuda_ops.functional.polynomial(torch.ones(3, device=device), [1.0] * 65),
            RuntimeError,
            "polynomial: expected coefficients to have 1 to 64 elements, got 65",
        ),
        Bad(
            "coefficients as a tensor",
            lambda device: cuda_ops.functional.polynomial(torch.ones(3, device=device), torch.ones(3, device=device)),
            NotImplementedError,
            "polynomial: expected coefficients to be numbers, got a tensor",
        ),
        Bad(
            "a tensor among the coefficients",
            lambda device: cuda_ops.functional.polynomial(
                torch.ones(3, device=device), [1.0, torch.ones((), requires_grad=True)]
            ),
            NotImplementedError,
            "polynomial: expected coefficients to be numbers, got a tensor",
        ),
        Bad(
            "grad_output of another shape",
            lambda device: torch.ops.cuda_ops.polynomial_backward(
                torch.ones(2, device=device), torch.ones(3, device=device), [1.0]
            ),
            RuntimeError,
            r"polynomial_backward: expected grad_output to have the shape of input, \[3\], got \[2\]",
        ),
        Bad(
            "grad_output of another dtype",
            lambda device: torch.ops.cuda_ops.polynomial_backward(
                torch.ones(3, device=device, dtype=torch.float64), torch.ones(3, device=device), [1.0]
            ),
            RuntimeError,
            "polynomial_backward: expected grad_output to have the dtype of input, float32, got float64",
        ),
    ],
)
