"""Arguments that are no tensor, integer, number or dtype, and those that stand for one; signatures as PyTorch's."""

import ast
import inspect
import re

import numpy as np
import pytest
import torch
from support.functionals import CALLS

from cuda_ops import functional as F

# The other tensors of each functional, to be replaced one at a time.
REQUIRED = {"add2": ["other"], "conv2d": ["weight"], "cross_entropy": ["target"], "linear": ["weight"]}
REQUIRED |= {"nll_loss": ["target"], "conv_bn_relu_pool": ["weight"], "linear_relu": ["weight"]}
REQUIRED["linear_cross_entropy"] = ["weight", "target"]
OPTIONAL = {
    "conv2d": ["bias"],
    "linear": ["bias"],
    "linear_relu": ["bias"],
    "linear_cross_entropy": ["bias"],
    "conv_bn_relu_pool": ["bias", "running_mean", "running_var", "bn_weight", "bn_bias"],
    "batch_norm": ["weight", "bias", "running_mean", "running_var"],
    "cross_entropy": ["weight"],
    "nll_loss": ["weight"],
}
FILL = {"kernel_size": 2, "running_mean": None, "running_var": None, "bias": None}
NO_TENSORS = [1.0, [1.0], np.ones(3, dtype=np.float32)]


def call_with(name, **changed):
    """functional.<name>, with ones for each tensor that it must have."""
    arguments = {"input": torch.ones(3, 4)}
    for parameter in inspect.signature(getattr(F, name)).parameters.values():
        if parameter.default is inspect.Parameter.empty and parameter.name != "input":
            arguments[parameter.name] = FILL.get(parameter.name, torch.ones(3, 4))
    return getattr(F, name)(**{**arguments, **changed})


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", NO_TENSORS, ids=["number", "list", "array"])
def test_what_is_no_tensor_is_a_type_error(name, value):
    got = type(value).__name__
    for argument in ["input", *REQUIRED.get(name, [])]:
        with pytest.raises(TypeError, match=f"{name}: expected {argument} to be a Tensor, got {got}"):
            call_with(name, **{argument: value})
    for argument in OPTIONAL.get(name, []):
        with pytest.raises(TypeError, match=f"{name}: expected {argument} to be a Tensor or None, got {got}"):
            call_with(name, **{argument: value})


@pytest.mark.parametrize("value", [1.0, True, "one", None], ids=repr)
def test_what_is_no_integer_is_a_type_error(value):
    x, weight, target = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 1, 1), torch.tensor([0])
    calls = {
        ("conv2d", "groups"): lambda: F.conv2d(x, weight, groups=value),
        ("conv2d", "stride"): lambda: F.conv2d(x, weight, stride=value),
        ("max_pool2d", "kernel_size"): lambda: F.max_pool2d(x, value),
        ("max_pool2d", "dilation"): lambda: F.max_pool2d(x, 2, dilation=(1, value)),
        ("avg_pool2d", "padding"): lambda: F.avg_pool2d(x, 2, padding=[value]),
        ("nll_loss", "ignore_index"): lambda: F.nll_loss(torch.ones(1, 2), target, ignore_index=value),
        ("cross_entropy", "ignore_index"): lambda: F.cross_entropy(torch.ones(1, 2), target, ignore_index=value),
    }
    if value is not None:
        calls["log_softmax", "dim"] = lambda: F.log_softmax(x, value)
        calls["avg_pool2d", "divisor_override"] = lambda: F.avg_pool2d(x, 2, divisor_override=value)
    for (op, argument), call in calls.items():
        with pytest.raises(TypeError, match=f"{op}: expected {argument} to be an int"):
            call()
    with pytest.raises(TypeError, match="batch_norm: expected momentum to be a number, got None"):
        F.batch_norm(x, torch.zeros(1), torch.ones(1), training=True, momentum=None)


@pytest.mark.parametrize("two", [np.int64(2), torch.tensor(2)], ids=["numpy", "tensor"])
def test_integers_of_numpy_and_tensors_are_integers(two):
    x, weight = torch.rand(1, 1, 6, 6), torch.rand(1, 1, 3, 3)
    native = torch.nn.functional
    for ours, theirs in (
        (F.conv2d(x, weight, stride=two, padding=(two, 1)), native.conv2d(x, weight, stride=2, padding=(2, 1))),
        (F.max_pool2d(x, two, (two, 1)), native.max_pool2d(x, 2, (2, 1))),
        (F.avg_pool2d(x, [two]), native.avg_pool2d(x, 2)),
        (F.log_softmax(x, two), native.log_softmax(x, 2)),
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_linear_spreads_a_bias_of_one_number(shape):
    """As PyTorch does."""
    x, bias = torch.rand(2, 2, 3, requires_grad=True), torch.rand(shape, requires_grad=True)
    for weight in (torch.rand(4, 3), torch.rand(1, 3)):
        results = []
        for linear in (F.linear, torch.nn.functional.linear):
            output = linear(x, weight, bias)
            results.append((output, *torch.autograd.grad(output.square().sum(), (x, bias))))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30])
def test_integers_that_no_kernel_could_be_given_are_named(value):
    x, weight = torch.ones(1, 2, 4, 4), torch.ones(2, 2, 1, 1)
    calls = {
        ("conv2d", "groups"): lambda: F.conv2d(x, weight, groups=value),
        ("conv2d", "stride"): lambda: F.conv2d(x, weight, stride=value),
        ("conv1d", "dilation"): lambda: F.conv1d(x[0], weight[0], dilation=value),
        ("max_pool2d", "padding"): lambda: F.max_pool2d(x, 2, padding=(1, value)),
        ("avg_pool2d", "divisor_override"): lambda: F.avg_pool2d(x, 2, divisor_override=value),
        ("softmax", "dim"): lambda: F.softmax(x, value),
    }
    for (op, argument), call in calls.items():
        with pytest.raises(OverflowError, match=f"^{op}: expected {argument} to be an integer of 64 bits, got {value}"):
            call()


WRONG_TYPES = {
    "conv_bn_relu_pool: expected eps to be a number, got 'x'": {"eps": "x"},
    "conv_bn_relu_pool: expected momentum to be a number, got 'x'": {"momentum": "x"},
    "conv_bn_relu_pool: expected channels_last to be a bool or None, got 'yes'": {"channels_last": "yes"},
    "batch_norm: expected eps to be a number, got 'x'": {"eps": "x"},
    "batch_norm: expected training to be a bool, got 'False'": {"training": "False"},
    "dropout: expected p to be a number, got '0.5'": {"p": "0.5"},
    "dropout: expected training to be a bool, got 1": {"training": 1},
    "hardtanh: expected min_val to be a number, got None": {"min_val": None},
    "hardtanh: expected max_val to be a number, got '1'": {"max_val": "1"},
    "max_pool2d: expected ceil_mode to be a bool, got None": {"ceil_mode": None},
    "avg_pool2d: expected ceil_mode to be a bool, got 'x'": {"ceil_mode": "x"},
    "avg_pool2d: expected count_include_pad to be a bool, got 0": {"count_include_pad": 0},
    "gather_normalize: expected mean to be a number, got '0.5'": {"mean": "0.5"},
    "gather_normalize: expected dtype to be a torch.dtype, got 'float32'": {"dtype": "float32"},
    "scaled_dot_product_attention: expected enable_gqa to be a bool, got 'False'": {"enable_gqa": "False"},
}


@pytest.mark.parametrize("message", WRONG_TYPES)
def test_other_arguments_of_the_wrong_type(message):
    images, indices = torch.ones(2, 1, 4, 4), torch.zeros(1, dtype=torch.int64)
    arguments = {
        "avg_pool2d": (images, 2),
        "batch_norm": (images, None, None),
        "conv_bn_relu_pool": (images, torch.ones(2, 1, 3, 3), None, None, None),
        "dropout": (images,),
        "gather_normalize": (indices.byte(), indices),
        "hardtanh": (images,),
        "max_pool2d": (images, 2),
        "scaled_dot_product_attention": (images, images, images),
    }
    name, wrong = message.split(":")[0], WRONG_TYPES[message]
    defaults = {"mean": 0.0, "std": 1.0} if name == "gather_normalize" else {}
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        getattr(F, name)(*arguments[name], **{**defaults, **wrong})


def test_bools_of_numpy_are_bools():
    images = torch.arange(9.0).view(1, 3, 3)
    for pool in (F.max_pool2d, F.avg_pool2d):
        assert torch.equal(pool(images, 2, ceil_mode=np.bool_(True)), pool(images, 2, ceil_mode=True))
    assert F.dropout(images, training=np.bool_(False)) is images


# Values of an argument that stands for one number, or for several, and what the message names.
NO_NUMBERS = ["0.1", b"0.1", [0.1], torch.tensor(0.1, requires_grad=True), torch.tensor([0.1, 0.2]), None, 1j]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
def test_what_is_no_number_is_a_type_error(value):
    x, target = torch.ones(1, 2), torch.tensor([0])
    calls = {
        ("cross_entropy", "label_smoothing"): lambda: F.cross_entropy(x, target, label_smoothing=value),
        ("linear_cross_entropy", "label_smoothing"): lambda: F.linear_cross_entropy(
            x, torch.ones(3, 2), target, label_smoothing=value
        ),
    }
    if not isinstance(value, torch.Tensor):  # of which several are a NotImplementedError
        calls["polynomial", r"coefficients\[1\]"] = lambda: F.polynomial(x, (1.0, value))
    for (op, argument), call in calls.items():
        with pytest.raises(TypeError, match=f"{op}: expected {argument} to be a number, got "):
            call()
    if isinstance(value, (str, bytes)) or value is None:
        with pytest.raises(TypeError, match="polynomial: expected coefficients to be numbers, got "):
            F.polynomial(x, value)


def test_numbers_of_numpy_and_tensors_are_numbers():
    """As in PyTorch."""
    x, target = torch.rand(2, 3), torch.tensor([0, 2])
    for tenth in (np.float64(0.1), np.float32(0.1), torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)):
        torch.testing.assert_close(
            F.cross_entropy(x, target, label_smoothing=tenth),
            torch.nn.functional.cross_entropy(x, target, label_smoothing=float(tenth)),
        )
        torch.testing.assert_close(
            F.linear_cross_entropy(x, torch.ones(3, 3), target, label_smoothing=tenth),
            F.linear_cross_entropy(x, torch.ones(3, 3), target, label_smoothing=float(tenth)),
        )
    for coefficients in (np.array([1.0, 2.0]), (np.float32(1), np.int64(2)), [1, 2], range(1, 3)):
        torch.testing.assert_close(F.polynomial(x, coefficients), 1 + 2 * x)


@pytest.mark.parametrize("value", [1.5, "float32", torch.float32.__class__], ids=repr)
def test_what_is_no_dtype_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"log_softmax: expected dtype to be a torch\.dtype, got "):
        F.log_softmax(torch.ones(2, 3), 1, dtype=value)
    images, indices = torch.zeros(2, 3, dtype=torch.uint8), torch.tensor([0])
    with pytest.raises(TypeError, match=r"gather_normalize: expected dtype to be a torch\.dtype, got "):
        F.gather_normalize(images, indices, 0.0, 1.0, dtype=value)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_dtype_or_none_goes_straight_to_the_op(dtype):
    """And not by way of torch.ops, which takes the host as long as a small op does."""
    _C = pytest.importorskip("cuda_ops._C", reason="cuda_ops._C is of another Python")

    def otherwise(*arguments):
        raise AssertionError("by way of torch.ops")

    x = torch.tensor([1.0, 2.0])
    output = _C.bind("cuda_ops::cumsum_forward", otherwise)(x, 0, dtype, False)
    torch.testing.assert_close(output, x.cumsum(0, dtype=dtype), rtol=0, atol=0)
    with pytest.raises(AssertionError, match="by way of"):  # which refuses it by name
        _C.bind("cuda_ops::cumsum_forward", otherwise)(x, 0, 6, False)


# Kinds of tensors that no kernel takes, as messages name them.
NOT_DENSE = {
    "a sparse tensor": [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc],
    "a tensor of MKL-DNN's layout": [torch.Tensor.to_mkldnn],
    "a quantized tensor": [lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)],
}


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support")
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_tensors_that_are_not_dense_are_refused(kind):
    """By a line that names op and argument, whichever argument it is, and where a gradient is wanted."""
    x, refused = torch.eye(3), f"to be a dense tensor, got {kind}$"
    for make in NOT_DENSE[kind]:
        odd = make(x)
        calls = {
            "relu: expected input": lambda odd=odd: F.relu(odd),
            "softmax: expected input": lambda odd=odd: F.softmax(odd, 0),
            "sum: expected input": lambda odd=odd: F.sum(odd),
            "add2: expected other": lambda odd=odd: F.add2(x, odd),
            "linear: expected weight": lambda odd=odd: F.linear(x, odd),
            "linear_gelu: expected input": lambda odd=odd: F.linear_gelu(odd, x),
            "matmul: expected other": lambda odd=odd: F.matmul(x, odd),
            "concat: expected tensors": lambda odd=odd: F.concat([x, odd]),
        }
        for start, call in calls.items():
            with pytest.raises(NotImplementedError, match=f"^{start} {refused}"):
                call()
    if "quantized" not in kind:
        with pytest.raises(NotImplementedError, match=f"^relu: expected input {refused}"):
            F.relu(make(x).requires_grad_())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize(
    "name", ["add2", "linear", "linear_gelu", "linear_relu", "log_softmax", "matmul", "polynomial", "relu", "square"]
)
def test_nested_tensors_are_refused(name, layout):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    for tensor in (nested, nested.detach().requires_grad_()):
        with pytest.raises(
            NotImplementedError, match=f"^{name}: expected input to be a dense tensor, got a nested tensor"
        ):
            if name in ("relu", "square", "polynomial"):
                getattr(F, name)(tensor)
            else:
                getattr(F, name)(tensor, -1 if name == "log_softmax" else torch.ones(3, 3))


def test_signatures_are_those_of_pytorch():
    """Names, order and defaults. Those of PyTorch's that are builtins keep them in their docstring."""
    for name in sorted(set(F.__all__) & set(dir(torch.nn.functional))):
        ours = inspect.signature(getattr(F, name)).parameters
        # max_pool2d itself, and its like, take anything and pass it on.
        passed_on = name in ("max_pool2d", "adaptive_max_pool2d")
        native = getattr(torch.nn.functional, f"_{name}" if passed_on else name)
        try:
            theirs = {p.name: repr(p.default) for p in inspect.signature(native).parameters.values()}
        except ValueError:
            line = re.search(rf"{name}\((.*?)\) -> Tensor", native.__doc__, re.DOTALL).group(1)
            theirs = dict(map(str.strip, (part.split("=") if "=" in part else (part, ""))) for part in line.split(","))
            assert list(ours) == list(theirs), name
            defaults = {n: d for n, d in theirs.items() if d}
            # 1 and 1.0 are one default.
            assert {n: ours[n].default for n in defaults} == {n: ast.literal_eval(d) for n, d in defaults.items()}, name
        else:
            assert [(p.name, repr(p.default)) for p in ours.values()] == list(theirs.items()), name
