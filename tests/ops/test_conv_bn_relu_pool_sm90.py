"""The path of conv_bn_relu_pool on Hopper's tensor cores, where its numbers of images matter: an image a warpgroup,
and then more than one. On other GPUs the same tests run the general path. test_conv_bn_relu_pool_tiled.py has the test
of which path is taken."""

import pytest
import torch
from specs.conv_bn_relu_pool import reference
from support.opspec import assert_close

import cuda_ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CHANNELS_LAST = torch.channels_last


def whole(*shape, low=-1, high=1):
    """Whole numbers: their convolution is exact in half precision, so that both sides take the same maxima."""
    return torch.randint(low, high + 1, shape, dtype=torch.float64)


def tensors(batch):
    generator = torch.Generator().manual_seed(batch)
    torch.manual_seed(batch)
    return [
        whole(batch, 32, 14, 14),
        whole(64, 32, 3, 3),
        whole(64),
        torch.rand(64, generator=generator, dtype=torch.float64),
        torch.rand(64, generator=generator, dtype=torch.float64) + 0.5,
        torch.randn(64, generator=generator, dtype=torch.float64).float().double(),
        torch.randn(64, generator=generator, dtype=torch.float64).float().double(),
    ]


def run(block, values, grad_output, device, input_dtype, parameter_dtype, format=torch.contiguous_format):
    input = values[0].to(device, input_dtype).contiguous(memory_format=format)
    rest = [value.to(device, parameter_dtype) for value in values[1:]]
    wanted = [input, rest[0], rest[4], rest[5]]
    for tensor in wanted:
        tensor.requires_grad_()
    output = block(input, *rest[:2], rest[2], rest[3], *rest[4:], padding=1, channels_last=False)
    grads = torch.autograd.grad(output, wanted, grad_output.to(device, input_dtype))
    return [output, *grads, rest[2], rest[3]]


@pytest.mark.parametrize("batch", [1, 2, 64, 131, 133, 265, 600])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", ["float32", "half"])
@pytest.mark.parametrize("format", [torch.contiguous_format, CHANNELS_LAST])
def test_values(batch, dtype, parameters, format):
    values = tensors(batch)
    grad_output = torch.randn(batch, 64, 7, 7).to(dtype)
    parameter_dtype = torch.float32 if parameters == "float32" else dtype
    if parameters == "half":
        values = [value.to(dtype).double() for value in values]
    block = cuda_ops.functional.conv_bn_relu_pool
    results = run(block, values, grad_output, "cuda", dtype, parameter_dtype, format)
    expected = run(reference, values, grad_output.double(), "cuda", torch.float64, torch.float64)
    for result, want in zip(results, expected, strict=True):
        assert_close(result, want, TOLERANCE[dtype])
    assert results[1].is_contiguous(memory_format=format)
    again = run(block, values, grad_output, "cuda", dtype, parameter_dtype, format)
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))


def test_no_gradient_of_input():
    x, w = torch.randn(5, 32, 14, 14, device="cuda").bfloat16(), torch.randn(64, 32, 3, 3, device="cuda")
    grads = []
    for needs in (False, True):
        x.requires_grad_(needs)
        weight = w.clone().requires_grad_()
        cuda_ops.functional.conv_bn_relu_pool(x, weight, None, None, None, padding=1).square().sum().backward()
        grads.append(weight.grad)
    assert torch.equal(*grads)


def test_nan_reaches_output_and_gradients():
    x = torch.randn(3, 32, 14, 14, device="cuda").half()
    x[1, 3, 5, 5] = torch.nan
    x.requires_grad_()
    w = torch.randn(64, 32, 3, 3, device="cuda", requires_grad=True)
    output = cuda_ops.functional.conv_bn_relu_pool(x, w, None, None, None, padding=1)
    assert output.isnan().all()  # the statistics are NaN
    output.sum().backward()
    assert x.grad.isnan().any() and w.grad.isnan().all()
