"""What users do when they swap torch.nn for cuda_ops.nn, beyond computing: meta tensors, copies and files of modules,
functional_call, checkpoints, hooks, threads, autograd's guards, gradient penalties."""

import copy
import io
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.functionals import CALLS
from torch.utils.checkpoint import checkpoint

import cuda_ops
from cuda_ops import functional as F

ROOT = Path(__file__).resolve().parents[1]


def small_net(nn, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        torch.nn.Flatten(),
        nn.Linear(16, 5),
        nn.LogSoftmax(1),
    )


@pytest.fixture
def images():
    return torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1)) - 0.5


@pytest.mark.parametrize("name", CALLS)
def test_meta_tensors_tell_shape_and_strides(name, images):
    actual, expected = CALLS[name](images.to("meta")), CALLS[name](images)
    assert actual.is_meta
    assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_a_meta_model_runs_forward_and_backward(images):
    model = small_net(cuda_ops.nn).to("meta")
    output = model(images.to("meta"))
    assert output.shape == (3, 5)
    output.sum().backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())
    assert model.to_empty(device="cpu")[0].weight.device.type == "cpu"


BAD_SHAPES = {
    "linear features": lambda ones: F.linear(ones(2, 4), ones(3, 5)),
    "linear bias": lambda ones: F.linear(ones(2, 5), ones(3, 5), ones(4)),
    "linear weight": lambda ones: F.linear(ones(2, 5), ones(1, 3, 5)),
    "linear scalar weight": lambda ones: F.linear(ones(2, 5), ones([]), ones([])),
    "conv2d channels": lambda ones: F.conv2d(ones(1, 1, 4, 4), ones(2, 3, 3, 3)),
    "conv2d groups": lambda ones: F.conv2d(ones(1, 4, 4, 4), ones(3, 2, 3, 3), groups=2),
    "conv2d kernel": lambda ones: F.conv2d(ones(1, 1, 4, 4), ones(2, 1, 3, 9)),
    "conv2d bias": lambda ones: F.conv2d(ones(1, 1, 4, 4), ones(2, 1, 3, 3), ones(3)),
    "conv2d stride": lambda ones: F.conv2d(ones(1, 1, 4, 4), ones(2, 1, 3, 3), stride=0),
    "conv2d padding": lambda ones: F.conv2d(ones(1, 1, 4, 4), ones(2, 1, 3, 3), padding=-1),
    "conv1d channels": lambda ones: F.conv1d(ones(1, 1, 4), ones(2, 3, 3)),
    "conv1d kernel": lambda ones: F.conv1d(ones(1, 1, 4), ones(2, 1, 9)),
    "conv1d bias": lambda ones: F.conv1d(ones(1, 1, 4), ones(2, 1, 3), ones(3)),
    "conv1d dimensions": lambda ones: F.conv1d(ones(1, 1, 4, 4), ones(2, 1, 3)),
    "conv_transpose2d channels": lambda ones: F.conv_transpose2d(ones(1, 1, 4, 4), ones(2, 3, 3, 3)),
    "conv_transpose2d groups": lambda ones: F.conv_transpose2d(ones(1, 3, 4, 4), ones(3, 2, 3, 3), groups=2),
    "conv_transpose2d bias": lambda ones: F.conv_transpose2d(ones(1, 1, 4, 4), ones(1, 2, 3, 3), ones(3)),
    "conv_transpose2d padding": lambda ones: F.conv_transpose2d(ones(1, 1, 4, 4), ones(1, 2, 3, 3), padding=3),
    "conv_transpose2d dimensions": lambda ones: F.conv_transpose2d(ones(4, 4), ones(1, 2, 3, 3)),
    "conv_transpose1d channels": lambda ones: F.conv_transpose1d(ones(1, 1, 4), ones(2, 3, 3)),
    "conv2d dimensions": lambda ones: F.conv2d(ones(4, 4), ones(2, 1, 3, 3)),
    "max_pool2d room": lambda ones: F.max_pool2d(ones(1, 1, 4, 4), 9),
    "max_pool2d padding": lambda ones: F.max_pool2d(ones(1, 1, 4, 4), 2, padding=2),
    "avg_pool2d stride": lambda ones: F.avg_pool2d(ones(1, 1, 4, 4), 2, 0),
    "avg_pool2d dimensions": lambda ones: F.avg_pool2d(ones(4, 4), 2),
    "avg_pool2d empty": lambda ones: F.avg_pool2d(ones(1, 0, 4, 4), 2),
    "batch_norm statistics": lambda ones: F.batch_norm(ones(2, 3), ones(4), ones(4)),
    "batch_norm weight": lambda ones: F.batch_norm(ones(2, 3), None, None, ones(4), training=True),
    "log_softmax dim": lambda ones: F.log_softmax(ones(2, 3), 2),
    "nll_loss batch": lambda ones: F.nll_loss(ones(2, 3), ones(4).long()),
    "nll_loss dimensions": lambda ones: F.nll_loss(ones(2, 3), ones(2, 1).long()),
    "conv_bn_relu_pool channels": lambda ones: F.conv_bn_relu_pool(
        ones(1, 1, 4, 4), ones(2, 3, 3, 3), None, None, None
    ),
    "conv_bn_relu_pool dimensions": lambda ones: F.conv_bn_relu_pool(ones(4, 4), ones(2, 1, 3, 3), None, None, None),
    "linear_relu features": lambda ones: F.linear_relu(ones(2, 4), ones(3, 5)),
    "linear_relu bias": lambda ones: F.linear_relu(ones(2, 5), ones(3, 5), ones(4)),
    "linear_cross_entropy features": lambda ones: F.linear_cross_entropy(ones(2, 4), ones(3, 5), ones(2).long()),
    "linear_cross_entropy batch": lambda ones: F.linear_cross_entropy(ones(2, 5), ones(3, 5), ones(4).long()),
    "linear_cross_entropy bias": lambda ones: F.linear_cross_entropy(ones(2, 5), ones(3, 5), ones(2).long(), ones(4)),
    "cross_entropy batch": lambda ones: F.cross_entropy(ones(2, 3), ones(4).long()),
    "cross_entropy positions": lambda ones: F.cross_entropy(ones(2, 3, 4), ones(2, 5).long()),
}


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_meta_tensors_are_refused_where_others_are(name):
    """With the same error type, so that a model can be proved on the meta device before it is given memory."""
    op = name.split()[0]
    with pytest.raises(Exception, match=f"^{op}: expected ") as real:
        BAD_SHAPES[name](torch.ones)
    with pytest.raises(real.type, match=f"^{op}: expected "):
        BAD_SHAPES[name](lambda *size: torch.ones(*size, device="meta"))


def test_cpu_autocast_leaves_float64_alone(images):
    x = images.double()
    with torch.autocast("cpu", torch.bfloat16):
        for name in ("conv2d", "linear", "conv_bn_relu_pool", "linear_relu", "linear_cross_entropy"):
            assert CALLS[name](x).dtype == torch.float64


# Of PyTorch's lists for the CPU, which are not those for CUDA: there softmax, norms and sums are float32.
AUTOCAST = {
    "softmax": lambda F, x: F.softmax(x, -1),
    "log_softmax": lambda F, x: F.log_softmax(x, -1),
    "softplus": lambda F, x: F.softplus(x),
    "layer_norm": lambda F, x: F.layer_norm(x, (6,)),
    "group_norm": lambda F, x: F.group_norm(x, 2),
    "gelu": lambda F, x: F.gelu(x),
    "linear": lambda F, x: F.linear(x, x),
    "prelu": lambda F, x: F.prelu(x, x[0, :1]),
    "conv1d": lambda F, x: F.conv1d(x[None], x[:, :, None].transpose(0, 1)[:2, :4]),
    "conv2d": lambda F, x: F.conv2d(x[None, None], x[None, None, :2, :2]),
    "conv_transpose2d": lambda F, x: F.conv_transpose2d(x[None, None], x[None, None, :2, :2]),
    "scaled_dot_product_attention": lambda F, x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "mse_loss": lambda F, x: F.mse_loss(x, -x),
    "huber_loss": lambda F, x: F.huber_loss(x, -x),
    "kl_div": lambda F, x: F.kl_div(x, x.abs(), reduction="sum"),
    "binary_cross_entropy_with_logits": lambda F, x: F.binary_cross_entropy_with_logits(x, x.abs()),
    "cross_entropy": lambda F, x: F.cross_entropy(x, torch.tensor([0, 1, 2, 3])),
    "nll_loss": lambda F, x: F.nll_loss(x, torch.tensor([0, 1, 2, 3])),
    "embedding": lambda F, x: F.embedding(torch.tensor([0, 2]), x),
}


@pytest.mark.parametrize("name", AUTOCAST)
@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
def test_cpu_autocast_casts_as_pytorch_does(name, lower):
    for dtype in (torch.float32, lower):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
        with torch.autocast("cpu", lower):
            ours, native = AUTOCAST[name](F, x), AUTOCAST[name](torch.nn.functional, x)
        assert ours.dtype == native.dtype
        torch.testing.assert_close(ours, native, rtol=2e-2, atol=2e-2)


def test_modules_copy_pickle_and_save(images):
    model = small_net(cuda_ops.nn).eval()
    expected = model(images)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = small_net(torch.nn, seed=5).eval()
    loaded.load_state_dict(torch.load(file, weights_only=True), strict=True)
    torch.testing.assert_close(loaded(images), expected)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images), expected)
        torch.testing.assert_close(twin.double()(images.double()).float(), expected)


@pytest.mark.parametrize("training", [True, False])
def test_fused_modules_copy_pickle_and_save(training):
    block = cuda_ops.nn.ConvBNReLUMaxPool2d(1, 4, 3, channels_last=True)
    names = ["conv.weight", "conv.bias", "norm.weight", "norm.bias"]
    assert list(block.state_dict()) == [*names, *(f"norm.{n}" for n, _ in block.norm.named_buffers())]
    images, rows = torch.randn(3, 1, 8, 8), torch.randn(3, 5)
    for module, arguments in [
        (block, (images,)),
        (cuda_ops.nn.LinearReLU(5, 4), (rows,)),
        (cuda_ops.nn.LinearCrossEntropyLoss(5, 4, label_smoothing=0.1), (rows, torch.tensor([0, 3, 2]))),
        (cuda_ops.models.MnistCNN("fused"), (torch.randn(3, 1, 28, 28),)),
    ]:
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        loaded = copy.deepcopy(module)
        for parameter in loaded.parameters():
            torch.nn.init.constant_(parameter, 7)
        loaded.load_state_dict(torch.load(file, weights_only=True), strict=True)
        twins = [loaded, copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        expected = module.train(training)(*arguments)
        for twin in twins:
            assert torch.equal(twin.train(training)(*arguments), expected)
            assert repr(twin) == repr(module)


def test_repr_of_fused_modules_tells_what_is_not_the_default():
    loss = cuda_ops.nn.LinearCrossEntropyLoss
    assert repr(loss(3, 4)) == "LinearCrossEntropyLoss(in_features=3, out_features=4, bias=True)"
    text = repr(loss(3, 4, reduction="sum", label_smoothing=0.1))
    assert text.endswith("bias=True, reduction='sum', label_smoothing=0.1)")
    assert "pool_kernel_size=3, pool_stride=3" in repr(cuda_ops.nn.ConvBNReLUMaxPool2d(1, 2, 3, pool_kernel_size=3))


def test_functional_call_and_hooks(images):
    ours, native = small_net(cuda_ops.nn), small_net(torch.nn)
    calls = []
    ours[0].register_forward_hook(lambda *_: calls.append("forward"))
    ours[3].register_full_backward_hook(lambda *_: calls.append("backward"))
    doubled = {name: (2 * value).detach().requires_grad_() for name, value in native.named_parameters()}
    results = []
    for model in (ours, native):
        output = torch.func.functional_call(model, doubled, (images,))
        results.append((output, *torch.autograd.grad(output.square().sum(), tuple(doubled.values()))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_repeats_the_same_bits(images, use_reentrant):
    gradients = []
    for run in (lambda m, x: m(x), lambda m, x: checkpoint(m, x, use_reentrant=use_reentrant)):
        model = small_net(cuda_ops.nn).insert(2, cuda_ops.nn.Dropout(0.5))
        torch.manual_seed(3)
        run(model, images.clone().requires_grad_()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_backward_twice_and_no_third_time(images):
    model = small_net(cuda_ops.nn)
    loss = model(images).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for parameter, grad in zip(model.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, 2 * grad)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("training", [True, False])
def test_gradient_penalty(images, training):
    """(|dy/dx| - 1)^2 through a whole model, as for Wasserstein GANs."""
    results = []
    for nn in (cuda_ops.nn, torch.nn):
        model = small_net(nn).double().train(training)
        x = images.double().requires_grad_()
        (grad,) = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
        ((grad.flatten(1).norm(dim=1) - 1) ** 2).mean().backward()
        results.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", ["batch_norm", "conv2d", "cross_entropy", "polynomial", "square"])
def test_a_saved_input_that_changes_is_noticed(name, images):
    x = images.clone().requires_grad_() * 1
    output = CALLS[name](x)
    if name == "conv2d":  # whose weight needs a gradient for input to be saved
        output = F.conv2d(x, torch.ones(1, 1, 3, 3, requires_grad=True))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_transforms_of_a_fused_op():
    """vmap, gradients of it included; forward mode meets what it fuses."""
    x, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4)
    results = []
    for function in (F.linear_relu, lambda x, weight: torch.relu(x @ weight.T)):
        output = torch.func.vmap(lambda x, function=function: function(x, weight))(x)
        results.append((output, *torch.autograd.grad(output.square().sum(), x)))
    torch.testing.assert_close(*results)
    results = []
    for function in (F.linear_relu, lambda x, weight: torch.relu(x @ weight.T)):
        grad = torch.func.grad(lambda x, function=function: function(x, weight).square().sum())
        results.append((grad(x.detach()), *torch.func.jvp(grad, (x.detach(),), (torch.ones_like(x),))))
    torch.testing.assert_close(*results)


def test_functions_are_what_the_functionals_record():
    """The autograd.Functions that ops have in Python give the same results and gradients."""
    from cuda_ops import ops

    def leaves(*shapes):
        generator = torch.Generator().manual_seed(0)
        return [torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]

    target = torch.tensor([1, 0])
    x, w, b = leaves((2, 3), (3, 3), (3,))
    calls = {
        "add2": (ops.add2.Add2Function.apply(x, b), F.add2(x, b)),
        "polynomial": (ops.polynomial.PolynomialFunction.apply(x, [1.0, 2.0, 3.0]), F.polynomial(x, (1, 2, 3))),
        "matmul": (ops.matmul.MatmulFunction.apply(x, w), F.matmul(x, w)),
        "log_softmax": (ops.log_softmax.LogSoftmaxFunction.apply(x, 1), F.log_softmax(x, 1)),
        "nll_loss": (ops.nll_loss.NllLossFunction.apply(x, target, None, 1, -100)[0], F.nll_loss(x, target)),
        "cross_entropy": (
            ops.cross_entropy.CrossEntropyFunction.apply(x, target, None, 1, -100, 0.1)[0],
            F.cross_entropy(x, target, label_smoothing=0.1),
        ),
        "linear_gelu": (ops.linear_gelu.LinearGELUFunction.apply(x, w, b, "none", True)[0], F.linear_gelu(x, w, b)),
        "linear_relu": (ops.linear_relu.LinearReLUFunction.apply(x, w, b), F.linear_relu(x, w, b)),
        "linear_cross_entropy": (
            ops.linear_cross_entropy.LinearCrossEntropyFunction.apply(
                x, w, target, b, None, 1, -100, 0.0, 0.0, 0.0, True, True, True
            )[0],
            F.linear_cross_entropy(x, w, target, b),
        ),
    }
    for name, (actual, expected) in calls.items():
        inputs = [
            t
            for t, grad in zip(
                (x, w, b),
                torch.autograd.grad(expected.sum(), (x, w, b), allow_unused=True, retain_graph=True),
                strict=True,
            )
            if grad is not None
        ]
        grads = [torch.autograd.grad(output.square().sum(), inputs) for output in (actual, expected)]
        torch.testing.assert_close(actual, expected, msg=name)
        torch.testing.assert_close(*grads, msg=name)


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"dropout"}))
def test_negative_views(name, images):
    """A tensor whose negation is still to be done: the imaginary part of a conjugate."""
    view = torch.complex(images, -images).conj().imag
    assert view.is_neg()
    assert torch.equal(CALLS[name](view), CALLS[name](images))


def test_writes_into_negative_views():
    """They once went beyond the dispatcher's stack. Repeated, since a heap that is hurt does not fall at once."""

    def negative(*values):
        view = torch.complex(torch.zeros(len(values)), -torch.tensor(values)).conj().imag
        assert view.is_neg()
        return view

    for _ in range(50):
        x = negative(1.0, -2.0, 3.0)
        assert F.relu(x, inplace=True) is x
        assert x.tolist() == [1.0, 0.0, 3.0]
        dense = torch._neg_view(torch.tensor([1.0, -2.0]))
        assert F.relu(dense, inplace=True).tolist() == [0.0, 2.0]

        ours = (negative(1.0, 2.0), negative(3.0, 4.0))
        # PyTorch's own batch_norm loses what it writes into such views.
        native = (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        batch = torch.tensor([[1.0, 2.0], [3.0, 7.0]])
        F.batch_norm(batch, *ours, training=True)
        torch.nn.functional.batch_norm(batch, *native, training=True)
        torch.testing.assert_close(ours, native)

        runs = []
        for optim in (cuda_ops.optim, torch.optim):
            weight = negative(1.0, -1.0).requires_grad_()
            optimizer = optim.SGD([weight], lr=0.5, momentum=0.9)
            for _ in range(2):
                weight.grad = negative(2.0, -4.0)
                optimizer.step()
            runs.append((weight.detach(), optimizer.state[weight]["momentum_buffer"]))
        torch.testing.assert_close(*runs)


def test_threads_of_python_share_a_model(images):
    model = small_net(cuda_ops.nn).eval()
    parameters = list(model.parameters())
    inputs = [images * k for k in range(16)]

    def step(x):
        output = model(x)
        return output, *torch.autograd.grad(output.square().sum(), parameters)

    expected = [step(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for actual, wanted in zip(pool.map(step, inputs * 4), expected * 4, strict=True):
            assert all(torch.equal(a, w) for a, w in zip(actual, wanted, strict=True))


def test_a_training_step_gives_the_same_bits_on_any_number_of_threads():
    x, target = torch.rand(32, 1, 32, 32, generator=torch.Generator().manual_seed(2)), torch.arange(32) % 5
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            model = small_net(cuda_ops.nn)
            model[6] = cuda_ops.nn.Linear(256, 5)
            model.insert(2, cuda_ops.nn.Dropout(0.3))
            optimizer = cuda_ops.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(x), target).backward()
                optimizer.step()
            results.append(model.state_dict())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_computes_on_one_thread():
    """As DataLoader's workers do. On several, OpenMP does not survive a fork, and PyTorch's own ops hang as well."""
    x = torch.rand(64, 3, 32, 32)
    expected = F.square(x)
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            os._exit(0 if torch.equal(F.square(x), expected) else 1)
        finally:
            os._exit(2)
    for _ in range(600):
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            assert status == 0
            return
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("training", [True, False])
def test_traces_pass_their_own_check_and_are_saved(training, images):
    """torch.jit.trace runs what it has traced again, and compares."""
    blocks = torch.nn.Sequential(
        cuda_ops.nn.ConvBNReLUMaxPool2d(1, 4, 3, padding=1),
        torch.nn.Flatten(),
        cuda_ops.nn.LinearReLU(64, 6),
        cuda_ops.nn.LinearGELU(6, 5),
    )
    for model in (small_net(cuda_ops.nn), blocks):
        model.train(training)
        traced = torch.jit.trace(model, images)
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        other = images.flip(0) + 0.25
        expected = model(other)
        torch.testing.assert_close(traced(other), expected)
        torch.testing.assert_close(torch.jit.load(file)(other), expected)


def test_submodules_are_there_after_import_cuda_ops():
    """Loaded at their first use, so that `import cuda_ops` stays quick."""
    program = """
import sys, cuda_ops
assert not {"cuda_ops.models", "cuda_ops.training", "cuda_ops.data", "cuda_ops.ladder"} & set(sys.modules)
cuda_ops.training.GraphedStep, cuda_ops.models.MnistCNN, cuda_ops.data.Batches, cuda_ops.ladder
try:
    cuda_ops.trainings
except AttributeError as error:
    assert "'cuda_ops' has no attribute 'trainings'" in str(error)
else:
    sys.exit("no error")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
