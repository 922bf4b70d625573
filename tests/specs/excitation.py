import torch
from support.opspec import OpSpec, Sample, bad

import cuda_ops

excitation = cuda_ops.functional.excitation


def hardswish(z):
    """PyTorch's on CUDA takes a sixth in float32, and its gradient at NaN depends on the element's place: here it is
    grad_output."""
    number = torch.where(z.isnan(), torch.zeros_like(z), z)
    return torch.where(z.isnan(), z, number * torch.clamp(number + 3, 0, 6) / 6)


def silu(z):
    """PyTorch's second derivative takes 1 - sigmoid(z), of which little is left at 25: here sigmoid(-z)."""
    is_positive = (z > 0) & (z < 700)
    positive = torch.where(is_positive, z, torch.zeros_like(z))
    return torch.where(is_positive, positive - positive * torch.sigmoid(-positive), torch.nn.functional.silu(z))


ACTIVATIONS = {
    "relu": torch.relu,
    "silu": silu,
    "hardswish": hardswish,
}


def reference(input, weight1, bias1, weight2, bias2, activation="relu"):
    hidden = torch.nn.functional.linear(input.flatten(1), weight1.flatten(1), bias1)
    output = torch.nn.functional.linear(ACTIVATIONS[activation](hidden), weight2.flatten(1), bias2)
    return output.view(*output.shape, *input.shape[2:])


def block(make, images, channels, squeezed, outputs, activation="relu", bias=True, pixel=True):
    ones = (1, 1) if pixel else ()
    # Sums of about one, however many terms they have; and off relu's kink, where rounding decides.
    weight1 = make(squeezed, channels, *ones)
    weight2 = make(outputs, squeezed, *ones)
    with torch.no_grad():
        weight1 /= max(channels, 1) ** 0.5
        weight2 /= max(squeezed, 1) ** 0.5
    biases = [make(squeezed), make(outputs)] if bias else [None, None]
    arguments = (make(images, channels, *ones), weight1, biases[0], weight2, biases[1], activation)
    return Sample(arguments, name=f"{activation}, {images} images, {channels} to {squeezed} to {outputs}")


def samples(make):
    for activation in ("silu", "hardswish"):
        # Whole vectors of lanes and not, few and many; rows around a warp's eight, columns around a block's.
        for sizes in [(2, 32, 8, 32), (9, 96, 4, 96), (17, 67, 5, 70), (8, 256, 64, 8), (1, 1, 1, 1)]:
            yield block(make, *sizes, activation)
        yield block(make, 64, 144, 6, 144, activation)
    yield block(make, 3, 40, 10, 40, "silu", bias=False)
    yield block(make, 3, 40, 10, 24, "silu", pixel=False)


def small_samples(make):
    yield block(make, 2, 3, 2, 3, "silu")
    yield block(make, 2, 2, 3, 2, "silu", bias=False, pixel=False)


def empty_samples(make):
    yield block(make, 0, 3, 2, 3, "silu")


def op_samples(make):
    forward = torch.ops.cuda_ops.excitation_forward
    for activation in ("silu", "hardswish"):
        yield forward, block(make, 3, 8, 4, 8, activation).args
    yield forward, block(make, 3, 8, 4, 8, "silu", bias=False).args


def bad_of(ones, **replaced):
    tensors = {
        "input": ones(2, 4, 1, 1),
        "weight1": ones(3, 4, 1, 1),
        "bias1": ones(3),
        "weight2": ones(4, 3, 1, 1),
        "bias2": ones(4),
    }
    return excitation(**tensors | replaced)


SPEC = OpSpec(
    name="excitation",
    function=excitation,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    # The input's gradient is of three products one behind the other, and sums of a few hidden terms cancel.
    relative_norm={torch.float32: 5e-6},
    bad=[
        bad(
            "integers",
            lambda ones: bad_of(ones, input=ones(2, 4, 1, 1).long()),
            "excitation: expected input to be floating point, got int64",
        ),
        bad(
            "an image of four pixels",
            lambda ones: bad_of(ones, input=ones(2, 4, 2, 2)),
            r"excitation: expected input to be images of one pixel, got shape \[2, 4, 2, 2\]",
        ),
        bad(
            "weights that do not fit each other",
            lambda ones: bad_of(ones, weight2=ones(4, 2, 1, 1)),
            r"excitation: expected weight2 to be of a convolution of one pixel, of shape \[\*, 3\], got \[4, 2, 1, 1\]",
        ),
        bad(
            "a bias of another size",
            lambda ones: bad_of(ones, bias2=ones(3)),
            r"excitation: expected bias2 to have shape \[4\], got \[3\]",
        ),
        bad(
            "another activation",
            lambda ones: bad_of(ones, activation="gelu"),
            "excitation: expected activation to be 'relu', 'silu' or 'hardswish', got 'gelu'",
            ValueError,
        ),
        bad(
            "no weight",
            lambda ones: bad_of(ones, weight1=1.0),
            "excitation: expected weight1 to be a Tensor, got float",
            TypeError,
        ),
    ],
)
