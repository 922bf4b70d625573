"""What the specifications of the adaptive pools share."""

import torch

import cuda_ops

from .opspec import OpSpec, Sample, bad

# (shape, output_size). Global, of whole vectors and not; windows that tile, that overlap, of one column, wider than a
# warp; fewer positions than windows; the identity; channels of whole vectors and not; no batch.
CASES = [
    ((2, 5, 7, 7), 1),
    ((2, 16, 8, 8), 1),
    ((1, 3, 20, 20), (1, 1)),
    ((2, 2, 33, 40), 1),
    ((2, 3, 8, 8), 4),
    ((2, 8, 7, 9), (3, 4)),
    ((1, 33, 6, 6), 6),
    ((2, 2, 10, 70), (3, 2)),
    ((2, 3, 40, 12), (3, 1)),
    ((1, 16, 40, 8), (3, 1)),
    ((1, 4, 36, 5), (1, 2)),
    ((2, 3, 3, 4), (5, 7)),
    ((2, 3, 5, 6), (None, 2)),
    ((2, 3, 5, 6), (3, None)),
    ((3, 9, 8), [3, 3]),
    ((1, 1, 1, 1), 1),
    ((1, 1, 1, 1), 3),
    ((2, 3, 5, 1), (2, 1)),
]


def adaptive_spec(name, *, values, returns_indices=False):
    """The specification of cuda_ops.functional.<name>. `values`: of a Make, how the input is made."""
    function = getattr(cuda_ops.functional, name)
    forward = getattr(torch.ops.cuda_ops, f"{name}_forward")
    backward = getattr(torch.ops.cuda_ops, f"{name}_backward")

    def samples(make):
        for shape, size in CASES:
            yield Sample((values(make, *shape), size), name=f"{shape} to {size}")
        if returns_indices:
            yield Sample((values(make, 2, 3, 7, 8), 3, True), name="indices")

    def small_samples(make):
        yield Sample((values(make, 1, 2, 3, 3), 1))
        yield Sample((values(make, 1, 2, 3, 4), (2, 3)))
        yield Sample((values(make, 2, 2, 3), (3, 2)))

    def empty_samples(make):
        yield Sample((values(make, 0, 3, 4, 4), 2))

    def op_samples(make):
        x = values(make, 2, 3, 6, 7)
        for input in (x, x.contiguous(memory_format=torch.channels_last), x[0], x[:0]):
            output = forward(input, [2, 3])
            yield forward, (input, [2, 3])
            if returns_indices:
                yield backward, (torch.ones_like(output[0]), output[1], list(input.shape[-2:]))
            else:
                for channels_last in (False, True)[: input.dim() - 2]:
                    yield backward, (torch.ones_like(output), list(input.shape[-2:]), channels_last)

    return OpSpec(
        name=name,
        function=function,
        reference=getattr(torch.nn.functional, name),
        samples=samples,
        small_samples=small_samples,
        empty_samples=empty_samples,
        op_samples=op_samples,
        gradgrad=True,
        bad=[
            bad(
                "integers",
                lambda ones: function(ones(1, 2, 4, 4, dtype=torch.int64), 2),
                f"{name}: expected input to be floating point, got int64",
            ),
            bad("matrix", lambda ones: function(ones(4, 4), 2), f"{name}: expected input to have 3 or 4 dimensions"),
            bad(
                "no channels",
                lambda ones: function(ones(1, 0, 4, 4), 2),
                f"{name}: expected input to have no empty dimension but the batch",
            ),
            bad(
                "negative",
                lambda ones: function(ones(1, 2, 4, 4), -1),
                f"{name}: expected output_size to be non-negative 32-bit integers",
            ),
            bad(
                "three sizes",
                lambda ones: function(ones(1, 2, 4, 4), (1, 2, 3)),
                rf"{name}: expected output_size to be an int or two of them, got \(1, 2, 3\)",
            ),
            bad(
                "no size",
                lambda ones: function(ones(1, 2, 4, 4), None),
                f"{name}: expected output_size to be an int or two of them, got None",
                TypeError,
            ),
            bad("no tensor", lambda ones: function(1.0, 2), f"{name}: expected input to be a Tensor", TypeError),
            bad(
                "a fraction",
                lambda ones: function(ones(1, 2, 4, 4), (2, 0.5)),
                rf"{name}: expected output_size to be an int or two of them, got \(2, 0.5\)",
                TypeError,
            ),
        ],
    )
