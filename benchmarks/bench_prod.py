"""prod of all elements, along rows, along columns, and of the images of a batch by channel."""

from harness import Bench, Implementation, reduction_cases


def prod(input, dim=None):
    """PyTorch's, which takes one dimension; of several one after the other."""
    dims = dim if isinstance(dim, tuple) else (dim,)
    for d in sorted(dims, reverse=True) if dim is not None else ():
        input = input.prod(d)
    return input.prod() if dim is None else input


BENCH = Bench(
    op="prod",
    native=[Implementation("eager", prod)],
    cases=reduction_cases(),
)
