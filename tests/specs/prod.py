import torch
from support.reductions import CASES, reduction_spec


def reference(input, dim=None, keepdim=False, *, dtype=None):
    """PyTorch's, one dimension after the other."""
    torch.sum(input.detach(), dim)  # which refuses what are no dimensions
    dims = range(input.dim()) if dim is None or dim == () else dim if isinstance(dim, tuple) else (dim,)
    output = input if dtype is None else input.to(dtype)
    for d in sorted((d % max(input.dim(), 1) for d in dims), reverse=True):
        output = output.prod(d, keepdim)
    return output


SPEC = reduction_spec(
    "prod",
    reference,
    # Products of many factors, rounded one by one, whose range float16 does not have.
    values="near 1",
    cases=[(shape, dim) for shape, dim in CASES if max(shape, default=0) < 300],
    relative_norm={torch.float32: 1e-5, torch.float64: 1e-11},
    # PyTorch divides by the factor where it is not 0: infinity by infinity.
    nonfinite_gradient=False,
    arguments=lambda dim, keepdim: ([dim], keepdim, None),
)
