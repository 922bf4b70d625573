"""cuda_ops.convert and revert: models of torchvision and transformers compute what they did, in float64, through three
training steps; and what is done to modules, before and after, counts."""

import copy
import gc
import importlib
import io
import operator
import os
import pickle
import time
import warnings

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize

import cuda_ops
from cuda_ops.conversion import fusing, layers
from cuda_ops.conversion.layers import LAYERS, native_class

nn = torch.nn
F = torch.nn.functional
pytestmark = pytest.mark.filterwarnings("ignore:.*(spectral|weight)_norm.* is deprecated:FutureWarning")


def classes(model):
    return [type(module) for module in model.modules()]


def without_dropout(model):
    """Ours draws other numbers than PyTorch's."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
    return model


def loss_of(output):
    """One number of a tensor, or of the tensors in a tuple or dict."""
    if isinstance(output, torch.Tensor):
        output = output.flatten().double()
        return (output * torch.linspace(-1, 1, len(output), dtype=torch.float64)).sum()
    values = output.values() if hasattr(output, "values") else output
    return sum(loss_of(v) for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())


def train(model, inputs, steps=3):
    """Outputs, gradients, parameters and buffers of some steps, and outputs in evaluation."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        loss = loss_of(output)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    training = model.training
    model.eval()
    with torch.no_grad():
        output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    model.train(training)
    is_detection = isinstance(output, list)  # its boxes are chosen by comparisons
    return [*found, *([] if is_detection else [loss_of(output)]), *model.parameters(), *model.buffers()]


def assert_converts(model, inputs, fusions=(), tolerance=1e-10, seed=0):
    """Converted, the model computes the same, with the same state_dict; and it can be reverted."""
    native, ours = copy.deepcopy(model), model
    before, names = classes(ours), list(ours.named_modules())
    report = cuda_ops.convert(ours)
    assert report.swapped
    assert {fusion.op for fusion in report.fusions} >= set(fusions), report
    assert [(n, id(m)) for n, m in ours.named_modules()] == [(n, id(m)) for n, m in names]
    states = ours.state_dict(), native.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert repr(ours) == repr(native)
    results = []
    for each in (ours, native):
        torch.manual_seed(seed)
        results.append(train(each, inputs))
    for actual, expected in zip(*results, strict=True):
        if expected.is_floating_point():
            distance = (actual - expected).abs().max() if expected.numel() else 0.0
            assert distance <= tolerance * max(1.0, expected.abs().max().item())
        else:
            assert torch.equal(actual, expected)
    assert cuda_ops.revert(ours) is ours
    assert classes(ours) == before
    return report


def images(count=2, size=32, channels=3):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, channels, size, size, generator=generator, dtype=torch.float64)


def classifier(name, **arguments):
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torchvision.models.get_model(name, weights=None, num_classes=5, **arguments)
    return without_dropout(model).double()


# Small members of torchvision's families. (Where batches are normalised over a handful of values, rounding is
# multiplied a thousandfold at each layer: images are as large as that takes.)
RESNET = ["batch_norm_act", "conv_bn_relu_pool"]
CLASSIFIERS = {
    "densenet": (
        lambda: small("densenet", "DenseNet", growth_rate=8, block_config=(2, 2), num_init_features=16),
        64,
        ["batch_norm_act", "conv_bn_relu_pool", "relu"],
    ),
    "efficientnet_b0": (lambda: classifier("efficientnet_b0"), 96, ["batch_norm_act"]),
    "mnasnet0_5": (lambda: classifier("mnasnet0_5"), 96, ["batch_norm_act"]),
    "mobilenet_v3_small": (lambda: classifier("mobilenet_v3_small"), 96, ["batch_norm_act"]),
    "resnet18": (lambda: small("resnet", "ResNet", "BasicBlock", [1, 1, 1, 1]), 64, RESNET),
    "resnext": (
        lambda: small("resnet", "ResNet", "Bottleneck", [1, 1], groups=4, width_per_group=4),
        64,
        RESNET,
    ),
    "shufflenet_v2_x0_5": (lambda: classifier("shufflenet_v2_x0_5"), 96, []),
    "squeezenet1_1": (lambda: classifier("squeezenet1_1"), 64, []),
    "vgg11_bn": (lambda: small_vgg(), 32, ["conv_bn_relu_pool", "linear_relu"]),
    "convnext": (lambda: small_convnext(), 32, ["linear_gelu"]),
    "swin_t": (lambda: small_swin(), 32, ["linear_gelu", "add_layer_norm"]),
    "vit": (lambda: small_vit(), 32, ["linear_gelu", "add_layer_norm"]),
    "googlenet": (lambda: inception_block(), 32, ["batch_norm_act"]),
}


def small(module, name, *arguments, **options):
    models = pytest.importorskip("torchvision").models
    module = getattr(models, module)
    torch.manual_seed(0)
    arguments = [getattr(module, a) if isinstance(a, str) else a for a in arguments]
    if arguments and len(arguments[1]) == 2:  # of ResNet, which has four stages
        arguments[1] = [*arguments[1], 1, 1]
    return without_dropout(getattr(module, name)(*arguments, num_classes=5, **options)).double()


def small_vgg():
    vgg = pytest.importorskip("torchvision").models.vgg
    torch.manual_seed(0)
    features = vgg.make_layers([8, "M", 16, 16, "M", 16, "M"], batch_norm=True)
    model = vgg.VGG(features, num_classes=5)
    model.avgpool = nn.AdaptiveAvgPool2d(2)
    model.classifier = nn.Sequential(nn.Linear(64, 32), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(32, 5))
    return model.double()


def small_convnext():
    convnext = pytest.importorskip("torchvision").models.convnext
    torch.manual_seed(0)
    blocks = [convnext.CNBlockConfig(16, 24, 1), convnext.CNBlockConfig(24, None, 1)]
    return without_dropout(convnext.ConvNeXt(blocks, num_classes=5, stochastic_depth_prob=0.0)).double()


def small_swin():
    swin = pytest.importorskip("torchvision").models.swin_transformer
    torch.manual_seed(0)
    model = swin.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=5)
    return without_dropout(model).double()


def small_vit():
    vit = pytest.importorskip("torchvision").models.vision_transformer
    torch.manual_seed(0)
    return vit.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5).double()


def inception_block():
    pytest.importorskip("torchvision")
    googlenet = importlib.import_module("torchvision.models.googlenet")  # torchvision.models has a function of the name
    torch.manual_seed(0)
    return nn.Sequential(googlenet.Inception(3, 8, 8, 8, 4, 8, 8), nn.Flatten(), nn.Linear(32 * 32 * 32, 5)).double()


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers(name):
    make, size, fusions = CLASSIFIERS[name]
    assert_converts(make(), (images(2, size),), fusions, tolerance=1e-9 if size == 96 else 1e-10)


def test_dense_layers_drop_in_training_alone():
    densenet = pytest.importorskip("torchvision").models.densenet
    model = nn.Sequential(densenet._DenseLayer(8, 4, 2, drop_rate=0.5)).double().eval()
    x = torch.randn(2, 8, 5, 5, dtype=torch.float64)
    expected = model(x)
    cuda_ops.convert(model)
    torch.testing.assert_close(model(x), expected)
    assert (model.train()(x) == 0).any()


def test_a_collection_while_a_forward_is_traced_is_no_part_of_it():
    ran = []

    def callback(phase, info):  # as hypothesis has one; a branch and a clock would both refuse a forward
        if phase == "start":
            ran.append(time.perf_counter())

    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1, 1, 1)
    try:
        report = cuda_ops.convert(CLASSIFIERS["densenet"][0]())
        assert ran and gc.isenabled()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)
    assert {fusion.op for fusion in report.fusions} >= {"conv_bn_relu_pool", "relu"}, report


def test_segmentation():
    segmentation = pytest.importorskip("torchvision").models.segmentation
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 3, 2, 1)
    )
    backbone = pytest.importorskip("torchvision").models._utils.IntermediateLayerGetter(backbone, {"3": "out"})
    head = segmentation.deeplabv3.DeepLabHead(16, 4, atrous_rates=(2, 3, 4))
    model = without_dropout(segmentation.DeepLabV3(backbone, head)).double()
    assert_converts(model, (images(8, 32),), tolerance=1e-9)


def test_detection():
    pytest.importorskip("torchvision")
    faster_rcnn = importlib.import_module("torchvision.models.detection.faster_rcnn")
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(inplace=True))
    backbone.out_channels = 16
    model = faster_rcnn.FasterRCNN(
        backbone,
        min_size=64,
        max_size=64,
        rpn_anchor_generator=faster_rcnn.AnchorGenerator(((8, 16),), ((0.5, 1.0, 2.0),)),
        box_roi_pool=faster_rcnn.MultiScaleRoIAlign(["0"], 3, 2),
        box_head=faster_rcnn.TwoMLPHead(16 * 9, 32),
        box_predictor=faster_rcnn.FastRCNNPredictor(32, 3),
        box_batch_size_per_image=16,
    )
    boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0], [30.0, 8.0, 60.0, 50.0]], dtype=torch.float64)
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])}]
    assert_converts(model.double(), (list(images(1, 64)), targets))


def tiny(name):
    """A transformers model of two tiny layers with random weights, and its inputs."""
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip install transformers)")
    tokens = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    text = {"input_ids": tokens}
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["intermediate_size"] = 32
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    kinds = {
        "Bert": (lambda t: t.BertModel(t.BertConfig(**sizes, **none)), text),
        "GPT2": (
            lambda t: t.GPT2Model(
                t.GPT2Config(
                    vocab_size=50, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
                )
            ),
            text,
        ),
        "ViT": (
            lambda t: t.ViTModel(
                t.ViTConfig(
                    **{k: v for k, v in sizes.items() if k != "vocab_size"}, **none, image_size=32, patch_size=8
                )
            ),
            {"pixel_values": images(2, 32)},
        ),
        "Llama": (lambda t: t.LlamaModel(t.LlamaConfig(**sizes)), text),
        "T5": (
            lambda t: t.T5Model(
                t.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0)
            ),
            {**text, "decoder_input_ids": tokens},
        ),
    }
    make, inputs = kinds[name]
    torch.manual_seed(0)
    model = make(transformers).double().train()
    if name != "ViT":
        model.config.use_cache = False
    return model, inputs


@pytest.mark.parametrize("name", ["Bert", "GPT2", "ViT", "Llama", "T5"])
def test_transformers(name):
    model, inputs = tiny(name)
    assert_converts(model, inputs, ["add_layer_norm"] if name == "Bert" else [])


# What is done to modules, before the conversion and after it.


class Net(nn.Module):
    """A forward that torch.fx can trace, with all that is fused."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.linear1, self.linear2, self.linear3 = nn.Linear(128, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.drop, self.layer_norm = nn.Dropout(0.0), nn.LayerNorm(16)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, input):
        x = self.pool(self.relu(self.norm(self.conv(input)))).flatten(1)
        x = F.relu(self.linear1(x))
        x = x + self.drop(F.gelu(self.linear2(x), approximate="tanh"))
        y = self.layer_norm(x)
        return self.head(x + y.softmax(-1) * torch.sigmoid(self.linear3(y)))


FUSED = ["conv_bn_relu_pool", "linear_relu", "linear_gelu", "add_layer_norm", "softmax", "sigmoid"]


def net(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def small_images():
    return (images(4, 8),)


def test_a_traced_forward_is_fused():
    report = assert_converts(net(), small_images(), FUSED)
    parts = {fusion.op: fusion.parts for fusion in report.fusions if not fusion.module}
    assert parts["conv_bn_relu_pool"] == ("conv", "norm", "relu", "pool")
    assert parts["add_layer_norm"] == ("drop", "add()", "layer_norm")


def count_calls(monkeypatch, name):
    """How often cuda_ops.functional.<name> is called by fused forwards."""
    calls, function = [], getattr(cuda_ops.functional, name)
    monkeypatch.setattr(cuda_ops.functional, name, lambda *a, **k: calls.append(name) or function(*a, **k))
    return calls


def test_fused_ops_are_what_runs(monkeypatch):
    model = net()
    cuda_ops.convert(model)
    calls = [count_calls(monkeypatch, name) for name in ("linear_relu", "linear_gelu", "add_layer_norm")]
    model(*small_images())
    assert [len(c) for c in calls] == [2, 1, 1]
    hook = model.linear2.register_forward_hook(lambda module, args, output: 2 * output)
    model(*small_images())
    assert [len(c) for c in calls] == [4, 1, 2]
    hook.remove()
    model(*small_images())
    assert [len(c) for c in calls] == [6, 2, 3]


CHANGES = {
    "forward hook": lambda m: m.register_forward_hook(lambda module, args, output: 0.5 * output),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "backward hook": lambda m: m.register_full_backward_pre_hook(lambda module, grads: (3 * grads[0],)),
    "forward set on it": lambda m: setattr(m, "forward", lambda x: 0.5 * type(m).forward(m, x)),
}
OF_WEIGHT = {
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "frozen": lambda m: m.requires_grad_(False),
}
CASES = [(layer, change) for layer in ("conv", "relu", "linear1", "layer_norm", "head.0") for change in CHANGES]
CASES += [(layer, change) for layer in ("conv", "linear2", "head.0") for change in OF_WEIGHT]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("layer", "change"), CASES)
def test_changed_layers_compute_what_they_did(layer, change, after):
    is_backward, change = change == "backward hook", {**CHANGES, **OF_WEIGHT}[change]
    ours, native = net(), net()
    for model in (ours, native):
        model.relu.inplace = not is_backward  # PyTorch allows not both
        if after and model is ours:
            cuda_ops.convert(ours)
        torch.manual_seed(1)
        change(model.get_submodule(layer))
    if not after:
        cuda_ops.convert(ours)
    results = [train(model, small_images(), steps=1) for model in (ours, native)]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)
    cuda_ops.revert(ours)
    assert not any(native_class(m) or "cuda_ops" in str(type(m).__mro__) for m in ours.modules())
    torch.testing.assert_close(ours(*small_images()), native(*small_images()), rtol=1e-9, atol=1e-11)


def test_parametrized_layers_are_ours_and_stay_parametrized():
    model = net()
    parametrizations.orthogonal(model.linear3)
    cuda_ops.convert(model)
    assert isinstance(model.linear3, cuda_ops.nn.Linear)
    assert parametrize.is_parametrized(model.linear3)
    parametrize.remove_parametrizations(model.linear3, "weight")
    assert native_class(model.linear3) is nn.Linear


def test_layers_replaced_later():
    ours, native = net(), net()
    cuda_ops.convert(ours)
    for model in (ours, native):
        torch.manual_seed(3)
        model.linear2 = nn.Linear(16, 16).double()
        model.pool = nn.AvgPool2d(2)
        model.relu = nn.Tanh()
        model.head.insert(1, nn.Sigmoid())
        model.head.append(nn.Linear(4, 3).double())
    torch.testing.assert_close(train(ours, small_images()), train(native, small_images()), rtol=1e-9, atol=1e-11)


def test_submodules_called_on_their_own_compute_what_they_did():
    ours, native = net(), net()
    cuda_ops.convert(ours)
    x = images(4, 8)
    torch.testing.assert_close(ours.norm(ours.conv(x)), native.norm(native.conv(x)))
    rows = torch.ones(2, 16, dtype=torch.float64)
    torch.testing.assert_close(ours.head[0](rows), native.head[0](rows))
    torch.testing.assert_close(ours.head[:2](rows), native.head[:2](rows))


class Branching(nn.Module):
    """What torch.fx sees one path of, or none."""

    def __init__(self):
        super().__init__()
        self.linear, self.relu, self.layers = nn.Linear(8, 8), nn.ReLU(), nn.ModuleList([nn.Linear(8, 8), nn.GELU()])

    def forward(self, input, mask=None):
        x = self.relu(self.linear(input))
        if mask is not None:
            x = x * mask
        if x.sum() > 0:
            x = -x
        for layer in self.layers:
            x = layer(x)
        return x


class Straight(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.slope, self.norm = nn.Linear(8, 8), 0.5, nn.LayerNorm(8)

    def forward(self, input, scale=2.0, **kwargs):
        x = F.relu(self.linear(input)) * self.slope * scale
        return self.norm(x * (1 + self.training) + input) + kwargs.get("bias", 0.0)


def test_control_flow_is_left_to_python():
    torch.manual_seed(0)
    model = Branching().double()
    native = copy.deepcopy(model)
    report = cuda_ops.convert(model)
    assert "branches" in report.untraced[""]
    assert len(report.swapped) == 4
    x = torch.randn(3, 8, dtype=torch.float64)
    for args in [(x,), (-x,), (x, x), (x, None)]:
        torch.testing.assert_close(model(*args), native(*args))


def test_numbers_modes_and_arguments_that_a_trace_saw_are_guarded():
    torch.manual_seed(0)
    model = Straight().double()
    native = copy.deepcopy(model)
    report = cuda_ops.convert(model)
    assert {fusion.op for fusion in report.fusions} == {"linear_relu", "add_layer_norm"}
    x = torch.randn(3, 8, dtype=torch.float64)
    for change in (lambda m: m.eval(), lambda m: m.train(), lambda m: setattr(m, "slope", 0.25), lambda m: None):
        for each in (model, native):
            change(each)
        for arguments in ({}, {"scale": 3.0}, {"bias": 1.0}, {"scale": x}):
            torch.testing.assert_close(model(x, **arguments), native(x, **arguments))
        torch.testing.assert_close(model(x, 0.5), native(x, 0.5))
        torch.testing.assert_close(model(input=x), native(input=x))


class Drawing(nn.Module):
    """Draws numbers at each call, which a trace would keep."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, input):
        return F.relu(self.linear(input)) * draw_number()


def draw_number():
    import random

    return random.random()


def test_random_numbers_of_python_are_drawn_at_each_call():
    model = Drawing(None)
    report = cuda_ops.convert(model)
    assert "draws numbers" in report.untraced[""]
    x = torch.ones(1, 4)
    assert len({model(x).sum().item() for _ in range(5)}) == 5 or model(x).sum() == 0


class Counting(nn.Module):
    """Leaves something behind at each call."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.relu, self.last, self.calls, self.how = nn.Linear(4, 4), nn.ReLU(), None, 0, how
        self.register_buffer("count", torch.zeros(1))

    def forward(self, input):
        self.how(self, input)
        return self.relu(self.linear(input)) + self.count


def keep(module, input):
    module.last = input


def count(module, input):
    module.calls += 1


def count_in_a_buffer(module, input):
    module.count.add_(1)


def replace_a_buffer(module, input):
    module.count = module.count + 1


@pytest.mark.parametrize("how", [keep, count, count_in_a_buffer, replace_a_buffer])
def test_what_a_forward_leaves_behind_is_left_at_calls_alone(how):
    model = Counting(how)
    native, before = copy.deepcopy(model), dict(vars(model))
    cuda_ops.convert(model)
    assert all(vars(model)[name] is value for name, value in before.items())
    assert model.count == 0
    for _ in range(2):
        x = torch.rand(2, 4)
        torch.testing.assert_close(model(x), native(x))
        assert (model.last is native.last is None or model.last is x) and model.calls == native.calls
    assert torch.equal(model.count, native.count)


def test_residual_sums_that_broadcast_or_promote():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.rms = nn.LayerNorm(4), nn.RMSNorm(4)

        def forward(self, a, b):
            total = self.norm(a + b)
            return self.rms(total + a) * total

    model = Sum()
    native = copy.deepcopy(model)
    report = cuda_ops.convert(model)
    assert {fusion.op for fusion in report.fusions} == {"add_layer_norm", "add_rms_norm"}
    a = torch.randn(3, 2, 4)
    for b in (torch.randn(3, 2, 4), torch.randn(4), torch.randn(3, 1, 1)):
        torch.testing.assert_close(model(a, b), native(a, b))


# Sharing, ties, copies, files, compilers.


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = self.first
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.blocks = nn.Sequential(self.first, nn.ReLU(), self.first)

    def forward(self, input):
        return self.tied(self.second(self.blocks(self.first(input))))


def test_shared_modules_and_tied_weights():
    torch.manual_seed(0)
    model = Shared().double()
    optimizer = torch.optim.SGD(model.parameters())
    report = assert_converts(model, (torch.randn(3, 6, dtype=torch.float64),), ["linear_relu"])
    assert [layer.name for layer in report.layers] == ["first", "tied", "blocks.1"]
    assert model.first is model.second is model.blocks[0] is model.blocks[2]
    assert model.tied.weight is model.first.weight is optimizer.param_groups[0]["params"][0]


def test_attributes_modes_and_formats_are_kept():
    model = net().to(memory_format=torch.channels_last)
    model.conv.note, model.norm.training = "mine", False
    model.linear1.bias = None
    model.norm.register_buffer("extra", torch.ones(2))
    model.linear2.weight.requires_grad_(False)
    pointers = [p.data_ptr() for p in model.parameters()]
    cuda_ops.convert(model)
    assert (model.conv.note, model.norm.training, model.linear1.bias) == ("mine", False, None)
    assert "norm.extra" in model.state_dict()
    assert not model.linear2.weight.requires_grad
    assert pointers == [p.data_ptr() for p in model.parameters()]
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert {"cuda_ops" in key for module in model.modules() for key in vars(module)} == {False}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_stay_converted(copied, monkeypatch):
    model = net()
    cuda_ops.convert(model)
    twin = copied(model)
    assert classes(twin) == classes(model)
    assert all(a is not b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    torch.testing.assert_close(train(twin, small_images()), train(model, small_images()))
    calls = count_calls(monkeypatch, "add_layer_norm")
    twin(*small_images())
    assert len(calls) == 1
    assert classes(cuda_ops.revert(twin)) == classes(net())


def test_state_dicts_go_both_ways():
    ours, native = net(0), net(1)
    cuda_ops.convert(ours)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    native.load_state_dict(torch.load(file, weights_only=True), strict=True)
    torch.testing.assert_close(ours(*small_images()), native(*small_images()))
    ours.load_state_dict(net(2).state_dict(), strict=True)
    torch.testing.assert_close(ours(*small_images()), net(2)(*small_images()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_sees_through(backend):
    ours, native = net(), net()
    cuda_ops.convert(ours)
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    for training in (True, False):
        ours.train(training), native.train(training)
        outputs = compiled(*small_images()), native(*small_images())
        torch.testing.assert_close(*outputs)
        loss_of(outputs[0]).backward(), loss_of(outputs[1]).backward()
    torch.testing.assert_close(*([p.grad for p in m.parameters()] for m in (ours, native)))


def test_a_compiled_model_can_be_converted_and_reverted():
    model, native = net(), net()
    compiled = torch.compile(model, backend="eager")
    expected = native(*small_images())
    for change in (lambda m: None, cuda_ops.convert, cuda_ops.revert):
        change(model)
        model.norm.reset_running_stats()
        torch.testing.assert_close(compiled(*small_images()), expected)


def test_torch_export():
    model = net().eval()
    expected = model(*small_images())
    cuda_ops.convert(model)
    program = torch.export.export(model, small_images())
    torch.testing.assert_close(program.module()(*small_images()), expected)
    assert "cuda_ops.add_layer_norm_forward" in str(program.graph)


def test_ddp_of_one_process(tmp_path):
    ours, native = net(), net()
    cuda_ops.convert(ours)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.testing.assert_close(
            train(nn.parallel.DistributedDataParallel(ours), small_images()), train(native, small_images())
        )
        inside = net()
        wrapped = nn.parallel.DistributedDataParallel(inside)
        assert cuda_ops.convert(wrapped).swapped
        assert native_class(inside.linear1) is nn.Linear
    finally:
        torch.distributed.destroy_process_group()


REFUSALS = {  # as conv2d and gemm, and as the ops with tables of paths say it
    "own": "conv2d: CUDA_OPS_CONV2D_PATH=sm90 cannot do this convolution on this device: forward, shape [1, 1, 3, 3]",
    "table": "linear: the path that the environment's CUDA_OPS_<OP>_PATH names cannot do this call on this device",
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_forced_path_that_cannot_do_a_call_is_told(refusal):
    def refusing(text):
        def call(*args, **kwargs):
            raise NotImplementedError(text)

        return call

    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    for text, is_told in ((refusal, True), ("linear: arguments of this kind are not supported", False)):
        forward = layers._forward(refusing(text), nn.Linear)
        function = layers._function("linear", refusing(text), F.linear)
        for call in (lambda f=forward: f(model, x), lambda f=function: f(x, model.weight, model.bias)):
            if is_told:
                with pytest.raises(NotImplementedError, match=r"CUDA_OPS_.*_PATH"):
                    call()
            else:
                assert torch.equal(call(), model(x))


@pytest.mark.cuda
def test_a_forced_path_that_cannot_do_a_call_is_told_on_a_gpu(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).cuda()
    cuda_ops.convert(model)
    monkeypatch.setenv("CUDA_OPS_CONV2D_PATH", "depthwise")
    with pytest.raises(NotImplementedError, match="CUDA_OPS_CONV2D_PATH=depthwise cannot"):
        model(torch.ones(1, 3, 8, 8, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_on_the_cpu(dtype):
    """As exact as PyTorch's own."""
    ours, native, exact = net().float(), net().float(), net().double()
    cuda_ops.convert(ours)
    x = images(4, 8).float()

    def check(*outputs):
        assert {output.dtype for output in outputs} == {dtype}
        error, theirs = ((output.double() - exact(x.double())).norm() for output in outputs)
        assert error <= 2 * theirs

    with torch.autocast("cpu", dtype):
        check(ours(x), native(x))
    check(ours.to(dtype)(x.to(dtype)), native.to(dtype)(x.to(dtype)))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_on_cuda(dtype):
    ours, native, exact = net().float().cuda(), net().float().cuda(), net().double().cuda()
    cuda_ops.convert(ours)
    x = images(4, 8).float().cuda()
    loss_of(exact(x.double()).cpu()).backward()
    with torch.autocast("cuda", dtype):
        outputs = ours(x), native(x)
    torch.testing.assert_close(*outputs, rtol=3e-2, atol=3e-2)
    for output in outputs:
        loss_of(output.cpu()).backward()
    # Normalised over few values, gradients in halves are a tenth off on both sides.
    for a, b, e in zip(ours.parameters(), native.parameters(), exact.parameters(), strict=True):
        error, allowed = ((p.grad.double() - e.grad).norm() for p in (a, b))
        assert error <= 2 * allowed + 2e-2 * e.grad.norm() + 1e-2


@pytest.mark.cuda
def test_on_cuda():
    model = net().cuda()
    native = copy.deepcopy(model)
    cuda_ops.convert(model)
    x = (images(4, 8).cuda(),)
    torch.testing.assert_close(
        [t.cpu() for t in train_on_cuda(model, x)], [t.cpu() for t in train_on_cuda(native, x)], rtol=1e-9, atol=1e-10
    )


def train_on_cuda(model, inputs):
    loss = model(*inputs).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


def test_what_ours_do_not_take_is_pytorchs():
    model = nn.Sequential(nn.ReLU(), nn.MaxPool2d(1), nn.Softmax(-1))
    cuda_ops.convert(model)
    assert model[0](torch.tensor([-1, 2])).tolist() == [0, 2]
    assert model[0](input=torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    sparse = torch.tensor([[0.0, -1.0], [2.0, 0.0]]).to_sparse()
    assert model[0](sparse).to_dense().tolist() == [[0, 0], [2, 0]]

    class Tagged(torch.Tensor):
        pass

    tagged = torch.tensor([1.0, -1.0]).as_subclass(Tagged)
    assert type(model[0](tagged)) is Tagged


# The report, and what is chosen.


def zoo():
    class MyLinear(nn.Linear):
        pass

    odd = nn.Linear(2, 2)
    odd.forward = lambda x: x
    return nn.ModuleDict(
        {
            "a": nn.Linear(2, 2),
            "b": MyLinear(2, 2),
            "c": odd,
            "d": nn.LazyLinear(2),
            "e": nn.Fold(4, 2),
            "f": nn.Flatten(),
            "g": nn.BatchNorm2d(2, eps=0.0),
            "h": Branching(),
            "i": nn.Bilinear(2, 2, 2),
            "j": cuda_ops.nn.Linear(2, 2),
            "k": torch.jit.script(nn.Linear(2, 2)),
        }
    )


def test_the_report_says_what_was_left_and_why():
    model = zoo()
    before = classes(model)
    report = cuda_ops.convert(model)
    left = {layer.name: layer.reason for layer in report.left}
    assert left == {
        "b": "a subclass of Linear",
        "c": "has a forward that was set on it",
        "d": "lazy: convert after the first forward",
        "e": "cuda_ops.nn has none",
        "f": "nothing to compute",
        "g": "eps is not above 0",
        "i": "cuda_ops.nn has none",
        "k": "TorchScript",
    }
    assert {layer.name for layer in report.swapped} >= {"a", "j", "h.linear", "h.relu"}
    assert ("Linear", 4, 1, "has a forward that was set on it") in report.rows()
    text = str(report)
    assert text.startswith("ModuleDict: 6 of 14 layers are ours")
    assert all(len(line) < 200 for line in text.splitlines())
    assert "b: " in report.names() and "a subclass of Linear" in report.names()
    assert "h: not traced: forward branches or loops" in report.names()
    data = report.as_dict()
    assert pickle.loads(pickle.dumps(data)) == data
    assert data["left"]["g"] == {"class": "BatchNorm2d", "reason": "eps is not above 0"}
    assert cuda_ops.convert(model).as_dict() == data
    assert classes(cuda_ops.revert(model)) == before


def test_a_layer_with_submodules_is_a_layer():
    layers = cuda_ops.convert(nn.Sequential(nn.MultiheadAttention(4, 2), nn.Sequential(), nn.ModuleList())).layers
    assert [(layer.name, layer.reason) for layer in layers] == [("0", None)]  # out_proj is read by the attention itself


def transformers():
    small = {"dim_feedforward": 24, "dropout": 0.0, "dtype": torch.float64}
    encoder, decoder = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    return {
        "encoder layer": encoder(8, 2, **small, batch_first=True),
        "encoder layer, norm first, gelu": encoder(8, 2, **small, activation="gelu", norm_first=True),
        "encoder": nn.TransformerEncoder(encoder(8, 2, **small, batch_first=True), 2),
        "decoder layer": decoder(8, 2, **small),
        "decoder": nn.TransformerDecoder(decoder(8, 2, **small, batch_first=True), 2, nn.LayerNorm(8).double()),
        "transformer": nn.Transformer(8, 2, 2, 2, **small, batch_first=True),
    }


def transformer_inputs(name):
    """Sequences of 5, of which some are shorter, and of 4 that are decoded; PyTorch's encoder makes nested tensors of
    the former in evaluation."""
    generator = torch.Generator().manual_seed(0)
    batch_first = "norm first" not in name and name != "decoder layer"
    rows = lambda length: torch.randn(3, length, 8, generator=generator, dtype=torch.float64)  # noqa: E731
    source, target = (x if batch_first else x.transpose(0, 1) for x in (rows(5), rows(4)))
    padding, causal = (
        torch.arange(5) >= torch.tensor([5, 3, 4])[:, None],
        nn.Transformer.generate_square_subsequent_mask,
    )
    if name.startswith("encoder"):
        return {"src": source, "src_key_padding_mask": padding}
    masks = {"tgt_mask": causal(4, dtype=torch.float64), "tgt_is_causal": True}
    if name.startswith("decoder"):
        return {"tgt": target, "memory": source, "memory_key_padding_mask": padding.double() * -3.0, **masks}
    return {"src": source, "tgt": target, "src_key_padding_mask": padding, **masks}


@pytest.mark.filterwarnings("ignore:.*(nested|src_key_padding|mismatched).*:UserWarning")
@pytest.mark.parametrize("name", list(transformers()))
def test_transformers_of_torch_nn(name):
    """Trained, and in evaluation, where PyTorch's fast path of an encoder takes nested tensors by its layers."""
    torch.manual_seed(0)
    report = assert_converts(transformers()[name], transformer_inputs(name))
    assert "MultiheadAttention" in {layer.kind for layer in report.swapped}
    assert not any("out_proj" in layer.name for layer in report.layers)


@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
def test_attention_takes_nested_tensors_and_halves_as_pytorch_does():
    """After convert what ours refuses is PyTorch's."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.nested.nested_tensor([torch.rand(3, 8), torch.rand(2, 8)])
    half = torch.rand(2, 3, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        before = attention(x, x, x, need_weights=False)[0].unbind()
        halves = copy.deepcopy(attention).bfloat16()(half, half, half)[0]
        cuda_ops.convert(attention)
        after = attention(x, x, x, need_weights=False)[0].unbind()
        assert torch.equal(copy.deepcopy(attention).bfloat16()(half, half, half)[0], halves)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_attention_of_a_vit_is_ours(monkeypatch):
    calls = []
    module = importlib.import_module("cuda_ops.ops.multihead_attention")
    attention = module.scaled_dot_product_attention
    monkeypatch.setattr(module, "scaled_dot_product_attention", lambda *a: calls.append(a) or attention(*a))
    model = small_vit()
    cuda_ops.convert(model)
    model(images(2, 32)).sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("options", "swapped"),
    [
        ({"only": "Linear"}, {"linear1", "linear2", "linear3", "head.0", "head.2"}),
        ({"only": [nn.LayerNorm, "head"]}, {"layer_norm", "head.0", "head.1", "head.2"}),
        ({"only": "linear?", "exclude": "linear2"}, {"linear1", "linear3"}),
        ({"exclude": ["head", "Linear", nn.Conv2d]}, {"norm", "relu", "pool", "drop", "layer_norm"}),
    ],
)
def test_only_and_exclude(options, swapped):
    model = net()
    report = cuda_ops.convert(model, **options)
    assert {layer.name for layer in report.swapped} == swapped
    assert {name for name, module in model.named_modules() if type(module) in LAYERS.values()} == swapped
    torch.testing.assert_close(train(model, small_images()), train(net(), small_images()))


def test_a_name_that_begins_with_another_is_not_of_it():
    for options, swapped in (({"only": "head"}, {"head.0"}), ({"exclude": "head"}, {"heads.0"})):
        model = nn.ModuleDict({name: nn.Sequential(nn.Linear(2, 2)) for name in ("head", "heads")})
        assert {layer.name for layer in cuda_ops.convert(model, **options).swapped} == swapped


def test_converting_again_takes_what_is_new():
    model = net()
    first, before = cuda_ops.convert(model), classes(model)
    assert cuda_ops.convert(model).as_dict() == first.as_dict()
    assert classes(model) == before
    model.linear2, model.drop = nn.Linear(16, 16).double(), nn.Identity()
    report = cuda_ops.convert(model)
    assert {fusion.op for fusion in report.fusions} == set(FUSED)
    assert ("add()", "layer_norm") in [fusion.parts for fusion in report.fusions]


class Act(nn.Module):
    """An activation as a function that is an attribute, as in transformers."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, input):
        return self.function(input)


def test_functions_that_are_attributes():
    model = nn.Sequential(nn.Linear(4, 4), Act(F.gelu), Act(F.relu), Act(torch.tanh), Act(torch.sin))
    native = copy.deepcopy(model)
    report = cuda_ops.convert(model)
    assert [fusion.op for fusion in report.fusions] == ["gelu", "relu", "tanh"]
    for change in (lambda m: None, lambda m: setattr(m[1], "function", torch.cos)):
        change(model), change(native)
        torch.testing.assert_close(model(torch.ones(2, 4)), native(torch.ones(2, 4)))
    twin = pickle.loads(pickle.dumps(model))
    assert classes(twin) == classes(model)


def test_without_fusing_classes_of_layers_alone_change():
    model = net()
    report = cuda_ops.convert(model, fuse=False)
    assert report.fusions == [] and report.untraced == {}
    assert type(model) is Net and type(model.head) is nn.Sequential
    assert native_class(model.conv) is nn.Conv2d


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match=r"convert: expected model to be a torch\.nn\.Module, got int"):
        cuda_ops.convert(3)
    with pytest.raises(TypeError, match=r"revert: expected model to be a torch\.nn\.Module, got Tensor"):
        cuda_ops.revert(torch.ones(1))
    for argument in ("only", "exclude"):
        with pytest.raises(TypeError, match=f"convert: expected {argument} to be names or classes"):
            cuda_ops.convert(nn.ReLU(), **{argument: 3})


@pytest.mark.parametrize("native", LAYERS, ids=lambda cls: cls.__name__)
def test_a_converted_class_differs_in_forward_alone(native):
    """Else a module that torch.nn's constructor made lacks what ours would have."""
    converted = LAYERS[native]
    assert converted.__name__ == native.__name__
    assert converted.__init__ is native.__init__
    assert pickle.loads(pickle.dumps(converted)) is converted
    assert os.path.basename(converted.__module__.replace(".", "/")) == "layers"


class Residual(nn.Module):
    """A block of convolutions with a residual sum, as torchvision writes it; `add` is how."""

    def __init__(self, add="iadd", activation=None, downsample=None, flag=False):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.activation, self.downsample, self.flag = activation or nn.ReLU(inplace=True), downsample, flag
        self.adds = {"iadd": operator.iadd, "add": operator.add, "turned": lambda a, b: b + a}[add]

    def forward(self, x):
        identity = x
        out = self.norm(self.conv(x))
        if self.downsample is not None:
            identity = self.downsample(x)
        if self.flag:
            identity = identity * 2
        return self.activation(self.adds(out, identity))


@pytest.mark.parametrize("add", ["iadd", "add", "turned"])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.SiLU(inplace=True), nn.Hardswish()])
def test_a_residual_block_is_one_op(add, activation):
    for downsample in (None, nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))):
        torch.manual_seed(0)
        model = Residual(add, copy.deepcopy(activation), downsample).double()
        report = assert_converts(model, (images(4, 8, 4),), ["batch_norm_act"])
        (fusion,) = [fusion for fusion in report.fusions if fusion.op == "batch_norm_act"]
        assert fusion.parts[0] == "norm" and fusion.parts[-1] == "activation" and len(fusion.parts) == 3


def test_what_a_branch_asked_is_asked_again():
    """A block that was traced with a downsample, a flag and a mode is called without."""
    torch.manual_seed(0)
    ours = Residual(downsample=nn.Conv2d(4, 4, 1)).double()
    native = copy.deepcopy(ours)
    cuda_ops.convert(ours)
    x = images(4, 8, 4)
    changes = [lambda m: None, lambda m: setattr(m, "flag", True), lambda m: setattr(m, "downsample", None)]
    changes += [lambda m: m.eval(), lambda m: setattr(m, "flag", False)]
    for change in changes:
        for model in (ours, native):
            change(model)
        torch.testing.assert_close(ours(x), native(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.norm.running_var, native.norm.running_var, rtol=1e-12, atol=1e-12)


def test_branches_on_more_than_attributes_are_not_traced():
    class OfArgument(Residual):
        def forward(self, x):
            if x.is_cuda:
                return x
            return self.activation(self.norm(self.conv(x)))

    class OfModule(Residual):
        def forward(self, x):
            if self.downsample:
                return x
            return self.activation(self.norm(self.conv(x)))

    for kind in (OfArgument, OfModule):
        report = cuda_ops.convert(kind(downsample=nn.Sequential()))
        assert "branches" in report.untraced[""] and not report.fusions


def test_hooks_between_a_norm_and_its_activation_are_called(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.SiLU()).double()
    cuda_ops.convert(model)
    calls, function = [], fusing.batch_norm_act_module
    monkeypatch.setattr(fusing, "batch_norm_act_module", lambda *a: calls.append(a) or function(*a))
    x = images(2, 8, 4)
    expected = model(x)
    assert len(calls) == 1
    seen = []
    hook = model[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    torch.testing.assert_close(model(x), expected)
    assert len(calls) == 1 and seen == [x.shape]
    hook.remove()
    model(x)
    assert len(calls) == 2


@pytest.mark.parametrize("run", ["conv_bn_relu_pool", "linear_gelu", "add_layer_norm", "batch_norm_act"])
def test_writing_into_what_comes_out_of_a_run(run):
    """Where PyTorch's layers have not saved it for their gradients, neither have the fused ones."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, input):
            return self.norm(input + input.cos())

    models = {
        "conv_bn_relu_pool": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2)),
        "linear_gelu": lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU()),
        "batch_norm_act": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.SiLU()),
        "add_layer_norm": Sum,
    }
    torch.manual_seed(0)
    ours = models[run]().double()
    native = copy.deepcopy(ours)
    assert [fusion.op for fusion in cuda_ops.convert(ours).fusions] == [run]
    gradients = []
    for model in (ours, native):
        x = torch.linspace(-1, 2, 96, dtype=torch.float64).view(3, 1, 8, 4).requires_grad_()
        model(x).mul_(2).square().sum().backward()
        gradients.append((x.grad, *(p.grad for p in model.parameters())))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10)


# Layers of one dimension, transposed convolutions, and torchvision's own layers.


def dcgan():
    layers = []
    for inputs, outputs, stride, padding in ((12, 16, 1, 0), (16, 8, 2, 1), (8, 6, 2, 1)):
        convolution = nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(6, 3, 4, 2, 1), nn.Tanh())


class UNet(nn.Module):
    """One level, whose plane of even sizes comes back by output_size."""

    def __init__(self):
        super().__init__()
        self.down, self.drop = nn.Conv2d(3, 8, 3, 2, 1), nn.Dropout2d(0.0)
        self.up, self.head = nn.ConvTranspose2d(8, 5, 3, 2, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = self.up(self.drop(F.relu(self.down(x))), output_size=x.shape[2:])
        return self.head(torch.cat([x, y], 1))


def wav2vec():
    """Features of a signal, and a convolution of their positions."""
    features = []
    for inputs, kernel, stride in ((1, 10, 5), (16, 3, 2), (16, 2, 2)):
        features += [nn.Conv1d(inputs, 16, kernel, stride, bias=False), nn.GroupNorm(4, 16), nn.GELU()]
    positions = nn.Conv1d(16, 16, 8, padding=4, groups=4)
    around = nn.Conv1d(16, 8, 3, padding="same", padding_mode="circular")
    return nn.Sequential(*features, positions, nn.GELU(), around, nn.ConvTranspose1d(8, 4, 16, 8, 4), nn.Dropout1d(0.0))


def signals():
    return torch.rand(3, 1, 403, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


CONVOLUTIONS = {
    "dcgan": (dcgan, lambda: torch.rand(4, 12, 1, 1, generator=torch.Generator().manual_seed(0)).double()),
    "unet": (UNet, lambda: images(2, 16)),
    "wav2vec": (wav2vec, signals),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_other_kinds(name):
    make, inputs = CONVOLUTIONS[name]
    torch.manual_seed(0)
    report = assert_converts(make().double(), (inputs(),))
    assert not report.left


def layers_of_torchvision():
    pytest.importorskip("torchvision")
    ops = importlib.import_module("torchvision.ops")
    maxvit, convnext = (importlib.import_module(f"torchvision.models.{name}") for name in ("maxvit", "convnext"))

    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.apart, self.together = maxvit.WindowPartition(), maxvit.WindowDepartition()
            self.there, self.back = maxvit.SwapAxes(-2, -3), maxvit.SwapAxes(-2, -3)

        def forward(self, x):
            windows = self.back(self.there(self.apart(x, 2)) * 2)
            return self.together(windows * torch.arange(windows.shape[1]).view(-1, 1, 1), 2, 4, 4)

    frozen = ops.FrozenBatchNorm2d(6)
    for buffer in frozen.buffers():
        buffer.copy_(torch.rand(6) + 0.5)
    return nn.Sequential(
        nn.Conv2d(3, 6, 1), convnext.LayerNorm2d(6), Windows(), ops.StochasticDepth(0.0, "row"), frozen
    ).double()


def test_layers_of_torchvision():
    torch.manual_seed(0)
    model = layers_of_torchvision()
    report = assert_converts(model, (images(2, 8),))
    assert {layer.name: layer.reason for layer in report.left} == dict.fromkeys(
        ("2.there", "2.back"), "nothing to compute"
    )
    cuda_ops.convert(model)
    for module in model[1], model[2].apart, model[3], model[4]:
        native = native_class(module)
        assert native.__module__.startswith("torchvision.") and isinstance(module, native)
        assert type(pickle.loads(pickle.dumps(module))) is type(module)
    model[3].p = 0.5
    torch.manual_seed(1)
    kept = model[3](torch.ones(1000, 2)).unique(dim=0).tolist()
    assert kept == [[0.0, 0.0], [2.0, 2.0]]
    # What ours do not take is torchvision's.
    model[4].eps = 0.0
    assert model[4](images(2, 8, 6)).isfinite().all()
    assert model.bfloat16()[1](images(2, 8, 6).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "family", ["convnext_tiny", "maxvit_t", "swin_v2_t", "efficientnet_v2_s", "mobilenet_v3_small"]
)
def test_what_is_left_of_torchvisions_classifiers_computes_nothing(family):
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = models.get_model(family, weights=None)
    report = cuda_ops.convert(model)
    assert {layer.reason for layer in report.left} <= {"nothing to compute"}, report
