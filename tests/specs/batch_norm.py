import functools

import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops


def with_statistics(batch_norm):
    """batch_norm on copies of the running statistics, which it returns beside its output: so that the tests see what
    became of them, and the sample's own tensors stay as they are."""

    @functools.wraps(batch_norm)
    def function(input, running_mean, running_var, *args, **kwargs):
        running_mean = None if running_mean is None else running_mean.clone()
        running_var = None if running_var is None else running_var.clone()
        output = batch_norm(input, running_mean, running_var, *args, **kwargs)
        return output if running_mean is None else (output, running_mean, running_var)

    return function


def weight_beside(bias, weight):
    """Ones for a weight that is None beside a bias: PyTorch's second derivatives of norms forget what depends on a bias
    without a weight."""
    return torch.ones_like(bias, requires_grad=False) if weight is None and bias is not None else weight


def reference(input, running_mean, running_var, weight=None, bias=None, *args, **kwargs):
    weight = weight_beside(bias, weight)
    return torch.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, *args, **kwargs)


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


SHAPES = [
    (5, 3),  # fewer rows than a warp, fewer channels
    (33, 31),  # rows: more than a warp, channels: fewer
    (300, 40),  # rows: several splits, channels: more than a tile of 32
    (1100, 2),  # rows: more than a block of the CPU holds
    (6, 1),  # one channel
    (7, 33, 3),  # planes shorter than a warp
    (3, 2, 31),
    (4, 5, 8, 8),  # planes of whole 16-byte vectors
    (3, 2, 5, 7),  # and not: a vector spans two channels
    (2, 3, 33, 65),  # planes longer than a segment of 2048
    (40, 3, 29, 31),  # several splits of planes, on CUDA kept whole by a block
    (9, 5, 6, 6),  # planes of whole 8-byte vectors in fp16 and bf16
    (1, 2, 3, 3),  # one image
    (2, 3, 2, 3, 4),
]


def samples(make):
    for shape in SHAPES:
        for training in (True, False):
            yield Sample(arguments(make, *shape), {"training": training}, name=f"{shape} training={training}")
    for weight, bias in [(True, False), (False, True), (False, False)]:
        for training in (True, False):
            name = f"weight={weight} bias={bias} training={training}"
            yield Sample(arguments(make, 4, 3, 6, weight=weight, bias=bias), {"training": training}, name=name)
    yield Sample(arguments(make, 4, 3, 6, statistics=False), {"training": True}, name="no running statistics")
    for momentum in (0.0, 1.0, 0.375):
        kwargs = {"training": True, "momentum": momentum, "eps": 1e-2}
        yield Sample(arguments(make, 4, 3, 6), kwargs, name=f"momentum={momentum}")
    yield Sample((*arguments(make, 4, 3, 6), True, 0.25, 0.5), name="all positional")


def small_samples(make):
    yield Sample(arguments(make, 5, 2), {"training": True}, name="training")
    yield Sample(arguments(make, 5, 2), {"training": False}, name="inference")
    yield Sample(arguments(make, 2, 2, 2, 2), {"training": True, "eps": 0.5}, name="images, training")
    yield Sample(arguments(make, 2, 2, 2, 2), {"training": False}, name="images, inference")
    plain = arguments(make, 3, 2, 2, statistics=False, weight=False, bias=False)
    yield Sample(plain, {"training": True}, name="nothing but input")
    yield Sample(arguments(make, 3, 2, 2, weight=False), {"training": False}, name="bias alone")


def empty_samples(make):
    # With no channels PyTorch raises an IndexError; that ours returns an empty tensor is tested in test_batch_norm.py.
    for shape in [(0, 3), (0, 3, 2, 2), (2, 3, 0), (2, 3, 0, 2)]:
        for training in (True, False):
            yield Sample(arguments(make, *shape), {"training": training}, name=f"{shape} training={training}")


def op_samples(make):
    ops = torch.ops.cuda_ops
    for memory_format in (torch.contiguous_format, torch.channels_last):
        input, mean, var, weight, bias = arguments(make, 2, 3, 4, 5)
        input = input.contiguous(memory_format=memory_format)
        yield ops.batch_norm_forward_training, (input, weight, bias, 1e-5)
        batches = torch.zeros((), dtype=torch.int64, device=input.device)
        for count in (batches, None):
            statistics = mean.clone(), var.clone(), count
            yield ops.batch_norm_forward_tracking, (input, weight, bias, *statistics, 0.1, 1e-5)
        yield ops.batch_norm_forward_inference, (input, weight, bias, mean, var, 1e-5)
        grad_output = make(2, 3, 4, 5)
        batch = [statistic.double() for statistic in (mean, var)]
        dtype = input.dtype
        yield ops.batch_norm_backward, (grad_output, input, weight, *batch, True, 1e-5, dtype, [True, True, True])
        yield ops.batch_norm_backward, (grad_output, input, weight, *batch, True, 1e-5, None, [False, True, False])
        yield ops.batch_norm_backward, (grad_output, input, weight, mean, var, False, 1e-5, dtype, [True, False, False])
    yield ops.batch_norm_forward_training, (make(6, 3).t(), None, None, 1e-5)
    yield ops.batch_norm_forward_training, (make(2, 5, 3).transpose(1, 2), None, None, 1e-5)
    for mean in (make(3), make(6)[::2]):
        yield ops.batch_norm_forward_tracking, (make(2, 3, 5), None, None, mean, make(3), None, 0.1, 1e-5)


def call_with(op, device, shape=(4, 3, 2), **replaced):
    arguments = {
        "input": torch.ones(shape, device=device),
        "running_mean": torch.zeros(3, device=device),
        "running_var": torch.ones(3, device=device),
        **replaced,
    }
    return getattr(cuda_ops.functional, op)(**arguments)


def bad_calls(op):
    """Those of batch_norm, and of what computes it with more beside it: their messages differ in the op's name."""

    def call(device, shape=(4, 3, 2), **replaced):
        return call_with(op, device, shape, **replaced)

    return [
        Bad(
            "integers",
            lambda device: call(device, input=torch.ones(4, 3, dtype=torch.int64, device=device)),
            RuntimeError,
            f"{op}: expected input to be floating point, got int64",
        ),
        Bad(
            "one dimension",
            lambda device: call(device, (3,)),
            RuntimeError,
            rf"{op}: expected input to have at least 2 dimensions, got shape \[3\]",
        ),
        Bad(
            "one dimension, training",
            lambda device: call(device, (3,), training=True),
            RuntimeError,
            rf"{op}: expected input to have at least 2 dimensions, got shape \[3\]",
        ),
        Bad(
            "one value per channel",
            lambda device: call(device, (1, 3, 1), training=True),
            ValueError,
            r"Expected more than 1 value per channel when training, got input size \(1, 3, 1\)",
        ),
        Bad("eps of 0", lambda device: call(device, eps=0.0), ValueError, "expected eps to be positive, got 0.0"),
        Bad(
            "no running_mean in evaluation",
            lambda device: call(device, running_mean=None),
            RuntimeError,
            f"{op}: running_mean must be defined in evaluation mode",
        ),
        Bad(
            "no running_var in evaluation",
            lambda device: call(device, running_var=None),
            RuntimeError,
            f"{op}: running_var must be defined in evaluation mode",
        ),
        Bad(
            "only one running statistic in training",
            lambda device: call(device, running_var=None, training=True),
            ValueError,
            "running_mean and running_var must either both be None or neither be None",
        ),
        Bad(
            "a running statistic that requires grad",
            lambda device: call(device, running_mean=torch.zeros(3, device=device, requires_grad=True)),
            RuntimeError,
            f"{op}: not differentiable with respect to running_mean",
        ),
        Bad(
            "weight of another size",
            lambda device: call(device, weight=torch.ones(4, device=device)),
            RuntimeError,
            rf"{op}: expected weight to have one element for each channel of input, 3, got shape \[4\]",
        ),
        Bad(
            "bias of another size",
            lambda device: call(device, bias=torch.ones(3, 3, device=device), training=True),
            RuntimeError,
            rf"{op}: expected bias to have one element for each channel of input, 3, got shape \[3, 3\]",
        ),
        Bad(
            "running_mean of another size",
            lambda device: call(device, running_mean=torch.ones(4, device=device)),
            RuntimeError,
            rf"{op}: expected running_mean to have one element for each channel of input, 3, got shape \[4\]",
        ),
        Bad(
            "running statistics of another size, training",
            lambda device: call(
                device,
                running_mean=torch.ones(4, device=device),
                running_var=torch.ones(4, device=device),
                training=True,
            ),
            RuntimeError,
            rf"{op}: expected running_mean to have one element for each channel of input, 3, got shape \[4\]",
        ),
        Bad(
            "running statistics of another dtype, training",
            lambda device: call(
                device,
                running_mean=torch.ones(3, device=device, dtype=torch.float64),
                running_var=torch.ones(3, device=device, dtype=torch.float64),
                training=True,
            ),
            RuntimeError,
            f"{op}: expected running_mean to have the dtype of input, float32, got float64",
        ),
        Bad(
            "weight of another dtype",
            lambda device: call(device, weight=torch.ones(3, device=device, dtype=torch.float64)),
            RuntimeError,
            f"{op}: expected weight to have the dtype of input, float32, got float64",
        ),
        Bad(
            "running_var of another dtype",
            lambda device: call(device, running_var=torch.ones(3, device=device, dtype=torch.float64)),
            RuntimeError,
            f"{op}: expected running_var to have the dtype of input, float32, got float64",
        ),
    ]


SPEC = OpSpec(
    name="batch_norm",
    function=with_statistics(cuda_ops.functional.batch_norm),
    reference=with_statistics(reference),
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    cancels=True,
    # Channels of equal values have variance 0, and equal grad_outputs a gradient of 0: what is left then is rounding.
    # Such grad_outputs are tested in test_batch_norm.py.
    expanded_dim=-1,
    # Running statistics that become infinite in PyTorch on the CPU are NaN on its CUDA path and here: the outputs are
    # compared in test_batch_norm.py.
    nonfinite=False,
    bad=[
        *bad_calls("batch_norm"),
        Bad(
            "grad_output of another shape",
            lambda device: torch.ops.cuda_ops.batch_norm_backward(
                torch.ones(4, 3, device=device),
                torch.ones(5, 3, device=device),
                None,
                torch.zeros(3, device=device),
                torch.ones(3, device=device),
                False,
                1e-5,
                torch.float32,
                [True, True, True],
            ),
            RuntimeError,
            r"batch_norm_backward: expected grad_output to have the shape of input, \[5, 3\], got \[4, 3\]",
        ),
        Bad(
            "statistics of the batch that are not float64",
            lambda device: torch.ops.cuda_ops.batch_norm_backward(
                torch.ones(4, 3, device=device),
                torch.ones(4, 3, device=device),
                None,
                torch.zeros(3, device=device),
                torch.ones(3, device=device),
                True,
                1e-5,
                torch.float32,
                [True, True, True],
            ),
            RuntimeError,
            "batch_norm_backward: expected mean and variance to be those that forward returned",
        ),
    ],
)
