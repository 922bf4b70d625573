"""AdamW: all parameters of the MNIST CNN, and 124 million in 148 tensors as in GPT-2."""

import math

import torch
from harness import Bench, Case, Implementation

import cuda_ops

MNIST = [(32, 1, 3, 3), (32,), (32,), (32,), (64, 32, 3, 3), (64,), (64,), (64,), (128, 3136), (128,), (10, 128), (10,)]
BLOCK = [(768,)] * 6 + [(2304, 768), (2304,), (768, 768), (3072, 768), (3072,), (768, 3072)]
GPT2 = [(50257, 768), (1024, 768), *BLOCK * 12, (768,), (768,)]


def case(name, shapes):
    count = sum(map(math.prod, shapes))
    return Case(name, lambda make: tuple(make(*shape) for shape in shapes), elements=(7 * count, 0))


def step_of(optimizer, **options):
    def prepare(*parameters):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        # On the device the harness captures the step, and the state is to be there before.
        step = optimizer(parameters, lr=1e-3, capturable=parameters[0].is_cuda, **options).step
        step()
        return (step,)

    return prepare


BENCH = Bench(
    op="adam",
    ours=Implementation("ours", lambda step: step(), lambda *p: step_of(cuda_ops.optim.AdamW)(*p)),
    native=[
        Implementation("foreach", lambda step: step(), step_of(torch.optim.AdamW, foreach=True)),
        Implementation("fused", lambda step: step(), step_of(torch.optim.AdamW, fused=True)),
    ],
    cases=[case(f"MNIST CNN, {len(MNIST)} tensors", MNIST), case(f"GPT-2, {len(GPT2)} tensors", GPT2)],
    backward=False,
    random=True,
)
