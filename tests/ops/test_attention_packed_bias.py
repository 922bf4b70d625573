"""attention_packed_bias: the gradient of a projection's bias is that of the sums over rows, as attention gives it."""

import pytest
import torch

from cuda_ops.functional import flash_attention_qkvpacked

op = torch.ops.cuda_ops.attention_packed_bias


def arguments(device, dtype, batch=3, length=5, heads=2, head_dim=4, outputs=8):
    generator = torch.Generator().manual_seed(0)
    sums = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    shapes = (batch, length, 3, heads, head_dim), (outputs,), (outputs, heads * head_dim)
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return found[0].to(device, dtype), found[1].to(device, sums), found[2].to(device, dtype)


# Rows of one block and of many; features that are whole vectors and others; more outputs than a block's warps take at
# once; no rows.
@pytest.mark.parametrize(
    "sizes", [(3, 5, 2, 4, 8), (2, 700, 3, 8, 24), (4, 512, 2, 64, 300), (1, 33, 1, 7, 5), (2, 0, 1, 8, 3)]
)
def test_sums_zeros_and_a_product(device_dtype, sizes):
    device, dtype = device_dtype
    grad_qkv, sums, weight = arguments(device, dtype, *sizes)
    features = weight.shape[1]
    actual = op(grad_qkv, sums, weight)
    assert actual.dtype == sums.dtype and actual.shape == (3 * features,)
    query, key, value = actual.double().split(features)
    rows = grad_qkv.select(2, 0).flatten(0, 1).flatten(1).double()
    eps = 1e-5 if sums.dtype == torch.float32 else 1e-13
    assert ((query - rows.sum(0)).abs() <= eps * rows.abs().sum(0)).all()
    assert (key == 0).all()
    products = sums.double()[:, None] * weight.double()
    assert ((value - products.sum(0)).abs() <= eps * products.abs().sum(0)).all()
    assert torch.equal(op(grad_qkv, sums, weight), actual)
    apart = (
        torch.stack([grad_qkv, grad_qkv], -1)[..., 0],
        torch.stack([sums, sums], -1)[..., 0],
        weight.T.contiguous().T,
    )
    torch.testing.assert_close(op(*apart), actual)


def test_it_is_the_gradient_of_the_bias(device):
    """In float64: of a projection that attention follows, and a layer with a bias behind that."""
    batch, length, heads, head_dim = 2, 6, 2, 4
    features = heads * head_dim
    x = torch.randn(batch, length, features, dtype=torch.float64, device=device)
    weight = torch.randn(3 * features, features, dtype=torch.float64, device=device)
    bias = torch.randn(3 * features, dtype=torch.float64, device=device, requires_grad=True)
    qkv = torch.nn.functional.linear(x, weight, bias).view(batch, length, 3, heads, head_dim)
    qkv.retain_grad()
    next_weight = torch.randn(5, features, dtype=torch.float64, device=device)
    output = flash_attention_qkvpacked(qkv, causal=True).flatten(2) @ next_weight.T
    grad_output = torch.randn_like(output)
    output.backward(grad_output)
    actual = op(qkv.grad, grad_output.flatten(0, 1).sum(0), next_weight)
    torch.testing.assert_close(actual, bias.grad, rtol=1e-10, atol=1e-10)


def test_contract(device):
    torch.library.opcheck(op.default, arguments(device, torch.float32))


MISTAKES = {
    "shape": (lambda g, s, w: (g[:, :, :2], s, w), r"expected grad_qkv to have shape \[batch, length, 3, heads"),
    "sums": (lambda g, s, w: (g, s.double(), w), "expected grad_next_bias to be float32, got float64"),
    "weight": (lambda g, s, w: (g, s, w[:, 1:]), r"expected next_weight to have shape \[8, 8\], got \[8, 7\]"),
    "dtype": (lambda g, s, w: (g, s, w.double()), "expected next_weight to"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_told(case):
    change, message = MISTAKES[case]
    with pytest.raises(RuntimeError, match=f"attention_packed_bias: {message}"):
        op(*change(*arguments("cpu", torch.float32)))
