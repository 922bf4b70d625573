"""rotary_embedding in what its specification has not: strides, and float32 tables beside halves."""

import pytest
import torch

import cuda_ops

rotary_embedding = cuda_ops.functional.rotary_embedding
HALVES = (torch.float16, torch.bfloat16)


def reference(input, cos, sin):
    first, second = input.chunk(2, -1)
    return input * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def views(shape, device, dtype):
    """Heads within rows, a part of a packed tensor, features that are no neighbours, rows that are not aligned."""
    batch, heads, length, features = shape
    generator = torch.Generator().manual_seed(0)

    def make(*sizes):
        return torch.randn(sizes, generator=generator).to(device, dtype)

    yield make(batch, length, heads, features).transpose(1, 2)
    yield make(batch, length, 3, heads, features)[:, :, 1].transpose(1, 2)
    yield make(batch, heads, features, length).transpose(2, 3)
    yield make(batch, length, heads, features + 1)[..., 1:].transpose(1, 2)
    yield make(batch, heads, length, features).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(2, 3, 5, 16), (3, 12, 7, 64), (2, 4, 33, 6), (1, 70, 2, 128), (2, 1, 9, 256)])
def test_strides(shape, device_dtype):
    device, dtype = device_dtype
    batch, _, length, features = shape
    limit = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    for tables in {1, batch}:
        cos, sin = torch.randn(2, tables, length, features, device=device).to(dtype)
        for input in views(shape, device, dtype):
            x = input.detach().requires_grad_()
            output = rotary_embedding(x, cos, sin)
            exact = input.detach().double().requires_grad_()
            expected = reference(exact, cos.double(), sin.double())
            upstream = torch.randn_like(output)
            (grad,) = torch.autograd.grad(output, x, upstream)
            (expected_grad,) = torch.autograd.grad(expected, exact, upstream.double())
            for ours, theirs in ((output, expected), (grad, expected_grad)):
                assert (ours.double() - theirs).norm() <= limit * theirs.norm()
            assert (output.transpose(1, 2) if x.stride(1) < x.stride(2) else output).is_contiguous()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("features", [64, 6])
def test_tables_in_float32(dtype, features, device):
    input = torch.randn(2, 5, 3, features, device=device).to(dtype).transpose(1, 2).requires_grad_()
    cos, sin = torch.randn(2, 1, 5, features, device=device)
    exact = reference(input.detach().float(), cos, sin)
    for wanted, expected in ((None, torch.float32), (dtype, dtype), (torch.float32, torch.float32)):
        output = rotary_embedding(input, cos, sin, wanted)
        assert output.dtype == expected
        torch.testing.assert_close(output, exact.to(expected), rtol=1e-2, atol=1e-2)
        (grad,) = torch.autograd.grad(output, input, torch.ones_like(output))
        other = input.detach().float().requires_grad_()
        (expected_grad,) = torch.autograd.grad(reference(other, cos, sin).sum(), other)
        assert grad.dtype == dtype
        torch.testing.assert_close(grad, expected_grad.to(dtype), rtol=1e-2, atol=1e-2)
    output = rotary_embedding(input.detach().float(), cos, sin, dtype)
    assert output.dtype == dtype
    torch.testing.assert_close(output, exact.to(dtype), rtol=1e-2, atol=1e-2)


def test_tables_have_no_gradient(device):
    input, table = torch.randn(1, 2, 3, 4, device=device), torch.randn(1, 3, 4, device=device, requires_grad=True)
    with pytest.raises((RuntimeError, NotImplementedError), match="cos"):
        rotary_embedding(input, table, table.detach())
