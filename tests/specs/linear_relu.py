import torch
from support.linear_cases import bad_parameters, empty_samples
from support.opspec import OpSpec, Sample, bad

import cuda_ops


def samples(make):
    # (leading shape, in_features, out_features): one element; nothing that fits a tile; around the GPU's tiles of 32,
    # 64 and 128 and its slices of 16, 32 and 64; few rows of many features, which split the sum on the GPU, in lengths
    # that 16-byte loads fit (multiples of 8) and not; many rows, which spread over threads on the CPU and take the
    # largest tiles on the GPU, or Hopper's launch for both gradients; the layer of the MNIST network.
    for leading, in_features, out_features in [
        ((1,), 1, 1),
        ((3,), 5, 7),
        ((31,), 15, 33),
        ((65,), 17, 63),
        ((33,), 64, 16),
        ((64,), 72, 24),
        ((129,), 136, 136),
        ((2,), 1025, 3),
        ((2,), 1032, 8),
        ((600,), 9, 5),
        ((513,), 24, 40),
        ((1030,), 40, 136),
        ((7,), 257, 1601),
        ((64,), 3136, 128),
        ((), 6, 4),
        ((2, 3), 4, 5),
        ((2, 3, 2, 2), 3, 2),
    ]:
        tensors = make(*leading, in_features), make(out_features, in_features), make(out_features)
        yield Sample(tensors, name=f"{leading} {in_features} -> {out_features}")
    yield Sample((make(4, 5), make(3, 5)), name="no bias")
    yield Sample((make(16, 8), make(24, 8)), {"bias": None}, name="bias None")
    for frozen in range(3):
        tensors = [make(17, 24, requires_grad=False), make(8, 24, requires_grad=False), make(8, requires_grad=False)]
        for i, tensor in enumerate(tensors):
            tensor.requires_grad_(make.requires_grad and i != frozen)
        yield Sample(tuple(tensors), name=f"argument {frozen} frozen")
    frozen = make(17, 24, requires_grad=False), make(8, 24, requires_grad=False), make(8)
    yield Sample(frozen, name="all but bias frozen")


def reference(input, weight, bias=None):
    return torch.nn.functional.relu(torch.nn.functional.linear(input, weight, bias))


def small_samples(make):
    yield Sample((make(3, 4), make(2, 4), make(2)), name="bias")
    yield Sample((make(2, 2, 3), make(2, 3)), name="no bias")
    yield Sample((make(3), make(2, 3), make(2)), name="one row")


def op_samples(make):
    forward, backward = torch.ops.cuda_ops.linear_relu_forward, torch.ops.cuda_ops.linear_relu_backward
    yield forward, (make(3, 5), make(4, 5), make(4))
    yield forward, (make(2, 3, 5).transpose(0, 1), make(5, 4).t(), None)
    yield backward, (make(3, 4), make(3, 4), make(3, 5), make(4, 5), True, True, True)
    yield backward, (make(2, 4, 3).transpose(1, 2), make(2, 3, 4), make(2, 3, 5), make(4, 5), True, False, True)
    yield backward, (make(3, 4), make(3, 4), make(3, 5), make(5, 4).t(), False, True, False)


linear_relu = cuda_ops.functional.linear_relu
SPEC = OpSpec(
    name="linear_relu",
    function=linear_relu,
    reference=reference,
    samples=samples,
    small_samples=small_samples,
    empty_samples=empty_samples,
    op_samples=op_samples,
    gradgrad=True,
    bad=[
        *bad_parameters("linear_relu", linear_relu, bias_is_like="weight"),
        bad(
            "no tensor",
            lambda ones: linear_relu(ones(2, 5), [1.0]),
            "linear_relu: expected weight to be a Tensor, got list",
            TypeError,
        ),
        bad(
            "grad_output that does not fit weight",
            lambda ones: torch.ops.cuda_ops.linear_relu_backward(
                ones(2, 4), ones(2, 4), ones(2, 5), ones(3, 5), True, True, True
            ),
            r"linear_relu_backward: expected grad_output to have the leading shape of input and the out_features of "
            r"weight, got grad_output of shape \[2, 4\], input of shape \[2, 5\] and weight of shape \[3, 5\]",
        ),
    ],
)
