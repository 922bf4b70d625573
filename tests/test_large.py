"""Tensors of more than 2**31 elements: offsets that were computed in 32 bits would wrap. Opt in with --large.

Values are cheap to know in advance (a pattern that repeats), so that no reference of the same size is needed; the last
elements, which lie beyond 2**31, are what is looked at.
"""

import pytest
import torch

import cuda_ops
from cuda_ops import functional as F

pytestmark = [pytest.mark.cuda, pytest.mark.large]

BEYOND = 2**31 + 4096
TAIL = 1000


@pytest.fixture(autouse=True)
def unpoisoned():
    """Filling these outputs with NaN first would double the time and prove nothing more."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.cuda.empty_cache()


def ramp(*shape, dtype=torch.bfloat16):
    """Values in [-1, 1] that differ between neighbours, made without a temporary of a wider dtype."""
    x = torch.empty(shape, device="cuda", dtype=dtype)
    flat = x.view(-1)
    period = torch.linspace(-1, 1, 1021, device="cuda").to(dtype)
    whole = flat.numel() // 1021 * 1021
    flat[:whole].view(-1, 1021).copy_(period)
    flat[whole:] = period[: flat.numel() - whole]
    return x


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (F.square, torch.square),
        (F.relu, torch.relu),
        (F.polynomial, lambda x: x * x + x + 1),
        (lambda x: F.add2(x, x), lambda x: x + x),
    ],
    ids=["square", "relu", "polynomial", "add2"],
)
def test_elementwise(function, reference):
    x = ramp(BEYOND).requires_grad_()
    output = function(x)
    (grad,) = torch.autograd.grad(output.view(-1)[-TAIL:].float().sum(), x)
    tail = x.detach()[-TAIL:].double().requires_grad_()
    expected = reference(tail)
    (expected_grad,) = torch.autograd.grad(expected.sum(), tail)
    torch.testing.assert_close(output[-TAIL:].double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(grad[-TAIL:].double(), expected_grad, atol=2e-2, rtol=2e-2)
    assert grad[:-TAIL].count_nonzero() == 0


def test_dropout():
    x = torch.ones(BEYOND, device="cuda", dtype=torch.bfloat16)
    kept = F.dropout(x, 0.5)[-(2**20) :]
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert abs(kept.float().mean().item() - 1) < 0.01


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images(memory_format):
    """conv2d, batch_norm and pooling: one channel of the last images against the same images alone."""
    batch = 2**31 // (4 * 32 * 32) + 2
    x = ramp(batch, 4, 32, 32).contiguous(memory_format=memory_format)
    few = x[-2:].double()
    weight = torch.randn(4, 4, 3, 3, device="cuda", dtype=torch.bfloat16)
    for ours, native in [
        (F.conv2d(x, weight, padding=1), torch.nn.functional.conv2d(few, weight.double(), padding=1)),
        (F.max_pool2d(x, 2), torch.nn.functional.max_pool2d(few, 2)),
        (F.avg_pool2d(x, 2), torch.nn.functional.avg_pool2d(few, 2)),
    ]:
        torch.testing.assert_close(ours[-2:].double(), native, atol=5e-2, rtol=2e-2)
        del ours
    mean, variance = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    normalised = F.batch_norm(x, mean, variance, training=True, momentum=1.0)
    period_mean = ramp(1021 * 4).double().mean()
    torch.testing.assert_close(mean.double(), period_mean.expand(4), atol=1e-3, rtol=0)
    expected = (few - mean.double().view(1, 4, 1, 1)) / (variance.double().view(1, 4, 1, 1) + 1e-5).sqrt()
    torch.testing.assert_close(normalised[-2:].double(), expected, atol=2e-2, rtol=2e-2)


def test_linear_and_losses():
    rows, columns = 2**31 // 1024 + 3, 1024
    x = ramp(rows, columns)
    weight = torch.randn(8, columns, device="cuda", dtype=torch.bfloat16) / 32
    output = F.linear(x, weight)
    expected = x[-TAIL:].double() @ weight.double().t()
    torch.testing.assert_close(output[-TAIL:].double(), expected, atol=2e-2, rtol=2e-2)
    log_probabilities = F.log_softmax(x, 1)
    expected = torch.log_softmax(x[-TAIL:].double(), 1)
    torch.testing.assert_close(log_probabilities[-TAIL:].double(), expected, atol=4e-2, rtol=1e-2)
    target = torch.arange(rows, device="cuda") % columns
    losses = F.cross_entropy(x, target, reduction="none")
    expected = torch.nn.functional.cross_entropy(x[-TAIL:].double(), target[-TAIL:], reduction="none")
    torch.testing.assert_close(losses[-TAIL:].double(), expected, atol=4e-2, rtol=1e-2)


def test_sgd_updates_the_last_element():
    parameter = torch.zeros(BEYOND, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    cuda_ops.optim.SGD([parameter], lr=0.5).step()
    assert parameter[-1].item() == -0.5
    assert (parameter != -0.5).count_nonzero() == 0


def test_reductions():
    """An index and a sum of what lies beyond 2**31, and of its rows and columns."""
    x = torch.zeros(BEYOND, device="cuda", dtype=torch.bfloat16)
    x[-TAIL:] = 1
    x[-7] = 2
    assert F.argmax(x).item() == BEYOND - 7
    assert F.sum(x, dtype=torch.float32).item() == TAIL + 1
    assert F.amax(x).item() == 2
    for dim in (0, 1):
        matrix = x.view(2, -1) if dim == 1 else x.view(-1, 2)
        assert F.sum(matrix, dim, dtype=torch.float32).sum().item() == TAIL + 1


def test_permute_contiguous():
    x = ramp(BEYOND // 64, 64)
    output = F.permute_contiguous(x, (1, 0))
    assert torch.equal(output[:, -TAIL:], x[-TAIL:].t()) and torch.equal(output[:, :TAIL], x[:TAIL].t())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_group_norm(memory_format):
    """One group longer than 2**31 elements, and the last of many groups beyond them."""
    for shape, groups in (((1, 4, 8192, 65_600), 1), ((65_600, 8, 64, 64), 4)):
        x = ramp(*shape).contiguous(memory_format=memory_format).requires_grad_()
        output = F.group_norm(x, groups)
        (grad,) = torch.autograd.grad(output, x, x.detach())
        last = x.detach()[-1:].double() if groups > 1 else None
        if last is not None:
            expected = torch.nn.functional.group_norm(last, groups)
            torch.testing.assert_close(output[-1:].double(), expected, atol=2e-2, rtol=2e-2)
        else:
            assert abs(output.detach()[..., -TAIL:].float().std().item() - 1) < 0.1
        assert grad[-1:].isfinite().all()
        del x, output, grad
