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
