import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

scale_channels = cuda_ops.functional.scale_channels


def reference(input, scale, activation=None):
    if activation == "sigmoid":
        scale = torch.sigmoid(scale)
    elif activation == "hardsigmoid":  # PyTorch's on CUDA takes a sixth in float32, for float64 too
        scale = torch.clamp(scale + 3, 0, 6) / 6
    return input * scale.reshape(*input.shape[:2], *[1] * (input.dim() - 2))


def block(make, shape, activation=None, ones=False):
    scale = make(*shape[:2], *[1] * (len(shape) - 2 if ones else 0))
    return Sample((make(*shape), scale, activation), name=f"{activation}, {shape}")


def samples(make):
    for activation in (None, "sigmoid", "hardsigmoid"):
        # In channels_last channels in whole vectors and not, of a block, of several, and pixels that several blocks
        # share; else planes in whole vectors and not, shorter than a vector, of a warp's and of a block's.
        for shape in [(3, 5, 4, 7), (33, 24, 2, 2), (1, 288, 5, 5), (2, 1032, 2, 2), (1, 32, 57, 61)]:
            yield block(make, shape, activation, ones=True)
        for shape in [(2, 8, 3, 3), (7, 3, 1, 2), (2, 3, 33, 32), (1, 2, 47, 53)]:
            yield block(make, shape, activation)
    for shape in [(4, 7), (3, 5, 9), (2, 3, 2, 3, 2), (1, 1, 3, 3), (5, 1, 8, 8)]:
        yield block(make, shape, "sigmoid", ones=len(shape) > 3)


def small_samples(make):
    yield block(make, (2, 3, 2, 2), "sigmoid")
    yield block(make, (1, 2, 3), None)
    yield block(make, (2, 2, 1, 2), "sigmoid", ones=True)


def empty_samples(make):
    for shape in [(0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4)]:
        yield Sample((make(*shape), make(*shape[:2]), "sigmoid"))


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.scale_channels_forward, torch.ops.cuda_ops.scale_channels_backward
    shape = (2, 4, 3, 3)
    for view in (lambda t: t, lambda t: t.contiguous(memory_format=torch.channels_last), lambda t: t.transpose(1, 2)):
        x = view(make(*shape)).detach()
        scale = make(*x.shape[:2], 1, 1)
        yield forward, (x.clone().requires_grad_(), scale, "sigmoid")
        yield forward, (x, scale.detach().flatten(1), None)
        for wanted in ([True, True], [False, True], [True, False]):
            yield backward, (x, x, scale.detach(), "hardsigmoid", wanted)


SPEC = OpSpec(
    name="scale_channels",
    function=scale_channels,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        bad(
            "integers",
            lambda ones: scale_channels(ones(3, 2).long(), ones(3, 2)),
            "scale_channels: expected input to be floating point, got int64",
        ),
        bad(
            "a scale for each channel alone",
            lambda ones: scale_channels(ones(3, 2, 4, 4), ones(2)),
            r"scale_channels: expected scale to have one element for each channel of each image of input, "
            r"\[3, 2, 4, 4\], got shape \[2\]",
        ),
        bad(
            "a scale for each pixel",
            lambda ones: scale_channels(ones(3, 2, 4, 4), ones(3, 2, 4, 1)),
            r"scale_channels: expected scale to have one element for each channel of each image of input, "
            r"\[3, 2, 4, 4\], got shape \[3, 2, 4, 1\]",
        ),
        bad(
            "another activation",
            lambda ones: scale_channels(ones(3, 2), ones(3, 2), "relu"),
            "scale_channels: expected activation to be 'sigmoid', 'hardsigmoid' or None, got 'relu'",
            ValueError,
        ),
        bad(
            "no scale",
            lambda ones: scale_channels(ones(3, 2), 1.0),
            "scale_channels: expected scale to be a Tensor, got float",
            TypeError,
        ),
    ],
)
