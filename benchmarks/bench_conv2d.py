"""conv2d with bias and padding that keeps the size: those of the MNIST CNN, and of usual networks."""

import torch
from harness import Bench, Case, Implementation


def case(batch, inputs, outputs, size, kernel):
    x, y, w = batch * inputs * size**2, batch * outputs * size**2, outputs * inputs * kernel**2
    return Case(
        f"{batch}x{inputs}x{size}x{size} to {outputs}, {kernel}x{kernel}",
        lambda make: (
            make(batch, inputs, size, size),
            make(outputs, inputs, kernel, kernel),
            make(outputs),
            1,
            kernel // 2,
        ),
        elements=(x + w + y, 2 * x + 2 * w + y),
        flops=(2 * y * inputs * kernel**2, 4 * y * inputs * kernel**2),
    )


def channels_last(input, weight, *others):
    relaid = [t.detach().contiguous(memory_format=torch.channels_last).requires_grad_() for t in (input, weight)]
    return (*relaid, *others)


SIZES = [(64, 1, 32, 28, 3), (64, 32, 64, 14, 3), (1024, 1, 32, 28, 3), (1024, 32, 64, 14, 3), (64, 64, 64, 56, 3)]
SIZES += [(64, 256, 256, 14, 3), (64, 512, 512, 7, 3), (64, 256, 256, 14, 1), (64, 3, 64, 224, 7)]
BENCH = Bench(
    op="conv2d",
    native=[
        Implementation("eager", torch.nn.functional.conv2d),
        Implementation("channels_last", torch.nn.functional.conv2d, channels_last),
    ],
    cases=[case(*sizes) for sizes in SIZES],
)
