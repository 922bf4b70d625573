"""What is special to the activation functions: far from 0 and near to it, the form in place, NaN, and the modules."""

import math

import mpmath
import pytest
import torch
from support.devices import CUDA_DTYPES

import cuda_ops

F, native = cuda_ops.functional, torch.nn.functional
NAN, INF = float("nan"), float("inf")
INPLACE = ["silu", "elu", "leaky_relu", "hardtanh", "relu6", "hardsigmoid", "hardswish", "mish"]
SMOOTH = {
    "gelu": native.gelu,
    "silu": native.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": native.elu,
    "softplus": native.softplus,
    "mish": native.mish,
}
PIECEWISE = {"leaky_relu": native.leaky_relu, "hardsigmoid": native.hardsigmoid, "hardswish": native.hardswish}
PIECEWISE |= {"hardtanh": native.hardtanh, "relu6": native.relu6}
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def exactly(name, x):
    """The function of a float, to double's digits wherever it is not too near to a double's ends."""
    e = math.exp(-abs(x))
    return {
        # In more digits than a double's: erfc of a rounded quotient is off by its square.
        "gelu": lambda: float(x / 2 * mpmath.erfc(-x / mpmath.sqrt(2))),
        "silu": lambda: x * (e if x < 0 else 1) / (1 + e),
        "sigmoid": lambda: (e if x < 0 else 1) / (1 + e),
        "tanh": lambda: math.tanh(x),
        "elu": lambda: x if x > 0 else math.expm1(x),
        "softplus": lambda: x if x > 20 else max(x, 0) + math.log1p(e),
        "mish": lambda: x * ((e * e + 2 * e) / (e * e + 2 * e + 2) if x < 0 else (1 + 2 * e) / (1 + 2 * e + 2 * e * e)),
    }[name]()


# Units of rounding by which a result may be off: the functions' own, and a half its last rounding with it.
ALLOWED = {torch.float64: 12, torch.float32: 12, torch.float16: 1.2, torch.bfloat16: 1.1}


@pytest.mark.parametrize("name", SMOOTH)
def test_relative_error_near_to_zero_and_far(name, device_dtype):
    """Each value by itself, down to where the result is no normal number: nothing cancels on the way."""
    device, dtype = device_dtype
    generator = torch.Generator().manual_seed(0)
    far = {torch.float16: 3.0 if name == "gelu" else 8.0}.get(dtype, 12.0 if name == "gelu" else 80.0)
    magnitude = torch.cat([torch.logspace(-3, math.log10(far), 2000), torch.rand(2000, generator=generator) * far])
    x = torch.cat([magnitude, -magnitude]).to(dtype)
    actual = getattr(F, name)(x.to(device)).cpu().double()
    with mpmath.workdps(30):
        expected = torch.tensor([exactly(name, value) for value in x.double().tolist()], dtype=torch.float64)
    units = ((actual - expected).abs() / expected.abs() / UNIT[dtype]).nan_to_num(nan=INF)
    worst = int(units.argmax())
    # What is beyond x is a polynomial of terms of both signs, up to 14 times their sum.
    allowed = 2 * ALLOWED[dtype] if name == "gelu" and dtype in (torch.float32, torch.float64) else ALLOWED[dtype]
    assert units[worst] <= allowed, f"{name}({x[worst].item()}) is off by {units[worst]:.2f} units"


def test_gelu_tanh_does_not_cancel(device):
    x = torch.tensor([-4.0, -6.0, -8.0], dtype=torch.float64)
    z = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    expected = x * z.exp() / (1 + z.exp())
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 2e-5)):
        actual = F.gelu(x.to(device, dtype), approximate="tanh")
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", [*SMOOTH, *PIECEWISE])
def test_gradient_at_the_corners_and_beyond_numbers(name, device):
    """Where PyTorch's vectors and its other code agree with each other: of NaN they do not in functions of several
    pieces, and which of them it takes is a matter of the processor."""
    corners = [-INF, INF, -6.0, -3.0, -1.0, -0.0, 0.0, 1.0, 3.0, 6.0]
    pieces = ("hardtanh", "relu6", "hardsigmoid", "hardswish", "elu")
    # In float64: PyTorch's vectors of float32 make gelu(inf) NaN on the CPU.
    values = torch.tensor(corners if name in pieces else [NAN, *corners], device=device).double()
    grads = []
    for function in (getattr(F, name), {**SMOOTH, **PIECEWISE}[name]):
        input = values.clone().requires_grad_()
        output = function(input)
        (grad,) = torch.autograd.grad(output, input, torch.ones_like(output))
        grads.append((output.detach(), grad))
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_second_derivative_of_elu_at_its_corner(device):
    """0 there, as PyTorch's, though the first is alpha."""
    x = torch.tensor([-1.0, -0.0, 0.0, 1.0], device=device, requires_grad=True)
    for inplace in (False, True):
        seconds = []
        for function in (F.elu, torch.nn.functional.elu):
            (grad,) = torch.autograd.grad(function(x.clone(), 1.75, inplace).sum(), x, create_graph=True)
            seconds += torch.autograd.grad(grad.sum(), x)
        torch.testing.assert_close(*seconds)


@pytest.mark.parametrize("name", ["hardtanh", "relu6"])
def test_nan_passes_the_gradient(name, device):
    input = torch.full((70,), NAN, device=device, requires_grad=True)
    output = getattr(F, name)(input)
    (grad,) = torch.autograd.grad(output, input, torch.ones_like(output))
    assert output.isnan().all() and (grad == 1).all()


@pytest.mark.parametrize("dtype", CUDA_DTYPES)
def test_bounds_that_a_dtype_does_not_have(device, dtype):
    """In bfloat16 0.3 is 0.30078125, and 0.9 is 0.8984375: the output is a bound all the same, and has no gradient."""
    if device == "cpu" and dtype in (torch.float16, torch.bfloat16):
        pytest.skip("halves run on CUDA")
    input = torch.tensor([-5.0, 0.0, 0.5, 5.0], device=device, dtype=dtype, requires_grad=True)
    output = F.hardtanh(input, 0.3, 0.9)
    (grad,) = torch.autograd.grad(output.sum(), input)
    assert grad.tolist() == [0, 0, 1, 0]


def hardsigmoid(input, inplace):
    """PyTorch's own is differentiable once."""
    return native.hardtanh(input.add_(3), 0, 6, inplace=inplace).div_(6)


def hardswish(input, inplace):
    """PyTorch's own takes a sixth in float32 on CUDA."""
    before = input.clone()
    return input.copy_(before * native.hardtanh(before + 3, 0, 6) / 6)


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


REFERENCE = {"hardsigmoid": hardsigmoid, "hardswish": hardswish}


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("name", INPLACE)
def test_inplace_in_a_graph(device, name, layout):
    source = torch.randn(33, 65, dtype=torch.float64, device=device)
    for actual, expected in zip(
        graph_with_inplace(getattr(F, name), source, layout),
        graph_with_inplace(REFERENCE.get(name) or getattr(native, name), source, layout),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", INPLACE)
def test_inplace_on_a_view_reaches_its_base(device, name):
    results = []
    for function in (getattr(F, name), getattr(native, name)):
        leaf = torch.linspace(-2, 2, 12, device=device).reshape(3, 4).requires_grad_()
        base = leaf * 3
        function(base[1], inplace=True)
        (grad,) = torch.autograd.grad((base * base).sum(), leaf)
        results.append((base, grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", INPLACE)
def test_inplace_with_and_without_a_record(device, name):
    values = torch.linspace(-5, 5, 40, device=device)
    expected = getattr(native, name)(values)
    input = values.clone()
    version = input._version
    assert getattr(F, name)(input, inplace=True) is input
    torch.testing.assert_close(input, expected)
    assert input._version > version
    leaf = values.clone().requires_grad_()
    middle = leaf * 1
    product = middle * middle
    getattr(F, name)(middle, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("name", INPLACE)
def test_inplace_compiles_into_one_graph(device, name):
    def function(leaf):
        middle = leaf * 2
        output = getattr(F, name)(middle, inplace=True)
        return output * middle

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for f in (function, compiled):
        leaf = torch.linspace(-2, 2, 12, device=device).reshape(3, 4).requires_grad_()
        output = f(leaf)
        (grad,) = torch.autograd.grad(output.sum(), leaf)
        results.append((output, grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("name", "argument"), [("elu", "alpha"), ("leaky_relu", "negative_slope")], ids=["elu", "leaky_relu"]
)
def test_inplace_with_a_slope_below_zero_has_no_gradient(device, name, argument):
    leaf = torch.ones(3, device=device, requires_grad=True)
    output = getattr(F, name)(leaf * 2, inplace=True, **{argument: -0.5})
    with pytest.raises(RuntimeError, match=f"{name}: expected {argument} to be at least 0 in place"):
        output.sum().backward()


MODULES = {
    "GELU": [{}, {"approximate": "tanh"}],
    "SiLU": [{}, {"inplace": True}],
    "Sigmoid": [{}],
    "Tanh": [{}],
    "ELU": [{"alpha": 0.5, "inplace": True}],
    "LeakyReLU": [{"negative_slope": 0.2, "inplace": True}],
    "Softplus": [{"beta": 2.0, "threshold": 10.0}],
    "Hardtanh": [{"min_val": -2.0, "max_val": 0.5, "inplace": True}],
    "ReLU6": [{"inplace": True}],
    "Hardsigmoid": [{"inplace": True}],
    "Hardswish": [{"inplace": True}],
    "Mish": [{"inplace": True}],
}


@pytest.mark.parametrize(
    ("name", "arguments"), [(name, arguments) for name in MODULES for arguments in MODULES[name]], ids=str
)
def test_module_is_a_drop_in(device, name, arguments):
    ours, theirs = getattr(cuda_ops.nn, name)(**arguments), getattr(torch.nn, name)(**arguments)
    assert isinstance(ours, getattr(torch.nn, name))
    assert repr(ours) == repr(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    source = torch.randn(5, 7, device=device) * 4
    a, b = source.clone(), source.clone()
    torch.testing.assert_close(ours(a), theirs(b))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_linear_gelu_does_not_cancel(device_dtype, approximate, with_gradient):
    """The preactivation is the input, exactly: what is off is gelu."""
    device, dtype = device_dtype
    x = torch.arange(-80, 1, dtype=torch.float64) / 16  # in steps that all dtypes have: -5 to 0
    weight = torch.eye(8, dtype=torch.float64)
    expected = {"none": lambda: x / 2 * torch.erfc(-x * 0.5**0.5)}.get(
        approximate, lambda: x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x**3))
    )()
    rows = torch.zeros(81, 8, dtype=torch.float64)
    rows[:, 0] = x
    input = rows.to(device, dtype).requires_grad_(with_gradient)
    actual = F.linear_gelu(input, weight.to(device, dtype), approximate=approximate)[:, 0].detach().cpu().double()
    # A half's smallest normal number is 6e-5, and what is below it has fewer digits.
    smallest = 6e-8 if dtype == torch.float16 else 0
    factor = {"none": 16, "tanh": 64}[approximate]  # tanh: the rounding of an exponent of 17
    torch.testing.assert_close(actual, expected, rtol=max(factor * UNIT[dtype], 1e-14), atol=smallest)
    if dtype in (torch.float16, torch.bfloat16):
        torch.testing.assert_close(actual, expected, rtol=1.1 * UNIT[dtype], atol=smallest)


def test_softplus_compares_the_product_with_its_threshold(device):
    x = torch.tensor([25.0, 150.0, 250.0, 10.0], dtype=torch.float64, device=device, requires_grad=True)
    for beta, threshold in ((0.1, 20.0), (4.0, 20.0), (0.1, 8.0)):
        output, expected = (f(x, beta, threshold) for f in (F.softplus, torch.nn.functional.softplus))
        torch.testing.assert_close(output, expected, rtol=1e-14, atol=0)
        grads = [torch.autograd.grad(y.sum(), x)[0] for y in (output, expected)]
        torch.testing.assert_close(*grads, rtol=1e-14, atol=0)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_second_derivatives_of_gelu_far_away(device, dtype, approximate):
    """Powers of large numbers overflow, in float16 from 40 on, where the derivative is 0."""
    x = torch.tensor([-6e4, -300.0, -45.0, 45.0, 300.0, 6e4], device=device, dtype=dtype)
    if dtype == torch.float32:
        x = x * 1e30
    x.requires_grad_()
    (grad,) = torch.autograd.grad(F.gelu(x, approximate).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(second, torch.zeros_like(x))
