import torch
from support.opspec import Bad, OpSpec, Sample, bad

import cuda_ops

from .batch_norm import weight_beside

# Rows of one element and few; of the limits between 1, 2, .. 32 threads a row, 4 or 8 pieces a thread, warps and blocks
# (16-byte vectors of 2, 4 and 8 elements), and of one element more, which makes them rows of single elements.
COLS = [1, 2, 3, 7, 8, 10, 31, 33, 64, 100, 128, 129, 250, 256, 257, 512, 513, 768, 1000, 1023, 1024, 1025, 2048, 2049]
# Where backward's block of single elements is full (2048 in float64, 4096), where a row of vectors goes to a cluster,
# backward and forward, and where single elements are streamed. Few rows, since these samples are large.
LONG = [2056, 3000, 4095, 4096, 4097, 4104, 8192, 8193, 8200, 16384, 16392]


def eps_for(cols):
    """The gradient of rows of two elements (of one, in rms_norm) is proportional to eps, all else cancels: with a small
    one what is left is rounding."""
    return 0.5 if cols <= 3 else 1e-5


def arguments(make, rows, cols, weight=True, bias=True):
    return make(rows, cols), (cols,), make(cols) if weight else None, make(cols) if bias else None, eps_for(cols)


def reference(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    return torch.nn.functional.layer_norm(input, normalized_shape, weight_beside(bias, weight), bias, eps)


def samples(make):
    for cols in COLS[1:]:  # of one element all gradients but bias's are nothing but rounding: test_layer_norm.py
        yield Sample(arguments(make, 5, cols), name=f"rows of {cols}")
    for cols in LONG:
        yield Sample(arguments(make, 3, cols), name=f"rows of {cols}")
    # More rows than one round of a block, and than the CPU's chunks of 8 and sums of 256 rows in one.
    for rows, cols in [(1, 768), (700, 24), (9000, 3), (300, 200), (67, 513)]:
        yield Sample(arguments(make, rows, cols), name=f"{rows} rows of {cols}")
    for weight, bias in [(True, False), (False, True), (False, False)]:
        for cols in (40, 33):
            name = f"weight={weight} bias={bias} cols={cols}"
            yield Sample(arguments(make, 6, cols, weight, bias), name=name)
    yield Sample((make(2, 3, 4, 5), (4, 5), make(4, 5), make(4, 5)), name="two dimensions")
    yield Sample((make(2, 3, 4, 5), (2, 3, 4, 5), make(2, 3, 4, 5), make(2, 3, 4, 5)), name="all dimensions")
    yield Sample((make(2, 7), [7], None, None, 0.25), name="all positional")
    yield Sample((make(4, 6, low=99, high=101), (6,), make(6), make(6)), {"eps": 1e-3}, name="near 100")


# For the sanitizer: parts of a warp, a warp, blocks, single elements; in float32 clusters, backward and forward;
# streamed.
KERNEL_SHAPES = [
    (5, 3),
    (40, 24),
    (3, 100),
    (5, 257),
    (3, 768),
    (7, 1025),
    (2, 4097),
    (2, 8200),
    (1, 16392),
    (1, 19_999),
]


def kernel_samples(make):
    for rows, cols in KERNEL_SHAPES:
        yield Sample(arguments(make, rows, cols))


def small_samples(make):
    yield Sample(arguments(make, 4, 5), name="weight and bias")
    yield Sample((make(2, 2, 3), (2, 3), make(2, 3)), {"eps": 0.5}, name="weight alone")
    yield Sample((make(2, 4), (4,)), {"eps": 0.5}, name="nothing but input")
    yield Sample((make(2, 4), (4,), None, make(4)), name="bias alone")


def empty_samples(make):
    yield Sample(arguments(make, 0, 3))
    yield Sample(arguments(make, 3, 0))
    yield Sample((make(2, 0, 3), (0, 3), make(0, 3), make(0, 3)))


def op_samples(make):
    ops = torch.ops.cuda_ops
    for cols in (5, 8):
        input, shape, weight, bias, _ = arguments(make, 4, cols)
        yield ops.layer_norm_forward, (input, shape, weight, bias, 1e-5)
        yield ops.layer_norm_forward, (make(cols, 4).t(), shape, None, None, 1e-5)
        mean, rstd = make(4, requires_grad=False).double(), make(4, low=0.5, requires_grad=False)
        rstd = rstd if input.dtype == torch.float64 else rstd.float()
        rest = (shape, weight, mean, rstd, 1e-5)
        yield ops.layer_norm_backward, (make(4, cols), None, input, *rest, input.dtype, [True, True, True])
        yield ops.layer_norm_backward, (make(4, cols), make(4, cols), input, *rest, None, [True, True, False])
        rest = (shape, None, mean, rstd, 1e-5)
        yield ops.layer_norm_backward, (make(4, cols), None, input, *rest, input.dtype, [False, False, True])


def no_forward_statistics(device):
    x, one = torch.ones(4, 3, device=device), torch.ones(4, device=device)
    torch.ops.cuda_ops.layer_norm_backward(x, None, x, [3], None, one, one, 1e-5, None, [True, True, True])


layer_norm = cuda_ops.functional.layer_norm
SPEC = OpSpec(
    name="layer_norm",
    function=layer_norm,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    kernel_samples=kernel_samples,
    gradgrad=True,
    cancels=True,
    bad=[
        bad("integers", lambda ones: layer_norm(ones(2, 3, dtype=torch.int64), (3,)), "floating point, got int64"),
        bad(
            "another shape",
            lambda ones: layer_norm(ones(2, 4), (3,)),
            r"layer_norm: expected input to end in the dimensions of normalized_shape, \[3\], got shape \[2, 4\]",
        ),
        bad(
            "more dimensions than input has",
            lambda ones: layer_norm(ones(3), (1, 3)),
            r"layer_norm: expected input to end in the dimensions of normalized_shape, \[1, 3\], got shape \[3\]",
        ),
        bad(
            "no dimensions",
            lambda ones: layer_norm(ones(3), ()),
            r"layer_norm: expected normalized_shape to have at least one dimension, got \[\]",
        ),
        bad(
            "a number",
            lambda ones: layer_norm(ones(3), 3),
            "layer_norm: expected normalized_shape to be a tuple of ints, got 3",
            TypeError,
        ),
        bad(
            "weight of another shape",
            lambda ones: layer_norm(ones(2, 3), (3,), ones(1, 3)),
            r"layer_norm: expected weight to have the shape normalized_shape, \[3\], got \[1, 3\]",
        ),
        bad(
            "bias of another shape",
            lambda ones: layer_norm(ones(2, 3), (3,), ones(3), ones(2)),
            r"layer_norm: expected bias to have the shape normalized_shape, \[3\], got \[2\]",
        ),
        bad(
            "weight of another dtype",
            lambda ones: layer_norm(ones(2, 3), (3,), ones(3, dtype=torch.float64)),
            "layer_norm: expected weight to have the dtype of input, float32, got float64",
        ),
        bad(
            "grad_output of another shape",
            lambda ones: torch.ops.cuda_ops.layer_norm_backward(
                ones(2, 3), None, ones(4, 3), [3], None, ones(4).double(), ones(4), 1e-5, None, [True, True, True]
            ),
            r"layer_norm_backward: expected grad_output to have the shape of input, \[4, 3\], got \[2, 3\]",
        ),
        Bad(
            "a mean that forward did not return",
            no_forward_statistics,
            RuntimeError,
            "layer_norm_backward: expected mean to be what forward returned",
        ),
    ],
)
