"""batch_norm, a residual sum and an activation in training. Forward reads the input twice and the residual once;
backward without a residual reads as batch_norm's does, and with one it reads the residual too and leaves its
gradient."""

import math

import torch
from harness import Bench, Case, Implementation

import cuda_ops


def by_layers(norm, activations):
    def function(input, mean, var, weight, bias, residual, activation, training):
        z = norm(input, mean, var, weight, bias, training)
        return activations[activation](z if residual is None else z.add_(residual))

    return function


def channels_last(input, mean, var, weight, bias, residual, *others):
    relaid = [
        None if t is None else t.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        for t in (input, residual)
    ]
    return (relaid[0], mean, var, weight, bias, relaid[1], *others)


def case(shape, activation, with_residual):
    channels, count = shape[1], math.prod(shape)

    def make_arguments(make):
        mean, var = make(channels, requires_grad=False), make(channels, requires_grad=False).square()
        residual = make(*shape) if with_residual else None
        return make(*shape), mean, var, make(channels), make(channels), residual, activation, True

    name = f"{'x'.join(map(str, shape))} {'+ residual, ' if with_residual else ''}{activation}"
    return Case(name, make_arguments, elements=(4 * count, 7 * count) if with_residual else (3 * count, 5 * count))


NATIVE = {
    "relu": lambda z: torch.nn.functional.relu(z, inplace=True),
    "silu": torch.nn.functional.silu,
    "hardswish": torch.nn.functional.hardswish,
}
CASES = [((64, 256, 56, 56), "relu", True), ((64, 64, 56, 56), "relu", False), ((64, 1024, 14, 14), "relu", True)]
CASES += [((64, 2048, 7, 7), "relu", True), ((64, 64, 112, 112), "relu", False), ((64, 96, 56, 56), "silu", False)]
CASES += [((64, 480, 14, 14), "hardswish", False), ((64, 128, 28, 28), "relu", False)]
BENCH = Bench(
    op="batch_norm_act",
    ours=[
        Implementation("ours", cuda_ops.functional.batch_norm_act),
        Implementation("ours channels_last", cuda_ops.functional.batch_norm_act, channels_last),
    ],
    native=[
        Implementation("eager", by_layers(torch.nn.functional.batch_norm, NATIVE)),
        Implementation("channels_last", by_layers(torch.nn.functional.batch_norm, NATIVE), channels_last),
    ],
    cases=[case(*arguments) for arguments in CASES],
    bends=10.0,
)
