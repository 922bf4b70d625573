"""interleave of images in channels_last, and of slices of their channels."""

import pytest
import torch
from specs.interleave import reference
from support.opspec import Make

from cuda_ops.functional import interleave


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(2, 8, 5, 4), (3, 58, 2, 3), (2, 7, 3, 1), (1, 1, 9, 9), (2, 33, 1, 1), (2, 116, 7, 7)]
)
@pytest.mark.parametrize("is_slice", [False, True])
def test_images(device, dtype, shape, is_slice):
    n, channels, height, width = shape
    whole = Make(device, dtype)(n, 2 * channels, height, width).contiguous(memory_format=torch.channels_last)
    pair = whole.chunk(2, 1)
    if not is_slice:
        pair = [half.contiguous(memory_format=torch.channels_last) for half in pair]
    pair = [half.detach().requires_grad_() for half in pair]
    output, expected = interleave(*pair), reference(*pair)
    assert torch.equal(output, expected)
    assert output.is_contiguous(memory_format=torch.channels_last)
    grad = torch.randn_like(output)
    for grad_output in (grad, grad.contiguous(), grad.expand(2, *grad.shape).sum(0) / 2):
        grads = [torch.autograd.grad(o, pair, grad_output, retain_graph=True) for o in (output, expected)]
        assert all(torch.equal(*both) for both in zip(*grads, strict=True))


def test_what_is_not_dense_is_copied(device):
    make = Make(device, torch.float32)
    x, y = make(2, 6, 4, 4)[:, ::2], make(2, 3, 8, 4).contiguous(memory_format=torch.channels_last)[:, :, ::2]
    assert torch.equal(interleave(x, y), reference(x, y))
    assert torch.equal(interleave(y, y), reference(y, y))
