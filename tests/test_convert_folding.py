"""cuda_ops.convert: batch_norm folded into the convolution before it, in evaluation without gradients alone, and never
out of date."""

import copy
import pickle

import pytest
import torch
from support.conversion import assert_converts, classes, images

import cuda_ops
from cuda_ops.conversion import fusing

nn = torch.nn
F = torch.nn.functional
ACTIVATIONS = [None, nn.ReLU(inplace=True), nn.ReLU6(), nn.SiLU(), nn.Hardswish()]


class Traced(nn.Module):
    """A forward of its own, with a block of each kind."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.conv3, self.norm3, self.relu = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)

    def forward(self, input):
        x = F.silu(self.norm1(self.conv1(input)))
        x = x + self.norm2(self.conv2(x))
        return self.relu(self.norm3(self.conv3(x)) + x)


def with_statistics(model, seed=0):
    """In double and in evaluation, with running statistics and parameters that matter."""
    generator = torch.Generator().manual_seed(seed)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                if tensor is not None:
                    tensor.data.uniform_(0.25, 1.5, generator=generator)
    return model.double().eval()


def block(activation=None, **options):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1, **options), nn.BatchNorm2d(8)]
    return with_statistics(nn.Sequential(*layers, *([] if activation is None else [copy.deepcopy(activation)])))


def count_folds(monkeypatch):
    calls, function = [], fusing.conv_bn_act_modules
    monkeypatch.setattr(fusing, "conv_bn_act_modules", lambda *a: calls.append(a) or function(*a))
    return calls


def assert_same(ours, native, x):
    with torch.no_grad():
        torch.testing.assert_close(ours(x), native(x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("bias", [True, False])
def test_a_block_is_one_call_in_evaluation_without_gradients(activation, bias, monkeypatch):
    ours = block(activation, bias=bias)
    native = copy.deepcopy(ours)
    report = cuda_ops.convert(ours)
    (fusion,) = report.fusions
    assert fusion.op == "conv_bn_act" and fusion.parts == tuple("012")[: len(ours)]
    calls, x = count_folds(monkeypatch), images(2, 8)
    for channels_last in (False, True):
        x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        with torch.no_grad():
            output = ours(x)
        assert output.is_contiguous(memory_format=torch.channels_last) is channels_last
        assert_same(ours, native, x)
    assert len(calls) == 4
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), native(x), rtol=1e-11, atol=1e-11)
    assert len(calls) == 5


@pytest.mark.parametrize("activation", [None, nn.SiLU()], ids=["none", "silu"])
def test_gradients_in_evaluation_take_the_layers(activation, monkeypatch):
    ours = block(activation)
    native = copy.deepcopy(ours)
    cuda_ops.convert(ours)
    calls, found = count_folds(monkeypatch), []
    for model in (ours, native):
        x = images(2, 8).requires_grad_()
        model(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
    assert not calls


def test_training_and_evaluation_in_turns():
    ours = with_statistics(Traced())
    native = copy.deepcopy(ours)
    report = cuda_ops.convert(ours)
    found = {fusion.parts: fusion.op for fusion in report.fusions}
    assert found[("conv1", "norm1", "silu()")] == found[("conv2", "norm2")] == "conv_bn_act"
    assert {parts[0]: op for parts, op in found.items()}["norm3"] == "batch_norm_act"
    x = images(4, 8)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, native)]
    for _ in range(2):
        assert_same(ours.eval(), native.eval(), x)
        for model, optimizer in zip((ours, native), optimizers, strict=True):
            model.train()(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(ours.state_dict().values(), native.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    # A norm that goes on training, and one without statistics, which takes those of the batch.
    for change in (lambda m: m.norm2.train(), lambda m: m.norm1.reset_running_stats(), without_statistics):
        for model in (ours.eval(), native.eval()):
            change(model)
        assert_same(ours, native, x)


def without_statistics(model):
    model.norm1.running_mean = model.norm1.running_var = None


CHANGES = {
    "in place": lambda m: m[0].weight.requires_grad_(False).mul_(2),
    "behind autograd's back": lambda m: m[0].weight.data.mul_(2),
    "a statistic": lambda m: m[1].running_var.mul_(3),
    "a parameter's data": lambda m: setattr(m[1].bias, "data", m[1].bias.data + 1),
    "another parameter": lambda m: setattr(m[1], "weight", nn.Parameter(m[1].weight.detach() * 2)),
    "a state": lambda m: m.load_state_dict({name: t * 1.5 for name, t in m.state_dict().items() if t.dim()}, False),
    "an assigned state": lambda m: m.load_state_dict({name: t + 1 for name, t in m.state_dict().items()}, assign=True),
    "eps": lambda m: setattr(m[1], "eps", 0.5),
    "dtype": lambda m: m.float(),
    "memory format": lambda m: m.to(memory_format=torch.channels_last),
    "another norm": lambda m: m.__setitem__(1, with_statistics(nn.BatchNorm2d(8), seed=3)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen_at_once(name):
    ours = block(nn.ReLU())
    native = copy.deepcopy(ours)
    cuda_ops.convert(ours)
    x = images(2, 8)
    assert_same(ours, native, x)
    for model in (ours, native):
        CHANGES[name](model)
    x = x.to(ours[0].weight.dtype)
    with torch.no_grad():
        before = native(x)
        tolerance = 1e-11 if x.dtype is torch.float64 else 1e-5
        torch.testing.assert_close(ours(x), before, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_hooks_are_called(layer):
    ours = block(nn.ReLU())
    native = copy.deepcopy(ours)
    cuda_ops.convert(ours)
    seen = []
    ours[layer].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert_same(ours, native, images(2, 8))
    assert seen == [(2, 8, 8, 8)]


def test_padding_modes_take_the_layers(monkeypatch):
    ours = block(nn.ReLU(), padding_mode="reflect")
    native = copy.deepcopy(ours)
    cuda_ops.convert(ours)
    calls = count_folds(monkeypatch)
    assert_same(ours, native, images(2, 8))
    assert not calls


def test_copies_pickles_names_and_revert():
    native = with_statistics(Traced())
    ours = copy.deepcopy(native)
    before = classes(ours)
    cuda_ops.convert(ours)
    x = images(2, 8)
    assert_same(ours, native, x)
    assert list(ours.state_dict()) == list(native.state_dict())
    assert not {name for module in ours.modules() for name in vars(module)} - {
        name for module in native.modules() for name in vars(module)
    }
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        other.conv1.weight.data.mul_(2)
        native.conv1.weight.data.mul_(2)
        assert_same(other, native, x)
        native.conv1.weight.data.mul_(0.5)
    assert classes(cuda_ops.revert(ours)) == before


def test_autocast_rounds_the_folded_weight_once():
    ours = block(bias=False).float()
    cuda_ops.convert(ours)
    x = images(2, 8).float()
    fused = torch.nn.utils.fuse_conv_bn_eval(*copy.deepcopy(cuda_ops.revert(copy.deepcopy(ours))))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = ours(x)
        expected = fused(x)
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output.float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_compile_and_export_see_one_op():
    model = with_statistics(Traced())
    x = images(2, 8)
    with torch.no_grad():
        expected = model(x)
        cuda_ops.convert(model)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-11, atol=1e-11)
        model.conv1.weight.data.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-11, atol=1e-11)
        exported = torch.export.export(model, (x,))
        assert "conv_bn_act_inference" in str(exported.graph)
        torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-11, atol=1e-11)
        traced = torch.jit.trace(model, (x,))
        torch.testing.assert_close(traced(x), model(x), rtol=1e-11, atol=1e-11)


def test_dense_layers_fold_the_norm_between_their_convolutions():
    densenet = pytest.importorskip("torchvision").models.densenet
    model = with_statistics(nn.Sequential(densenet._DenseLayer(8, 4, 2, drop_rate=0.0)))
    report = assert_converts(model, (images(2, 8, 8),), ["conv_bn_act", "batch_norm_act"])
    assert [f.parts for f in report.fusions if f.op == "conv_bn_act"] == [("conv1", "norm2", "relu2")]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_captured_graph_reads_parameters_as_they_are(autocast):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    ours = block(nn.ReLU(), bias=False).float().cuda().to(memory_format=torch.channels_last)
    cuda_ops.convert(ours)
    x = images(2, 8).float().cuda().contiguous(memory_format=torch.channels_last)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        with torch.cuda.stream(stream):
            ours(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                output = ours(x)
        ours[0].weight.data.mul_(-2)
        ours[1].running_mean.add_(1)
        graph.replay()
        torch.testing.assert_close(output, ours(x), rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: type(a).__name__)
def test_no_pass_of_the_norm_is_left_where_the_kernel_applies_the_activation(activation):
    ours = block(activation).to("cuda", torch.float32).to(memory_format=torch.channels_last)
    ours[0] = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False, device="cuda")
    cuda_ops.convert(ours)
    x = torch.randn(2, 8, 20, 20, device="cuda").contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        ours(x)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            ours(x)
            torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    names = [name for name in names if not name.startswith("void at::")]
    norms = sum("normalize" in name for name in names)
    assert any("depthwise" in name for name in names), names
    assert sum("fold_batch_norm" in name for name in names) == (0 if norms else 1), names
    assert norms == (1 if isinstance(activation, nn.SiLU) else 0), names
