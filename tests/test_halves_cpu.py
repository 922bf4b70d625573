"""float16 and bfloat16 on the CPU: every op's values and gradients, and what is special to computing them as float32 in
tiles of rows: lengths, threads, parameters of float32, state, masks."""

import itertools
import os

import pytest
import torch
from support.opspec import Make, as_tuple, assert_close, run_with_gradients, upcast
from test_values import check

import cuda_ops
from cuda_ops import functional as F

HALVES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
halves = pytest.mark.parametrize("dtype", HALVES)


@halves
def test_values_and_gradients(spec, dtype):
    if spec.random:
        pytest.skip("random: has tests of its own")
    make = Make("cpu", dtype, requires_grad=True)
    for sample in itertools.chain(spec.samples(make), spec.empty_samples(make)):
        check(spec, sample, dtype)


@halves
def test_nonfinite_values_travel_as_in_pytorch(spec, dtype):
    if spec.random or not spec.nonfinite:
        pytest.skip("the specification has tests of its own for it")
    for value in (float("nan"), float("inf"), float("-inf")):
        for sample in spec.small_samples(Make("cpu", dtype)):
            first = sample.tensors()[0]
            if first.numel() == 0:
                continue
            with torch.no_grad():
                first.view(-1)[first.numel() // 2] = value
            outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
            expected_outputs, _ = run_with_gradients(spec.reference, upcast(sample))
            for output, expected in zip(outputs, expected_outputs, strict=True):
                assert_close(output, expected, spec.tolerance(dtype), f"{sample.name} with {value}")


def test_fakes_have_the_dtypes_of_results(spec):
    for op, args in spec.op_samples(Make("cpu", torch.bfloat16)):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_differentiable_as_often_as_in_float32(spec):
    """Second derivatives and tangents are there, in the dtype of what they are by."""
    if spec.random or not spec.gradgrad:
        pytest.skip("not differentiable twice")
    for sample in spec.small_samples(Make("cpu", torch.bfloat16, requires_grad=True)):
        inputs = [t for t in sample.tensors() if t.requires_grad]
        outputs = [o for o in as_tuple(spec.function(*sample.args, **sample.kwargs)) if o.requires_grad]
        if not inputs or not outputs:
            continue
        grads = torch.autograd.grad(sum(o.float().sum() for o in outputs), inputs, create_graph=True, allow_unused=True)
        again = [g.float().square().sum() for g in grads if g is not None and g.requires_grad]
        if again:
            for second, input in zip(torch.autograd.grad(sum(again), inputs, allow_unused=True), inputs, strict=True):
                assert second is None or second.dtype == input.dtype


@halves
@pytest.mark.parametrize("threads", [1, 2])
def test_tiles_end_anywhere(dtype, threads):
    """Rows shorter and longer than a tile, more elements than a thread takes, rows that are converted as a whole."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in ((1,), (2047,), (2049,), (70001,), (3, 40001), (40001, 3), (1, (1 << 20) + 3)):
            x, y = (torch.randn(shape).to(dtype) for _ in range(2))
            gelu = F.gelu(x.float())
            if dtype == torch.bfloat16:  # of functions that are as exact as it is: off by 2e-5 before they are rounded
                assert ((F.gelu(x).float() - gelu).abs() <= (2**-8 + 3e-5) * gelu.abs()).all()
            else:
                assert torch.equal(F.gelu(x), gelu.to(dtype))
            assert torch.equal(F.add2(x, y), x + y)
            assert torch.equal(F.relu(x), torch.relu(x))
            assert torch.equal(F.softmax(x, 0), F.softmax(x.float(), 0).to(dtype))
            assert torch.equal(F.softmax(x, -1), F.softmax(x.float(), -1).to(dtype))
            assert torch.equal(F.sum(x, 0), F.sum(x.float(), 0).to(dtype))
            assert torch.equal(F.amax(x), x.amax())
            assert torch.equal(F.cumsum(x, -1), F.cumsum(x.float(), -1).to(dtype))
            assert torch.equal(F.mse_loss(x, y), F.mse_loss(x.float(), y.float()).to(dtype))
            assert torch.equal(F.layer_norm(x, shape[-1:]), F.layer_norm(x.float(), shape[-1:]).to(dtype))
    finally:
        torch.set_num_threads(before)


@halves
def test_gradients_of_many_rows(dtype):
    """Layer norm's are summed by chunks of rows, the last of which is shorter."""
    for rows in (1, 7, 33, 700):
        x, w, b, g = (torch.randn(*s).to(dtype) for s in ((rows, 70), (70,), (70,), (rows, 70)))
        results = []
        for convert in (lambda t: t, lambda t: t.float()):
            leaves = [convert(t).requires_grad_() for t in (x, w, b)]
            results.append(torch.autograd.grad(F.layer_norm(leaves[0], (70,), *leaves[1:]), leaves, convert(g)))
        for ours, exact in zip(*results, strict=True):
            assert torch.equal(ours, exact.to(dtype))


@halves
def test_dropout_has_the_mask_of_float32(dtype):
    x = torch.randn(5000).to(dtype)
    results = []
    for values in (x, x.float()):
        torch.manual_seed(5)
        values = values.clone().requires_grad_()
        output = F.dropout_add(F.dropout(values, 0.3, True), values.detach(), 0.5, True)
        results.append((output, *torch.autograd.grad(output.sum(), values)))
    for ours, exact in zip(*results, strict=True):
        assert_close(ours, exact.double(), TOLERANCE[dtype])
        assert torch.equal(ours == 0, exact == 0)


WITH_PARAMETERS = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (6,), w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (6,), w),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "batch_norm": lambda x, w, b: F.batch_norm(x, torch.zeros(6), torch.ones(6), w, b, True),
    "batch_norm in evaluation": lambda x, w, b: F.batch_norm(x, torch.zeros(6), torch.ones(6), w, b),
    "instance_norm": lambda x, w, b: F.instance_norm(x, None, None, w, b),
}


@halves
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_float32_parameters_beside_halves(name, dtype):
    """Their gradients are float32, which are not rounded to the half's."""
    torch.manual_seed(0)
    function = WITH_PARAMETERS[name]
    shape = (9, 6, 4) if name == "instance_norm" else (9, 6)
    x, w, b = torch.randn(shape).to(dtype), torch.rand(6) + 0.5, torch.randn(6)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    exact = [t.double().requires_grad_() for t in (x, w, b)]
    output, expected = function(*leaves), function(x.float(), w, b)
    assert output.dtype == dtype
    assert torch.equal(output, expected.to(dtype))
    wide = [x.float().requires_grad_(), *(t.clone().requires_grad_() for t in (w, b))]
    g = torch.randn(output.shape).to(dtype)
    grads = torch.autograd.grad(output, leaves, g, allow_unused=True)
    expected_grads = torch.autograd.grad(function(*wide), wide, g.float(), allow_unused=True)
    for ours, theirs, leaf in zip(grads, expected_grads, exact, strict=True):
        assert (ours is None) == (theirs is None), leaf.shape
        if ours is not None:
            assert torch.equal(ours, theirs.to(ours.dtype))


@halves
@pytest.mark.parametrize("of", ["halves", "float32"])
def test_running_statistics(of, dtype):
    """Of the input's dtype, or float32 beside it; rounded once."""
    kind = dtype if of == "halves" else torch.float32
    for layer, shape in ((torch.nn.BatchNorm2d, (4, 3, 5, 5)), (torch.nn.InstanceNorm2d, (4, 3, 5, 5))):
        ours = getattr(cuda_ops.nn, layer.__name__)(3, track_running_stats=True, affine=True).to(kind)
        theirs = getattr(cuda_ops.nn, layer.__name__)(3, track_running_stats=True, affine=True)
        x = torch.randn(shape).to(dtype)
        for _ in range(2):
            output = ours(x)
            expected = theirs(x.float())
        assert output.dtype == dtype
        assert_close(output, expected.double(), TOLERANCE[dtype])
        for name in ("running_mean", "running_var"):
            assert getattr(ours, name).dtype == kind
            assert_close(getattr(ours, name), getattr(theirs, name).double(), 2 * TOLERANCE[dtype])
        assert ours.num_batches_tracked == theirs.num_batches_tracked


@halves
@pytest.mark.parametrize("training", [False, True])
def test_a_fused_block(dtype, training):
    """conv_bn_relu_pool, whose path keeps other tensors for backward in each dtype."""
    torch.manual_seed(0)
    for channels in (1, 8):
        block = cuda_ops.nn.ConvBNReLUMaxPool2d(channels, 8, 3, 2).train(training)
        exact = cuda_ops.nn.ConvBNReLUMaxPool2d(channels, 8, 3, 2).double().train(training)
        exact.load_state_dict(block.state_dict())
        x = torch.randn(4, channels, 12, 12)
        halved = block.to(dtype)
        outputs = halved(x.to(dtype)), exact(x.to(dtype).double())
        assert outputs[0].dtype == dtype
        assert_close(outputs[0], outputs[1], 2 * TOLERANCE[dtype])
        for (name, ours), theirs in zip(halved.named_buffers(), exact.buffers(), strict=True):
            assert_close(ours, theirs, 2 * TOLERANCE[dtype], name)
        for output in outputs:
            output.sum().backward()
        for ours, theirs in zip(halved.parameters(), exact.parameters(), strict=True):
            assert ours.grad.dtype == dtype and ours.grad.shape == theirs.grad.shape and ours.grad.isfinite().all()


OPTIMIZERS = {
    "sgd": lambda p: cuda_ops.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: cuda_ops.optim.Adam(p, lr=0.1, weight_decay=0.01, amsgrad=True),
    "adamw": lambda p: cuda_ops.optim.AdamW(p, lr=0.1),
    "adamw, float32 state": lambda p: cuda_ops.optim.AdamW(p, lr=0.1, state_dtype=torch.float32),
}


@halves
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_float32s_rounded_once(name, dtype):
    torch.manual_seed(0)
    start, gradient = torch.randn(5000).to(dtype), torch.randn(5000).to(dtype)
    results = []
    for convert in (lambda t: t, lambda t: t.float()):
        p = torch.nn.Parameter(convert(start).clone())
        p.grad = convert(gradient).clone()
        OPTIMIZERS[name]([p]).step()
        results.append(p.detach())
    assert torch.equal(results[0], results[1].to(dtype))


@halves
def test_gradients_are_clipped(dtype):
    for norm_type in (2.0, 1.0, float("inf")):
        given = [torch.randn(n).to(dtype) for n in (1, 33, 40000)]
        ours, theirs = ([torch.nn.Parameter(torch.zeros_like(g)) for g in given] for _ in range(2))
        for params in (ours, theirs):
            for p, g in zip(params, given, strict=True):
                p.grad = g.clone()
        norm = cuda_ops.nn.utils.clip_grad_norm_(ours, 1.0, norm_type)
        exact = torch.linalg.vector_norm(torch.cat(given).double(), norm_type)
        assert norm.dtype == dtype and abs(norm.double() - exact) <= TOLERANCE[dtype] * exact
        for p, g in zip(ours, given, strict=True):
            assert_close(p.grad, g.double() / exact, TOLERANCE[dtype])


@halves
def test_in_place(dtype):
    x = torch.randn(3, 4000).to(dtype)
    for function in (F.relu, F.silu, F.elu, F.hardtanh, F.leaky_relu):
        y = x.clone()
        assert function(y, inplace=True) is y
        assert torch.equal(y, function(x))
        z = x.clone().t()  # not dense in the order of its dimensions
        assert torch.equal(function(z, inplace=True), function(x).t())
    index = torch.tensor([2, 0, 2])
    expected = x.float().index_add(0, index, x.float()).to(dtype)
    y = x.clone()
    F.index_add_(y, 0, index, x)
    assert torch.equal(y, expected)


@halves
def test_mixed_dtypes_are_refused_by_name(dtype):
    x, w = torch.ones(4, 6, dtype=dtype), torch.ones(6, 6)
    for op, call in {
        "linear": lambda: F.linear(x, w),
        "matmul": lambda: F.matmul(x, w),
        "add2": lambda: F.add2(x, torch.ones(4, 6)),
        "mse_loss": lambda: F.mse_loss(x, torch.ones(4, 6)),
        "layer_norm": lambda: F.layer_norm(x, (6,), w[0].double()),
        "attention": lambda: F.scaled_dot_product_attention(x[None], w[None], w[None]),
    }.items():
        with pytest.raises(RuntimeError, match=f"{op}: expected .* to have the dtype of"):
            call()


def test_denormal_numbers_of_float16():
    x = torch.arange(1, 1024).to(torch.int16).view(torch.float16)  # all of them
    assert torch.equal(F.add2(x, torch.zeros_like(x)), x)
    assert torch.equal(F.square(x), torch.zeros_like(x))
    assert torch.equal(F.hardtanh(x), x)
    assert torch.equal(F.sum(x.float() / 2, dtype=torch.float16), (x.float() / 2).sum().half())


@pytest.mark.parametrize("dtype", HALVES)
def test_tangents(dtype):
    x, t = torch.randn(3, 5).to(dtype), torch.randn(3, 5).to(dtype)
    for function in (F.gelu, lambda v: F.softmax(v, 1), lambda v: F.layer_norm(v, (5,)), lambda v: F.matmul(v, v.mT)):
        output, tangent = torch.func.jvp(function, (x,), (t,))
        exact = torch.func.jvp(function, (x.double(),), (t.double(),))
        assert output.dtype == tangent.dtype == dtype
        assert_close(output, exact[0], TOLERANCE[dtype])
        assert_close(tangent, exact[1], 2 * TOLERANCE[dtype])


# (input, weight, stride, padding, dilation, groups): channels and pixels on either side of a tile, stride phases with
# and without taps, kernels of one and of few channels, blocks of rows and of images.
CONVOLUTIONS = {
    "tiles": ((2, 32, 9, 9), (32, 32, 3, 3), 1, 1, 1, 1),
    "ragged": ((2, 40, 12, 10), (70, 40, 3, 3), 2, 1, 1, 1),
    "1x1": ((3, 64, 8, 8), (33, 64, 1, 1), 1, 0, 1, 1),
    "strided 1x1": ((2, 33, 11, 11), (17, 33, 1, 1), 2, 0, 1, 1),
    "few channels": ((2, 3, 20, 20), (24, 3, 7, 7), 2, 3, 1, 1),
    "one channel": ((2, 1, 28, 28), (32, 1, 3, 3), 1, 1, 1, 1),
    "unequal": ((1, 48, 7, 7), (50, 48, 3, 2), (3, 2), (0, 1), (1, 2), 1),
    "small images": ((9, 64, 2, 2), (64, 64, 3, 3), 1, 1, 1, 1),
    "groups": ((2, 64, 6, 6), (64, 32, 3, 3), 1, 1, 1, 2),
    "blocks of rows": ((1, 128, 60, 60), (64, 128, 3, 3), 1, 1, 1, 1),
    "phases without taps": ((1, 20, 8, 8), (20, 20, 3, 3), 4, 0, 1, 1),
    "channels in pieces": ((5, 260, 5, 5), (280, 260, 3, 3), 1, 1, 1, 1),
}


def convolution_products(dtype, name, formats, threads=1):
    """(result, the same in float64, the sum of the magnitudes of its products) of each product."""
    input_size, weight_size, *parameters = CONVOLUTIONS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(size, generator=generator).to(dtype) for size in (input_size, weight_size)]
    x, w = (t.contiguous(memory_format=f).requires_grad_() for t, f in zip(inputs, formats, strict=False))
    bias = torch.randn(weight_size[0], generator=generator).to(dtype)
    torch.set_num_threads(threads)
    output = F.conv2d(x, w, bias, *parameters)
    g = torch.randn(output.shape, generator=generator).to(dtype).contiguous(memory_format=formats[2])
    ours = (output.detach(), *torch.autograd.grad(output, (x, w), g))
    exact = []
    for convert in (torch.Tensor.double, lambda t: t.double().abs()):
        leaves = [convert(t.detach()).requires_grad_() for t in (x, w)]
        wide = torch.nn.functional.conv2d(*leaves, convert(bias), *parameters)
        exact.append((wide.detach(), *torch.autograd.grad(wide, leaves, convert(g))))
    return list(zip(ours, *exact, strict=True))


@halves
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(dtype, name):
    """Rounded once, of sums with the error of float32 and of float16's parts, in all formats, by one thread and two."""
    before = torch.get_num_threads()
    half = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    try:
        for formats in itertools.product((torch.contiguous_format, torch.channels_last), repeat=3):
            products = convolution_products(dtype, name, formats)
            for result, exact, magnitude in products:
                allowed = half * exact.abs() + 2**-17 * magnitude + 1e-7
                assert ((result.double() - exact).abs() <= allowed).all(), formats
        for (one, *_), (two, *_) in zip(products, convolution_products(dtype, name, formats, threads=2), strict=True):
            assert torch.equal(one, two)
    finally:
        torch.set_num_threads(before)


@halves
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("channels", [3, 32])
def test_special_numbers_reach_only_their_convolutions(dtype, value, channels):
    x, weight = torch.randn(1, channels, 12, 12).to(dtype), torch.randn(20, channels, 3, 3).to(dtype)
    x[0, 1, 5, 6] = value
    for w in (weight, weight.contiguous(memory_format=torch.channels_last)):
        output = F.conv2d(x, w, padding=1)
        expected = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
        assert torch.equal(output.isnan(), expected.isnan()) and torch.equal(output.isinf(), expected.isinf())
        assert_close(output[expected.isfinite()], expected[expected.isfinite()], 2 * TOLERANCE[dtype])


@halves
def test_products_do_not_depend_on_threads_or_on_other_rows(dtype):
    before = torch.get_num_threads()
    try:
        for m, n, k in ((150, 300, 700), (1, 2000, 500), (40, 16, 1100), (3, 5, 40)):
            a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            results = []
            for threads in (1, 2):
                torch.set_num_threads(threads)
                results.append([F.linear(a, b), F.matmul(a, b.t()), F.matmul(a.expand(3, m, k), b.t().expand(3, k, n))])
            for one, two in zip(*results, strict=True):
                assert torch.equal(one, two)
    finally:
        torch.set_num_threads(before)


@halves
def test_beside_pytorchs_kernels_and_after_a_fork(dtype):
    """Both may use the processor's tile registers, in the same thread, and a child process may too."""
    a, x, w = (torch.randn(*size).to(dtype) for size in ((80, 80), (2, 32, 12, 12), (32, 32, 3, 3)))
    native = torch.matmul(a, a), torch.nn.functional.conv2d(x, w)
    ours = F.matmul(a, a), F.conv2d(x, w)
    for _ in range(5):
        assert torch.equal(torch.matmul(a, a), native[0]) and torch.equal(F.matmul(a, a), ours[0])
        assert torch.equal(torch.nn.functional.conv2d(x, w), native[1]) and torch.equal(F.conv2d(x, w), ours[1])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if (child := os.fork()) == 0:
            same = torch.equal(F.matmul(a, a), ours[0]) and torch.equal(F.conv2d(x, w), ours[1])
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)
