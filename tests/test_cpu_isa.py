"""CUDA_OPS_CPU_ISA: every instruction set that this machine has, each in a process of its own, as it is read once."""

import os
import subprocess
import sys

import pytest

NAMES = ["portable", "avx2", "avx512", "avx512_bf16", "amx"]
# Sizes on either side of what gemm decides by, odd ones, every pass of conv2d, and attention, against float64.
PROGRAM = """
import sys, torch, cuda_ops
from torch.nn import functional as F
assert torch.ops.cuda_ops.cpu_isa() == sys.argv[1], torch.ops.cuda_ops.cpu_isa()
torch.manual_seed(0)
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-13, torch.bfloat16: 8e-3, torch.float16: 1e-3}

def small_numbers(shape, dtype):
    return torch.randint(-1, 2, shape).to(dtype) if len(shape) == 4 else torch.randn(shape, dtype=dtype)

def conv_bn_relu_pool(x, w, b):
    return F.max_pool2d(F.relu(F.batch_norm(F.conv2d(x, w, padding=1), None, None, None, b, training=True)), 2)

def check(ours, native, dtype, *shapes, layout=torch.contiguous_format, random=torch.randn):
    inputs = [random(shape, dtype=dtype) for shape in shapes]
    inputs = [t.contiguous(memory_format=layout) if t.dim() == 4 else t for t in inputs]
    inputs = [t.requires_grad_() for t in inputs]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    output, expected = ours(*inputs), native(*wide)
    grad = torch.randn(output.shape, dtype=dtype)
    if output.dim() == 4:
        grad = grad.contiguous(memory_format=layout)
    output.backward(grad)
    expected.backward(grad.double())
    tolerance = TOLERANCE[dtype]
    for actual, right in zip((output, *(t.grad for t in inputs)), (expected, *(t.grad for t in wide))):
        error = (actual.double() - right).abs().max() / right.abs().max()
        assert error < tolerance, (shapes, dtype, error)

for dtype in TOLERANCE:
    for rows, inputs, outputs in [(1, 7, 5), (35, 79, 19), (64, 700, 33), (130, 65, 300), (71, 645, 301)]:
        check(cuda_ops.functional.linear, F.linear, dtype, (rows, inputs), (outputs, inputs), (outputs,))
    check(cuda_ops.functional.matmul, torch.matmul, dtype, (3, 20, 40), (3, 40, 50))
    for channels, filters, size in [(1, 5, 9), (17, 33, 7), (40, 20, 12)]:
        shapes = (2, channels, size, size), (filters, channels, 3, 3), (filters,)
        check(cuda_ops.functional.conv2d, F.conv2d, dtype, *shapes)
    # Input, filters, kernel, stride, padding, groups: the ways of gathered.c and depthwise.c.
    CONVOLUTIONS = [
        ((2, 3, 21, 18), 24, (7, 7), 2, 3, 1),  # few channels: a kernel's row is one tap
        ((1, 3, 70, 33), 20, (3, 3), 1, 1, 1),  # blocks of rows of one image
        ((5, 20, 6, 5), 36, (3, 3), 1, 1, 1),  # several images together, channels that are no vectors
        ((2, 16, 9, 17), 48, (5, 3), 1, (2, 1), 1),  # the weight's gradient of one vector of channels
        ((2, 24, 13, 29), 28, (3, 3), 1, 1, 1),  # ... of two vectors and few outputs, and tiles within a row
        ((3, 72, 11, 9), 72, (3, 3), 2, 1, 3),
        ((1, 64, 40, 45), 40, (3, 3), 1, 1, 1),
        ((3, 130, 5, 3), 40, (3, 3), 2, 1, 1),  # stride phases
        ((3, 80, 10, 9), 80, (3, 3), 1, 1, 5),  # groups that are taken together
        ((3, 96, 9, 8), 64, (3, 3), 2, 1, 4),
        ((3, 48, 9, 8), 48, (3, 3), 2, 1, 6),
        ((2, 24, 9, 8), 24, (3, 3), 1, 1, 3),
        ((2, 40, 8, 9), 40, (7, 7), 1, 3, 40),  # rows of mostly edges
        ((2, 40, 2, 3), 40, (7, 7), 1, 3, 40),
    ]
    for shape, filters, kernel, stride, padding, groups in CONVOLUTIONS if dtype.itemsize > 2 else ():
        shapes = shape, (filters, shape[1] // groups, *kernel), (filters,)
        for layout in (torch.contiguous_format, torch.channels_last):
            check(
                lambda *a: cuda_ops.functional.conv2d(*a, stride, padding, 1, groups),
                lambda *a: F.conv2d(*a, stride, padding, 1, groups), dtype, *shapes, layout=layout,
            )
    # Whole numbers, which are exact in every dtype: the maximum of a window does not depend on rounding, nor, with a
    # bias of the normalisation, what relu leaves.
    for shape, filters in [((3, 1, 28, 28), 32), ((5, 32, 14, 14), 64), ((3, 64, 6, 8), 32), ((2, 16, 4, 6), 48)]:
        for layout in (torch.contiguous_format, torch.channels_last):
            check(
                lambda x, w, b: cuda_ops.functional.conv_bn_relu_pool(x, w, *[None] * 4, b, padding=1),
                conv_bn_relu_pool, dtype, shape, (filters, shape[1], 3, 3), (filters,),
                layout=layout, random=small_numbers,
            )
    shape = 2, 3, 70, 16
    check(cuda_ops.functional.scaled_dot_product_attention, F.scaled_dot_product_attention, dtype, shape, shape, shape)
"""


def run(name):
    environment = {**os.environ, "CUDA_OPS_CPU_ISA": name}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, name], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def available():
    """What this machine has, from the message to a name that nothing has."""
    error = run("sse9").stderr
    message = "CUDA_OPS_CPU_ISA: expected one of "
    assert message in error
    assert "got sse9" in error
    return error.split(message)[1].split(" (")[0].split(", ")


@pytest.mark.parametrize("name", NAMES)
def test_forced(name, available):
    result = run(name)
    if name in available:
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode != 0
        assert f"(what this machine has), got {name}" in result.stderr


def test_available(available):
    assert available == NAMES[: len(available)]
