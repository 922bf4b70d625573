"""What is special to relu: the in-place form, NaN, and the module."""

import pytest
import torch

import cuda_ops

NAN = float("nan")


def test_nan_stays_and_passes_the_gradient(device):
    values = torch.tensor([NAN, -1.0, -0.0, 0.0, 2.0, float("inf"), -float("inf")], device=device)
    results = []
    for function in (cuda_ops.functional.relu, torch.nn.functional.relu):
        input = values.clone().requires_grad_()
        output = function(input)
        (grad,) = torch.autograd.grad(output.nan_to_num().sum() + output.sum() * 0 + output.sum(), input)
        results.append((output, grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def graph_with_inplace(function, source, layout):
    """Gradient of a graph in which `function` writes over an intermediate tensor, in some layout, twice."""
    leaf = source.clone().requires_grad_()
    middle = leaf * 2
    if layout == "transposed":
        middle = middle.transpose(-1, -2)
    elif layout == "strided":
        middle = torch.stack([middle, middle], -1).reshape(*middle.shape[:-1], -1)[..., ::2]
    output = function(middle, inplace=True)
    assert output is middle
    output = function(output + 0.25, inplace=True)
    (grad,) = torch.autograd.grad((output * output).sum(), leaf, create_graph=True)
    (grad_grad,) = torch.autograd.grad((grad * grad).sum(), leaf)
    return output, grad, grad_grad


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_inplace_in_a_graph(device, layout):
    source = torch.randn(33, 65, dtype=torch.float64, device=device)
    for actual, expected in zip(
        graph_with_inplace(cuda_ops.functional.relu, source, layout),
        graph_with_inplace(torch.nn.functional.relu, source, layout),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


def test_inplace_on_a_view_reaches_its_base(device):
    results = []
    for function in (cuda_ops.functional.relu, torch.nn.functional.relu):
        leaf = torch.linspace(-2, 2, 12, device=device).reshape(3, 4).requires_grad_()
        base = leaf * 3
        function(base[1], inplace=True)
        (grad,) = torch.autograd.grad((base * base).sum(), leaf)
        results.append((base, grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_inplace_invalidates_what_was_saved_before(device):
    leaf = torch.ones(3, device=device, requires_grad=True)
    middle = leaf * 2
    product = middle * middle
    cuda_ops.functional.relu(middle, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("view", [False, True])
def test_a_refused_leaf_keeps_its_values(device, view):
    leaf = torch.full((2, 3), -1.0, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        cuda_ops.functional.relu(leaf[0] if view else leaf, inplace=True)
    assert (leaf == -1).all()


def test_inplace_without_grad(device):
    input = torch.tensor([1.0, -1.0], device=device)
    assert cuda_ops.functional.relu(input, inplace=True) is input
    assert input.tolist() == [1.0, 0.0]
    version = input._version
    with torch.no_grad():
        cuda_ops.functional.relu(input, inplace=True)
    assert input._version > version
    version = input._version
    torch.ops.cuda_ops.relu_inplace(input)
    assert input._version > version
    with torch.inference_mode():
        input = torch.tensor([1.0, -1.0], device=device)
        assert cuda_ops.functional.relu(input, inplace=True).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dynamic", [False, True])
def test_inplace_compiles_into_one_graph(device, dynamic):
    def function(leaf):
        middle = leaf * 2
        output = cuda_ops.functional.relu(middle, inplace=True)
        return output * middle

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    results = []
    for f in (function, compiled):
        leaf = torch.linspace(-2, 2, 12, device=device).reshape(3, 4).requires_grad_()
        output = f(leaf)
        (grad,) = torch.autograd.grad(output.sum(), leaf)
        results.append((output, grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    argument = torch.tensor([1.0, -1.0], device=device)
    torch.compile(lambda x: cuda_ops.functional.relu(x, inplace=True), fullgraph=True, backend="aot_eager")(argument)
    assert argument.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("inplace", [False, True])
def test_module_is_a_drop_in(device, inplace):
    ours, native = cuda_ops.nn.ReLU(inplace=inplace), torch.nn.ReLU(inplace=inplace)
    assert isinstance(ours, torch.nn.ReLU)
    assert repr(ours) == repr(native)
    ours.load_state_dict(native.state_dict(), strict=True)
    native.load_state_dict(ours.state_dict(), strict=True)
    source = torch.randn(5, 7, device=device)
    a, b = source.clone(), source.clone()
    assert torch.equal(ours(a), native(b))
    assert torch.equal(a, b)
