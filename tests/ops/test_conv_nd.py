"""conv1d and the transposed convolutions: what their specifications do not say. Layouts of results, modules beside
PyTorch's, and forward mode."""

import itertools

import pytest
import torch

import cuda_ops

F, N = cuda_ops.functional, torch.nn.functional


def make(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64) - 0.5


def channels_next_to_each_other(tensor):
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d"])
def test_rows_keep_their_layout(name):
    """A view of (N, L, C) gives one, and so do its gradients; the values are those of contiguous tensors."""
    x, weight = make(3, 6, 11), make(6, 6, 4)
    expected = getattr(N, name)(x, weight, stride=2, padding=1)
    for given, last in ((x, False), (channels_next_to_each_other(x), True)):
        given = given.detach().requires_grad_()
        output = getattr(F, name)(given, weight, stride=2, padding=1)
        torch.testing.assert_close(output, expected)
        assert output.transpose(1, 2).is_contiguous() == last
        assert output.is_contiguous() != last
        (grad,) = torch.autograd.grad(output.square().sum(), given)
        assert grad.transpose(1, 2).is_contiguous() == last


def test_images_keep_their_layout():
    x, weight = make(2, 4, 5, 6), make(4, 3, 4, 4)
    for image_format, weight_format in itertools.product([torch.contiguous_format, torch.channels_last], repeat=2):
        given = x.contiguous(memory_format=image_format)
        output = F.conv_transpose2d(given, weight.contiguous(memory_format=weight_format), stride=2, padding=1)
        torch.testing.assert_close(output, N.conv_transpose2d(x, weight, stride=2, padding=1))
        last = torch.channels_last in (image_format, weight_format)
        assert output.is_contiguous(memory_format=torch.channels_last) == last


@pytest.mark.parametrize("stride", [2**30, 2**63 - 1])
def test_strides_beyond_all_images(stride):
    """Of a kernel that fits once; two places would make a step of the stride. PyTorch counts its own in 32 bits."""
    x, image, weight = make(2, 4, 5), make(2, 4, 5, 7), make(4, 4, 3)
    calls = {
        "conv1d": ((x, weight), lambda stride: {"stride": stride, "padding": 1}),
        "conv2d": ((image, weight.unsqueeze(2)), lambda stride: {"stride": (1, stride), "padding": (0, 1)}),
        "conv_transpose1d": ((x[..., :1], weight), lambda stride: {"stride": stride}),
        "conv_transpose2d": ((image[..., :1], weight.unsqueeze(2)), lambda stride: {"stride": (2, stride)}),
    }
    for name, (tensors, options) in calls.items():
        found = []
        for functional, step in ((F, stride), (N, 2**20)):
            inputs = [t.detach().requires_grad_() for t in tensors]
            output = getattr(functional, name)(*inputs, **options(step))
            found.append((output, *torch.autograd.grad(output.square().sum(), inputs)))
        torch.testing.assert_close(*found)
    with pytest.raises(RuntimeError, match=r"conv_transpose1d: expected lengths, .* to be below 1073741824"):
        F.conv_transpose1d(x, weight, stride=stride)


MODULES = {
    "Conv1d": (
        (4, 6, 3),
        [{"stride": 2, "padding": 1}, {"padding": "same", "dilation": 2, "groups": 2, "bias": False}],
    ),
    "ConvTranspose1d": ((4, 6, 3), [{"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2, "bias": False}]),
    "ConvTranspose2d": ((4, 6, (3, 2)), [{"stride": (2, 1), "output_padding": (1, 0)}, {"dilation": 2, "groups": 2}]),
}
MODULES["Conv1d"][1].extend({"padding": 2, "padding_mode": mode} for mode in ("reflect", "replicate", "circular"))


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    """Same repr, state_dict and initial values as PyTorch's; same output, with a batch and without."""
    arguments, options = MODULES[name]
    x = make(3, 4, 9) if name.endswith("1d") else make(3, 4, 5, 6)
    for option in options:
        modules = []
        for nn in (cuda_ops.nn, torch.nn):
            torch.manual_seed(0)
            modules.append(getattr(nn, name)(*arguments, **option, dtype=torch.float64))
        ours, native = modules
        assert repr(ours) == repr(native)
        assert {k: v.tolist() for k, v in ours.state_dict().items()} == {
            k: v.tolist() for k, v in native.state_dict().items()
        }
        for given in (x, x[0]):
            torch.testing.assert_close(ours(given), native(given))


@pytest.mark.parametrize("name", ["ConvTranspose1d", "ConvTranspose2d"])
def test_output_size(name):
    """As PyTorch's modules take it: lengths alone, or with batch and channels; what cannot be is an error."""
    x = make(2, 4, 5) if name.endswith("1d") else make(2, 4, 5, 3)
    axes = x.dim() - 2
    ours = getattr(cuda_ops.nn, name)(4, 3, 3, stride=3, dtype=torch.float64)
    native = getattr(torch.nn, name)(4, 3, 3, stride=3, dtype=torch.float64)
    native.load_state_dict(ours.state_dict())
    for extra in range(3):
        size = [3 * length + extra for length in x.shape[2:]]
        for given in (size, [2, 3, *size]):
            torch.testing.assert_close(ours(x, output_size=given), native(x, given))
    with pytest.raises(ValueError, match="requested an output size of"):
        ours(x, output_size=[100] * axes)
    with pytest.raises(ValueError, match=r"Only .zeros. padding mode is supported"):
        getattr(cuda_ops.nn, name)(4, 3, 3, padding_mode="reflect")


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d", "conv_transpose2d"])
def test_forward_mode_and_hessians(name):
    rows = name.endswith("1d")
    x, weight, bias = (make(2, 2, 4), make(2, 2, 3), make(2)) if rows else (make(2, 2, 4, 3), make(2, 2, 3, 2), make(2))
    results = []
    for function in (getattr(F, name), getattr(N, name)):

        def call(x, weight, bias, function=function):
            return function(x, weight, bias, stride=2, padding=1).pow(3).sum()

        tangents = tuple(torch.ones_like(t) * 0.5 for t in (x, weight, bias))
        results.append((torch.func.jvp(call, (x, weight, bias), tangents), torch.func.hessian(call)(x, weight, bias)))
    torch.testing.assert_close(*results)


def test_rows_that_nobody_writes_are_bias():
    output = F.conv_transpose2d(make(1, 2, 2, 2), make(2, 3, 1, 1), torch.tensor([1.0, 2.0, 3.0]).double(), stride=3)
    assert output.shape == (1, 3, 4, 4)
    assert torch.equal(output[0, :, 1:3].flatten(1).unique(dim=1)[:, 0], torch.tensor([1.0, 2.0, 3.0]).double())


@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d", "conv_transpose2d"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(name, dtype, device):
    x, weight = (make(2, 8, 9), make(8, 8, 3)) if name.endswith("1d") else (make(2, 8, 9, 5), make(8, 8, 3, 3))
    expected = getattr(N, name)(x, weight)
    with torch.autocast(device, dtype):
        output = getattr(F, name)(x.float().to(device), weight.float().to(device))
    assert output.dtype == dtype
    assert (output.double().cpu() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d", "conv_transpose2d"])
def test_other_dtypes_are_refused_by_name(name):
    x, weight = (torch.ones(2, 4, 9), torch.ones(4, 4, 3))
    if name.endswith("2d"):
        x, weight = x.unsqueeze(3), weight.unsqueeze(3)
    with pytest.raises(RuntimeError, match=f"{name}: "):
        getattr(F, name)(x.bfloat16(), weight)
    with pytest.raises(RuntimeError, match=f"{name}: "):
        getattr(F, name)(x.long(), weight.long())
    for wrong in (1.0, None, [1.0]):
        with pytest.raises(TypeError, match=f"{name}: expected weight to be a Tensor, got"):
            getattr(F, name)(x, wrong)
        with pytest.raises(TypeError, match=f"{name}: expected input to be a Tensor, got"):
            getattr(F, name)(wrong, weight)
