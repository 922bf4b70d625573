"""clip_grad_norm_: all gradients of the MNIST CNN, and 124 million in 148 tensors as in GPT-2, all of them scaled."""

import math

import torch
from harness import Bench, Case, Implementation

import cuda_ops

MNIST = [(32, 1, 3, 3), (32,), (32,), (32,), (64, 32, 3, 3), (64,), (64,), (64,), (128, 3136), (128,), (10, 128), (10,)]
BLOCK = [(768,)] * 6 + [(2304, 768), (2304,), (768, 768), (3072, 768), (3072,), (768, 3072)]
GPT2 = [(50257, 768), (1024, 768), *BLOCK * 12, (768,), (768,)]


def case(name, shapes):
    count = sum(map(math.prod, shapes))
    return Case(name, lambda make: tuple(make(*shape) for shape in shapes), elements=(3 * count, 0))


def clip_by(function):
    def prepare(*parameters):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        # A limit that every call is above, as long as there are fewer than a million of them.
        return (lambda: function(parameters, 1e-6),)

    return prepare


BENCH = Bench(
    op="clip_grad_norm",
    ours=Implementation("ours", lambda clip: clip(), clip_by(cuda_ops.nn.utils.clip_grad_norm_)),
    native=[Implementation("eager", lambda clip: clip(), clip_by(torch.nn.utils.clip_grad_norm_))],
    cases=[case(f"MNIST CNN, {len(MNIST)} tensors", MNIST), case(f"GPT-2, {len(GPT2)} tensors", GPT2)],
    backward=False,
    random=True,
)
