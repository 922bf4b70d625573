"""group_norm and instance_norm: what is special to them beside the properties that hold for every op."""

import copy

import pytest
import torch
from support.devices import CUDA_DTYPES
from support.opspec import RELATIVE_NORM, assert_close

import cuda_ops
from cuda_ops.functional import group_norm, instance_norm

native = torch.nn.functional
FORMATS = [torch.contiguous_format, torch.channels_last]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Groups that stay in registers, in a cluster's, and that take two kernels; of vectors and of single elements.
SHAPES = [
    ((3, 6, 5, 5), 2),
    ((2, 32, 16, 16), 8),
    ((2, 64, 33, 33), 4),
    ((1, 4, 128, 128), 1),
    ((1, 4, 257, 255), 2),
    ((1, 8, 130, 128), 1),
]


@pytest.mark.parametrize("memory_format", FORMATS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape, groups", SHAPES)
def test_means_far_larger_than_the_deviation(device, shape, groups, memory_format):
    """Mean 1e4, deviation 1e-2, which float32 tells from it in steps of 1e-3: what is normalised are the values as they
    are, and neither a mean that is rounded to float32 nor E[x^2] - E[x]^2 has a digit of them."""
    x = (random(*shape) * 1e-2 + 1e4).float()
    grad_output, weight = random(*shape, seed=1).float(), random(shape[1], seed=2).float()
    exact = x.double().requires_grad_()
    expected = native.group_norm(exact, groups, weight.double(), eps=1e-12)
    ours = x.to(device).contiguous(memory_format=memory_format).requires_grad_()
    output = group_norm(ours, groups, weight.to(device), eps=1e-12)
    assert_close(output, expected, 4e-6)
    assert_close(
        torch.autograd.grad(output, ours, grad_output.to(device))[0],
        torch.autograd.grad(expected, exact, grad_output.double())[0],
        1e-5,
    )


@pytest.mark.parametrize("memory_format", FORMATS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape, groups", SHAPES)
def test_groups_with_infinities(device, shape, groups, memory_format):
    """A group with one odd value is NaN, as PyTorch's, and no other group sees it."""
    x = random(*shape)
    for group, value in enumerate((float("nan"), float("inf"))[:groups]):
        x[0, group * shape[1] // groups, 1, 2] = value
    ours = group_norm(x.float().to(device).contiguous(memory_format=memory_format), groups)
    assert_close(ours, native.group_norm(x.float().double(), groups), 2e-6)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("memory_format", FORMATS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape, groups", [*SHAPES, ((3, 5, 7, 3), 5), ((2, 24, 1, 1), 3), ((1, 700, 3, 3), 7)])
def test_tensors_that_start_anywhere(device_dtype, shape, groups, memory_format, offset):
    device, dtype = device_dtype

    def make(seed):
        count = random(*shape).numel()
        storage = random(count + offset, seed=seed).to(device, dtype)
        strides = torch.empty(shape, device="meta").contiguous(memory_format=memory_format).stride()
        return storage[offset:].as_strided(shape, strides, offset)

    x, grad_output = make(0).requires_grad_(), make(1)
    weight, bias = [random(shape[1], seed=s).to(device, dtype).requires_grad_() for s in (2, 3)]
    exact = [t.detach().double().cpu().requires_grad_() for t in (x, weight, bias)]
    output = group_norm(x, groups, weight, bias)
    expected = native.group_norm(exact[0], groups, *exact[1:])
    assert_close(output, expected, RELATIVE_NORM[dtype])
    grads = torch.autograd.grad(output, (x, weight, bias), grad_output)
    wanted = torch.autograd.grad(expected, exact, grad_output.detach().double().cpu())
    for grad, want in zip(grads, wanted, strict=True):
        assert_close(grad, want, 2 * RELATIVE_NORM[dtype])


@pytest.mark.parametrize("memory_format", FORMATS, ids=["contiguous", "channels_last"])
def test_formats_are_kept(device, memory_format):
    x = random(2, 8, 5, 3).float().to(device).contiguous(memory_format=memory_format).requires_grad_()
    for output in (group_norm(x, 2), instance_norm(x)):
        assert output.is_contiguous(memory_format=memory_format)
        grad_output = torch.ones_like(output, memory_format=torch.contiguous_format)
        assert torch.autograd.grad(output, x, grad_output)[0].is_contiguous(memory_format=memory_format)


@pytest.mark.cuda
@pytest.mark.parametrize("memory_format", FORMATS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [d for d in CUDA_DTYPES if d.itemsize == 2])
def test_float32_parameters(dtype, memory_format):
    x = random(3, 12, 7, 5).to("cuda", dtype).contiguous(memory_format=memory_format).requires_grad_()
    weight, bias = [random(12, seed=s).float().cuda().requires_grad_() for s in (1, 2)]
    output = group_norm(x, 3, weight, bias)
    assert output.dtype == dtype
    expected = native.group_norm(x.double(), 3, weight.double(), bias.double())
    assert_close(output, expected.cpu(), RELATIVE_NORM[dtype])
    grads = torch.autograd.grad(output.double().square().sum(), (x, weight, bias))
    assert [grad.dtype for grad in grads] == [dtype, torch.float32, torch.float32]


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["registers", "cluster", "split"])
def test_paths_agree(path, monkeypatch):
    x, weight, bias = random(2, 4, 130, 128).float().cuda(), random(4, seed=1).float().cuda(), None
    expected = native.group_norm(x.double(), 2, weight.double())
    x = x if path != "registers" else x[:, :, :60]
    expected = expected if path != "registers" else native.group_norm(x.double(), 2, weight.double())
    monkeypatch.setenv("CUDA_OPS_GROUP_NORM_PATH", path)
    try:
        torch.ops.cuda_ops.reload_paths()
        assert_close(group_norm(x, 2, weight, bias), expected.cpu(), 2e-6)
    finally:
        monkeypatch.undo()
        torch.ops.cuda_ops.reload_paths()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_modules_train_and_evaluate_as_pytorchs(device, dims, track, affine):
    name = f"InstanceNorm{dims}d"
    theirs = getattr(torch.nn, name)(3, affine=affine, track_running_stats=track).to(device)
    ours = getattr(cuda_ops.nn, name)(3, affine=affine, track_running_stats=track).to(device)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert repr(ours) == repr(theirs)
    for training in (True, True, False):
        theirs.train(training), ours.train(training)
        for shape in [(2, 3, *[5] * dims), (3, *[4] * dims)]:  # a batch, and one image without its dimension
            x = random(*shape).float().to(device)
            assert_close(ours(x), theirs(x).double(), 2e-5)
    for key, value in theirs.state_dict().items():
        assert_close(ours.state_dict()[key], value.double() if value.is_floating_point() else value, 1e-5)


def test_running_statistics_that_are_not_contiguous(device):
    x = random(4, 3, 6).float().to(device)
    expected = [torch.zeros(3, device=device), torch.ones(3, device=device)]
    native.instance_norm(x, *expected)
    storage = torch.full((2, 6), 7.0, device=device)
    mean, variance = storage[0, ::2].zero_(), storage[1, 1::2].fill_(1)
    versions = mean._version, variance._version
    instance_norm(x, mean, variance)
    assert_close(mean, expected[0].double(), 2e-6)
    assert_close(variance, expected[1].double(), 2e-6)
    assert (storage[0, 1::2] == 7).all() and (storage[1, ::2] == 7).all()
    assert mean._version > versions[0] and variance._version > versions[1]


def test_running_statistics_that_change_are_noticed(device):
    """By whoever has saved them."""
    x = torch.rand(2, 3, 4, device=device)
    mean, variance = torch.zeros(3, device=device), torch.ones(3, device=device)
    factor = torch.rand(3, device=device, requires_grad=True)
    products = factor * mean, factor * variance
    instance_norm(x, mean, variance, use_input_stats=True)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_images_without_pixels(device):
    x, weight, bias = torch.ones(2, 4, 0), torch.ones(4), torch.ones(4)
    x, weight, bias = [tensor.to(device).requires_grad_() for tensor in (x, weight, bias)]
    output = group_norm(x, 2, weight, bias)
    assert output.shape == x.shape
    grads = torch.autograd.grad(output.sum(), (x, weight, bias), create_graph=True)
    assert not grads[1].any() and not grads[2].any()
    assert not torch.autograd.grad(grads[1].sum() + grads[2].sum(), weight, allow_unused=True)[0].any()
