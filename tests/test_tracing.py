"""What torch.jit and torch.fx make of our layers and functions."""

import inspect

import pytest
import torch

import cuda_ops

F, nn = cuda_ops.functional, cuda_ops.nn
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


def layers(module=torch.nn):
    return torch.nn.Sequential(
        module.Conv2d(1, 4, 3),
        module.BatchNorm2d(4),
        module.ReLU(),
        module.MaxPool2d(2),
        torch.nn.Flatten(),
        module.Linear(36, 10),
        module.Softmax(-1),
    )


def converted():
    model = layers()
    cuda_ops.convert(model)
    return model


@pytest.mark.parametrize("make", [converted, lambda: layers(nn)], ids=["converted", "ours"])
@pytest.mark.parametrize("training", [False, True])
def test_jit_trace_with_its_checks(make, training, tmp_path):
    """Its check traces again, without gradients; fused and not they are the same graph."""
    model, images = make().train(training), torch.randn(3, 1, 8, 8)
    traced = torch.jit.trace(model, images)
    expected = model(images)
    torch.testing.assert_close(traced(images), expected)
    traced.save(tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt")
    torch.testing.assert_close(loaded(images), expected)
    loaded(images).square().sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


@pytest.mark.parametrize("make", [converted, lambda: layers(nn)], ids=["converted", "ours"])
def test_jit_script_is_refused_with_the_layers_name(make):
    with pytest.raises(
        NotImplementedError, match=r"^cuda_ops\.nn\.Conv2d: torch\.jit\.script is not supported, .*revert"
    ):
        torch.jit.script(make())


def test_a_reverted_model_is_scripted():
    model, images = converted().eval(), torch.randn(3, 1, 8, 8)
    cuda_ops.revert(model)
    torch.testing.assert_close(torch.jit.script(model)(images), model(images))


def test_fx_sees_converted_layers_as_leaves():
    model, images = converted().eval(), torch.randn(3, 1, 8, 8)
    traced = torch.fx.symbolic_trace(model)
    # Flatten too, which is PyTorch's.
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == list("0123456")
    assert isinstance(traced.get_submodule("0"), nn.Conv2d)
    assert torch.equal(traced(images), torch.nn.Sequential(*model)(images))
    embedding = torch.nn.Sequential(torch.nn.Embedding(5, 3))
    cuda_ops.convert(embedding)
    assert torch.equal(torch.fx.symbolic_trace(embedding)(torch.tensor([2])), embedding[0].weight[2:3])


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "densenet121", "shufflenet_v2_x0_5", "swin_t"])
@pytest.mark.parametrize("training", [False, True])
def test_fx_traces_converted_models_of_torchvision(name, training):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = getattr(models, name)(num_classes=3, weights=None).train(training)
    signature, modules = inspect.signature(model.forward), dict(model.named_modules())
    cuda_ops.convert(model)
    traced = torch.fx.symbolic_trace(model)  # a layer is a leaf, whatever stands for several of them at a call
    assert inspect.signature(model.forward) == signature
    assert {node.target for node in traced.graph.nodes if node.op == "call_module"} <= set(modules)
    if not training:  # where rows are dropped
        images = torch.randn(1, 3, 64, 64)
        with torch.no_grad():
            torch.testing.assert_close(traced(images), model(images), rtol=1e-4, atol=1e-4)


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.weight = nn.Linear(8, 8), torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        x = F.linear_relu(self.linear(x), self.weight, bias=None)
        return F.softmax(F.matmul(F.gelu(x), self.weight) + F.layer_norm(x, (8,), self.weight[0]), dim=-1)


def test_fx_sees_functions_as_their_ops():
    model, x = Mixed(), torch.randn(4, 8)
    traced = torch.fx.symbolic_trace(model)
    names = [node.target.name() for node in traced.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert names[:3] == ["cuda_ops::linear_forward", "cuda_ops::linear_relu_forward", "cuda_ops::gelu_forward"]
    torch.testing.assert_close(traced(x), model(x))
    expected = torch.autograd.grad(model(x).square().sum(), model.weight)
    torch.testing.assert_close(torch.autograd.grad(traced(x).square().sum(), traced.weight), expected)
