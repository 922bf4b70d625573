import torch
from support.opspec import Bad, OpSpec, Sample

import cuda_ops
from specs.batch_norm import weight_beside
from specs.batch_norm_act import ACTIVATIONS
from specs.conv_bn_relu_pool import whole


def reference(
    input,
    weight,
    bias,
    running_mean,
    running_var,
    bn_weight=None,
    bn_bias=None,
    activation="relu",
    eps=1e-5,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
):
    functional = torch.nn.functional
    x = functional.conv2d(input, weight, bias, stride, padding, dilation, groups)
    bn_weight = weight_beside(bn_bias, bn_weight)
    return ACTIVATIONS[activation](functional.batch_norm(x, running_mean, running_var, bn_weight, bn_bias, eps=eps))


def arguments(make, input, weight, bias=True, affine=True, last=False):
    """input, weight, bias, running_mean, running_var, bn_weight, bn_bias. In halves what is convolved is exact, and
    what is normalised small: no rounding decides on which side of an activation's kink, 0, ±3 or 6, a value lies,
    where gradients jump."""
    channels = weight[0]
    half = make.dtype in (torch.float16, torch.bfloat16)
    numbers = whole if half else type(make).__call__
    affine = affine and ({"low": -1 / 64, "high": 1 / 64}, {"low": -1.0, "high": 1.0}) if half else affine and ({}, {})
    images = [numbers(make, *input), numbers(make, *weight)]
    if last:  # leaves, which belong to no stream
        images = [
            image.detach().contiguous(memory_format=torch.channels_last).requires_grad_(image.requires_grad)
            for image in images
        ]
    return (
        *images,
        numbers(make, channels) if bias else None,
        make(channels, requires_grad=False),
        make(channels, low=0.25, requires_grad=False),
        make(channels, **affine[0]) if affine else None,
        make(channels, **affine[1]) if affine else None,
    )


def block(make, input, weight, bias=True, affine=True, last=False, **kwargs):
    given = f"{input} {weight} {bias=} {affine=} {last=} {kwargs}"
    return Sample(arguments(make, input, weight, bias, affine, last), kwargs, given)


def samples(make):
    for last in (False, True):
        for activation in ACTIVATIONS:
            options = {"last": last, "activation": activation}
            # 1x1 and 3x3 of whole vectors of channels, an image's few, and a group for each channel.
            yield block(make, (2, 16, 9, 8), (24, 16, 1, 1), bias=False, **options)
            yield block(make, (2, 16, 9, 8), (32, 16, 3, 3), padding=1, **options)
            yield block(make, (2, 3, 17, 14), (16, 3, 3, 3), bias=False, padding=1, stride=2, **options)
            for size in (3, 5):
                padding = size // 2
                yield block(make, (2, 16, 11, 10), (16, 1, size, size), groups=16, padding=padding, **options)
            yield block(make, (2, 16, 12, 9), (16, 1, 3, 3), groups=16, padding=1, stride=2, **options)
            yield block(make, (2, 8, 9, 10), (8, 1, 3, 2), groups=8, dilation=2, **options)
        # Channels that are no vectors; groups; every argument; a long sum of few pixels; more pixels than a tile.
        yield block(make, (2, 5, 7, 6), (7, 5, 3, 3), last=last, padding="same")
        yield block(make, (2, 6, 9, 8), (9, 2, 3, 3), last=last, groups=3, stride=(1, 2), padding=(2, 1))
        yield block(make, (2, 2, 10, 9), (4, 2, 3, 3), last=last, dilation=(2, 3), padding="same", bias=False, eps=0.5)
        yield block(make, (1, 64, 4, 4), (40, 64, 3, 3), last=last, padding=1)
        yield block(make, (3, 16, 40, 24), (16, 16, 3, 3), last=last, padding=1, affine=False)
    # A weight that is larger than the output, with an activation and without.
    for activation in ("silu", None):
        yield block(make, (1, 16, 3, 3), (16, 16, 3, 3), activation=activation)


def small_samples(make):
    for activation in ("silu", "hardswish", None):
        yield block(make, (2, 2, 4, 4), (2, 2, 2, 2), activation=activation, eps=0.5)
    yield block(make, (2, 2, 5, 4), (2, 1, 3, 3), bias=False, activation="silu", groups=2, padding=1, last=True)
    yield block(make, (1, 1, 3, 4), (2, 1, 1, 1), affine=False, activation="silu")


def empty_samples(make):
    for activation in ("relu", None):
        yield block(make, (0, 2, 5, 4), (3, 2, 3, 3), activation=activation)


def op_samples(make):
    op = torch.ops.cuda_ops.conv_bn_act_inference
    for last in (False, True):
        x, w, bias, mean, variance, bn_weight, bn_bias = arguments(make, (2, 4, 6, 5), (4, 4, 3, 3), last=last)
        geometry = [1, 1], [1, 1, 1, 1], [1, 1], 1
        for activation in ("silu", None):
            yield op, (x, w, bias, bn_weight, bn_bias, mean, variance, activation, 1e-5, *geometry)
        yield op, (x, w, None, None, None, mean, variance, "relu", 1e-5, *geometry)


def call(input=(2, 2, 6, 5), weight=(4, 2, 3, 3), dtype=torch.float32, replace=None, **kwargs):
    """A call with the given shapes and arguments, all else being right; `replace` names another shape or dtype."""

    def run(device):
        tensors = {
            "input": torch.ones(input, dtype=dtype, device=device),
            "weight": torch.ones(weight, dtype=dtype, device=device),
        }
        for name in ("bias", "running_mean", "running_var", "bn_weight", "bn_bias"):
            tensors[name] = torch.ones(weight[0], dtype=dtype, device=device)
        for name, value in (replace or {}).items():
            if isinstance(value, torch.dtype):
                tensors[name] = tensors[name].to(value)
            else:
                tensors[name] = None if value is None else torch.ones(value, dtype=dtype, device=device)
        return cuda_ops.functional.conv_bn_act(**tensors, **kwargs)

    return run


def bad(name, run, match, error=RuntimeError):
    return Bad(name, run, error, "conv_bn_act: " + match)


SPEC = OpSpec(
    name="conv_bn_act",
    function=cuda_ops.functional.conv_bn_act,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    # The gradient of bias is a sum of gradients times slopes, each with its rounding, of which little may be left.
    # In halves folding rounds weight and bias, each by 2^-12 (bfloat16: 2^-9) of itself on average. Where a layout
    # repeats one value in all channels, a tenth of them may be what an activation leaves in the whole output: 10 *
    # sqrt(2) of these roundings.
    relative_norm={torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 3.5e-3, torch.bfloat16: 2.8e-2},
    cancels=True,
    nonfinite=False,  # as conv_bn_relu_pool
    # Along the first dimension all channels would be one, and where that lies on a kink there is nothing else.
    expanded_dim=-1,
    bad=[
        bad("integers", call(dtype=torch.int64), "expected input to be floating point, got int64"),
        bad("no batch", call(input=(2, 6, 5)), r"expected input to have 4 dimensions, .*\[2, 6, 5\]"),
        bad("channels", call(input=(2, 3, 6, 5)), r"expected input to have 2 channels in dimension 1"),
        bad("no channels", call(input=(2, 0, 6, 5), weight=(4, 0, 3, 3)), "expected input to have channels"),
        bad("empty kernel", call(weight=(4, 2, 0, 3)), "expected weight to have a kernel that is not empty"),
        bad("groups", call(groups=0), "expected groups to be positive, got 0"),
        bad("stride", call(stride=0), r"expected stride to be positive, got \[0, 0\]"),
        bad("word", call(padding="full"), "expected padding to be 'same', 'valid'"),
        bad("stride of another type", call(stride=1.5), "expected stride to be an int or two of them", TypeError),
        bad("size of bias", call(replace={"bias": (3,)}), "expected bias to have one element for each output channel"),
        bad("size of running_var", call(replace={"running_var": (5,)}), "expected running_var to have one element"),
        bad(
            "dtype of weight",
            call(replace={"weight": torch.float64}),
            "expected weight to have the dtype of input, float32, got float64",
        ),
        bad(
            "dtype of running_mean",
            call(replace={"running_mean": torch.float64}),
            "expected running_mean to have the dtype of input, float32, got float64",
        ),
        bad(
            "no running_mean",
            call(replace={"running_mean": None}),
            "expected running_mean to be a Tensor, got NoneType",
            TypeError,
        ),
        bad(
            "an unknown activation",
            call(activation="gelu"),
            "expected activation to be 'relu', 'relu6', 'silu', 'hardswish' or None, got 'gelu'",
            ValueError,
        ),
        bad("eps of 0", call(eps=0.0), "expected eps to be positive, got 0.0", ValueError),
    ],
)
