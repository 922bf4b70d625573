import torch
from support.linear_cases import bad_parameters, empty_samples
from support.opspec import OpSpec, Sample, bad

import cuda_ops

from . import gelu


def samples(make):
    # (leading shape, in_features, out_features): one element; nothing that fits a tile; around the GPU's tile of 64 and
    # its slices of 16; around the CPU's tiles of 14 and 32; few rows of many features, which split the sum on the GPU;
    # many rows, which split the sum of the bias's gradient and spread over threads on the CPU; more rows than the CPU
    # finishes at a time; out_features that 16-byte accesses fit (multiples of 8) and not; enough work for large tiles.
    for leading, in_features, out_features in [
        ((1,), 1, 1),
        ((3,), 5, 7),
        ((63,), 15, 65),
        ((65,), 17, 63),
        ((14,), 31, 33),
        ((2,), 1025, 3),
        ((600,), 9, 5),
        ((1030,), 40, 136),
        ((7,), 257, 1601),
        ((64,), 128, 10),
        ((64,), 1024, 128),
        ((), 6, 4),
        ((2, 3), 4, 5),
        ((2, 3, 2, 2), 3, 2),
    ]:
        # Sums of a size where gelu bends, whatever the number of features, and most of them above zero (see below).
        bound = 2 / max(in_features, 4) ** 0.5
        tensors = make(*leading, in_features), make(out_features, in_features, low=-bound, high=bound)
        bias = make(out_features, low=0, high=4)
        for approximate in ("none", "tanh"):
            name = f"{leading} {in_features} -> {out_features} {approximate}"
            yield Sample((*tensors, bias), {"approximate": approximate}, name=name)
    # Below -8 PyTorch's 1 + erf(x) is zero in float64, and what is there, 1e-17, is not: weights that stay clear of it.
    small = {"low": -0.5, "high": 0.5}
    yield Sample((make(4, 5), make(3, 5, **small)), name="no bias")
    yield Sample((make(16, 8), make(24, 8, **small)), {"bias": None}, name="bias None")
    for frozen in range(3):
        tensors = [make(17, 24), make(8, 24, **small), make(8)]
        tensors = [tensor.detach() for tensor in tensors]
        for i, tensor in enumerate(tensors):
            tensor.requires_grad_(make.requires_grad and i != frozen)
        yield Sample(tuple(tensors), name=f"argument {frozen} frozen")
    frozen = make(17, 24, requires_grad=False), make(8, 24, requires_grad=False, **small), make(8)
    yield Sample(frozen, name="all but bias frozen")


def reference(input, weight, bias=None, approximate="none"):
    return gelu.reference(torch.nn.functional.linear(input, weight, bias), approximate)


def small_samples(make):
    yield Sample((make(3, 4), make(2, 4), make(2)), name="bias")
    yield Sample((make(3, 4), make(2, 4), make(2)), {"approximate": "tanh"}, name="bias, tanh")
    yield Sample((make(2, 2, 3), make(2, 3)), name="no bias")
    yield Sample((make(3), make(2, 3), make(2), "tanh"), name="one row, tanh")


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.linear_gelu_forward, torch.ops.cuda_ops.linear_gelu_backward
    yield forward, (make(3, 5), make(4, 5), make(4), "none", True)
    yield forward, (make(2, 3, 5).transpose(0, 1), make(5, 4).t(), None, "tanh", False)
    yield backward, (make(3, 4), make(3, 4), "tanh", True)
    yield backward, (make(2, 4, 3).transpose(1, 2), make(2, 3, 4), "none", False)


linear_gelu = cuda_ops.functional.linear_gelu
SPEC = OpSpec(
    name="linear_gelu",
    function=linear_gelu,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    # Far below zero gelu(x) and its slope are small beside x, and rounding x, a sum of products, or in halves a stored
    # preactivation (PyTorch rounds there too), costs them x^2 as much. That is in the problem, whatever the kernel.
    relative_norm={torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2},
    bad=[
        *bad_parameters("linear_gelu", linear_gelu, bias_is_like="input"),
        bad(
            "another approximation",
            lambda ones: linear_gelu(ones(2, 5), ones(3, 5), approximate="sigmoid"),
            "linear_gelu: expected approximate to be 'none' or 'tanh', got 'sigmoid'",
        ),
        bad(
            "no tensor",
            lambda ones: linear_gelu(ones(2, 5), [1.0]),
            "linear_gelu: expected weight to be a Tensor, got list",
            TypeError,
        ),
        bad(
            "grad_output of another shape",
            lambda ones: torch.ops.cuda_ops.linear_gelu_backward(ones(2, 4), ones(2, 5), "none", True),
            r"linear_gelu_backward: expected grad_output to have the shape of preactivation, \[2, 5\], got \[2, 4\]",
        ),
        bad(
            "a scalar preactivation",
            lambda ones: torch.ops.cuda_ops.linear_gelu_backward(ones(), ones(), "none", True),
            "linear_gelu_backward: expected preactivation to have at least 1 dimension, got a scalar",
        ),
    ],
)
