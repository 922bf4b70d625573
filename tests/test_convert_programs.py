"""cuda_ops.convert of forwards that nobody wrote: statements drawn at random, of which many write in place and read
what others have written. What is computed, and what is in the input afterwards, is what it was."""

import copy
import linecache
import random

import pytest
import torch

import cuda_ops

nn = torch.nn
F = torch.nn.functional

# ReLU6 and Hardtanh are not among them: they save their output, which must not be written into (convert's docstring).
LAYERS_OF_ROWS = [
    "nn.Linear(6, 6)",
    "nn.Linear(6, 6)",
    "nn.LayerNorm(6)",
    "nn.LayerNorm(6, elementwise_affine=False)",
    "nn.RMSNorm(6)",
    "nn.ReLU()",
    "nn.ReLU(inplace=True)",
    "nn.GELU()",
    "nn.GELU('tanh')",
    "nn.SiLU()",
    "nn.SiLU(inplace=True)",
    "nn.Tanh()",
    "nn.Dropout(0.0)",
    "nn.Dropout(0.0, inplace=True)",
    "nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 6))",
]
LAYERS_OF_IMAGES = [
    "nn.Conv2d(4, 4, 3, padding=1)",
    "nn.Conv2d(4, 4, 3, padding=1, bias=False)",
    "nn.Conv2d(4, 4, 1, groups=2)",
    "nn.BatchNorm2d(4)",
    "nn.BatchNorm2d(4)",
    "nn.GroupNorm(2, 4)",
    "nn.ReLU()",
    "nn.ReLU(inplace=True)",
    "nn.SiLU(inplace=True)",
    "nn.Hardswish()",
    "nn.Sigmoid()",
    "nn.MaxPool2d(3, 1, 1)",
    "nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))",
]
# {}: names of values that are there, and {scale}: a parameter, {layer}: another layer.
STATEMENTS = [
    "{new} = {a} + {b}",
    "{new} = {a} + {b}",
    "{new} = {a} * {b}",
    "{new} = torch.mul({a}, 0.5)",
    "{new} = F.relu({a})",
    "{new} = {a}.relu()",
    "{new} = F.silu({a}) * {b}",
    "{new} = {a}.view({a}.shape)",
    "{new} = {scale} * {layer}({a}) + {b}",
    "{new} = {scale} * {layer}({a})\n        {new} += {b}",
    "{a} += {b}",
    "{a} += 1.0",
    "{a} -= {b}",
    "{a} *= 0.5",
    "{a}.add_({b})",
    "{a}.relu_()",
    "F.relu({a}, True)",
    "torch.relu_({a})",
]


def program(draw: random.Random, of_images: bool) -> str:
    """A class of a module, as text."""
    members, body, values, called = [], [], ["x"], []

    def member(text):
        members.append(f"        self.m{len(members)} = {text}")
        return f"self.m{len(members) - 1}"

    def layer():
        return member(draw.choice(LAYERS_OF_IMAGES if of_images else LAYERS_OF_ROWS))

    for number in range(draw.randint(3, 11)):
        new, a, b = f"v{number}", draw.choice(values[-3:]), draw.choice(values)
        if draw.random() < 0.5:
            if not called or draw.random() < 0.85:
                called.append(layer())
                name = called[-1]
            else:
                name = draw.choice(called)
            body.append(f"{new} = {name}({a})")
        else:
            statement = draw.choice(STATEMENTS)
            scale = (
                member(f"nn.Parameter(torch.rand({'4, 1, 1' if of_images else '6'}))") if "scale" in statement else ""
            )
            more = layer() if "{layer}" in statement else ""
            body.append(statement.format(new=new, a=a, b=b, scale=scale, layer=more))
        if body[-1].startswith(f"{new} ="):
            values.append(new)
    if draw.random() < 0.8:
        body.insert(0, "x = x * 1")
    lines = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()", *members]
    lines += ["    def forward(self, x):", *(f"        {line}" for line in body)]
    return "\n".join([*lines, f"        return {values[-1]}, {draw.choice(values)}", ""])


def run(model, x, grad):
    """Outputs, gradients or what is in the input afterwards, and buffers."""
    x = x.clone().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        outputs = model(x)
    results = [output.detach().clone() for output in outputs]
    if grad:
        weights = [torch.linspace(0.1, 1, o.numel(), dtype=o.dtype).view(o.shape) for o in outputs]
        loss = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
        grads = torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True)
        results += [torch.zeros(()) if g is None or not g.any() else g for g in grads]
    return [*results, x.detach(), *(buffer.clone() for buffer in model.buffers())]


@pytest.mark.parametrize("of_images", [False, True], ids=["rows", "images"])
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_forwards(of_images, first):
    fused = 0
    for seed in range(first, first + 20):
        text = program(random.Random(f"{of_images} {seed}"), of_images)
        file = f"<program {of_images} {seed}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        space = {"nn": nn, "torch": torch, "F": F, "__name__": __name__}
        exec(compile(text, file, "exec"), space)
        torch.manual_seed(seed)
        native, x = space["Net"]().double(), torch.randn((2, 4, 5, 6) if of_images else (4, 6), dtype=torch.float64)
        ours = copy.deepcopy(native)
        fused += len(cuda_ops.convert(ours).fusions)
        for training in (True, False):
            native.train(training)
            ours.train(training)
            for grad in (True, False):
                try:
                    expected = run(native, x, grad)
                except RuntimeError:  # what is needed for gradients has been written into
                    if training:  # and its statistics have been brought up to date meanwhile
                        ours.load_state_dict(native.state_dict())
                    continue
                found = run(ours, x, grad)
                for one, other in zip(found, expected, strict=True):
                    assert torch.allclose(one, other, rtol=1e-6, atol=1e-7 * max(1.0, other.abs().max().item())), text
    assert fused > 10
