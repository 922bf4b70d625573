import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops
from specs.batch_norm import weight_beside, with_statistics

SHAPES = [
    (2, 3, 5),
    (3, 2, 31),
    (4, 5, 8, 8),  # planes of whole 16-byte vectors
    (3, 2, 5, 7),  # and not
    (2, 33, 3, 3),  # channels_last: channels that are no whole vectors
    (2, 16, 9, 6),
    (40, 3, 5),  # more images than a warp
    # Planes longer than a segment of 2048. (Of one image PyTorch's gradient for a channels_last grad_output is wrong.)
    (2, 2, 47, 45),
    (2, 3, 2, 3, 4),
]


def arguments(make, *shape, statistics=True, weight=True, bias=True):
    """input, running_mean, running_var, weight, bias"""
    channels = shape[1]
    return (
        make(*shape),
        make(channels, requires_grad=False) if statistics else None,
        make(channels, low=0.25, requires_grad=False) if statistics else None,
        make(channels) if weight else None,
        make(channels) if bias else None,
    )


def reference(
    input,
    running_mean=None,
    running_var=None,
    weight=None,
    bias=None,
    use_input_stats=True,
    momentum=0.1,
    eps=1e-5,
):
    weight = weight_beside(bias, weight)
    if input.numel() == 0:  # of which PyTorch's statistics become NaN
        running_mean, running_var = (None if t is None else t.clone() for t in (running_mean, running_var))
    statistics = (running_mean, running_var)
    output = torch.nn.functional.instance_norm(input, *statistics, weight, bias, use_input_stats, momentum, eps)
    if eps == 0 and use_input_stats:  # 0/0 is NaN, as group_norm's: instance_norm of PyTorch's has 0
        return torch.nn.functional.group_norm(input, input.shape[1], weight, bias, eps)
    return output


def samples(make):
    for shape in SHAPES:
        for own in (True, False):
            yield Sample(arguments(make, *shape), {"use_input_stats": own}, name=f"{shape} use_input_stats={own}")
    for weight, bias in [(True, False), (False, True), (False, False)]:
        name = f"weight={weight} bias={bias}"
        yield Sample(arguments(make, 4, 3, 6, weight=weight, bias=bias), name=name)
    yield Sample(arguments(make, 4, 3, 6, statistics=False), name="no running statistics")
    yield Sample((make(4, 3, 6), None, None), name="nothing but input")
    for momentum in (0.0, 1.0, 0.375):
        yield Sample(arguments(make, 4, 3, 6), {"momentum": momentum, "eps": 1e-2}, name=f"momentum={momentum}")
    yield Sample((*arguments(make, 4, 3, 6), True, 0.25, 0.5), name="all positional")


def small_samples(make):
    yield Sample(arguments(make, 2, 2, 3), {"eps": 0.5}, name="own statistics")
    yield Sample(arguments(make, 2, 2, 2, 2), {"use_input_stats": False}, name="running statistics")
    plain = arguments(make, 3, 2, 3, statistics=False, weight=False, bias=False)
    yield Sample(plain, {"eps": 0.5}, name="nothing but input")
    yield Sample(arguments(make, 2, 2, 3, weight=False), {"eps": 0.5}, name="bias alone")


def op_samples(make):
    ops = torch.ops.cuda_ops
    for memory_format in (torch.contiguous_format, torch.channels_last):
        input, mean, var, weight, bias = arguments(make, 2, 3, 4, 5)
        input = input.contiguous(memory_format=memory_format)
        yield ops.instance_norm_forward, (input, weight, bias, 1e-5)
        yield ops.instance_norm_forward_inference, (input, weight, bias, mean, var, 1e-5)
    mean = make(2, 3, requires_grad=False).double()
    variance = make(2, 3, low=0.5, requires_grad=False).double()
    for running in (make(3, requires_grad=False), make(6, requires_grad=False)[::2]):
        yield ops.instance_norm_update_, (running, running.clone(), mean, variance, 20, 0.1)


instance_norm = cuda_ops.functional.instance_norm
SPEC = OpSpec(
    name="instance_norm",
    function=with_statistics(instance_norm),
    reference=with_statistics(reference),
    samples=samples,
    small_samples=small_samples,
    op_samples=op_samples,
    gradgrad=True,
    cancels=True,
    # As batch_norm's: running statistics that become infinite in PyTorch on the CPU are NaN here.
    nonfinite=False,
    bad=[
        bad("integers", lambda ones: instance_norm(ones(2, 4, 3, dtype=torch.int64)), "floating point, got int64"),
        bad(
            "one value",
            lambda ones: instance_norm(ones(2, 4, 1)),
            "instance_norm: Expected more than 1 spatial element when training, got input size ",
            ValueError,
        ),
        bad(
            "no running statistics",
            lambda ones: instance_norm(ones(2, 4, 3), use_input_stats=False),
            "instance_norm: Expected running_mean and running_var to be defined when use_input_stats is false",
        ),
        bad(
            "one running statistic",
            lambda ones: instance_norm(ones(2, 4, 3), ones(4)),
            "instance_norm: expected running_mean and running_var to be both None or neither",
            ValueError,
        ),
        bad(
            "running_mean of another shape",
            lambda ones: instance_norm(ones(2, 4, 3), ones(3), ones(4)),
            r"instance_norm: expected running_mean to have one element for each channel of input, 4, got shape \[3\]",
        ),
        bad(
            "running_var that requires grad",
            lambda ones: instance_norm(ones(2, 4, 3), ones(4), ones(4, requires_grad=True)),
            "instance_norm: not differentiable with respect to running_var",
        ),
        bad(
            "weight of another shape",
            lambda ones: instance_norm(ones(2, 4, 3), None, None, ones(2)),
            r"instance_norm: expected weight to have one element for each channel of input, 4, got shape \[2\]",
        ),
        bad(
            "one dimension",
            lambda ones: instance_norm(ones(4)),
            r"instance_norm: expected input to have at least 2 dimensions, got shape \[4\]",
        ),
    ],
)
