"""What tests of cuda_ops.convert share: whether a model computes what it did, and a network with all fusions."""

import copy

import torch

import cuda_ops

nn = torch.nn
F = torch.nn.functional


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


def count_calls(monkeypatch, name):
    """How often cuda_ops.functional.<name> is called by fused forwards."""
    calls, function = [], getattr(cuda_ops.functional, name)
    monkeypatch.setattr(cuda_ops.functional, name, lambda *a, **k: calls.append(name) or function(*a, **k))
    return calls


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
