"""linear_cross_entropy: the last layer of the MNIST CNN by batch size, and language models' heads; the loss alone, and
with the gradients, which the op computes along with it."""

from dataclasses import replace

import torch
from harness import Bench, Case, Implementation, compiled_on_cuda

import cuda_ops


def case(rows, inputs, classes, gradients, bias):
    x, w = rows * inputs, classes * inputs

    def make_arguments(make):
        sizes = [(rows, inputs), (classes, inputs)] + ([(classes,)] if bias else [])
        input, weight, *others = [make(*size, requires_grad=False) for size in sizes]
        weight *= inputs**-0.5  # logits of a model that begins to learn, not of one-hot softmaxes
        floats = [t.requires_grad_(gradients) for t in (input, weight, *others)]
        return (*floats[:2], make.integers(rows, high=classes), *floats[2:])

    return Case(
        f"{rows}x{inputs} to {classes}, {'loss and gradients' if gradients else 'loss'}",
        make_arguments,
        elements=((2 if gradients else 1) * (x + w), 0),
        flops=((6 if gradients else 2) * rows * inputs * classes, 0),
        bytes=(8 * rows, 0),
        devices=("cpu", "cuda") if classes < 1000 else ("cuda",),
    )


def native(input, weight, target, bias=None):
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(input, weight, bias), target)


def step(function):
    """The loss, and the gradients of what requires grad."""

    def call(*arguments):
        loss = function(*arguments)
        wanted = [t for t in arguments if t.requires_grad]
        return (loss.detach(), *torch.autograd.grad(loss, wanted)) if wanted else loss

    return call


def compiled(device, dtype, case):
    return [replace(peer, function=step(peer.function)) for peer in compiled_on_cuda(native)(device, dtype, case)]


SIZES = [(rows, 128, 10) for rows in (64, 1024, 16384)]
HEADS = [(2048, 768, 50304), (8192, 768, 50304), (32768, 768, 50304)]
HEADS += [(2048, 4096, 128256), (8192, 4096, 128256), (16384, 4096, 50304)]
BENCH = Bench(
    op="linear_cross_entropy",
    ours=Implementation("ours", step(cuda_ops.functional.linear_cross_entropy)),
    native=[Implementation("eager", step(native))],
    beside=compiled,
    cases=[case(*sizes, gradients, True) for sizes in SIZES for gradients in (False, True)]
    + [case(*sizes, gradients, False) for sizes in HEADS for gradients in (False, True)],
    backward=False,
)
