"""What is special to linear: module beside torch.nn's, random shapes, autocast, what is kept and what is computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.opspec import RELATIVE_NORM, Make, Sample, assert_close, random_grad_outputs, run_with_gradients, upcast

import cuda_ops
from cuda_ops.functional import linear


@pytest.mark.parametrize("bias", [True, False])
def test_module_is_a_drop_in(device_dtype, bias):
    device, dtype = device_dtype
    ours = cuda_ops.nn.Linear(33, 10, bias=bias, device=device, dtype=dtype)
    native = torch.nn.Linear(33, 10, bias=bias, device=device, dtype=dtype)
    assert repr(ours) == repr(native)
    native.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(native.state_dict(), strict=True)
    input = Make(device, dtype)(2, 3, 33)
    expected = torch.nn.functional.linear(
        input.cpu().double(), *(p.detach().cpu().double() for p in native.parameters())
    )
    assert_close(ours(input), expected, RELATIVE_NORM[dtype])


def test_module_initialises_like_pytorch():
    torch.manual_seed(3)
    ours = cuda_ops.nn.Linear(7, 5)
    torch.manual_seed(3)
    native = torch.nn.Linear(7, 5)
    assert torch.equal(ours.weight, native.weight)
    assert torch.equal(ours.bias, native.bias)


@pytest.mark.parametrize("sizes", [(1000, 768), (3, 10), (700, 33), (0, 5)])
def test_sums_of_halves_that_are_not_rounded(device_dtype, sizes):
    """What goes to float32 biases that were rounded for the product: from linear, and through gelu."""
    device, dtype = device_dtype
    grad = Make(device, dtype)(*sizes)
    wanted = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    sums = torch.ops.cuda_ops.linear_backward_float32_bias(grad)
    exact, size = grad.double().sum(0), grad.double().abs().sum(0)
    assert sums.dtype == wanted and sums.shape == sizes[1:]
    assert ((sums.double() - exact).abs() <= 4 * torch.finfo(wanted).eps * size).all()
    weight, preactivation = Make(device, dtype)(sizes[1], 16), Make(device, dtype)(sizes[0], 16)
    for with_bias in (True, False):
        arguments = grad, weight, preactivation, "tanh", with_bias
        back, sums = torch.ops.cuda_ops.gelu_linear_backward(*arguments)
        assert sums.dtype == wanted and sums.numel() == (16 if with_bias else 0)
        if with_bias:
            error = (sums.double() - back.double().sum(0)).abs()
            assert (error <= torch.finfo(dtype).eps * back.double().abs().sum(0)).all()
        torch.library.opcheck(torch.ops.cuda_ops.gelu_linear_backward.default, arguments)


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.float64]),
    leading=st.lists(st.integers(0, 5), max_size=3),
    scale=st.sampled_from([1, 1, 7, 40]),
    in_features=st.integers(0, 70),
    out_features=st.integers(0, 70),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape(device, dtype, leading, scale, in_features, out_features, bias, seed):
    """Small integers, whose sums are exact, so that nothing but the right result will do."""
    make = Make(seed=seed)

    def integers(*shape):
        return make.integers(*shape, low=-4, high=5).to(device, dtype).requires_grad_()

    leading = [size * scale if d == 0 else size for d, size in enumerate(leading)]
    tensors = [integers(*leading, in_features), integers(out_features, in_features)]
    tensors += [integers(out_features)] if bias else []
    output = linear(*tensors)
    grad_output = integers(*output.shape)
    grads = torch.autograd.grad(output, tensors, grad_output)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    expected = torch.nn.functional.linear(*doubles)
    expected_grads = torch.autograd.grad(expected, doubles, grad_output.double())
    for actual, reference in zip((output, *grads), (expected, *expected_grads), strict=True):
        assert torch.equal(actual.double(), reference)


def test_threads_do_not_change_the_bits():
    """Large enough for several threads by rows, and by columns."""
    for rows, in_features, out_features in [(400, 130, 70), (70, 300, 900)]:
        make = Make("cpu", torch.float32, requires_grad=True)
        tensors = make(rows, in_features), make(out_features, in_features), make(out_features)
        before = torch.get_num_threads()
        results = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                output = linear(*tensors)
                results.append([output, *torch.autograd.grad(output, tensors, torch.ones_like(output))])
        finally:
            torch.set_num_threads(before)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_rows_do_not_depend_on_each_other_on_the_cpu():
    """A row's result has the same bits alone and in a batch: every element is summed in one order."""
    make = Make("cpu", torch.float32)
    input, weight, bias = make(50, 600), make(37, 600), make(37)
    together = linear(input, weight, bias)
    for row in (0, 13, 14, 49):
        assert torch.equal(linear(input[row], weight, bias), together[row])


@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_only_the_wanted_gradients_are_computed(device, frozen):
    make = Make(device, torch.float32)
    tensors = {"input": make(3, 4), "weight": make(2, 4), "bias": make(2)}
    wanted = {name: t.requires_grad_() for name, t in tensors.items() if name != frozen}
    with torch.profiler.profile(acc_events=True) as profile:
        linear(**tensors).sum().backward()
    called = {event.name for event in profile.events()}
    for name in tensors:
        assert (f"cuda_ops::linear_backward_{name}" in called) == (name in wanted)
    assert tensors[frozen].grad is None


def test_a_frozen_weight_keeps_no_input():
    input = torch.ones(3, 4, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(input, torch.ones(2, 4))
    assert not any(t.data_ptr() == input.data_ptr() for t in saved)


def test_nan_times_zero_is_nan(device_dtype):
    device, dtype = device_dtype
    input = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [0.0, 1.0]], device=device, dtype=dtype)
    output = linear(input, torch.tensor([[0.0, 2.0]], device=device, dtype=dtype)).cpu()
    assert output[0].isnan() and output[1].isnan() and output[2] == 2


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    """Forward in the lower precision, gradients in the dtype of the parameters, both as PyTorch computes them."""
    make = Make("cuda", torch.float32, requires_grad=True)
    tensors = make(65, 33), make(10, 33), make(10)
    results = []
    for function in (linear, torch.nn.functional.linear):
        with torch.autocast("cuda", dtype):
            output = function(*tensors)
        grads = torch.autograd.grad(output, tensors, random_grad_outputs((output,)))
        assert output.dtype == dtype
        assert all(g.dtype == torch.float32 for g in grads)
        results.append((output, *grads))
    for ours, native in zip(*results, strict=True):
        assert_close(ours, native.double(), 2e-3 if dtype == torch.float16 else 1.6e-2)


@pytest.mark.cuda
def test_autocast_leaves_float64_alone():
    make = Make("cuda", torch.float64)
    with torch.autocast("cuda", torch.float16):
        assert linear(make(2, 3), make(4, 3)).dtype == torch.float64


@pytest.mark.cuda
def test_sums_that_are_split_repeat_bitwise():
    """The shapes of the MNIST network: few tiles and a long sum, so that blocks share it."""
    for rows, in_features, out_features in [(64, 3136, 128), (1024, 128, 10), (4096, 70, 33)]:
        make = Make("cuda", torch.float32, requires_grad=True)
        tensors = make(rows, in_features), make(out_features, in_features), make(out_features)
        sample = Sample(tensors)
        first = None
        for _ in range(30):
            outputs = (linear(*tensors),)
            grad_outputs = random_grad_outputs(outputs)
            now = [*outputs, *torch.autograd.grad(outputs, tensors, grad_outputs)]
            first = first or now
            assert all(torch.equal(a, b) for a, b in zip(first, now, strict=True))
        expected = run_with_gradients(
            torch.nn.functional.linear, upcast(sample), [g.cpu().double() for g in grad_outputs]
        )
        for actual, reference in zip(first, (*expected[0], *expected[1]), strict=True):
            assert_close(actual, reference, 2e-6)


# Rows of whole 16-byte vectors, read several at a time, and others; one column; more columns than a block
# has; rows for one block, for several, and some left over.
BIAS_SHAPES = [
    (1, 1),
    (7, 10),
    (1024, 10),
    (30_011, 10),
    (70_003, 1),
    (2049, 33),
    (4097, 257),
    (100, 1281),
    (5, 50_257),
]
BIAS_SHAPES += [(3001, 264), (1500, 640), (20, 8192), (255, 1023), (0, 5)]


@pytest.mark.parametrize("offset", [0, 1])
def test_bias_gradient_of_any_shape(device_dtype, offset):
    """Small integers, whose sums are exact, also where the array is not aligned to 16 bytes."""
    device, dtype = device_dtype
    for rows, columns in BIAS_SHAPES:
        values = Make(seed=rows).integers(rows * columns + offset, low=-2, high=3).to(device, dtype)
        grad_output = values[offset:].view(rows, columns)
        expected = grad_output.double().sum(0).to(dtype)
        for _ in range(2):
            assert torch.equal(torch.ops.cuda_ops.linear_backward_bias(grad_output), expected), (rows, columns)


@pytest.mark.cuda
def test_bias_gradient_repeats_bitwise():
    for rows, columns in [(30_011, 10), (5120, 640), (999, 1281)]:
        grad_output = Make("cuda", torch.float32)(rows, columns)
        first = torch.ops.cuda_ops.linear_backward_bias(grad_output)
        assert_close(first, grad_output.double().sum(0).cpu(), 2e-6)
        for _ in range(10):
            assert torch.equal(torch.ops.cuda_ops.linear_backward_bias(grad_output), first)


@pytest.mark.cuda
@pytest.mark.large
def test_more_than_2_31_elements():
    """Offsets are 64 bits wide: an input of 2^31 + some elements, of which the last rows are looked at."""
    rows, in_features = (2**31 // 1024) + 5, 1024
    input = torch.zeros(rows, in_features, device="cuda", dtype=torch.bfloat16)
    input[-3:] = 1
    weight = torch.ones(2, in_features, device="cuda", dtype=torch.bfloat16)
    output = linear(input, weight)
    assert (output[:-3] == 0).all()
    assert (output[-3:] == 1024).all()
    grad_output = torch.zeros_like(output)
    grad_output[-1] = 1
    assert (torch.ops.cuda_ops.linear_backward_weight(grad_output, input) == 1).all()
    assert (torch.ops.cuda_ops.linear_backward_bias(input) == 3).all()
