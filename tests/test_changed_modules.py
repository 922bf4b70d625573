"""Fused modules read the parameters of modules that they do not call. What these have become since (by hooks, pruning,
parametrizations, other modules in their place) counts as in the same layers of PyTorch, called one after the other."""

import copy

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune

import cuda_ops
from cuda_ops.models import MnistCNN
from cuda_ops.ops.conv_bn_relu_pool import are_fusable
from cuda_ops.training import MnistStep
from cuda_ops.training.mnist.step import unlike_the_kernel

pytestmark = pytest.mark.filterwarnings("ignore:.*(spectral|weight)_norm.* is deprecated:FutureWarning")
F = torch.nn.functional


class Scale(torch.nn.Module):
    def forward(self, weight):
        return 1.5 * weight


def scaled_backwards(module, grad_input, grad_output):
    return tuple(None if grad is None else 2 * grad for grad in grad_input)


def give_another_forward(module):
    forward = module.forward
    module.forward = lambda *args: 2 * forward(*args) - 0.1


def make_a_subclass(module):
    class Another(type(module)):
        def forward(self, *args):
            return 2 * super().forward(*args) + 0.1

    module.__class__ = Another


def norm_by_weights(module):
    torch.nn.utils.weight_norm(module)
    with torch.no_grad():
        module.weight_g *= 2


# What can be done to a module: with parameters, and to any.
OF_WEIGHT = {
    "parametrization": lambda m: parametrize.register_parametrization(m, "weight", Scale()),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m, n_power_iterations=3),
    "old spectral_norm": lambda m: torch.nn.utils.spectral_norm(m, n_power_iterations=3),
    "old weight_norm": norm_by_weights,
    "prune": lambda m: prune.l1_unstructured(m, "weight", 0.5),
}
OF_ANY = {
    "forward hook": lambda m: m.register_forward_hook(lambda module, args, output: 0.5 * output),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:])),
    "backward hook": lambda m: m.register_full_backward_hook(scaled_backwards),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda module, grads: (3 * grads[0],)),
    "forward set on it": give_another_forward,
    "subclass": make_a_subclass,
}


class Block(torch.nn.Module):
    """ConvBNReLUMaxPool2d by PyTorch's layers, with its names of submodules."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)

    def forward(self, input):
        return F.max_pool2d(F.relu(self.norm(self.conv(input))), 2)


class LinearReLU(torch.nn.Linear):
    def forward(self, input):
        return F.relu(F.linear(input, self.weight, self.bias))


class LinearGELU(torch.nn.Linear):
    def forward(self, input):
        return F.gelu(F.linear(input, self.weight, self.bias))


class LinearCrossEntropyLoss(torch.nn.Linear):
    def forward(self, input, target):
        return F.cross_entropy(F.linear(input, self.weight, self.bias), target)


MODULES = {
    "ConvBNReLUMaxPool2d": (lambda: cuda_ops.nn.ConvBNReLUMaxPool2d(3, 8, 3, padding=1), Block),
    "LinearReLU": (lambda: cuda_ops.nn.LinearReLU(6, 5), lambda: LinearReLU(6, 5)),
    "LinearGELU": (lambda: cuda_ops.nn.LinearGELU(6, 5), lambda: LinearGELU(6, 5)),
    "LinearCrossEntropyLoss": (
        lambda: cuda_ops.nn.LinearCrossEntropyLoss(6, 5),
        lambda: LinearCrossEntropyLoss(6, 5),
    ),
    "MnistCNN": (lambda: MnistCNN("fused"), lambda: MnistCNN("native")),
}
SUBMODULES = {"ConvBNReLUMaxPool2d": ["conv", "norm"], "MnistCNN": ["conv1", "norm2", "relu", "pool", "linear1"]}
SUBMODULES["MnistCNN"] += ["linear2"]


def pair(name, device="cpu"):
    """Ours and PyTorch's in float64, with the same parameters."""
    torch.manual_seed(0)
    ours, native = (make().to(device, torch.float64) for make in MODULES[name])
    native.load_state_dict(ours.state_dict())
    return ours, native


def arguments(name, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    shape = {"ConvBNReLUMaxPool2d": (4, 3, 8, 8), "MnistCNN": (3, 1, 28, 28)}.get(name, (4, 6))
    input = (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.4).to(device).requires_grad_()
    labels = {"LinearCrossEntropyLoss": [0, 3, 4, 1], "MnistCNN": [3, 9, 0]}.get(name)
    return (input,) if labels is None else (input, torch.tensor(labels, device=device))


def run(module, args):
    """Two steps' outputs, gradients and what is kept; then the same in evaluation."""
    found = []
    for training in (True, True, False):
        module.train(training)
        output = module(*args)
        loss = (output * torch.linspace(-1, 2, output.numel(), device=output.device).view_as(output)).sum()
        tensors = [args[0], *module.parameters()]
        found += [output, *torch.autograd.grad(loss, tensors)]
    return found + list(module.buffers())


def assert_same(ours, native, args):
    torch.testing.assert_close(run(ours, args), run(native, args), rtol=1e-9, atol=1e-12)


def change_both(ours, native, submodule, change):
    for module in (ours, native):
        torch.manual_seed(2)
        change(module.get_submodule(submodule))


# Of the many layers of MnistCNN, which asks them as the block asks its two, each is changed in two ways.
CASES = [("MnistCNN", s, change) for s in SUBMODULES["MnistCNN"] for change in ("forward hook", "subclass")]
CASES += [
    (name, submodule, change)
    for name in list(MODULES)[:-1]
    for submodule in SUBMODULES.get(name, [""])
    for change in {**OF_ANY, **OF_WEIGHT}
    if not (submodule == "norm" and "_norm" in change)
]


@pytest.mark.parametrize("name, submodule, change", CASES)
def test_a_changed_submodule_counts(name, submodule, change, device):
    ours, native = pair(name, device)
    args = arguments(name, device)
    before = copy.deepcopy(ours)
    change_both(ours, native, submodule, {**OF_ANY, **OF_WEIGHT}[change])
    assert_same(ours, native, args)
    # What has changed is no matter of rounding.
    found, unchanged = run(ours, args)[:2], run(before, args)[:2]
    assert not all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(found, unchanged, strict=True))


REPLACEMENTS = {
    "conv": {
        "reflecting padding": lambda: torch.nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        "other options": lambda: torch.nn.Conv2d(3, 8, 3, stride=2, padding=2, dilation=2, bias=False),
        "ours": lambda: cuda_ops.nn.Conv2d(3, 8, 3, padding=1),
    },
    "norm": {
        "SyncBatchNorm": lambda: torch.nn.SyncBatchNorm(8),
        "GroupNorm": lambda: torch.nn.GroupNorm(2, 8),
        "InstanceNorm2d": lambda: torch.nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        "Identity": lambda: torch.nn.Identity(),
        "other options": lambda: torch.nn.BatchNorm2d(8, eps=0.1, momentum=None, affine=False),
        "ours": lambda: cuda_ops.nn.BatchNorm2d(8, track_running_stats=False),
    },
}


@pytest.mark.parametrize("submodule, replacement", [(s, r) for s in REPLACEMENTS for r in REPLACEMENTS[s]])
def test_a_block_takes_other_layers(submodule, replacement, device):
    ours, native = pair("ConvBNReLUMaxPool2d", device)
    new = REPLACEMENTS[submodule][replacement]().to(device, torch.float64)
    for module in (ours, native):
        setattr(module, submodule, copy.deepcopy(new))
    assert_same(ours, native, arguments("ConvBNReLUMaxPool2d", device))
    assert are_fusable(ours.conv, ours.norm) == (replacement in ("ours", "other options"))


@pytest.mark.parametrize(
    "submodule, new",
    [
        ("pool", torch.nn.MaxPool2d(3, 2, 1)),
        ("pool", torch.nn.MaxPool2d(1, 2, dilation=2)),
        ("pool", torch.nn.AvgPool2d(2)),
        ("relu", torch.nn.GELU()),
        ("conv1", torch.nn.Conv2d(1, 32, 5, padding=2, padding_mode="circular")),
        ("norm1", torch.nn.GroupNorm(4, 32)),
        ("linear2", torch.nn.Sequential(torch.nn.Linear(128, 20), torch.nn.Linear(20, 10))),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("with_labels", [False, True])
def test_a_model_takes_other_layers(submodule, new, with_labels, device):
    ours, native = pair("MnistCNN", device)
    for model in (ours, native):
        setattr(model, submodule, copy.deepcopy(new).to(device, torch.float64))
    assert_same(ours, native, arguments("MnistCNN", device)[: 1 + with_labels])


@pytest.mark.parametrize("channels_last", [True, False, None])
def test_the_output_keeps_its_memory_format(channels_last, device):
    block = cuda_ops.nn.ConvBNReLUMaxPool2d(3, 8, 3, channels_last=channels_last).to(device)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        images = torch.randn(2, 3, 8, 8, device=device).contiguous(memory_format=memory_format)
        fused = block(images)
        handle = block.conv.register_forward_hook(lambda *_: None)
        separate = block(images)
        handle.remove()
        assert separate.stride() == fused.stride()
        torch.testing.assert_close(separate, fused, rtol=1e-5, atol=1e-5)


def test_hooks_are_called_and_without_them_layers_are_fused_again(device):
    ours, _ = pair("ConvBNReLUMaxPool2d", device)
    (images,) = arguments("ConvBNReLUMaxPool2d", device)
    calls = []

    def step():
        calls.clear()
        with torch.profiler.profile(acc_events=True) as profile:
            ours(images).sum().backward()
        return "cuda_ops::conv_bn_relu_pool_forward" in {event.name for event in profile.events()}

    assert step()
    handles = [
        ours.conv.register_forward_pre_hook(lambda *_: calls.append("conv before")),
        ours.conv.register_forward_hook(lambda *_: calls.append("conv")),
        ours.norm.register_forward_hook(lambda *_: calls.append("norm")),
        ours.norm.register_full_backward_pre_hook(lambda *_: calls.append("norm backward before")),
        ours.norm.register_full_backward_hook(lambda *_: calls.append("norm backward")),
    ]
    assert not step()
    assert calls == ["conv before", "conv", "norm", "norm backward before", "norm backward"]
    for handle in handles:
        handle.remove()
    assert step()
    assert not calls


@pytest.mark.parametrize("name", ["ConvBNReLUMaxPool2d", "MnistCNN"])
@pytest.mark.parametrize(
    "register",
    [
        torch.nn.modules.module.register_module_forward_hook,
        torch.nn.modules.module.register_module_forward_pre_hook,
        torch.nn.modules.module.register_module_full_backward_hook,
        torch.nn.modules.module.register_module_full_backward_pre_hook,
    ],
    ids=lambda register: register.__name__,
)
def test_hooks_of_all_modules_see_the_layers(name, register):
    ours, _ = pair(name)
    seen = []
    handle = register(lambda module, *_: seen.append(module))
    try:
        ours(*arguments(name)).sum().backward()
    finally:
        handle.remove()
    assert {id(module) for module in seen} == {id(module) for module in ours.modules()}


@pytest.mark.parametrize("change", ["forward hook", "parametrization", "subclass"])
def test_a_changed_block_compiles(change):
    torch._dynamo.reset()
    ours, native = pair("ConvBNReLUMaxPool2d")
    (images,) = arguments("ConvBNReLUMaxPool2d")
    change_both(ours, native, "conv", {**OF_ANY, **OF_WEIGHT}[change])
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), native(images))


# Beside what can be done to any module: what MnistStep, which computes the whole step, leaves out.
OF_STEP = {
    "conv1 has stride=(2, 2), and the kernel computes with (1, 1)": lambda m, _: setattr(m.conv1, "stride", (2, 2)),
    "conv2 has padding_mode='reflect'": lambda m, _: setattr(m.conv2, "padding_mode", "reflect"),
    "pool has ceil_mode=True": lambda m, _: setattr(m.pool, "ceil_mode", True),
    "pool is of class torch.nn.modules.pooling.AvgPool2d, not a plain MaxPool2d": lambda m, _: setattr(
        m, "pool", torch.nn.AvgPool2d(2)
    ),
    "norm2 is of class torch.nn.modules.batchnorm.SyncBatchNorm, not a plain BatchNorm2d": lambda m, _: setattr(
        m, "norm2", torch.nn.SyncBatchNorm(64)
    ),
    "linear2 has no bias": lambda m, _: setattr(m, "linear2", torch.nn.Linear(128, 10, bias=False)),
    "norm1 has no weight": lambda m, _: setattr(m, "norm1", torch.nn.BatchNorm2d(32, affine=False)),
    "conv1.weight does not require grad": lambda m, _: m.conv1.requires_grad_(False),
    "linear1.weight has hooks": lambda m, _: m.linear1.weight.register_hook(lambda grad: 2 * grad),
    "linear1.bias has hooks": lambda m, _: m.linear1.bias.register_post_accumulate_grad_hook(lambda p: None),
    "the optimizer has hooks": lambda _, o: o.register_step_post_hook(lambda *_: None),
    "the model has hooks": lambda m, _: m.register_forward_hook(lambda *_: None),
    "the model is of class": lambda m, _: make_a_subclass(m),
}


@pytest.mark.parametrize("backend", ["fused", "native"])
def test_one_kernel_for_the_step_refuses_what_it_would_leave_out(backend):
    def refused(change):
        model = MnistCNN(backend)
        optimizer = cuda_ops.optim.SGD(model.parameters(), lr=0.1)
        assert unlike_the_kernel(model, optimizer) is None
        change(model, optimizer)
        return unlike_the_kernel(model, optimizer)

    for message, change in OF_STEP.items():
        assert refused(change).startswith(message)
    for submodule in SUBMODULES["MnistCNN"]:
        for name, change in OF_ANY.items():
            reason = refused(lambda model, _, s=submodule, change=change: change(model.get_submodule(s)))
            assert reason.startswith(f"{submodule} "), (submodule, name)
    for name, change in OF_WEIGHT.items():
        reason = refused(lambda model, _, change=change: change(model.linear1))
        assert reason.startswith("linear1 "), name


@pytest.mark.cuda
@pytest.mark.skipif(MnistStep.why_not("cuda") is not None, reason=f"{MnistStep.why_not('cuda')}")
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_kernel_for_the_step_is_refused_by_name(when):
    images = torch.zeros(100, 28, 28, dtype=torch.uint8, device="cuda")
    labels = torch.zeros(100, dtype=torch.int64, device="cuda")
    for message, change in OF_STEP.items():
        model = MnistCNN("fused").cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = MnistStep(model, optimizer, images, labels)
        change(model, optimizer)
        with pytest.raises(NotImplementedError, match="MnistStep: ") as error:
            if when == "before":
                MnistStep(model, optimizer, images, labels)
            else:
                step(torch.arange(64))
        assert str(error.value).startswith(f"MnistStep: {message}")
