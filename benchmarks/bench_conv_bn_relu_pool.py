"""The blocks of the MNIST CNN, in training: convolution of 3x3, batch_norm, relu and max-pooling of 2x2."""

import torch
from harness import Bench, Case, Implementation


def native(input, weight, bias, running_mean, running_var, bn_weight, bn_bias, *options):
    training, momentum, eps, stride, padding = options
    functional = torch.nn.functional
    x = functional.conv2d(input, weight, bias, stride, padding)
    x = functional.batch_norm(x, running_mean, running_var, bn_weight, bn_bias, training, momentum, eps)
    return functional.max_pool2d(functional.relu(x), 2)


def channels_last(input, weight, *others):
    relaid = [t.detach().contiguous(memory_format=torch.channels_last).requires_grad_() for t in (input, weight)]
    return (*relaid, *others)


def case(batch, inputs, outputs, size):
    x, y, w = batch * inputs * size**2, batch * outputs * size**2, outputs * inputs * 9

    def make_arguments(make):
        mean, var = make(outputs, requires_grad=False), make(outputs, requires_grad=False).square()
        # The gradient of bias is 0 but for rounding, which cannot be compared.
        weight, bias = make(outputs, inputs, 3, 3), make(outputs, requires_grad=False)
        norm = mean, var, make(outputs), make(outputs)
        return make(batch, inputs, size, size), weight, bias, *norm, True, 0.1, 1e-5, 1, 1

    return Case(
        f"{batch}x{inputs}x{size}x{size} to {outputs}",
        make_arguments,
        # What no implementation can do without: the images, and the pooled output or its gradient.
        elements=(x + w + y // 4, 2 * x + 2 * w + y // 4),
        flops=(2 * y * inputs * 9, 4 * y * inputs * 9),
    )


BENCH = Bench(
    op="conv_bn_relu_pool",
    native=[Implementation("eager", native), Implementation("channels_last", native, channels_last)],
    cases=[case(*sizes) for sizes in [(64, 1, 32, 28), (1024, 1, 32, 28), (64, 32, 64, 14), (1024, 32, 64, 14)]],
)
