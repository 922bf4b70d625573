"""concat_batch_norm_act: batch_norm_act of a list of tensors, which it hands on; and the blocks of a DenseNet, which
take it."""

import copy

import pytest
import torch
from support.opspec import Make

import cuda_ops
from cuda_ops.conversion import fusing

op = torch.ops.cuda_ops.concat_batch_norm_act.default
F = torch.nn.functional


def inputs(device, dtype, widths=(16, 8, 24), channels_last=True):
    """Tensors, weight, bias, and running statistics of all channels."""
    make = Make(device, dtype, requires_grad=True)
    tensors = [make(3, width, 5, 4) for width in widths]
    if channels_last:
        tensors = [tensor.detach().contiguous(memory_format=torch.channels_last) for tensor in tensors]
        tensors = [tensor.requires_grad_() for tensor in tensors]
    mean, variance = Make(device, dtype)(sum(widths)), Make(device, dtype)(sum(widths)).square() + 0.5
    return tensors, make(sum(widths)), make(sum(widths)), mean, variance


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["relu", "silu", None])
def test_is_concat_then_batch_norm_act(device, training, activation, channels_last):
    """With what others add to the gradients of the tensors that are handed on."""
    dtype = torch.float64
    tensors, weight, bias, mean, variance = inputs(device, dtype, channels_last=channels_last)
    others = [(mean.clone(), variance.clone(), torch.tensor(3, device=device)) for _ in range(2)]
    ours = op(tensors, [], weight, bias, *others[0], activation, training, 0.25, 1e-3)
    whole = torch.cat(tensors, 1)
    expected = F.batch_norm(whole, *others[1][:2], weight, bias, training, 0.25, 1e-3)
    expected = getattr(F, activation)(expected) if activation else expected
    torch.testing.assert_close(ours[0], expected)
    assert ours[0].is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    torch.testing.assert_close(others[0][:2], others[1][:2])
    assert int(others[0][2]) == 3 + training
    assert all(alias.data_ptr() == tensor.data_ptr() for alias, tensor in zip(ours[1], tensors, strict=True))
    grad, more = torch.randn_like(expected), torch.randn_like(whole)
    sizes = [tensor.shape[1] for tensor in tensors]
    used = [(a, g) for a, g in zip(ours[1], more.split(sizes, 1), strict=True)][1:]  # of the first nothing else is made
    actual = torch.autograd.grad(
        [ours[0], *(a for a, _ in used)], [*tensors, weight, bias], [grad, *(g for _, g in used)]
    )
    wanted = list(torch.autograd.grad(expected, [*tensors, weight, bias], grad))
    for i, (_, g) in enumerate(used, 1):
        wanted[i] = wanted[i] + g
    torch.testing.assert_close(actual, tuple(wanted))


@pytest.mark.parametrize("training", [True, False])
def test_second_derivatives(device, training):
    tensors, weight, bias, mean, variance = inputs(device, torch.float64, (8, 2))
    tensors = [tensor[:, :, :2, :2].detach().requires_grad_() for tensor in tensors]

    def function(*arguments):
        output, passed, _ = op(
            list(arguments[:2]), [], *arguments[2:], mean.clone(), variance.clone(), None, "silu", training, 0.1, 1e-3
        )
        return output, passed[0] * 2

    assert torch.autograd.gradcheck(function, (*tensors, weight, bias))
    assert torch.autograd.gradgradcheck(function, (*tensors, weight, bias))


def test_gradients_of_what_is_handed_on_alone(device):
    """Where output is not used they pass through, and a tensor that requires none is handed on as it is."""
    tensors, weight, bias, mean, variance = inputs(device, torch.float64)
    tensors[1] = tensors[1].detach()
    _, passed, _ = op(tensors, [], weight, bias, mean, variance, None, "relu", True, 0.1, 1e-5)
    assert not passed[1].requires_grad
    (grad,) = torch.autograd.grad(passed[0].square().sum(), tensors[0])
    torch.testing.assert_close(grad, 2 * tensors[0])
    with torch.no_grad():
        assert op(tensors, [], weight, bias, mean, variance, None, "relu", True, 0.1, 1e-5)[1] == []


def test_arguments_are_checked(device):
    tensors, weight, bias, mean, variance = inputs(device, torch.float32)

    def call(tensors=tensors, weight=weight, mean=mean, moments=(), activation="relu", eps=1e-5, training=True):
        return op(tensors, list(moments), weight, bias, mean, variance, None, activation, training, 0.1, eps)

    with pytest.raises(RuntimeError, match=r"expected tensors\[1\] to have the shape .* but along dimension 1"):
        call([tensors[0], tensors[1][:2]])
    with pytest.raises(RuntimeError, match="tensors"):
        call([tensors[0], tensors[1].double()])
    with pytest.raises(RuntimeError, match="weight"):
        call(weight=weight[:3])
    with pytest.raises(ValueError, match="activation"):
        call(activation="tanh")
    with pytest.raises(ValueError, match="eps"):
        call(eps=0.0)
    with pytest.raises(RuntimeError, match="moments"):
        call(moments=[mean] * 4)
    needs_grad = variance.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="concat_batch_norm_act: not differentiable with respect to running"):
        torch.ops.cuda_ops.concat_batch_norm_act_forward_inference(
            tensors, weight, bias, mean, needs_grad, "relu", 1e-5
        )
    with pytest.raises(RuntimeError, match="concat_batch_norm_act: not differentiable with respect to running"):
        torch.ops.cuda_ops.concat_batch_norm_act_forward_training(
            tensors, [], weight, bias, mean, needs_grad, None, "relu", 0.1, 1e-5
        )
    with pytest.raises(RuntimeError, match="running_mean"):
        call(mean=None, training=False)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        call([tensor[:1, :, :1, :1] for tensor in tensors])


def densenet(device, **options):
    models = pytest.importorskip("torchvision").models.densenet
    torch.manual_seed(0)
    model = models.DenseNet(8, (3, 2), 16, 2, num_classes=5, **options).double()
    return model.to(device, memory_format=torch.channels_last)


def batch(device):
    torch.manual_seed(1)
    x = torch.randn(6, 3, 64, 64, dtype=torch.float64, device=device).contiguous(memory_format=torch.channels_last)
    return x, torch.arange(6, device=device) % 5


def step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.05)
            parameter.grad = None
    return loss.detach()


def assert_same_state(model, native):
    for (name, actual), (_, expected) in zip(model.state_dict().items(), native.state_dict().items(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-8, msg=name)


def test_densenet_trains_alike(device):
    native = densenet(device)
    model = copy.deepcopy(native)
    cuda_ops.convert(model)
    x, y = batch(device)
    for _ in range(3):
        torch.testing.assert_close(step(model, x, y), step(native, x, y))
    assert_same_state(model, native)
    torch.testing.assert_close(model.eval()(x), native.eval()(x), rtol=1e-6, atol=1e-7)


def test_dense_blocks_take_it(device, monkeypatch):
    """Every layer calls it, with what the one before has handed on; and none where a layer has a hook."""
    model, calls = densenet(device), []
    cuda_ops.convert(model)
    x, _ = batch(device)

    def counted(tensors, moments, *rest):
        calls.append((len(tensors), len(moments)))
        return op(tensors, moments, *rest)

    monkeypatch.setattr(fusing, "concat_batch_norm_act", counted)
    model(x)
    assert [count for count, _ in calls] == [1, 2, 3, 1, 2]
    if device == "cuda":
        assert [known for _, known in calls] == [0, 1, 2, 0, 1]
    calls.clear()
    model.features.denseblock1.denselayer2.norm1.register_forward_hook(lambda module, args, output: None)
    model(x)
    assert [count for count, _ in calls] == [1, 3, 1, 2]
    calls.clear()
    torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    torch.func.jvp(model.eval(), (x,), (torch.ones_like(x),))
    assert len(calls) == 4


def test_moments_of_features_that_are_written_to(device):
    """A hook may do so between two layers; what is normalised then is what is there."""

    def write(module, args):
        args[0][0].mul_(1.5)

    native = densenet(device)
    for layer in native.features.denseblock1.children():
        layer.register_forward_pre_hook(write)
    model = copy.deepcopy(native)
    cuda_ops.convert(model)
    x, y = batch(device)
    with torch.no_grad():
        torch.testing.assert_close(model(x), native(x))
    assert_same_state(model, native)
    grads = [torch.autograd.grad(F.cross_entropy(each(x), y), list(each.parameters())) for each in (model, native)]
    torch.testing.assert_close(*grads)


def test_hooks_before_layers_see_features_themselves(device):
    native = densenet(device)
    model = copy.deepcopy(native)
    cuda_ops.convert(model)
    x, y = batch(device)
    seen = []

    def keep(module, args):
        seen.append([feature.retain_grad() or feature for feature in args[0]])

    for each in (native, model):
        layer = each.features.denseblock1.denselayer2
        handle = layer.register_forward_pre_hook(keep)
        F.cross_entropy(each(x), y).backward()
        handle.remove()
    torch.testing.assert_close([f.grad for f in seen[1]], [f.grad for f in seen[0]])


def test_hooks_see_features_and_their_gradients(device):
    native = densenet(device)
    model = copy.deepcopy(native)
    cuda_ops.convert(model)
    x, y = batch(device)
    seen = []
    for each in (native, model):
        found = {}
        for name, layer in each.features.denseblock1.named_children():
            layer.register_forward_hook(
                lambda module, args, output, name=name, found=found: found.setdefault(name, output).retain_grad()
            )
        F.cross_entropy(each(x), y).backward()
        seen.append({name: (output, output.grad) for name, output in found.items()})
    torch.testing.assert_close(seen[1], seen[0])


def test_frozen_features(device):
    """Only the classifier and the last layers train: what comes before requires no gradient."""
    native = densenet(device)
    for name, parameter in native.named_parameters():
        parameter.requires_grad_("denseblock2.denselayer2" in name or "classifier" in name)
    model = copy.deepcopy(native)
    cuda_ops.convert(model)
    x, y = batch(device)
    for each in (native, model):
        F.cross_entropy(each(x), y).backward()
    for actual, expected in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


@pytest.mark.parametrize("options", [{"memory_efficient": True}, {"drop_rate": 0.5}])
def test_options_of_densenet(device, options):
    native = densenet(device, **options)
    model = copy.deepcopy(native)
    cuda_ops.convert(model)
    x, y = batch(device)
    if "drop_rate" in options:
        torch.testing.assert_close(model.eval()(x), native.eval()(x))
        assert torch.isfinite(step(model.train(), x, y))
        return
    torch.testing.assert_close(step(model, x, y), step(native, x, y))
    assert_same_state(model, native)


@pytest.mark.parametrize("channels_last", [True, False])
def test_the_ops_below_have_fakes(device, channels_last):
    tensors, weight, bias, mean, variance = inputs(device, torch.float64, channels_last=channels_last)
    tensors, weight, bias = [tensor.detach() for tensor in tensors], weight.detach(), bias.detach()
    ops = torch.ops.cuda_ops
    moments = [ops.batch_norm_moments(tensor) for tensor in tensors]
    whole = torch.cat(tensors, 1)
    statistics = whole.mean((0, 2, 3)), whole.var((0, 2, 3), correction=0)
    torch.testing.assert_close(torch.cat(moments, 1), torch.stack(statistics))
    training = (moments, weight, bias, mean, variance, torch.tensor(0, device=device), "relu", 0.1, 1e-3)
    backward = (tensors, [tensors[0], tensors[0].new_empty(0), tensors[2]], weight, bias, *statistics)
    for op, arguments in [
        (ops.batch_norm_moments, (whole,)),
        (ops.concat_batch_norm_act_forward_training, (tensors, *training)),
        (ops.concat_batch_norm_act_forward_inference, (tensors, weight, bias, mean, variance, "relu", 1e-3)),
        (
            ops.concat_batch_norm_act_backward,
            (whole, *backward, True, "relu", 1e-3, [True, False, True], True),
        ),
        (
            ops.concat_batch_norm_act_backward,
            (whole, *backward, False, None, 1e-3, [False, True, True], False),
        ),
    ]:
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
