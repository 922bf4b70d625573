"""cuda_ops.convert and models and layers of torchvision."""

import gc
import importlib
import pickle
import time
import warnings

import pytest
import torch
from support.conversion import assert_converts, images, without_dropout

import cuda_ops
from cuda_ops.conversion.layers import native_class

nn = torch.nn


def classifier(name, **arguments):
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torchvision.models.get_model(name, weights=None, num_classes=5, **arguments)
    return without_dropout(model).double()


# Small members of torchvision's families. (Where batches are normalised over a handful of values, rounding is
# multiplied a thousandfold at each layer: images are as large as that takes.)
RESNET = ["batch_norm_act", "conv_bn_act", "conv_bn_relu_pool"]
CLASSIFIERS = {
    "densenet": (
        lambda: small("densenet", "DenseNet", growth_rate=8, block_config=(2, 2), num_init_features=16),
        64,
        ["batch_norm_act", "conv_bn_act", "conv_bn_relu_pool", "relu"],
    ),
    "efficientnet_b0": (lambda: classifier("efficientnet_b0"), 96, ["conv_bn_act"]),
    "mnasnet0_5": (lambda: classifier("mnasnet0_5"), 96, ["conv_bn_act"]),
    "mobilenet_v3_small": (lambda: classifier("mobilenet_v3_small"), 96, ["conv_bn_act"]),
    "resnet18": (lambda: small("resnet", "ResNet", "BasicBlock", [1, 1, 1, 1]), 64, RESNET),
    "resnext": (
        lambda: small("resnet", "ResNet", "Bottleneck", [1, 1], groups=4, width_per_group=4),
        64,
        RESNET,
    ),
    "shufflenet_v2_x0_5": (lambda: classifier("shufflenet_v2_x0_5"), 96, ["conv_bn_act", "interleave"]),
    "squeezenet1_1": (lambda: classifier("squeezenet1_1"), 64, []),
    "vgg11_bn": (lambda: small_vgg(), 32, ["conv_bn_act", "conv_bn_relu_pool", "linear_relu"]),
    "convnext": (lambda: small_convnext(), 32, ["linear_gelu"]),
    "swin_t": (lambda: small_swin(), 32, ["linear_gelu", "add_layer_norm"]),
    "vit": (lambda: small_vit(), 32, ["linear_gelu", "add_layer_norm"]),
    "googlenet": (lambda: inception_block(), 32, ["conv_bn_act"]),
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
    model = torch.nn.Sequential(densenet._DenseLayer(8, 4, 2, drop_rate=0.5)).double().eval()
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


def test_attention_of_a_vit_is_ours(monkeypatch):
    calls = []
    module = importlib.import_module("cuda_ops.ops.multihead_attention")
    attention = module.scaled_dot_product_attention
    monkeypatch.setattr(module, "scaled_dot_product_attention", lambda *a: calls.append(a) or attention(*a))
    model = small_vit()
    cuda_ops.convert(model)
    model(images(2, 32)).sum().backward()
    assert len(calls) == 2


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
