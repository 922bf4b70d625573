"""window_attention beyond its specification: its paths, other dtypes of the bias, non-finite numbers, autocast."""

import pytest
import torch
from specs.window_attention import SPEC, reference, sample
from support.opspec import Make, assert_close

import cuda_ops
from cuda_ops.functional import window_attention

HALVES = [torch.float16, torch.bfloat16]


def test_a_shift_counts_only_along_what_a_window_does_not_fill(device):
    make = Make(device, torch.float32)
    qkv = make(1, 4, 8, 24)
    expected = window_attention(qkv, None, 2, (4, 4), (0, 1))
    assert torch.equal(window_attention(qkv, None, 2, 4, 1), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_bias_is_taken_as_it_is(device, dtype):
    """In float32, and in that of qkv, whose gradient is of the same dtype."""
    make = Make(device, dtype, requires_grad=True)
    qkv, bias = make(2, 4, 4, 48), make(2, 4, 4)
    wide = bias.detach().float().requires_grad_()
    outputs = [window_attention(qkv, b, 2, 2) for b in (bias, wide)]
    assert torch.equal(*outputs)
    grads = [torch.autograd.grad(o.sum() + o.square().sum(), b)[0] for o, b in zip(outputs, (bias, wide), strict=True)]
    assert [grad.dtype for grad in grads] == [dtype, torch.float32]
    assert torch.equal(grads[0], grads[1].to(dtype))


def test_autocast_lowers_qkv_alone(device):
    make = Make(device, torch.float32, requires_grad=True)
    qkv, bias = make(2, 4, 4, 48), make(2, 4, 4)
    with torch.autocast(device, torch.bfloat16):
        output = window_attention(qkv, bias, 2, 2)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, window_attention(qkv.bfloat16(), bias, 2, 2))
    grads = torch.autograd.grad(output.float().square().sum(), (qkv, bias))
    assert [grad.dtype for grad in grads] == [torch.float32] * 2


def test_no_bias_has_no_gradient(device):
    make = Make(device, torch.float64, requires_grad=True)
    qkv, bias = make(1, 4, 4, 24), make(2, 4, 4)
    zeros = torch.zeros_like(bias)
    (grad,) = torch.autograd.grad(window_attention(qkv, None, 2, 2).square().sum(), qkv)
    (expected,) = torch.autograd.grad(window_attention(qkv, zeros, 2, 2).square().sum(), qkv)
    torch.testing.assert_close(grad, expected)
    (grad,) = torch.autograd.grad(window_attention(qkv.detach(), bias, 2, 2).square().sum(), bias)
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_in_its_window(device, dtype):
    """Of 49 pixels a tile of 64 has more rows and columns, and others than these windows follow in it."""
    make = Make(device, dtype)
    qkv, bias = make(8, 14, 14, 3 * 3 * 24), make(3, 49, 49)
    expected = window_attention(qkv, bias, 3, 7)
    grad_output = torch.ones_like(expected)

    def gradients(qkv):
        qkv = qkv.detach().requires_grad_()
        return torch.autograd.grad(window_attention(qkv, bias, 3, 7), qkv, grad_output)[0]

    expected_grad = gradients(qkv)
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = qkv.clone()
        bad[0, 3, 4] = value
        output, grad = window_attention(bad, bias, 3, 7), gradients(bad)
        assert not output[0, :7, :7].isfinite().all()
        for actual, wanted in ((output, expected), (grad, expected_grad)):
            actual[0, :7, :7] = wanted[0, :7, :7]
            assert torch.equal(actual, wanted)


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["mma", "simt"])
@pytest.mark.parametrize("dtype", HALVES)
def test_paths(monkeypatch, path, dtype):
    """Each path at the sizes that the tensor cores take, against float64."""
    monkeypatch.setenv("CUDA_OPS_WINDOW_ATTENTION_PATH", path)
    torch.ops.cuda_ops.reload_paths()
    try:
        make = Make("cuda", dtype, requires_grad=True)
        sizes = [
            (2, 14, 21, 3, 32, (7, 7), (3, 3)),
            (65, 14, 14, 2, 32, (7, 7), 0, True),
            (3, 16, 16, 2, 64, (8, 8), 4),
        ]
        for size in [*sizes, (2, 6, 4, 2, 8, (3, 2), (1, 1)), (1, 12, 12, 5, 40, (4, 3)), (700, 4, 4, 1, 16, (4, 4))]:
            each = sample(make, *size)
            output = window_attention(*each.args)
            exact = each.map(lambda t: t.detach().double().requires_grad_())
            expected = reference(*exact.args)
            tolerance = SPEC.tolerance(dtype)
            assert_close(output, expected, tolerance)
            grad = torch.randn_like(output)
            grads = torch.autograd.grad(output, each.args[:2], grad)
            for actual, wanted in zip(grads, torch.autograd.grad(expected, exact.args[:2], grad.double()), strict=True):
                assert_close(actual, wanted, tolerance, each.name)
    finally:
        monkeypatch.delenv("CUDA_OPS_WINDOW_ATTENTION_PATH")
        torch.ops.cuda_ops.reload_paths()


@pytest.mark.cuda
def test_tensor_cores_take_what_they_can():
    def chosen(qkv, heads, window=7):
        return {
            product.chosen.name for product in cuda_ops.explain(window_attention, qkv, None, heads, window).products
        }

    qkv = torch.empty(1, 14, 14, 3 * 64, dtype=torch.bfloat16, device="cuda")
    if torch.cuda.get_device_capability() >= (8, 0):
        assert chosen(qkv, 2) == chosen(qkv.half(), 8) == chosen(qkv, 1) == {"mma"}
    # Other dtypes, heads of 22 elements and of 2, windows of 98 pixels.
    assert chosen(qkv.float(), 2) == chosen(qkv[..., :132], 2) == chosen(qkv[..., :24], 4) == {"simt"}
    assert chosen(qkv, 2, (14, 7)) == {"simt"}
