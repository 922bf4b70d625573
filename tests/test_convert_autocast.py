"""cuda_ops.convert under autocast: norms rounded for the layer behind them, and the ends of residual blocks."""

import copy
import pickle

import pytest
import torch

import cuda_ops
from cuda_ops.conversion import fusing

nn = torch.nn
torchvision = pytest.importorskip("torchvision")
OPS = ("layer_norm_rounded_forward", "add_layer_norm_rounded_forward", "layer_scale_add_forward")


def convnext(depth=0.0):
    torch.manual_seed(0)
    config = torchvision.models.convnext.CNBlockConfig
    blocks = [config(32, 64, 3), config(64, None, 2)]
    return torchvision.models.ConvNeXt(blocks, stochastic_depth_prob=depth, layer_scale=0.5, num_classes=10)


def vit():
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model


MODELS = {"convnext": convnext, "vit": vit}


def images(device, dtype=torch.float32):
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    return x.contiguous(memory_format=torch.channels_last)


def results(model, x, enabled):
    with torch.autocast(x.device.type, torch.bfloat16, enabled=enabled):
        output = model(x)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(x.device)
    loss = (output.double() * weights).sum()
    return output, dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, model.parameters()), strict=True))


def distance(tensor, reference):
    return float((tensor.double() - reference).norm() / reference.norm().clamp_min(1e-30))


def calls_of(monkeypatch):
    counts = dict.fromkeys(OPS, 0)

    def counted(name):
        op = getattr(fusing, name)

        def call(*arguments):
            counts[name] += 1
            return op(*arguments)

        return call

    for name in OPS:
        monkeypatch.setattr(fusing, name, counted(name))
    return counts


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_as_near_to_float64_as_it_was(monkeypatch, name, enabled, device):
    model = MODELS[name]().to(device)
    native, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    keys = list(model.state_dict())
    cuda_ops.convert(model)
    counts = calls_of(monkeypatch)
    output, grads = results(model, images(device), enabled)
    assert list(model.state_dict()) == keys
    expected = {"convnext": [6, 0, 5], "vit": [2, 2, 0]}[name] if enabled else [0, 0, 5 if name == "convnext" else 0]
    if device == "cuda" and name == "vit" and enabled:
        expected[2] = 0  # of residual_sum, by its function
    assert list(counts.values()) == expected
    of_native, native_grads = results(native, images(device), enabled)
    reference, exact_grads = results(exact, images(device, torch.float64), False)
    # By the product of roundings, whose draw may be a lucky one of either side.
    floor = 2e-2 if enabled else 1e-5
    assert output.dtype == of_native.dtype
    assert distance(output, reference) <= 2 * distance(of_native, reference) + floor
    for key, grad in grads.items():
        assert grad.dtype == native_grads[key].dtype and grad.shape == native_grads[key].shape
        assert distance(grad, exact_grads[key]) <= 2 * distance(native_grads[key], exact_grads[key]) + floor, key


def test_rows_are_dropped_as_by_stochastic_depth():
    """With the numbers of the converted layer, which a hook keeps apart."""
    model = convnext(0.5)
    cuda_ops.convert(model)
    torch.manual_seed(3)
    output, grads = results(model, images("cpu"), False)
    for module in model.modules():
        if type(module).__name__ == "StochasticDepth":
            module.register_forward_hook(lambda module, args, output: None)
    torch.manual_seed(3)
    expected, expected_grads = results(model, images("cpu"), False)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[key], rtol=1e-4, atol=1e-5)


def test_hooks_see_what_they_saw(monkeypatch):
    model = convnext()
    native = copy.deepcopy(model)
    cuda_ops.convert(model)
    counts, seen, hooks = calls_of(monkeypatch), {}, []
    for kind, each in (("native", native), ("converted", model)):
        block, dtypes = each.features[1][1], seen.setdefault(kind, [])
        for module in (block, block.block, block.block[3]):
            hook = module.register_forward_hook(lambda m, args, output, dtypes=dtypes: dtypes.append(args[0].dtype))
            hooks.append(hook)
        with torch.autocast("cpu", torch.bfloat16):
            each(images("cpu"))
    assert len(seen["native"]) == 3 and seen["converted"] == seen["native"]
    assert counts["layer_norm_rounded_forward"] == 5  # but for the one in front of the hook
    for hook in hooks:
        hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        model(images("cpu"))
    assert counts["layer_norm_rounded_forward"] == 11


def test_a_norm_that_others_read_is_not_rounded(monkeypatch):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear, self.first = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, input):
            rows = self.norm(input)
            return self.linear(torch.relu(self.first(rows))) + rows

    model = Twice()
    cuda_ops.convert(model)
    counts = calls_of(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(3, 8)).dtype == torch.float32
    assert sum(counts.values()) == 0


def test_another_layer_of_that_name_is_called():
    class LayerNorm2d(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            return 2 * self.norm(torch.nn.functional.relu(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    model = nn.Sequential(LayerNorm2d(), nn.Conv2d(4, 4, 1))
    native = copy.deepcopy(model)
    cuda_ops.convert(model)
    x = torch.randn(2, 4, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), native(x), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", MODELS)
def test_compile_export_and_pickle_see_it(name):
    model = MODELS[name]().eval()
    kinds = [type(module) for module in model.modules()]
    cuda_ops.convert(model)
    x = images("cpu")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
        torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))
    cuda_ops.revert(model)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(7, 96), (300, 768), (5, 30), (3, 4100), (2, 16384), (2, 40000)])
def test_rounded_norms(device, norm, half, adds, rows, cols):
    """By float64's, of what the kernels are given; and its derivatives."""
    generator = torch.Generator().manual_seed(cols)

    def make(*shape, dtype=torch.float32):
        return (torch.randn(shape, generator=generator) + 0.5).to(device, dtype).requires_grad_()

    inputs = [make(rows, cols, dtype=half), make(rows, cols)] if adds else [make(rows, cols)]
    parameters = [make(cols), make(cols)] if norm == "layer_norm" else [make(cols)]
    op = getattr(torch.ops.cuda_ops, f"{'add_' if adds else ''}{norm}_rounded_forward")
    outputs = op(*inputs, [cols], *parameters, 1e-5, half)[: 1 + adds]
    exact = [tensor.detach().double().requires_grad_() for tensor in (*inputs, *parameters)]
    total = exact[0] + exact[1] if adds else exact[0]
    references = [getattr(nn.functional, norm)(total, (cols,), *exact[1 + adds :], eps=1e-5), total][: 1 + adds]
    assert [output.dtype for output in outputs] == [half, torch.float32][: 1 + adds]
    upstream = [torch.randn(o.shape, generator=generator).to(device, o.dtype) for o in outputs]
    grads = torch.autograd.grad(outputs, (*inputs, *parameters), upstream)
    expected = torch.autograd.grad(references, exact, [u.double() for u in upstream])
    for ours, theirs in zip([*outputs, *grads], [*references, *expected], strict=True):
        limit = 3e-3 if ours.dtype == torch.bfloat16 else 4e-4 if ours.dtype == torch.float16 else 1e-5
        assert distance(ours.detach(), theirs.detach()) <= limit


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_rounded_norms_are_differentiated_further(device, norm):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    weight = torch.randn(8, device=device, requires_grad=True)
    bias = [None] if norm == "layer_norm" else []
    op, adding = (getattr(torch.ops.cuda_ops, f"{add}{norm}_rounded_forward") for add in ("", "add_"))

    def composed(x, weight):  # rms_norm of PyTorch has no forward mode
        centered = x - x.mean(-1, keepdim=True) if norm == "layer_norm" else x
        return centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    output = op(x, [8], weight, *bias, 1e-5, torch.bfloat16)[0]
    (grad,) = torch.autograd.grad(output.float().square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(composed(x, weight).square().sum(), x, create_graph=True)
    for ours, theirs in zip(
        torch.autograd.grad(grad.square().sum(), (x, weight)),
        torch.autograd.grad(expected.square().sum(), (x, weight)),
        strict=True,
    ):
        assert distance(ours, theirs.double()) <= 3e-2
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for each, inputs in ((op, (x,)), (adding, (x.detach().bfloat16(), x))):
        arguments = (*inputs, [8], weight, *bias, 1e-5, torch.bfloat16)
        torch.library.opcheck(each.default, arguments, test_utils=checks, atol=0.1, rtol=0.1)
    tangents = torch.randn_like(x), torch.randn_like(weight)
    with torch.autograd.forward_ad.dual_level():
        dual = [torch.autograd.forward_ad.make_dual(t.detach(), d) for t, d in zip((x, weight), tangents, strict=True)]
        ours, theirs = op(dual[0], [8], dual[1], *bias, 1e-5, torch.bfloat16)[0], composed(*dual)
        found = [torch.autograd.forward_ad.unpack_dual(each).tangent for each in (ours, theirs)]
    assert distance(found[0], found[1].double()) <= 1e-2


def test_rounded_norms_refuse_by_name():
    x = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="layer_norm_rounded: expected dtype to be float16 or bfloat16, got Float"):
        torch.ops.cuda_ops.layer_norm_rounded_forward(x, [3], None, None, 1e-5, torch.float32)
    with pytest.raises(RuntimeError, match="add_layer_norm_rounded: expected residual to have the shape of input"):
        torch.ops.cuda_ops.add_layer_norm_rounded_forward(x, x[:1], [3], None, None, 1e-5, torch.bfloat16)
    with pytest.raises(RuntimeError, match="rms_norm_rounded: expected dtype to be float16 or bfloat16, got Float"):
        torch.ops.cuda_ops.rms_norm_rounded_forward(x, [3], None, 1e-5, torch.float32)
    with pytest.raises(RuntimeError, match="add_rms_norm_rounded: expected residual to have the shape of input"):
        torch.ops.cuda_ops.add_rms_norm_rounded_forward(x, x[:1], [3], None, 1e-5, torch.bfloat16)
