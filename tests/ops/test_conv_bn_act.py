"""What is special to conv_bn_act: it folds as PyTorch does, and each path has the activation in its epilogue."""

import pytest
import torch
from support.opspec import assert_close

from cuda_ops.functional import conv_bn_act

F = torch.nn.functional
ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": lambda z: z * torch.clamp(z + 3, 0, 6) / 6,  # PyTorch's on CUDA takes a sixth in float32
    None: lambda z: z,
}
# By path, (channels of input, of output, of a group, kernel, stride).
PATHS = {
    "mma": (64, 72, 64, 3, 1),
    "sm90": (64, 72, 64, 3, 2),
    "sm90_halo": (64, 72, 64, 3, 1),
    "gemm_1x1": (64, 72, 64, 1, 1),
    "depthwise": (72, 72, 1, 5, 2),
    "few_channels": (3, 40, 3, 3, 2),
    "patches": (3, 40, 3, 3, 2),
    "simt": (64, 72, 64, 3, 1),
}


def arguments(path, dtype, device):
    inputs, outputs, of_group, kernel, stride = PATHS[path]
    generator = torch.Generator(device).manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, device=device, generator=generator)

    images = rand(3, inputs, 21, 20), rand(outputs, of_group, kernel, kernel) / (of_group * kernel**2) ** 0.5
    images = [image.to(dtype).contiguous(memory_format=torch.channels_last) for image in images]
    channels = rand(outputs), rand(outputs), rand(outputs).abs() + 0.5, rand(outputs), rand(outputs)
    geometry = {"stride": stride, "padding": kernel // 2, "groups": inputs // of_group}
    return [*images, *(t.to(dtype) for t in channels)], geometry


def reference(tensors, activation, geometry):
    input, weight, bias, *norm = (t.double() for t in tensors)
    return ACTIVATIONS[activation](F.batch_norm(F.conv2d(input, weight, bias, **geometry), *norm))


@pytest.mark.cuda
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_activations_by_each_path(path, dtype, monkeypatch):
    tensors, geometry = arguments(path, dtype, "cuda")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", dtype is torch.float32)
    for activation in ACTIVATIONS:
        expected = reference(tensors, activation, geometry)
        monkeypatch.setenv("CUDA_OPS_CONV2D_PATH", path)
        try:
            with torch.no_grad():
                output = conv_bn_act(*tensors, activation=activation, **geometry)
        except NotImplementedError as error:
            assert activation == "relu", error  # the first: a path that this GPU has takes all of them
            pytest.skip(str(error))
        monkeypatch.delenv("CUDA_OPS_CONV2D_PATH")
        # As rounded to TF32, in float32.
        assert_close(output, expected, {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-3}[dtype])


# Products of 1x1 convolutions, by as many of gemm's paths and tiles as their sizes lead to: (pixels of an image's side,
# channels of input and output).
PRODUCTS = [(56, 16, 96), (28, 24, 144), (14, 80, 480), (7, 192, 1152), (5, 320, 64), (3, 64, 200), (2, 24, 16)]
PRODUCTS += [(9, 40, 30), (9, 13, 48), (1, 256, 128), (40, 64, 256), (17, 8, 8)]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tf32", [False, True])
def test_activations_of_products(dtype, tf32, monkeypatch):
    if tf32 and dtype is not torch.float32:
        pytest.skip("TF32 is float32's")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    generator = torch.Generator("cuda").manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.float64)

    rounding = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-3 if tf32 else 2e-6}.get(dtype, 1e-13)
    for side, inputs, outputs in PRODUCTS:
        for images in (1, 8):
            tensors = rand(images, inputs, side, side), rand(outputs, inputs, 1, 1) / inputs**0.5, rand(outputs)
            norm = rand(outputs), rand(outputs).abs() + 0.5, rand(outputs), rand(outputs)
            tensors = [t.to(dtype) for t in (*tensors, *norm)]
            tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
            for activation in ACTIVATIONS:
                with torch.no_grad():
                    output = conv_bn_act(*tensors, activation=activation)
                assert_close(output, reference(tensors, activation, {}), rounding)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("last", [True, False], ids=["channels_last", "contiguous"])
def test_activations_of_a_stem_of_many_pixels(dtype, last):
    generator = torch.Generator("cuda").manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    # By way of patches in memory.
    tensors = [rand(8, 3, 322, 320), rand(24, 3, 3, 3) / 27**0.5, rand(24), rand(24), rand(24).abs() + 0.5]
    tensors = [t.to(dtype) for t in (*tensors, rand(24), rand(24))]
    if last:
        tensors[:2] = [t.contiguous(memory_format=torch.channels_last) for t in tensors[:2]]
    geometry = {"stride": 2, "padding": 1}
    for activation in ACTIVATIONS:
        with torch.no_grad():
            output = conv_bn_act(*tensors, activation=activation, **geometry)
        expected = reference(tensors, activation, geometry)
        assert_close(output, expected, 8e-3 if dtype is torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_convolution_that_pytorch_folds(bias):
    torch.manual_seed(0)
    conv, norm = torch.nn.Conv2d(3, 8, 3, bias=bias, dtype=torch.float64), torch.nn.BatchNorm2d(8, dtype=torch.float64)
    for tensor in (*norm.parameters(), norm.running_mean, norm.running_var):
        tensor.data.uniform_(0.5, 1.5)
    fused, x = torch.nn.utils.fuse_conv_bn_eval(conv.eval(), norm.eval()), torch.randn(2, 3, 9, 8, dtype=torch.float64)
    statistics = norm.running_mean, norm.running_var
    output = conv_bn_act(x, conv.weight, conv.bias, *statistics, norm.weight, norm.bias, None, norm.eps)
    torch.testing.assert_close(output, fused(x), rtol=1e-13, atol=1e-13)
