import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops
from specs.batch_norm import SHAPES, arguments, bad_calls, call_with, weight_beside, with_statistics

F = torch.nn.functional
ACTIVATIONS = {"relu": F.relu, "relu6": F.relu6, "silu": F.silu, "hardswish": F.hardswish, None: lambda z: z}


def reference(
    input, mean, var, weight=None, bias=None, residual=None, activation="relu", training=False, momentum=0.1, eps=1e-5
):
    weight = weight_beside(bias, weight)
    z = F.batch_norm(input, mean, var, weight, bias, training, momentum, eps)
    return ACTIVATIONS[activation](z if residual is None else z + residual)


def all_arguments(make, *shape, activation="relu", residual=True, spread=1.0, **which):
    """input, running_mean, running_var, weight, bias, residual, activation"""
    first = arguments(make, *shape, **which)
    return (*first, make(*shape) if residual else None, activation)


def samples(make):
    names = list(ACTIVATIONS)
    for number, shape in enumerate(SHAPES):
        for training in (True, False):
            activation = names[(number + training) % len(names)]
            for residual in (True, False):
                args = all_arguments(make, *shape, activation=activation, residual=residual)
                name = f"{shape} {activation} residual={residual} training={training}"
                yield Sample(args, {"training": training}, name=name)
    for activation in names:
        for training in (True, False):
            for residual in (True, False):
                args = all_arguments(make, 6, 8, 5, 3, activation=activation, residual=residual)
                last = [None if t is None else t.contiguous(memory_format=torch.channels_last) for t in args[:1]]
                name = f"channels_last {activation} residual={residual} training={training}"
                yield Sample((*last, *args[1:]), {"training": training}, name=name)
    for weight, bias in [(True, False), (False, True), (False, False)]:
        for training in (True, False):
            args = all_arguments(make, 4, 3, 6, weight=weight, bias=bias, residual=weight)
            yield Sample(args, {"training": training}, name=f"weight={weight} bias={bias} training={training}")
    args = all_arguments(make, 40, 16, statistics=False)
    yield Sample(args, {"training": True}, name="no running statistics, several splits")
    yield Sample(all_arguments(make, 4, 3, 6), {"training": True, "momentum": 0.375, "eps": 1e-2}, name="momentum")
    yield Sample((*all_arguments(make, 4, 3, 6, activation="silu"), True, 0.25, 0.5), name="all positional")


def small_samples(make):
    for activation in ("silu", "hardswish", None):
        for training in (True, False):
            kwargs = {"training": training, "eps": 0.5}
            yield Sample(all_arguments(make, 5, 2, activation=activation), kwargs, name=f"{activation} {training}")
    yield Sample(all_arguments(make, 2, 2, 2, 2, activation="silu", residual=False), {"training": True}, name="images")
    plain = all_arguments(make, 3, 2, 2, activation="silu", statistics=False, weight=False, bias=False, residual=False)
    yield Sample(plain, {"training": True}, name="nothing but input")


def empty_samples(make):
    for shape in [(0, 3), (0, 3, 2, 2), (2, 3, 0), (2, 3, 0, 2)]:
        for training in (True, False):
            yield Sample(all_arguments(make, *shape), {"training": training}, name=f"{shape} training={training}")


def op_samples(make):
    ops = torch.ops.cuda_ops
    for memory_format in (torch.contiguous_format, torch.channels_last):
        input, mean, var, weight, bias = arguments(make, 2, 3, 4, 5)
        input = input.contiguous(memory_format=memory_format)
        residual = make(2, 3, 4, 5)
        yield ops.batch_norm_act_forward_training, (input, weight, bias, residual, "relu", 1e-5)
        batches = torch.zeros((), dtype=torch.int64, device=input.device)
        for count in (batches, None):
            statistics = mean.clone(), var.clone(), count
            yield ops.batch_norm_act_forward_tracking, (input, weight, bias, None, *statistics, "silu", 0.1, 1e-5)
        yield ops.batch_norm_act_forward_inference, (input, weight, bias, residual, mean, var, "hardswish", 1e-5)
        batch = [statistic.double() for statistic in (mean, var)]
        both = make(2, 3, 4, 5), input, weight, bias
        for wanted in ([True, True, True, True], [False, True, False, True], [True, False, False, False]):
            yield ops.batch_norm_act_backward, (*both, residual, *batch, True, "relu6", 1e-5, wanted)
        wanted = [True, False, False, False]
        yield ops.batch_norm_act_backward, (*both, None, mean, var, False, "relu", 1e-5, wanted)


SPEC = OpSpec(
    name="batch_norm_act",
    function=with_statistics(cuda_ops.functional.batch_norm_act),
    reference=with_statistics(reference),
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    # The gradient of bias is a sum of gradients times slopes, each with its rounding, of which little may be left.
    relative_norm={torch.float32: 1e-5},
    cancels=True,
    expanded_dim=-1,  # as batch_norm
    nonfinite=False,  # likewise
    bad=[
        Bad(
            "an unknown activation",
            lambda device: call_with("batch_norm_act", device, activation="gelu"),
            ValueError,
            "batch_norm_act: expected activation to be 'relu', 'relu6', 'silu', 'hardswish' or None, got 'gelu'",
        ),
        Bad(
            "a residual of another shape",
            lambda device: call_with("batch_norm_act", device, residual=torch.ones(3, device=device)),
            RuntimeError,
            r"batch_norm_act: expected residual to have the shape of input, \[4, 3, 2\], got \[3\]",
        ),
        Bad(
            "a residual of another dtype, training",
            lambda device: call_with(
                "batch_norm_act",
                device,
                residual=torch.ones(4, 3, 2, device=device, dtype=torch.float64),
                training=True,
            ),
            RuntimeError,
            "batch_norm_act: expected residual to have the dtype of input, float32, got float64",
        ),
        *bad_calls("batch_norm_act"),
    ],
)
