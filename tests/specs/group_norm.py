import torch
from support.opspec import Bad, OpSpec, Sample, bad

import cuda_ops

# (images, channels, ...), num_groups. Of a group's 2 to 2048 values, which the GPU keeps in the registers of from one
# thread to a block, in vectors and, where planes or addresses allow none, in single elements.
SHAPES = [
    ((5, 6), 2),  # no spatial dimensions: weights differ from element to element
    ((3, 64), 4),
    ((300, 8), 2),  # more images than a round of sums
    ((2, 6, 5), 3),
    ((3, 4, 1, 7), 1),  # one group
    ((2, 5, 3, 3), 5),  # as many groups as channels
    ((2, 32, 7, 7), 8),  # a vector spans two channels
    ((3, 12, 4, 4), 3),
    ((2, 16, 5, 2, 3), 4),
    ((1, 3, 9, 7), 1),
    ((2, 2, 33, 31), 1),  # single elements by a warp and more
    ((2, 48, 6, 6), 6),  # channels_last: vectors of channels, several groups in one
    ((2, 130, 3, 5), 65),  # and not
    ((1, 520, 4, 2), 4),  # several tiles of channels
    ((1, 32, 40, 40), 2),  # channels_last: several parts of the pixels
    ((1, 2, 70, 60), 2),  # channels longer than a segment of 2048, odd at the end
]
# Of clusters, and of two kernels: in float32 more than 16384 and more than 131072 values, in float64 more than 8192.
LONG = [((1, 4, 80, 128), 2), ((2, 2, 128, 129), 1), ((1, 2, 256, 257), 1)]


def arguments(make, shape, groups, weight=True, bias=True):
    channels = shape[1]
    return make(*shape), groups, make(channels) if weight else None, make(channels) if bias else None


def reference(input, num_groups, weight=None, bias=None, eps=1e-5):
    """PyTorch's, with ones and zeros for None: without a weight its derivatives that are differentiated further raise
    an error or forget what depends on bias."""
    weight = input.new_ones(input.shape[1]) if weight is None else weight
    bias = input.new_zeros(input.shape[1]) if bias is None else bias
    return torch.nn.functional.group_norm(input, num_groups, weight, bias, eps)


def samples(make):
    for shape, groups in [*SHAPES, *LONG]:
        yield Sample(arguments(make, shape, groups), name=f"{shape} in {groups}")
    for weight, bias in [(True, False), (False, True), (False, False)]:
        for shape in [(2, 8, 4, 4), (2, 9, 5)]:
            name = f"{shape} weight={weight} bias={bias}"
            yield Sample(
                arguments(make, shape, shape[1] // 2, weight, bias)
                if shape[1] % 2 == 0
                else arguments(make, shape, 3, weight, bias),
                name=name,
            )
    yield Sample((make(2, 4, 7), 2, None, None, 0.25), name="all positional")
    yield Sample((make(4, 6, 9, low=99, high=101), 3, make(6), make(6)), {"eps": 1e-3}, name="near 100")


# For the sanitizer: a part of a warp, a warp, a block, single elements, a cluster; two kernels.
KERNEL_SHAPES = [
    ((5, 6), 2),
    ((2, 32, 7, 7), 8),
    ((2, 48, 6, 6), 6),
    ((2, 130, 3, 5), 65),
    ((1, 32, 40, 40), 2),
    ((1, 2, 70, 60), 2),
    *LONG,
]


def kernel_samples(make):
    for shape, groups in KERNEL_SHAPES:
        yield Sample(arguments(make, shape, groups))


def small_samples(make):
    yield Sample(arguments(make, (2, 4, 3), 2), {"eps": 0.5}, name="weight and bias")
    yield Sample(arguments(make, (2, 4, 2, 2), 2, bias=False), {"eps": 0.5}, name="weight alone")
    yield Sample(arguments(make, (2, 4, 3), 4, False, False), {"eps": 0.5}, name="nothing but input")
    yield Sample(arguments(make, (2, 6), 1, False), {"eps": 0.5}, name="bias alone")


def empty_samples(make):
    # Without pixels PyTorch's gradients of parameters are NaN: ours are in test_group_norm.py.
    for shape in [(0, 4), (0, 4, 3), (0, 4, 2, 0)]:
        yield Sample(arguments(make, shape, 2), name=str(shape))


def op_samples(make):
    ops = torch.ops.cuda_ops
    for memory_format in (torch.contiguous_format, torch.channels_last):
        input, groups, weight, bias = arguments(make, (2, 6, 4, 5), 3)
        input = input.contiguous(memory_format=memory_format)
        yield ops.group_norm_forward, (input, groups, weight, bias, 1e-5)
        mean = make(2, 3, requires_grad=False).double()
        variance = make(2, 3, low=0.5, requires_grad=False).double()
        grad_output = make(2, 6, 4, 5)
        rest = groups, weight, mean, variance, 1e-5
        yield ops.group_norm_backward, (grad_output, input, *rest, input.dtype, [True, True, True])
        yield ops.group_norm_backward, (grad_output, input, *rest, None, [True, True, False])
        rest = groups, None, mean, variance, 1e-5
        yield ops.group_norm_backward, (grad_output, input, *rest, input.dtype, [False, False, True])
    yield ops.group_norm_forward, (make(6, 4).t(), 2, None, None, 1e-5)
    yield ops.group_norm_forward, (make(2, 5, 4).transpose(1, 2), 2, None, None, 1e-5)


group_norm = cuda_ops.functional.group_norm
SPEC = OpSpec(
    name="group_norm",
    function=group_norm,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    kernel_samples=kernel_samples,
    gradgrad=True,
    cancels=True,
    bad=[
        bad("integers", lambda ones: group_norm(ones(2, 4, dtype=torch.int64), 2), "floating point, got int64"),
        bad(
            "one dimension",
            lambda ones: group_norm(ones(4), 2),
            r"group_norm: expected input to have at least 2 dimensions, got shape \[4\]",
        ),
        bad(
            "groups that do not divide",
            lambda ones: group_norm(ones(2, 4, 3), 3),
            "group_norm: expected num_groups to be positive and to divide the channels of input, 4, got 3",
        ),
        bad(
            "no groups",
            lambda ones: group_norm(ones(2, 4, 3), 0),
            "group_norm: expected num_groups to be positive, got 0",
        ),
        bad(
            "a fraction of groups",
            lambda ones: group_norm(ones(2, 4, 3), 2.0),
            "group_norm: expected num_groups to be an int, got 2.0",
            TypeError,
        ),
        bad(
            "one value",
            lambda ones: group_norm(ones(1, 2, 1), 2),
            r"group_norm: Expected more than 1 value per channel when training, got input size \[1, 2, 1\]",
            ValueError,
        ),
        bad(
            "weight of another shape",
            lambda ones: group_norm(ones(2, 4, 3), 2, ones(2)),
            r"group_norm: expected weight to have one element for each channel of input, 4, got shape \[2\]",
        ),
        bad(
            "bias of another shape",
            lambda ones: group_norm(ones(2, 4, 3), 2, ones(4), ones(1, 4)),
            r"group_norm: expected bias to have one element for each channel of input, 4, got shape \[1, 4\]",
        ),
        bad(
            "weight of another dtype",
            lambda ones: group_norm(ones(2, 4, 3), 2, ones(4, dtype=torch.float64)),
            "group_norm: expected weight to have the dtype of input, float32, got float64",
        ),
        bad(
            "grad_output of another shape",
            lambda ones: torch.ops.cuda_ops.group_norm_backward(
                ones(2, 3), ones(2, 4), 2, None, ones(2, 2).double(), ones(2, 2).double(), 1e-5, None, [True] * 3
            ),
            r"group_norm_backward: expected grad_output to have the shape of input, \[2, 4\], got \[2, 3\]",
        ),
        Bad(
            "statistics that forward did not return",
            lambda device: torch.ops.cuda_ops.group_norm_backward(
                *[torch.ones(2, 4, device=device)] * 2,
                2,
                None,
                *[torch.ones(2, 2, device=device)] * 2,
                1e-5,
                None,
                [True] * 3,
            ),
            RuntimeError,
            "group_norm_backward: expected mean and variance to be those that forward returned",
        ),
    ],
)
