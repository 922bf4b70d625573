"""MnistStep: whole training steps in one kernel, against the same steps by PyTorch in float64 and under autocast."""

import pytest
import torch

import cuda_ops
from cuda_ops.data import Batches
from cuda_ops.data.mnist import MEAN, STD
from cuda_ops.models import MnistCNN
from cuda_ops.training import GraphedStep, MnistStep

COUNT = 600
needs_kernel = pytest.mark.skipif(MnistStep.why_not("cuda") is not None, reason=f"{MnistStep.why_not('cuda')}")


@pytest.fixture(scope="module")
def data():
    """Images of ten kinds, with noise, as bytes."""
    torch.manual_seed(0)
    labels = torch.randint(10, (COUNT,))
    kinds = torch.rand(10, 1, 10, 10)
    images = torch.nn.functional.interpolate(
        kinds[labels] + 0.5 * torch.rand(COUNT, 1, 10, 10), size=28, mode="bicubic"
    )
    images = ((images - 0.4) * 255).clamp(0, 255).to(torch.uint8)
    return (images.cuda(), labels.cuda()) if torch.cuda.is_available() else (images, labels)


def fresh(backend="fused"):
    torch.manual_seed(1)
    model = MnistCNN(backend).cuda()
    with torch.no_grad():
        for norm in (model.norm1, model.norm2):
            norm.weight.uniform_(-1.5, 1.5)
            norm.bias.uniform_(-0.3, 0.3)
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
    return model


def step_of(model, data, lr=0.1, **options):
    return MnistStep(model, cuda_ops.optim.SGD(model.parameters(), lr=lr), *data, **options)


def reference(data, indices, dtype, label_smoothing, autocast=False):
    model = fresh("native").to(dtype)
    images = (data[0][indices].to(dtype) / 255 - MEAN) / STD
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model.loss(images, data[1][indices], label_smoothing)
    loss.backward()
    return model, loss.item()


def error(result, expected):
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


@needs_kernel
@pytest.mark.parametrize("batch", [1, 63, 64, 65, 130, 192, 256, 257, 300, 385, 512, 777, 1024])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_gradients(data, batch, label_smoothing, monkeypatch):
    """What a step subtracts is about as near to float64's gradient as autocast's is: rounding decides which is the
    largest of nearly equal values, on both sides."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    indices = torch.randint(COUNT, (batch,), device="cuda")
    exact, loss = reference(data, indices, torch.float64, label_smoothing)
    half, _ = reference(data, indices, torch.float32, label_smoothing, autocast=True)
    model = fresh()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = [
        {"params": [*model.linear1.parameters(), *model.linear2.parameters()], "lr": 0.25},
        {"params": [p for name, p in model.named_parameters() if "linear" not in name], "lr": 0.5},
    ]
    step = MnistStep(model, cuda_ops.optim.SGD(groups, lr=1.0), *data, label_smoothing=label_smoothing)
    assert abs(step(indices).item() - loss) < 2e-3
    halves = dict(half.named_parameters())
    for name, wanted in exact.named_parameters():
        change = (before[name] - dict(model.named_parameters())[name]) / (0.25 if "linear" in name else 0.5)
        if name in MnistCNN.zero_gradients:
            assert not change.any()
        else:
            assert error(change, wanted.grad) <= 2 * error(halves[name].grad, wanted.grad) + 0.01, name
    for name, wanted in exact.named_buffers():
        assert error(dict(model.named_buffers())[name], wanted) < 1e-3, name


@needs_kernel
def test_follows_the_fused_step(data):
    """The losses of a training are those of GraphedStep with the fused ops, to bfloat16's rounding."""
    indices = torch.randint(COUNT, (40, 64), device="cuda")
    one, many = fresh(), fresh()
    batches = Batches(*data, "cuda", torch.bfloat16, keep_on_device=True)
    graphed = GraphedStep(
        many,
        many.loss,
        cuda_ops.optim.SGD(many.parameters(), lr=0.02),
        source=batches.gather,
        autocast=torch.bfloat16,
    )
    losses, expected = step_of(one, data, lr=0.02)(indices), graphed.run(indices)
    assert (losses - expected).abs().max() < 0.1 * expected.max()
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()


@needs_kernel
@pytest.mark.parametrize("batch", [64, 200, 300, 1000])
def test_same_bits(data, batch):
    """Again, and with the steps distributed over calls and graphs in other ways."""
    indices = torch.randint(COUNT, (6, batch), device="cuda")
    found = []
    for cut in ([6], [6], [1] * 6, [2, 4]):
        model = fresh()
        step = step_of(model, data)
        losses = torch.cat([step(part) for part in indices.split(cut)])
        found.append([losses, *(value.clone() for value in model.state_dict().values())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@needs_kernel
def test_in_a_graph(data):
    model, other = fresh(), fresh()
    step, buffer = step_of(model, data), torch.randint(COUNT, (3, 64), device="cuda")
    step(buffer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses = step(buffer)
    buffer.copy_(torch.randint(COUNT, (3, 64), device="cuda"))
    plain = step_of(other, data)
    other.load_state_dict(model.state_dict())
    graph.replay()
    assert torch.equal(losses, plain(buffer))


@needs_kernel
def test_learning_rates(data):
    indices = torch.randint(COUNT, (3, 64), device="cuda")

    def trained(lr, optimizer_lr=0.1):
        model = fresh()
        step_of(model, data, lr=optimizer_lr)(indices, lr)
        return model.linear1.weight.detach()

    expected = trained(0.1)
    assert torch.equal(trained(None), expected)
    assert torch.equal(trained(None, torch.tensor(0.1, device="cuda")), expected)
    for lr in (torch.tensor(0.1), torch.full((3,), 0.1), torch.full((3, 1), 0.1), torch.full((1,), 0.1)):
        assert torch.equal(trained(lr.cuda()), expected)
    assert not torch.equal(trained(torch.tensor([0.1, 0.1, 0.2])), expected)
    with pytest.raises(ValueError, match="3 steps"):
        trained(torch.ones(4))


@needs_kernel
def test_backward_through_older_values_is_refused(data):
    model = fresh()
    loss = model.loss(torch.randn(2, 1, 28, 28, device="cuda"), torch.tensor([1, 2], device="cuda"))
    step_of(model, data)(torch.arange(64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_kernel
def test_bad_index(data, monkeypatch):
    monkeypatch.setenv("CUDA_OPS_CHECK_INDICES", "1")
    indices = torch.arange(64)
    indices[7] = COUNT
    with pytest.raises(IndexError, match=f"{COUNT}.*indices|indices.*{COUNT}"):
        step_of(fresh(), data)(indices)


@needs_kernel
def test_refused(data):
    model = fresh()
    for options in ({"momentum": 0.9}, {"weight_decay": 0.1}, {"maximize": True}):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            MnistStep(model, cuda_ops.optim.SGD(model.parameters(), lr=0.1, **options), *data)
    with pytest.raises(NotImplementedError, match="AdamW"):
        MnistStep(model, torch.optim.AdamW(model.parameters()), *data)
    with pytest.raises(ValueError, match="one parameter group"):
        MnistStep(model, cuda_ops.optim.SGD(model.linear1.parameters(), lr=0.1), *data)
    with pytest.raises(ValueError, match="label_smoothing"):
        step_of(model, data, label_smoothing=1.5)
    step = step_of(model, data)
    with pytest.raises(NotImplementedError, match="batches of 1025"):
        step(torch.zeros(1025, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="batches of 0"):
        step(torch.zeros(2, 0, dtype=torch.int64))
    assert step(torch.zeros(0, 64, dtype=torch.int64)).shape == (0,)
    model.eval()
    with pytest.raises(NotImplementedError, match="evaluation mode"):
        step(torch.arange(64))
    model.train().double()
    with pytest.raises(RuntimeError, match=r"conv1\.weight to be float"):
        step(torch.arange(64))
    with pytest.raises(RuntimeError, match="images"):
        step_of(fresh(), (data[0][:, :, :27], data[1]))(torch.arange(64))


def test_says_why_not(data):
    model = MnistCNN("fused")
    assert "CUDA alone" in MnistStep.why_not("cpu")
    with pytest.raises(NotImplementedError, match="CUDA alone"):
        MnistStep(model, cuda_ops.optim.SGD(model.parameters(), lr=0.1), *(tensor.cpu() for tensor in data))
    with pytest.raises(TypeError, match="MnistCNN"):
        MnistStep(torch.nn.Linear(2, 2), None, *data)
