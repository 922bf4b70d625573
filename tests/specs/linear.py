import torch
from support.linear_cases import bad_parameters, empty_samples
from support.opspec import OpSpec, Sample, bad

import cuda_ops


def samples(make):
    # (leading shape, in_features, out_features): one element; nothing that fits a tile; around the GPU's tile of 64 and
    # its slices of 16; around the CPU's tiles of 14 and 32; few rows of many features, which split the sum on the GPU;
    # many rows, which split it for the gradients of weight and bias, and spread over threads on the CPU; more than one
    # block of 256 deep and of 1536 wide on the CPU; the last layer of the MNIST network; enough work for the GPU's
    # GEMM, with rows that are not whole 16 bytes and rows that are.
    for leading, in_features, out_features in [
        ((1,), 1, 1),
        ((3,), 5, 7),
        ((63,), 15, 65),
        ((65,), 17, 63),
        ((14,), 31, 33),
        ((2,), 1025, 3),
        ((600,), 9, 5),
        ((130,), 129, 70),
        ((7,), 257, 1601),
        ((64,), 128, 10),
        ((130,), 301, 121),
        ((64,), 1024, 128),
        ((), 6, 4),
        ((2, 3), 4, 5),
        ((2, 3, 2, 2), 3, 2),
    ]:
        tensors = make(*leading, in_features), make(out_features, in_features), make(out_features)
        yield Sample(tensors, name=f"{leading} {in_features} -> {out_features}")
    yield Sample((make(4, 5), make(3, 5)), name="no bias")
    yield Sample((make(4, 5), make(3, 5)), {"bias": None}, name="bias None")
    yield Sample((make(4, 5), make(3, 5), make()), name="scalar bias")
    yield Sample((make(4, 5), make(5)), name="one output feature")
    yield Sample((make(2, 4, 5), make(5), make()), name="one output feature, scalar bias")


def reference(input, weight, bias=None):
    # PyTorch refuses a scalar bias beside a weight of one dimension for some shapes of input, and takes it for others.
    if weight.dim() == 1 and bias is not None:
        return torch.nn.functional.linear(input, weight) + bias
    return torch.nn.functional.linear(input, weight, bias)


def small_samples(make):
    yield Sample((make(3, 4), make(2, 4), make(2)), name="bias")
    yield Sample((make(2, 2, 3), make(2, 3)), name="no bias")
    yield Sample((make(3), make(2, 3), make(2)), name="one row")
    yield Sample((make(2, 3), make(3), make()), name="one output feature")


def op_samples(make):
    ops = torch.ops.cuda_ops
    yield ops.linear_forward, (make(3, 5), make(4, 5), make(4))
    yield ops.linear_forward, (make(2, 3, 5).transpose(0, 1), make(5, 4).t(), None)
    yield ops.linear_backward_input, (make(3, 4), make(4, 5))
    yield ops.linear_backward_input, (make(2, 4, 3).transpose(1, 2), make(4, 5))
    yield ops.linear_backward_weight, (make(3, 4), make(3, 5))
    yield ops.linear_backward_weight, (make(2, 3, 4), make(2, 3, 5))
    yield ops.linear_backward_bias, (make(3, 4),)
    yield ops.linear_backward_bias, (make(4, 3).t(),)


linear = cuda_ops.functional.linear
SPEC = OpSpec(
    name="linear",
    function=linear,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        *bad_parameters("linear", linear, bias_is_like="input"),
        bad(
            "a bias for a weight of one dimension",
            lambda ones: linear(ones(2, 5), ones(5), ones(2)),
            r"linear: expected bias to be a scalar where weight has 1 dimension, got a bias of shape \[2\]",
        ),
        bad(
            "grad_output that does not fit weight",
            lambda ones: torch.ops.cuda_ops.linear_backward_input(ones(2, 4), ones(3, 5)),
            "linear_backward_input: expected the last dimension of grad_output to be the out_features of weight, 3",
        ),
        bad(
            "grad_output with other rows than input",
            lambda ones: torch.ops.cuda_ops.linear_backward_weight(ones(2, 4), ones(3, 5)),
            r"linear_backward_weight: expected grad_output to have the leading shape of input, "
            r"got grad_output of shape \[2, 4\] and input of shape \[3, 5\]",
        ),
        bad(
            "a scalar grad_output",
            lambda ones: torch.ops.cuda_ops.linear_backward_bias(ones()),
            "linear_backward_bias: expected grad_output to have at least 1 dimension, got a scalar",
        ),
    ],
)
