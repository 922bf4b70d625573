"""batch_norm_act_forked: batch_norm_act for two readers, whose gradients backward adds up; and residual blocks behind
each other, which take it."""

import copy
import pickle

import pytest
import torch
from support.opspec import Make
from torch import nn

import cuda_ops
from cuda_ops.conversion import fusing

op = torch.ops.cuda_ops.batch_norm_act_forked.default
backward_of_two = torch.ops.cuda_ops.batch_norm_act_backward_of_two.default
F = torch.nn.functional


def inputs(device, dtype, shape=(3, 16, 5, 4), channels_last=True):
    """Input, weight, bias and residual, and running statistics."""
    make = Make(device, dtype)
    images = [make(*shape), make(*shape)]
    if channels_last:
        images = [image.contiguous(memory_format=torch.channels_last) for image in images]
    leaves = [t.requires_grad_() for t in (images[0], make(shape[1]), make(shape[1]), images[1])]
    return *leaves, make(shape[1]), make(shape[1]).square() + 0.5


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["relu", "silu", None])
@pytest.mark.parametrize("has_residual", [True, False])
def test_is_batch_norm_act(device, has_residual, activation, training, channels_last):
    """For all of what its two tensors are read for: both, the one, the other."""
    x, weight, bias, residual, mean, variance = inputs(device, torch.float64, channels_last=channels_last)
    residual = residual if has_residual else None
    leaves = [t for t in (x, weight, bias, residual) if t is not None]
    others = [(mean.clone(), variance.clone(), torch.tensor(3, device=device)) for _ in range(2)]
    output, (alias,) = op(x, weight, bias, residual, *others[0], activation, training, 0.25, 1e-3)
    expected = F.batch_norm(x, *others[1][:2], weight, bias, training, 0.25, 1e-3)
    expected = expected if residual is None else expected + residual
    expected = getattr(F, activation)(expected) if activation else expected
    torch.testing.assert_close(output, expected)
    assert output.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert alias.data_ptr() == output.data_ptr() and alias._version == output._version
    torch.testing.assert_close(others[0][:2], others[1][:2])
    assert int(others[0][2]) == 3 + training
    for readers in ([output, alias], [output], [alias]):
        grads = [torch.randn_like(expected) for _ in readers]
        actual = torch.autograd.grad(readers, leaves, grads, retain_graph=True)
        wanted = torch.autograd.grad(expected, leaves, sum(grads), retain_graph=True)
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("training", [True, False])
def test_second_derivatives(device, training):
    x, weight, bias, residual, mean, variance = inputs(device, torch.float64, (3, 2, 2, 2))

    def function(*arguments):
        output, (alias,) = op(*arguments, mean.clone(), variance.clone(), None, "silu", training, 0.1, 1e-3)
        return output, alias * 2

    assert torch.autograd.gradcheck(function, (x, weight, bias, residual))
    assert torch.autograd.gradgradcheck(function, (x, weight, bias, residual))


def test_where_no_gradient_is_recorded(device):
    x, weight, bias, residual, mean, variance = inputs(device, torch.float64)
    arguments = (mean, variance, None, "relu", False, 0.1, 1e-5)
    with torch.no_grad():
        assert op(x, weight, bias, residual, *arguments)[1] == []
    assert op(x.detach(), None, None, residual.detach(), *arguments)[1] == []
    # Those that want none have none.
    output, (alias,) = op(x.detach(), weight, None, residual, *arguments)
    (output.sum() + alias.sum()).backward()
    assert x.grad is None and weight.grad is not None and residual.grad is not None


def test_arguments_are_checked(device):
    x, weight, bias, residual, mean, variance = inputs(device, torch.float32)

    def call(x=x, weight=weight, residual=residual, mean=mean, activation="relu", eps=1e-5, training=True):
        return op(x, weight, bias, residual, mean, variance, None, activation, training, 0.1, eps)

    with pytest.raises(RuntimeError, match="residual"):
        call(residual=residual[:2])
    with pytest.raises(RuntimeError, match="weight"):
        call(weight=weight[:3])
    with pytest.raises(ValueError, match="activation"):
        call(activation="tanh")
    with pytest.raises(ValueError, match="eps"):
        call(eps=0.0)
    with pytest.raises(ValueError, match="both be None"):
        call(mean=None)
    with pytest.raises(RuntimeError, match="running statistics"):
        call(mean=mean.clone().requires_grad_())
    arguments = (residual.detach(), weight, bias, residual, mean.double(), variance.double(), True, "relu", 1e-5)
    with pytest.raises(RuntimeError, match="added"):
        backward_of_two(x.detach(), x.detach()[:2], *arguments, [True] * 4)


# Of 16-byte vectors, odd channels, contiguous planes, and one pixel more than whole rounds of a block's rows.
SHAPES = [
    ((5, 64, 9, 7), True),
    ((3, 7, 5, 4), True),
    ((4, 16, 6, 6), False),
    ((2, 8, 1, 1025), True),
    ((9, 24, 1, 1), True),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape, channels_last", SHAPES)
def test_gradients_of_the_sum_of_two(device, shape, channels_last, training, dtype):
    """Beside the same op of a sum that was made before, in float64."""
    x, weight, bias, residual, mean, variance = inputs(device, dtype, shape, channels_last)
    grads = [torch.randn_like(x.detach()) for _ in range(2)]
    if training:
        mean = x.detach().double().mean((0, 2, 3))
        variance = x.detach().double().var((0, 2, 3), correction=0)
    tensors = [t.detach() for t in (x, weight, bias, residual)]
    wide = [t.double() for t in (*grads, *tensors, mean, variance)]
    options = (training, "relu", 1e-3, [True] * 4)
    actual = backward_of_two(*grads, *tensors, mean, variance, *options)
    expected = torch.ops.cuda_ops.batch_norm_act_backward(wide[0] + wide[1], *wide[2:], *options)
    rounding = torch.finfo(dtype).eps
    for ours, reference in zip(actual, expected, strict=True):
        error = torch.linalg.vector_norm(ours.double() - reference) / torch.linalg.vector_norm(reference)
        assert error < 8 * rounding
    again = backward_of_two(*grads, *tensors, mean, variance, *options)
    assert all(map(torch.equal, actual, again))
    torch.library.opcheck(
        backward_of_two, (*grads, *tensors, mean, variance, *options), test_utils=("test_schema", "test_faketensor")
    )


def test_gradients_that_are_not_dense(device):
    x, weight, bias, residual, mean, variance = (t.detach() for t in inputs(device, torch.float32))
    many = torch.randn(3, 33, 5, 4, device=device)
    grads = many[:, 1:17], many[:, 17:]
    arguments = (x, weight, bias, residual, mean, variance, False, "relu", 1e-3, [True] * 4)
    actual = backward_of_two(*grads, *arguments)
    expected = torch.ops.cuda_ops.batch_norm_act_backward(grads[0] + grads[1], *arguments)
    torch.testing.assert_close(actual, expected)


# Blocks of models.


class Block(nn.Module):
    """A residual block that nobody has told cuda_ops of."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.act = nn.BatchNorm2d(width), nn.SiLU()
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        return self.act(self.norm2(self.second(self.act(self.norm1(self.first(x))))) + x)


class WritingBlock(Block):
    """It writes into its argument, which the sum reads afterwards."""

    def __init__(self, width):
        super().__init__(width)
        self.first = nn.ReLU6(inplace=True)


def resnet(kind="BasicBlock", depth=(2, 3), **options):
    models = pytest.importorskip("torchvision").models.resnet
    torch.manual_seed(0)
    return models.ResNet(getattr(models, kind), [*depth, 1, 2], num_classes=5, **options).double()


def batch(device, channels=3, size=32):
    torch.manual_seed(1)
    x = torch.randn(6, channels, size, size, dtype=torch.float64, device=device)
    return x.contiguous(memory_format=torch.channels_last), torch.arange(6, device=device) % 5


def loss_of(model, x, y):
    output = model(x)
    return F.cross_entropy(output if output.dim() == 2 else output.mean((2, 3)), y)


def assert_trains_alike(model, native, x, y):
    for _ in range(2):
        losses = []
        for each in (model, native):
            each.zero_grad()
            loss = loss_of(each, x, y)
            loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.sub_(parameter.grad, alpha=0.02)
        torch.testing.assert_close(*losses)
    for (name, actual), (_, expected) in zip(model.state_dict().items(), native.state_dict().items(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7, msg=name)


@pytest.fixture
def forks(monkeypatch):
    """The calls of the op in blocks."""
    calls, function = [], fusing.batch_norm_act_forked_module
    monkeypatch.setattr(fusing, "batch_norm_act_forked_module", lambda *a: calls.append(a) or function(*a))
    return calls


def converted(native, device):
    native.to(device, memory_format=torch.channels_last)
    model = copy.deepcopy(native)
    cuda_ops.convert(model)
    return model, native


def grads_of(output):
    """How many gradients go into each node of a graph that is the op's."""
    seen, counts, left = set(), {}, [output.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, number in node.next_functions:
            if following is not None and following.name() == "BatchNormActForkedBackward":
                counts.setdefault(following, []).append(number)
            left.append(following)
    return [sorted(numbers) for numbers in counts.values()]


@pytest.mark.parametrize("kind", ["BasicBlock", "Bottleneck"])
@pytest.mark.parametrize("training", [True, False])
def test_resnets_train_alike(device, kind, training, forks):
    model, native = converted(resnet(kind).train(training), device)
    x, y = batch(device)
    assert_trains_alike(model, native, x, y)
    assert len(forks) == 2 * 8
    # Each of the outputs that two read has two gradients, also at the ends of Sequentials; the last has one.
    assert sorted(grads_of(loss_of(model, x, y))) == [[0]] + [[0, 1]] * 7


def test_blocks_of_others(device, forks):
    model, native = converted(nn.Sequential(Block(4), Block(4), nn.Conv2d(4, 5, 1), Block(5)).double(), device)
    x, y = batch(device, 4)
    assert_trains_alike(model, native, x, y)
    assert len(forks) == 2 * 3


def test_blocks_that_write_into_their_input(device, forks):
    model, native = converted(nn.Sequential(Block(5), WritingBlock(5), Block(5)).double(), device)
    x, y = batch(device, 5)
    assert_trains_alike(model, native, x, y)
    assert len(forks) == 2 * 2  # not in the one that writes


@pytest.mark.parametrize("where", ["layer1.0", "layer1.1.conv1", "layer2", "layer2.0.downsample.0"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_see_what_they_saw(device, where, kind):
    """Their tensors, and the gradients of these."""
    model, native = converted(resnet(), device)
    x, y = batch(device)
    seen = []
    for each in (model, native):
        found = []

        def keep(module, *arguments, found=found):
            tensors = [t for a in arguments for t in (a if isinstance(a, tuple) else (a,)) if t is not None]
            if kind != "full_backward":
                [t.retain_grad() for t in tensors]
            found += tensors

        getattr(each.get_submodule(where), f"register_{kind}_hook")(keep)
        loss_of(each, x, y).backward()
        seen.append([(t.detach(), t.grad) for t in found])
    torch.testing.assert_close(*seen)
    assert seen[0]


def test_hooks_that_write_into_the_input_of_a_block(device):
    def write(module, args):
        args[0].mul_(1.5)

    model, native = converted(resnet(), device)
    x, _y = batch(device)
    for each in (model, native):
        each.layer1[1].conv1.register_forward_pre_hook(write)
    with torch.no_grad():
        torch.testing.assert_close(model(x), native(x))


def test_layers_that_are_put_in_the_place_of_others(device):
    model, native = converted(resnet(), device)
    x, y = batch(device)
    for each in (model, native):
        each.layer1[1].conv1 = nn.Sequential(nn.Hardtanh(0, 1), each.layer1[1].conv1)
        each.layer2[1] = nn.Identity()
    torch.testing.assert_close(model.eval()(x), native.eval()(x))
    assert_same_gradients(model, native, x, y)


def assert_same_gradients(model, native, x, y):
    for each in (model, native):
        loss_of(each, x, y).backward()
    grads = [[parameter.grad for parameter in each.parameters()] for each in (model, native)]
    torch.testing.assert_close(*grads)


def test_frozen_layers(device):
    model, native = converted(resnet(), device)
    x, y = batch(device)
    for each in (model, native):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("layer3" in name or "layer2.1.bn2" in name or "fc" in name)
        loss_of(each, x, y).backward()
    for actual, expected in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(device, use_reentrant, forks):
    model, native = converted(resnet(), device)
    x, y = batch(device)
    for each in (model, native):
        layer = each.layer2
        each.layer2 = Checkpointed(layer, use_reentrant)
    assert_same_gradients(model, native, x, y)
    assert forks


class Checkpointed(nn.Module):
    def __init__(self, layer, use_reentrant):
        super().__init__()
        self.layer, self.use_reentrant = layer, use_reentrant

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.use_reentrant)


def test_second_derivatives_of_a_model(device):
    model, native = converted(nn.Sequential(Block(5), Block(5)).double().eval(), device)
    x, y = batch(device, 5, 8)
    found = []
    for each in (model, native):
        parameters = list(each.parameters())
        grads = torch.autograd.grad(loss_of(each, x, y), parameters, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), parameters))
    torch.testing.assert_close(*found)


def test_compiled_traced_and_pickled(device, forks):
    model, native = converted(resnet().eval(), device)
    x, _y = batch(device)
    expected = native(x)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), expected)
    assert len(forks) == 8
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)
    calls = len(forks)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), expected)
    torch.testing.assert_close(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), expected)
    torch.func.jvp(model, (x,), (torch.ones_like(x),))
    torch.compile(model, backend="eager")(x)
    assert len(forks) == calls + 8 * 1  # functional_call is an ordinary call
    cuda_ops.revert(model)
    torch.testing.assert_close(model(x), expected)
