"""Losses of elements: factors of more elements than a block of the kernels has, gradients of infinite logits."""

import pytest
import torch
from support.opspec import assert_close

from cuda_ops import functional as F

INF = float("inf")


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_factors_of_many_elements(device_dtype, reduction):
    device, dtype = device_dtype
    generator = torch.Generator().manual_seed(0)
    x, target, weight, positive = (torch.rand(size, generator=generator) for size in ((3, 700), (3, 700), 700, (3, 1)))
    values = [t.to(device, dtype) for t in (x, target, weight, positive)]
    x, target = (t.requires_grad_() for t in values[:2])
    loss = F.binary_cross_entropy_with_logits(x, target, values[2], reduction=reduction, pos_weight=values[3])
    exact = [t.detach().cpu().double().requires_grad_(t.requires_grad) for t in values]
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        *exact[:3], reduction=reduction, pos_weight=exact[3]
    )
    tolerance = 2e-2 if dtype.itemsize == 2 else 1e-5  # a half has 8 or 11 bits
    assert_close(loss, expected, tolerance, "loss")
    grads = torch.autograd.grad(loss.sum(), (x, target))
    for grad, wanted in zip(grads, torch.autograd.grad(expected.sum(), exact[:2]), strict=True):
        assert_close(grad, wanted, tolerance, "gradient")


def test_targets_of_infinite_logits_have_infinite_gradients(device):
    target = torch.tensor([0.25, 0.5, 1.0], device=device, requires_grad=True)
    x = torch.tensor([-INF, INF, 2.0], device=device)
    F.binary_cross_entropy_with_logits(x, target, reduction="sum").backward()
    assert target.grad.tolist() == [INF, -INF, -2]


@pytest.mark.parametrize("positive", [0.0, 1e-4, 0.5, 1.0, 3.0, INF])
def test_targets_of_weighted_logits(positive, device_dtype):
    """Their gradient is log(1 - sigmoid(x)) - pos_weight log(sigmoid(x)), neither of whose parts is to be lost in the
    other, nor an infinity in one that stands for nothing."""
    device, dtype = device_dtype
    x = torch.tensor([-INF, -90.0, -3.0, -1e-3, 0.0, 1e-3, 3.0, 90.0, INF, float("nan")], dtype=dtype)
    pos_weight = torch.tensor(positive, dtype=dtype)
    target = torch.full((10,), 0.25, dtype=dtype, device=device, requires_grad=True)
    loss = F.binary_cross_entropy_with_logits(x.to(device), target, pos_weight=pos_weight.to(device), reduction="sum")
    loss.backward()
    a, p = x.double(), pos_weight.double()
    expected = torch.nn.functional.logsigmoid(-a) - p * torch.nn.functional.logsigmoid(a)
    expected = torch.where(x.isposinf() & (p == 1), -INF, expected)  # without a weight it is -x
    if positive == INF:  # infinity times what is 0 in this dtype, or next to it in float64
        expected = torch.where(x > 80, target.grad.cpu().double(), expected)
    finite = expected.isfinite()
    assert torch.equal(
        target.grad.cpu().double()[~finite].nan_to_num(), expected.to(dtype)[~finite].double().nan_to_num()
    )
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    assert_close(target.grad.cpu()[finite], expected[finite], tolerance, "gradient")
    if finite.any():
        error = (target.grad.cpu().double() - expected)[finite].abs()
        assert (error <= tolerance * 4 * expected[finite].abs() + torch.finfo(dtype).tiny).all(), error
