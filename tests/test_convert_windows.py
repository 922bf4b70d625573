"""cuda_ops.convert and attention in windows: torchvision's Swin Transformer and MaxViT."""

import copy
import pickle

import pytest
import torch
from support.conversion import assert_converts, count_calls, images, without_dropout

import cuda_ops
from cuda_ops.conversion import windows

nn = torch.nn
torchvision = pytest.importorskip("torchvision")
models = torchvision.models


@pytest.fixture
def everywhere(monkeypatch):
    """The op for any call that it takes, also where what it stands in for is faster."""
    monkeypatch.setattr(windows, "is_worth_it", lambda *arguments, **options: True)


def swin(window=(4, 4), **options):
    torch.manual_seed(0)
    options = {"stochastic_depth_prob": 0.0, "num_classes": 5} | options
    model = models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], list(window), **options)
    for name, parameter in model.named_parameters():
        if name.endswith("relative_position_bias_table"):
            nn.init.normal_(parameter)
    return model


def maxvit(depth=0.0, **options):
    torch.manual_seed(0)
    sizes = {"stem_channels": 8, "partition_size": 2, "block_channels": [8, 16], "block_layers": [1, 2], "head_dim": 8}
    options = {"stochastic_depth_prob": depth, "num_classes": 5} | options
    model = models.MaxVit(input_size=(32, 32), **sizes, **options)
    for name, parameter in model.named_parameters():
        if name.endswith("relative_position_bias_table"):
            nn.init.normal_(parameter)
    return model


# 8 x 8 pixels of two windows each way, then one; such that have to be padded; windows larger than the image; others
# than squares.
@pytest.mark.parametrize(
    "size, window", [(32, (4, 4)), (36, (4, 4)), (12, (4, 4)), (32, (2, 4)), (44, (3, 5))], ids=str
)
def test_swin(everywhere, monkeypatch, size, window):
    calls = count_calls(monkeypatch, "window_attention")
    model = swin(window).double()
    report = assert_converts(model, (images(2, size),), ["window_attention", "linear_gelu", "add_layer_norm"])
    assert len([fusion for fusion in report.fusions if fusion.op == "window_attention"]) == 4
    assert len(calls) == 4 * 4  # three steps and one of evaluation


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_maxvit(everywhere, monkeypatch, layout):
    calls = count_calls(monkeypatch, "window_attention")
    model = maxvit().double().to(memory_format=layout)
    x = images(3, 32).contiguous(memory_format=layout)
    assert_converts(model, (x,), ["window_attention", "linear_gelu"], tolerance=1e-8)
    assert len(calls) == 6 * 4


@pytest.mark.parametrize("make", [swin, maxvit])
def test_what_the_op_does_not_beat_is_left(monkeypatch, make):
    calls = count_calls(monkeypatch, "window_attention")
    assert_converts(make().double(), (images(2, 32),), tolerance=1e-8)
    assert not calls


def test_dropout_of_weights_is_torchvisions(everywhere, monkeypatch):
    calls = count_calls(monkeypatch, "window_attention")
    model = swin(attention_dropout=0.5).double()
    cuda_ops.convert(model)
    model(images(2, 32))
    assert not calls
    model.eval()(images(2, 32))
    assert len(calls) == 4


def test_dropout_of_outputs(everywhere, monkeypatch):
    calls = count_calls(monkeypatch, "window_attention")
    layer = models.swin_transformer.ShiftedWindowAttention(8, [2, 2], [1, 1], 2, dropout=0.5).double()
    x = torch.randn(2, 4, 4, 8, dtype=torch.float64)
    expected = layer.eval()(x)
    outer = nn.Sequential(layer.train())
    cuda_ops.convert(outer)
    output = outer(x)
    kept = output != 0
    assert 0.2 < kept.double().mean() < 0.8 and len(calls) == 1
    torch.testing.assert_close(output[kept], 2 * expected[kept])


@pytest.mark.parametrize("part", ["attn_layer", "attn_layer.1", "mlp_layer", "partition_op", "departition_swap"])
def test_parts_with_hooks_are_called(everywhere, monkeypatch, part):
    calls, shapes = count_calls(monkeypatch, "window_attention"), []
    model = maxvit().double().eval()
    x = images(2, 32)
    with torch.no_grad():
        expected = model(x)
        cuda_ops.convert(model)
        layer = next(module for module in model.modules() if type(module).__name__ == "PartitionAttentionLayer")
        layer.get_submodule(part).register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
        torch.testing.assert_close(model(x), expected)
    assert len(shapes) == 1 and len(calls) == 5


def test_other_layers_of_maxvit(everywhere, monkeypatch):
    """A grid of another size than the layer was made for is torchvision's error, and so is another table."""
    layer = next(m for m in maxvit().double().modules() if type(m).__name__ == "PartitionAttentionLayer")
    outer = nn.Sequential(layer)
    cuda_ops.convert(outer)
    calls = count_calls(monkeypatch, "window_attention")
    with pytest.raises(RuntimeError):
        outer(images(2, 12, 8))
    assert outer(images(2, 8, 8)).shape == (2, 8, 8, 8) and len(calls) == 1


class Residual(nn.Module):
    def __init__(self, depth, turned):
        super().__init__()
        self.linear, self.gelu, self.turned = nn.Linear(8, 8), nn.GELU(), turned
        self.depth = torchvision.ops.StochasticDepth(depth, "row")

    def forward(self, input):
        branch = self.depth(self.gelu(self.linear(input)))
        return branch + input if self.turned else input + branch


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_rows_of_a_residual_sum_are_dropped_in_its_pass(monkeypatch, depth, turned):
    calls = count_calls(monkeypatch, "layer_scale_add")
    model = Residual(depth, turned).double()
    x = torch.randn(200, 3, 8, dtype=torch.float64, requires_grad=True)
    branch = model.eval()(x).detach() - x.detach()
    cuda_ops.convert(model.train())
    output = model(x)
    kept = (output != x).flatten(1).any(1)
    assert 0.3 < kept.double().mean() < 0.7 if depth == 0.5 else bool(kept.all() if depth == 0.0 else not kept.any())
    factor = 1 / (1 - depth) if depth < 1.0 else 0.0
    torch.testing.assert_close(output, x + kept.double().view(-1, 1, 1) * branch * factor)
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal((grad != 1).flatten(1).any(1), kept)
    assert len(calls) == (depth > 0.0)
    torch.testing.assert_close(model.eval()(x), x + branch)


@pytest.mark.parametrize("make", [swin, maxvit])
def test_copies_and_pickles(everywhere, make):
    model = make().double().eval()
    cuda_ops.convert(model)
    x = images(2, 32)
    with torch.no_grad():
        expected = model(x)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
            assert torch.equal(other(x), expected)


@pytest.mark.parametrize("make", [swin, maxvit])
def test_compiled(everywhere, make):
    model = make().double().eval()
    cuda_ops.convert(model)
    x = images(2, 32)
    expected = model(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)


def shifted():
    return models.swin_transformer.ShiftedWindowAttention(64, [7, 7], [3, 3], 2), (4, 14, 14, 64)


def partition(kind):
    layer = models.maxvit.PartitionAttentionLayer
    arguments = 64, 32, 7, kind, (14, 14), 2, nn.GELU, nn.LayerNorm, 0.0, 0.0, 0.0
    return layer(*arguments), (4, 64, 14, 14)


def merging():
    return models.swin_transformer.PatchMerging(16), (4, 6, 8, 16)


LAYERS = {
    "swin": shifted,
    "merging": merging,
    "windows": lambda: partition("window"),
    "grid": lambda: partition("grid"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_autocast(everywhere, name, device):
    """As near to float64 as the layer was, and of the dtype that it had."""
    torch.manual_seed(0)
    layer, shape = LAYERS[name]()
    native = nn.Sequential(layer).to(device)
    exact, ours = copy.deepcopy(native).double(), copy.deepcopy(native)
    cuda_ops.convert(ours)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    x = x.contiguous(memory_format=torch.channels_last) if shape[1] == 64 else x
    grad = torch.randn_like(exact(x.double()))
    found = []
    for model in (exact, native, ours):
        input = x.to(torch.float64 if model is exact else torch.float32).requires_grad_()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=model is not exact):
            output = model(input)
        grads = torch.autograd.grad(output, (input, *model.parameters()), grad.to(output.dtype))
        found.append([output.detach(), *grads])
    assert [t.dtype for t in found[2]] == [t.dtype for t in found[1]]
    for reference, before, after in zip(*found, strict=True):
        errors = [float((t - reference).norm() / reference.norm()) for t in (before, after)]
        assert errors[1] < 1.5 * errors[0] + 4e-3, errors


@pytest.mark.cuda
@pytest.mark.parametrize("make", [swin, maxvit])
def test_training_on_cuda(monkeypatch, make):
    """Three steps under autocast, as the model was: losses close."""
    losses, x = [], images(8, 32).float().cuda().contiguous(memory_format=torch.channels_last)
    calls = count_calls(monkeypatch, "window_attention")
    for converted in (False, True):
        model = without_dropout(make()).cuda().to(memory_format=torch.channels_last)
        if converted:
            cuda_ops.convert(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), torch.arange(8, device="cuda") % 5)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert calls
    torch.testing.assert_close(*losses, rtol=3e-2, atol=3e-2)
