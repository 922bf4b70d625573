"""cuda_ops.convert: what is fused in traced forwards and Sequential, and what must not be traced."""

import copy
import functools
import operator
import pickle

import pytest
import torch
from support.conversion import FUSED, Branching, assert_converts, classes, count_calls, images, net, small_images

import cuda_ops
from cuda_ops.conversion import fusing

nn = torch.nn
F = torch.nn.functional


def test_a_traced_forward_is_fused():
    report = assert_converts(net(), small_images(), FUSED)
    parts = {fusion.op: fusion.parts for fusion in report.fusions if not fusion.module}
    assert parts["conv_bn_relu_pool"] == ("conv", "norm", "relu", "pool")
    assert parts["add_layer_norm"] == ("drop", "add()", "layer_norm")


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
    for b in (torch.randn(3, 2, 4), torch.randn(4), torch.randn(3, 1, 1), torch.randn(3, 2, 4).bfloat16()):
        torch.testing.assert_close(model(a, b), native(a, b))


def test_what_is_alike():
    """Of tensors on meta too, of which autocast knows nothing."""
    x = torch.ones(2, 3)
    for place in ("cpu", "meta"):
        a = x.to(place)
        assert fusing._is_like(a, a) and fusing._are_alike(a, a) and fusing._is_sum_of_rows(a, a, None)
        assert fusing._are_alike(a, a.half()) and not fusing._is_like(a, a.half())
        for other in (a[:1], a.long(), x.to("meta" if place == "cpu" else "cpu"), 1.0):
            assert not fusing._are_alike(a, other) and not fusing._is_like(other, a)
            assert not fusing._is_sum_of_rows(a, other, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert fusing._is_like(x, x) and not fusing._is_sum_of_rows(x, x, None)
        assert fusing._is_sum_of_rows(x.to("meta"), x.to("meta"), None)


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


SCALE = 1.0


def test_what_may_be_another_in_the_next_call_is_not_traced(monkeypatch):
    """A global, a variable of the function around, or a mode of PyTorch's: none is an attribute of a module, which a
    guard would see change."""

    class OfGlobal(Residual):
        def forward(self, x):
            return self.activation(self.norm(self.conv(x))) * SCALE

    class OfClass(Residual):
        scale = 1.0

        def forward(self, x):
            return self.activation(self.norm(self.conv(x))) * OfClass.scale

    around = 1.0

    class OfFunction(Residual):
        def forward(self, x):
            return self.activation(self.norm(self.conv(x))) * around

    class OfMode(Residual):
        def forward(self, x):
            return self.activation(self.norm(self.conv(x))) * float(torch.is_grad_enabled())

    x = images(2, 8, 4)
    reasons = {OfGlobal: "it reads SCALE, which", OfClass: "it reads OfClass.scale, which"}
    reasons |= {OfFunction: "it reads around, which", OfMode: "it asks is_grad_enabled"}
    for kind, reason in reasons.items():
        ours = kind().double()
        native = copy.deepcopy(ours)
        assert reason in cuda_ops.convert(ours).untraced[""]
        monkeypatch.setitem(globals(), "SCALE", SCALE + 1)
        OfClass.scale, around = OfClass.scale + 1, around + 1
        with torch.no_grad():
            torch.testing.assert_close(ours(x), native(x))


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


class Members(nn.Module):
    """Forwards without a loop in their own code that go through members all the same, or ask for what is not there."""

    scale = 2.0

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()])
        self.named = nn.ModuleDict({"linear": nn.Linear(4, 4)})
        self.weights = nn.ParameterList([torch.ones(4)])

    def forward(self, x):
        return self.how(self, F.relu(self.layers[0](x)))


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


MEMBERS = {
    "reduce": lambda self, x: functools.reduce(lambda value, layer: layer(value), self.layers, x),
    "map": lambda self, x: sum(map(operator.methodcaller("__call__", x), self.layers)),
    "len": lambda self, x: x * len(self.layers),
    "last": lambda self, x: self.layers[-1](x),
    "slice": lambda self, x: nn.Sequential.forward(self.layers[1:], x),
    "keys": lambda self, x: x * len(self.named.keys()),
    "parameters": lambda self, x: x * len(self.weights),
    "children": lambda self, x: x * len(list(self.children())),
    "dtype": lambda self, x: x.to(next(self.parameters()).dtype),
    "getattr": lambda self, x: x * getattr(self, "gate", 3.0),
    "hasattr": lambda self, x: x * hasattr(self, "gate"),
    "class": lambda self, x: x * self.__class__.scale,
    "type": lambda self, x: x * type(self).scale,
}


def grow(model):
    model.layers.append(nn.Tanh())
    model.named["gelu"] = nn.GELU()
    model.weights.append(torch.ones(4))


@pytest.mark.parametrize(
    "change",
    [grow, lambda m: setattr(m, "gate", 0.5), lambda m: m.float(), lambda m: setattr(m, "more", nn.ReLU())],
    ids=["grow", "gate", "float", "more"],
)
@pytest.mark.parametrize("how", MEMBERS)
def test_members_and_what_was_not_there_are_asked_for_again(how, change, monkeypatch):
    torch.manual_seed(0)
    ours = Members(MEMBERS[how]).double()
    native = copy.deepcopy(ours)
    cuda_ops.convert(ours)
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(ours(x), native(x))
    for model in (ours, native):
        change(model)
    x = x.to(ours.layers[0].weight.dtype)
    torch.testing.assert_close(ours(x), native(x))
    monkeypatch.setattr(Members, "scale", 5.0)
    torch.testing.assert_close(ours(x), native(x))


class Modes(nn.Module):
    """Helpers that a decorator puts into a mode, and identities of tensors."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear, self.drop = how, nn.Linear(4, 4), nn.Dropout(0.25)

    def forward(self, x):
        return getattr(self, self.how)(F.relu(self.linear(x)), x)

    @torch.no_grad()
    def constant(self, x, input):
        return 2 * x

    @torch.inference_mode()
    def inference(self, x, input):
        return 2 * x

    @torch.autocast("cpu", torch.bfloat16)
    def lowered(self, x, input):
        return x @ x.mT

    def identity(self, x, input):
        return x * (input.grad is None)

    def dropped(self, x, input):
        if self.drop is not None:
            x = x * self.drop.p
        return x


@pytest.mark.parametrize("how", ["constant", "inference", "lowered", "identity", "dropped"])
def test_modes_of_helpers_and_what_is_gone(how):
    torch.manual_seed(0)
    ours = Modes(how)
    native = copy.deepcopy(ours)
    report = cuda_ops.convert(ours)
    assert bool(report.fusions) is (how == "dropped"), report.untraced
    x = torch.randn(3, 4)
    for drop in (ours.drop, None, nn.Identity()):
        results = []
        for model in (ours, native):
            model.drop = drop
            try:
                results.append(model(x))
            except AttributeError as error:
                results.append(str(error))
        if isinstance(results[0], str):
            assert results[0] == results[1]
        else:
            torch.testing.assert_close(*results)
            assert results[0].requires_grad is results[1].requires_grad
            assert results[0].is_inference() is results[1].is_inference()


def test_a_sequential_that_goes_on_after_its_layers_takes_more_of_them():
    torch.manual_seed(0)
    ours = Doubled(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    native = copy.deepcopy(ours)
    report = cuda_ops.convert(ours)
    assert [fusion.op for fusion in report.fusions] == ["linear_relu"]
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(ours(x), native(x))
    for model in (ours, native):
        model.append(nn.Tanh())
    torch.testing.assert_close(ours(x), native(x))


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


@pytest.mark.parametrize("when", ["before", "after"])
def test_layers_that_were_compiled_by_themselves_are_called(when, monkeypatch):
    """`layer.compile()` is a call of the layer's that a fused op would leave out."""
    ours, called = net(), []
    native = copy.deepcopy(ours)
    layers = {name: layer for name, layer in ours.named_modules() if not layer._modules}
    if when == "after":
        cuda_ops.convert(ours)
    for name, layer in layers.items():
        layer.compile(backend="eager")
        compiled = layer._compiled_call_impl
        layer._compiled_call_impl = lambda *args, name=name, compiled=compiled: called.append(name) or compiled(*args)
    if when == "before":
        cuda_ops.convert(ours)
    (x,) = small_images()
    torch.testing.assert_close(ours(x), native(x))
    assert set(called) == set(layers)
    for layer in layers.values():
        layer._compiled_call_impl = None
    calls = count_calls(monkeypatch, "linear_relu")
    ours(x)
    assert len(calls) == 2


RUNS = ["conv_bn_relu_pool", "linear_gelu", "add_layer_norm", "batch_norm_act", "conv_bn_act"]


@pytest.mark.parametrize("run", RUNS)
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
        "batch_norm_act": lambda: nn.Sequential(nn.BatchNorm2d(1), nn.SiLU()),
        "conv_bn_act": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.SiLU()),
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


class Halved(torch.Tensor):
    """A weight as torchao's quantized ones are: what a layer's function makes of it, it says itself."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not F.linear:
            return super().__torch_function__(function, types, args, kwargs)
        input, weight, *bias = [tensor.as_subclass(torch.Tensor) for tensor in args]
        return F.linear(input, weight / 2, *bias)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, input):
        return self.second(F.relu(self.first(input)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.GELU()),
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh()),
        Pair,
    ],
    ids=["fused", "one by one", "traced"],
)
def test_weights_of_a_class_of_their_own_say_what_a_product_is(make):
    torch.manual_seed(0)
    model, x = make(), torch.randn(3, 4)
    native = copy.deepcopy(model)
    cuda_ops.convert(model)
    for each in (model, native):
        for linear in each.modules():
            if isinstance(linear, nn.Linear):
                linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Halved), requires_grad=False)
    torch.testing.assert_close(model(x), native(x))


class PostNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout, self.norm = nn.Dropout(0.5), nn.LayerNorm(16)

    def forward(self, x, y):
        return self.norm(x + self.dropout(y))


def test_a_dropout_that_is_replaced():
    model = PostNorm().eval()
    x, y = torch.randn(2, 3, 16)
    expected = model(x, y)
    cuda_ops.convert(model)
    model.dropout = nn.Identity()
    torch.testing.assert_close(model(x, y), expected)


def test_converted_layers_run_on_meta():
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU())
    cuda_ops.convert(model)
    cuda_ops.convert(post := PostNorm())
    x = torch.empty(3, 16, device="meta")
    assert model.to("meta")(x).shape == post.to("meta")(x, x).shape == (3, 16)


class WritesBetween(nn.Module):
    """What the first convolution reads is written to before its norm is."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.norm1, self.relu, self.relu6 = nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.ReLU6()

    def forward(self, x):
        y = self.conv1(x)
        z = self.conv2(self.relu(x))
        return self.relu6(self.norm1(y)) + self.norm1(self.conv1(z)) + z


@pytest.mark.parametrize("training", [False, True])
def test_a_run_reads_what_its_first_layer_read(training):
    native = WritesBetween().train(training)
    model = copy.deepcopy(native)
    assert len(cuda_ops.convert(model).fusions) == 2
    x = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(x.clone()), native(x.clone()))


@pytest.mark.parametrize("channels", [fusing.MOST_BLOCK_CHANNELS, fusing.MOST_BLOCK_CHANNELS + 1])
def test_on_the_cpu_a_block_of_many_channels_is_made_by_its_layers(channels, monkeypatch):
    calls = []
    block = fusing.conv_bn_relu_pool_modules
    monkeypatch.setattr(fusing, "conv_bn_relu_pool_modules", lambda *a: calls.append(a) or block(*a))
    layers = torch.nn.Conv2d(channels, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    theirs = torch.nn.Sequential(*layers).double()
    ours = copy.deepcopy(theirs)
    cuda_ops.convert(ours)
    x = torch.randn(2, channels, 8, 8, dtype=torch.float64)
    y, expected = ours(x), theirs(x)
    assert len(calls) == (channels <= fusing.MOST_BLOCK_CHANNELS)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    torch.testing.assert_close(ours[1].running_var, theirs[1].running_var)


def test_classes_that_hear_of_their_subclasses_hear_of_none_of_ours():
    known = []

    class Registered(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear1, self.linear2 = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.linear2(F.relu(self.linear1(x)))

        def __init_subclass__(cls, *, of):
            super().__init_subclass__()
            known.append((cls.__name__, of))

    class Model(Registered, of="users"):
        pass

    ours, x = Model(), torch.randn(3, 4)
    expected = ours(x)
    assert cuda_ops.convert(ours).fusions
    assert type(ours) is not Model and isinstance(ours, Model)
    torch.testing.assert_close(ours(x), expected)
    assert type(copy.deepcopy(ours)) is type(ours)
    cuda_ops.revert(ours)
    assert type(ours) is Model
    assert known == [("Model", "users")]


def into_a_view(self, x):
    y = self.conv(x)
    y.view(-1)[:].add_(0.0)
    z = y.flatten(1)
    z += 1.0
    return F.relu(self.norm(y))


def into_the_input(self, x):
    y = F.relu(self.norm(self.conv(x)))
    x *= 2.0
    return y + x


def into_what_is_read_again(self, x):
    y = self.conv(x)
    z = y
    z -= x
    return F.relu(self.norm(y)) + z


def into_another_dtype(self, x):
    y = self.conv(x).to(torch.bfloat16)
    y += x
    return y, F.relu(self.norm(self.conv(x)))


def between_sequences(self, x):
    x = x * 1.0
    y = self.first(x)
    x += 1.0
    return F.relu(self.norm(self.second(y))), x


@pytest.mark.parametrize(
    "forward",
    [into_a_view, into_the_input, into_what_is_read_again, into_another_dtype, between_sequences],
    ids=lambda forward: forward.__name__,
)
def test_what_is_written_in_place_is_seen_by_all(forward):
    """torch.fx takes `x += y` for `x = x + y`."""

    def init(self):
        nn.Module.__init__(self)
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.first, self.second = (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2))

    ours = type("Model", (nn.Module,), {"__init__": init, "forward": forward})()
    native = copy.deepcopy(ours)
    assert cuda_ops.convert(ours).fusions
    inputs = [torch.linspace(-1, 1, 54).view(2, 3, 3, 3) for _ in range(2)]
    with torch.no_grad():
        outputs = [model(x) for model, x in zip((ours, native), inputs, strict=True)]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*inputs)


def test_statistics_of_a_norm_that_is_called_twice_go_by_the_order_of_its_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2, self.norm = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            y, z = self.conv1(x), self.conv2(x)
            return F.relu(self.norm(z)) + F.relu(self.norm(y)), self.norm(x)

    ours = Twice().double()
    native = copy.deepcopy(ours)
    assert cuda_ops.convert(ours).fusions
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(ours(x), native(x))
    torch.testing.assert_close(ours.state_dict(), native.state_dict())
