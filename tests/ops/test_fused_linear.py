"""What is special to linear_relu and linear_cross_entropy: float32 parameters beside fp16 and bf16 activations."""

import pytest
import torch
from support.devices import needs_hopper
from support.opspec import RELATIVE_NORM, Make, assert_close

from cuda_ops.functional import linear_cross_entropy, linear_gelu, linear_relu

HALVES = [torch.float16, torch.bfloat16]


def parameters(make, dtype, rows, columns):
    """Values of `dtype`, in float32: their rounding on the way to the tensor cores is no part of the error."""
    bound = 8 / max(columns, 4)
    values = make(rows, columns, low=-bound, high=bound), make(rows)
    return [t.to(dtype).float().requires_grad_() for t in values]


def check(function, reference, tensors, dtype):
    output = function(*tensors)
    grad = torch.randn_like(output) if output.dim() else torch.ones_like(output)
    grads = torch.autograd.grad(output, tensors, grad)
    doubles = [t.detach().cpu().double().requires_grad_() for t in tensors]
    expected = reference(*doubles)
    expected_grads = torch.autograd.grad(expected, doubles, grad.cpu().double())
    assert_close(output, expected, RELATIVE_NORM[dtype])
    for tensor, actual, wanted in zip(tensors, grads, expected_grads, strict=True):
        assert actual.dtype == tensor.dtype
        assert_close(actual, wanted, RELATIVE_NORM[dtype], "gradient")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALVES, ids=str)
# Features that 16-byte loads of fp16 and of float32 fit (24), those of float32 alone (20, 1028), and neither (17, 33).
# Classes off the padding of their rows, which is to hold no garbage where it is loaded with them.
@pytest.mark.parametrize(
    ("rows", "in_features", "classes"),
    [(37, 24, 10), (37, 24, 17), (37, 20, 17), (37, 20, 30), (5, 1028, 3), (37, 17, 19), (130, 33, 130), (3, 20, 1)],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cross_entropy_of_float32_parameters(dtype, rows, in_features, classes, reduction):
    make = Make("cuda", torch.float32)
    input = make(rows, in_features).to(dtype).requires_grad_()
    target = make.integers(rows, high=classes)

    def ours(input, weight, bias):
        return linear_cross_entropy(input, weight, target, bias, reduction=reduction, label_smoothing=0.1)

    def native(input, weight, bias):
        logits = torch.nn.functional.linear(input, weight, bias)
        return torch.nn.functional.cross_entropy(logits, target.cpu(), reduction=reduction, label_smoothing=0.1)

    if classes == 1:  # nothing to compare: a loss and gradients of 0
        output = ours(input, *parameters(make, dtype, classes, in_features))
        assert (output == 0).all()
        assert (torch.autograd.grad(output.sum(), input)[0] == 0).all()
        return
    check(ours, native, [input, *parameters(make, dtype, classes, in_features)], dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("rows", "in_features", "classes"), [(5000, 40, 65), (4097, 264, 120), (4096, 20, 17)])
def test_cross_entropy_of_many_rows_and_few_classes(dtype, rows, in_features, classes):
    """The gradient of weight is a product of few tiles, which splits the rows; with a bias it is another one."""
    make = Make("cuda", torch.float32)
    input = make(rows, in_features).to(dtype).requires_grad_()
    target = make.integers(rows, high=classes)
    weight, bias = parameters(make, dtype, classes, in_features)
    options = {"reduction": "sum"}  # the gradients of a mean are too small for fp16
    for tensors in ([input, weight], [input, weight, bias]):
        check(
            lambda *t: linear_cross_entropy(*t[:2], target, *t[2:], **options),
            reference_of(target, **options),
            tensors,
            dtype,
        )


def reference_of(target, **options):
    return lambda *t: torch.nn.functional.cross_entropy(torch.nn.functional.linear(*t), target.cpu(), **options)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_cross_entropy_of_several_chunks_of_rows(dtype, spread):
    """Chunks of 3072 rows and a last one of 2856: what is left of a chunk for the next one to do is of the right rows.
    With logits far apart rows have losses beyond the range of their references, and are rewritten."""
    make = Make("cuda", torch.float32)
    input = make(9000, 64).to(dtype).requires_grad_()
    target = make.integers(9000, high=300)
    target[::7] = -100
    weight = parameters(make, dtype, 300, 64)[0].detach().mul(spread).to(dtype).float().requires_grad_()
    options = {"reduction": "sum"}  # the gradients of a mean are too small for fp16
    check(
        lambda *t: linear_cross_entropy(*t, target, **options), reference_of(target, **options), [input, weight], dtype
    )


@pytest.mark.cuda
def test_the_heads_workspace_is_that_of_its_plans():
    """In bfloat16 on Hopper: a chunk's exponentials, weight in halves, the gradients, and little else; where a GPU has
    other numbers of multiprocessors than 132, a product's split too."""
    needs_hopper()
    rows, features, classes = 4096, 768, 50304
    input = torch.randn(rows, features, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(classes, features, device="cuda").requires_grad_()
    target = torch.randint(classes, (rows,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(input, weight, target)
    taken = torch.cuda.max_memory_allocated() - before
    known = 2 * rows * classes + (2 + 4) * classes * features + 2 * rows * features
    split = 0 if torch.cuda.get_device_properties(0).multi_processor_count == 132 else 40e6
    assert taken < known + 50e6 + split


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [
        *[(1, 24, 16), (37, 24, 17), (37, 20, 24), (130, 33, 70), (1030, 72, 136), (1030, 20, 12)],
        *[(1024, 3136, 128), (1025, 64, 8), (9000, 16, 264)],
        # Hopper's own kernels: off their tiles and their splits of k, one split, several tiles of both features.
        *[(128, 512, 8), (130, 520, 72), (513, 1032, 136), (600, 3136, 8), (700, 640, 264), (4097, 776, 128)],
    ],
)
def test_relu_of_float32_parameters(dtype, rows, in_features, out_features):
    make = Make("cuda", torch.float32)
    # Whole numbers, so that both sides agree on what is above 0.
    input = make(rows, in_features).round().to(dtype).requires_grad_()
    weight, bias = (make(*shape).round().requires_grad_() for shape in ((out_features, in_features), (out_features,)))

    def native(input, weight, bias):
        return torch.relu(torch.nn.functional.linear(input, weight, bias))

    check(linear_relu, native, [input, weight, bias], dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_relu_of_many_rows_leaves_out_what_nobody_wants(parameter_dtype):
    make = Make("cuda", torch.float32)
    input, grad = make(515, 520).bfloat16(), make(515, 72).bfloat16()
    weight, bias = make(72, 520, low=-0.1, high=0.1).to(parameter_dtype), make(72).to(parameter_dtype)
    forward, backward = torch.ops.cuda_ops.linear_relu_forward, torch.ops.cuda_ops.linear_relu_backward
    output = forward(input, weight, bias)
    assert torch.equal(output, forward(input, weight, bias))
    whole = backward(grad, output, input, weight, True, True, True)
    for wanted in range(7):
        flags = [bool(wanted & 1), bool(wanted & 2), bool(wanted & 4)]
        for flag, some, every in zip(flags, backward(grad, output, input, weight, *flags), whole, strict=True):
            assert torch.equal(some, every) if flag else some.numel() == 0


FUNCTIONS = {
    "relu": (linear_relu, lambda x, w, b: torch.relu(torch.nn.functional.linear(x, w, b))),
    "gelu": (linear_gelu, lambda x, w, b: torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
# A row, a feature; what no vector, tile or thread's share of rows divides; a long sum.
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"), [(1, 5, 3), (7, 1, 1), (67, 130, 33), (515, 33, 70), (3, 3136, 128)]
)
def test_sizes_that_no_tile_divides(name, rows, in_features, out_features, device):
    function, reference = FUNCTIONS[name]
    make = Make(device, torch.float32, requires_grad=True)
    tensors = [make(rows, in_features), *parameters(make, torch.float32, out_features, in_features)]
    check(function, reference, tensors, torch.float32)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_alone(name, value, device):
    """In outputs and in input's gradients; of parameters' gradients all that it is part of is not finite."""
    function, reference = FUNCTIONS[name]
    make = Make(device, torch.float32)
    input, weight, bias = make(70, 33), make(40, 33), make(40)
    input[69, 32] = value
    results = []
    for run, convert in ((function, lambda t: t), (reference, lambda t: t.cpu().double())):
        tensors = [convert(t).detach().requires_grad_() for t in (input, weight, bias)]
        output = run(*tensors)
        results.append((output, *torch.autograd.grad(output, tensors, torch.ones_like(output))))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, 5e-6)


@pytest.mark.cuda
def test_relu_of_many_rows_lets_nan_travel():
    make = Make("cuda", torch.float32)
    input, weight = make(600, 512).bfloat16(), make(64, 512)
    input[599, 511] = torch.nan
    output = torch.ops.cuda_ops.linear_relu_forward(input, weight, None)
    assert output[599].isnan().all() and not output[:599].isnan().any()
    # It lets the gradient through, too.
    ones = torch.ones_like(output)
    bias = torch.ops.cuda_ops.linear_relu_backward(ones, output, input, weight, False, False, True)[2]
    assert torch.equal(bias, ((output > 0) | output.isnan()).sum(0).float())


@pytest.fixture
def tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.cuda
# A tile that few rows take, one in between and a large one; backward of few and of many rows; sizes that no tile
# divides; rows of features that no 16-byte load fits, which are multiplied as they are.
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [(64, 3136, 128), (70, 44, 36), (1000, 132, 260), (9000, 100, 132), (1100, 3136, 128), (33, 35, 19)],
)
def test_relu_with_tf32(rows, in_features, out_features, tf32):
    make = Make("cuda", torch.float32)
    bound = 8 / max(in_features, 4)
    input, weight, bias = (
        make(rows, in_features),
        make(out_features, in_features, low=-bound, high=bound),
        make(out_features),
    )
    tensors = [t.requires_grad_() for t in (input, weight, bias)]
    output = linear_relu(*tensors)
    grad = make(rows, out_features)
    grads = torch.autograd.grad(output, tensors, grad)
    exact = torch.nn.functional.linear(*(t.double() for t in (input, weight, bias)))
    assert_close(output, torch.relu(exact), 1e-3)
    masked = torch.where(output > 0, grad, 0.0).double()  # by the output that there is: rounding moves others past 0
    expected = masked @ weight.double(), masked.T @ input.double(), masked.sum(0)
    for actual, wanted in zip(grads, expected, strict=True):
        assert_close(actual, wanted, 1e-3, "gradient")
    again = torch.autograd.grad(linear_relu(*tensors), tensors, grad)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.cuda
def test_tf32_is_obeyed():
    """1 + 2^-12 is 1 in TF32, which has 10 bits behind the point; 1 + 2^-11 + 2^-13 is rounded up, not cut off."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no TF32 before sm_80")
    try:
        for value, rounded in ((1 + 2**-12, 1.0), (1 + 2**-11 + 2**-13, 1 + 2**-10)):
            x, ones = torch.full((256, 256), value, device="cuda"), torch.ones(256, 256, device="cuda")
            for allowed, result in ((False, 256 * value), (True, 256 * rounded)):
                torch.backends.cuda.matmul.allow_tf32 = allowed
                for tensors in ((x, ones), (ones, x)):
                    input, weight = (t.clone().requires_grad_() for t in tensors)
                    output = linear_relu(input, weight)
                    assert (output == result).all()
                    of_input, of_weight = torch.autograd.grad(output, (input, weight), ones)
                    assert (of_input == (result if tensors[1] is x else 256.0)).all()
                    assert (of_weight == (result if tensors[0] is x else 256.0)).all()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(
    ("wanted", "saved"),
    [
        ("iwb", ["input", "preactivation", "weight"]),
        ("i", ["preactivation", "weight"]),
        ("w", ["input", "preactivation"]),
        ("b", ["preactivation"]),
        ("", []),
    ],
)
def test_linear_gelu_saves_what_the_wanted_gradients_need(wanted, saved):
    input, weight, bias = torch.rand(5, 3), torch.rand(4, 3), torch.rand(4)
    for name, tensor in zip("iwb", (input, weight, bias), strict=True):
        tensor.requires_grad_(name in wanted)
    names = {(5, 3): "input", (4, 3): "weight", (5, 4): "preactivation"}
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(names[tuple(t.shape)]) or t, lambda t: t):
        linear_gelu(input, weight, bias)
    assert sorted(packed) == saved


def test_gradients_to_be_scaled_are_those_of_forward():
    x, weight, target = torch.rand(4, 3), torch.rand(5, 3), torch.arange(4)
    options = 1, -100, 0.0, 0.0, 0.0, True, True, False
    loss, total, *grads = torch.ops.cuda_ops.linear_cross_entropy_forward(x, weight, target, None, None, *options)
    grads[1] = grads[1].double()
    refusal = "expected grad_weight and grad_bias to be those of forward, float32, got float64"
    with pytest.raises(RuntimeError, match=refusal):
        torch.ops.cuda_ops.linear_cross_entropy_scale(torch.ones_like(loss), total, *grads, 1)
