"""layer_norm, rms_norm and both after an addition: what is special to them beside the properties that hold for every
op."""

import functools

import pytest
import torch
from support.devices import CUDA_DTYPES, cuda_param
from support.opspec import RELATIVE_NORM, assert_close

import cuda_ops
from cuda_ops.functional import (
    add_layer_norm,
    add_rms_norm,
    batch_norm,
    dropout,
    group_norm,
    layer_norm,
    rms_norm,
)

native = torch.nn.functional
INF, NAN = float("inf"), float("nan")
PAIRS = [(layer_norm, native.layer_norm), (rms_norm, native.rms_norm)]
IDS = ["layer_norm", "rms_norm"]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# As above; 768 of bfloat16 and float16 are those whose kernel makes the sums.
@pytest.mark.parametrize("cols", [5, 64, 257, 768, 1600, 4096, 16384, 40_001])
@pytest.mark.parametrize("with_grad_sum", [False, True])
def test_backward_with_the_sums_over_rows(device_dtype, cols, with_grad_sum):
    """The sums are those of grad_input, before it is rounded; the rest is what backward without them gives."""
    device, dtype = device_dtype
    rows = 700 if cols < 10_000 else 20
    parameter_dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    x, g, more = (random(rows, cols, seed=seed).to(device, dtype) for seed in range(3))
    weight = random(cols, seed=3).to(device, parameter_dtype)
    _, mean, rstd = torch.ops.cuda_ops.layer_norm_forward(x, [cols], weight, None, 1e-5)
    more = more if with_grad_sum else None
    both = g, more, x, [cols], weight, mean, rstd
    expected = torch.ops.cuda_ops.layer_norm_backward(*both, 1e-5, None, [True, True, True])
    *actual, sums = torch.ops.cuda_ops.layer_norm_backward_with_sums(*both, None, True, True)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert sums.dtype == parameter_dtype and sums.shape == (cols,)
    exact = actual[0].double()
    error, size = (sums.double() - exact.sum(0)).abs(), exact.abs().sum(0)
    assert (error <= 8 * torch.finfo(dtype).eps * size).all()
    *none, again = torch.ops.cuda_ops.layer_norm_backward_with_sums(*both, None, False, False)
    assert torch.equal(again, sums) and [tensor.numel() for tensor in none[1:]] == [0, 0]
    if cols == 64:
        torch.library.opcheck(torch.ops.cuda_ops.layer_norm_backward_with_sums.default, (*both, None, True, False))


@pytest.mark.parametrize("dtype", [cuda_param(torch.bfloat16), cuda_param(torch.float16)])
@pytest.mark.parametrize("cols", [8, 64, 264, 384, 768, 1600, 8192])
@pytest.mark.parametrize("shift", [0, 1])
def test_dropouts_mask_is_kept(dtype, cols, shift):
    """Forward is that of add_layer_norm after the same seed, and leaves its mask; backward is layer_norm's, with the
    gradient by the mask beside it. Also where rows are at odd addresses. Many rows of 33 to 48 vectors have half a warp
    each."""
    ops, device, rows, p = torch.ops.cuda_ops, "cuda", 5000 if 256 < cols <= 384 else 700, 0.3

    def halves(seed):
        flat = torch.empty(rows * cols + shift, device=device, dtype=dtype)[shift:]
        return flat.copy_(random(rows * cols, seed=seed)).view(rows, cols)

    x, residual, g, more = (halves(seed) for seed in range(4))
    weight, bias = (random(cols, seed=seed).to(device, torch.float32) for seed in (4, 5))
    results = []
    for op in (ops.add_layer_norm_forward, ops.add_layer_norm_forward_mask):
        torch.manual_seed(2)
        results.append(op(x, residual, [cols], weight, bias, 1e-5, p))
    *actual, mask = results[1]
    for ours, theirs in zip(actual, results[0], strict=True):
        if shift:  # by another kernel
            assert_close(ours, theirs, RELATIVE_NORM[dtype])
        else:
            assert torch.equal(ours, theirs)
    output, total, mean, rstd, state = actual
    expected = native.layer_norm(total.double(), (cols,), weight.double(), bias.double())
    assert_close(output, expected, RELATIVE_NORM[dtype])
    ones = torch.ones_like(x)
    kept = ops.dropout_backward(ones, state, p, ones.stride()) != 0
    assert torch.equal((mask[:, None] >> torch.arange(8, device=device) & 1).bool().view(rows, cols), kept)
    both = g, more, total, [cols], weight, mean, rstd
    grad, dropped, *parameters = ops.layer_norm_backward_mask(*both, mask, p, None, True, True)
    expected = ops.layer_norm_backward(*both, 1e-5, None, [True, True, True])
    for ours, theirs in zip((grad, *parameters), expected, strict=True):
        assert_close(ours, theirs, RELATIVE_NORM[dtype])
    assert_close(dropped, grad.double() * kept / (1 - p), RELATIVE_NORM[dtype])
    assert torch.equal(dropped == 0, (grad == 0) | ~kept)
    none = ops.layer_norm_backward_mask(*both, mask, p, None, False, False)[2:]
    assert [tensor.numel() for tensor in none] == [0, 0]
    if cols == 64:
        tests = ("test_schema", "test_faketensor")
        backward = ops.layer_norm_backward_mask.default, (*both, mask, p, None, True, False)
        forward = ops.add_layer_norm_forward_mask.default, (x, residual, [cols], weight, bias, 1e-5, p)
        for op, arguments in (backward, forward):
            torch.library.opcheck(op, arguments, test_utils=tests)


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["cluster", "streamed"])
def test_masks_beside_a_forced_path(path, monkeypatch):
    """What takes a mask has one way alone, and its workspace: with another path forced nothing is written beyond it."""
    ops, rows, cols = torch.ops.cuda_ops, 8192, 768
    x, residual, g, more = (random(rows, cols, seed=seed).to("cuda", torch.bfloat16) for seed in range(4))
    weight = random(cols, seed=4).to("cuda", torch.float32)
    _, total, mean, rstd, _, mask = ops.add_layer_norm_forward_mask(x, residual, [cols], weight, None, 1e-5, 0.3)
    arguments = (g, more, total, [cols], weight, mean, rstd, mask, 0.3, None, True, False)
    expected = ops.layer_norm_backward_mask(*arguments)
    monkeypatch.setenv("CUDA_OPS_LAYER_NORM_PATH", path)
    ops.reload_paths()
    try:
        actual = ops.layer_norm_backward_mask(*arguments)
    finally:
        monkeypatch.delenv("CUDA_OPS_LAYER_NORM_PATH")
        ops.reload_paths()
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_masks_of_other_rows_are_refused(device_dtype):
    device, dtype = device_dtype
    x = random(3, 12).to(device, dtype)
    with pytest.raises(NotImplementedError, match="add_layer_norm: expected input to be float16 or bfloat16 on CUDA"):
        torch.ops.cuda_ops.add_layer_norm_forward_mask(x, x, [12], None, None, 1e-5, 0.5)
    with pytest.raises(RuntimeError, match="expected p to be above 0 and at most 1, got 0"):
        torch.ops.cuda_ops.add_layer_norm_forward_mask(x, x, [12], None, None, 1e-5, 0.0)


# Rows of a part of a warp, a warp, a block, a cluster, and streamed ones; of whole vectors and not.
@pytest.mark.parametrize("cols", [5, 64, 257, 768, 4096, 4099, 16384, 20_000, 40_001, 262_144])
def test_means_far_larger_than_the_deviation(device, cols):
    """Mean 1e4, deviation 1e-2, which float32 tells from it in steps of 1e-3: what is normalised are the values as they
    are, and neither a mean that is rounded to float32 nor E[x^2] - E[x]^2 has a digit of them."""
    x = (random(3, cols) * 1e-2 + 1e4).float()
    grad_output, weight = random(3, cols, seed=1).float(), random(cols, seed=2).float()
    exact = x.double().requires_grad_()
    expected = native.layer_norm(exact, (cols,), weight.double(), eps=1e-12)
    ours = x.to(device).requires_grad_()
    output = layer_norm(ours, (cols,), weight.to(device), eps=1e-12)
    assert_close(output, expected, 2e-6)
    assert_close(
        torch.autograd.grad(output, ours, grad_output.to(device))[0],
        torch.autograd.grad(expected, exact, grad_output.double())[0],
        5e-6,
    )


EQUAL = {  # a shape, and that of what has equal elements, which are different for each
    "layer_norm": (layer_norm, native.layer_norm, (9, 257), (9, 1), {"normalized_shape": (257,)}),
    "group_norm": (group_norm, native.group_norm, (9, 6, 257), (9, 1, 1), {"num_groups": 1}),
    "batch_norm": (
        batch_norm,
        native.batch_norm,
        (257, 9),
        (1, 9),
        {"running_mean": None, "running_var": None, "training": True},
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_second_derivatives_of_equal_elements(name, device):
    """They are composed of sums in the input's dtype, for which a mean that is rounded once is too little: what is left
    of equal elements is then no 0."""
    ours, theirs, shape, which, options = EQUAL[name]
    size = shape[-1] if name == "layer_norm" else shape[1]

    def second(function, dtype, device):
        def made(*shape, seed):
            return random(*shape, seed=seed).float().to(device, dtype).requires_grad_()

        x = random(*which).float().expand(shape).to(device, dtype).requires_grad_()
        grad_output, weight, v = made(*shape, seed=1), made(size, seed=2), made(*shape, seed=3)
        output = function(x, **options, weight=weight, bias=torch.zeros_like(weight))
        grads = torch.autograd.grad(output, (x, weight), grad_output, create_graph=True)
        return torch.autograd.grad(grads, (x, grad_output), (v, torch.ones_like(weight)))

    expected = second(theirs, torch.float64, "cpu")
    for a, e in zip(second(ours, torch.float32, device), expected, strict=True):
        assert_close(a, e, 2e-6)


@pytest.mark.parametrize("cols", [3, 32, 300, 1025, 8192, 40_001])
@pytest.mark.parametrize("ours, theirs", PAIRS, ids=IDS)
def test_rows_of_infinities(device, ours, theirs, cols):
    """Rows with one odd value are as PyTorch's, and no other row sees it."""
    rows = [random(cols)]
    for column in (0, cols // 2, cols - 1):
        for value in (NAN, INF, -INF):
            rows.append(random(cols, seed=column))
            rows[-1][column] = value
    rows += [torch.full((cols,), value, dtype=torch.float64) for value in (INF, 0.0, 3.0)] + [random(cols)]
    x = torch.stack(rows).float()
    assert_close(ours(x.to(device), (cols,), eps=1e-5), theirs(x.double(), (cols,), eps=1e-5), 2e-6)


@pytest.mark.parametrize("cols", [1, 7, 256, 1025, 4096, 20_000])
def test_equal_values_are_zero(device, cols):
    for value in (0.0, 1.0, 1e4, -12345.678):
        output = layer_norm(torch.full((3, cols), value, device=device), (cols,))
        assert output.abs().max() <= 1e-4  # of a value, the deviation is taken to be sqrt(eps)


def test_sums_that_overflow(device):
    """The mean of many 1e38 is one of the dtype's numbers, which their sum is not."""
    x = torch.full((2, 600), 1e38, device=device)
    output = layer_norm(x, (600,))
    assert output.isfinite().all()


# Of registers, cluster and streamed, with tensors that start anywhere.
@pytest.mark.parametrize("cols", [1, 3, 24, 100, 256, 768, 1023, 2048, 2050, 4096, 4100, 8192, 16384, 33_000])
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("ours, theirs", PAIRS, ids=IDS)
def test_tensors_that_start_anywhere(device_dtype, ours, theirs, cols, offset):
    device, dtype = device_dtype

    def make(rows, seed):
        storage = random(rows * cols + offset, seed=seed).to(device, dtype)
        return storage[offset:].view(rows, cols)

    x, grad_output, weight = make(5, 0).requires_grad_(), make(5, 1), make(1, 2)[0].requires_grad_()
    exact = [t.detach().cpu().double().requires_grad_() for t in (x, weight)]
    eps = 0.5 if cols <= 3 else 1e-5
    output, expected = ours(x, (cols,), weight, eps=eps), theirs(exact[0], (cols,), exact[1], eps=eps)
    assert_close(output, expected, RELATIVE_NORM[dtype])
    grads = torch.autograd.grad(output, (x, weight), grad_output)
    expected_grads = torch.autograd.grad(expected, exact, grad_output.cpu().double())
    if cols > 1:  # the gradient of a row of one value is nothing but rounding
        assert_close(grads[0], expected_grads[0], 2 * RELATIVE_NORM[dtype])
    if cols > 1 or ours is rms_norm:
        assert_close(grads[1], expected_grads[1], 2 * RELATIVE_NORM[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["unaligned_row", "registers", "cluster", "streamed"])
@pytest.mark.parametrize("dtype", CUDA_DTYPES)
def test_every_path_with_many_rows(path, dtype, monkeypatch):
    """Blocks that go round their loop, full and with rows missing; each path forced where it can."""
    monkeypatch.setenv("CUDA_OPS_LAYER_NORM_PATH", path)
    torch.ops.cuda_ops.reload_paths()
    done = 0
    try:
        for rows, cols in [
            (3000, 8),
            (2999, 100),
            (1500, 257),
            (5001, 129),
            (777, 1156),
            (555, 2049),
            (300, 5500),
            (1001, 768),
            (701, 4096),
            (133, 9000),
            (300, 16384),
            (60, 20480),
            (41, 36864),
        ]:
            x, weight, bias = (t.to("cuda", dtype) for t in (random(rows, cols), random(cols), random(cols)))
            grad_output, residual = (random(rows, cols, seed=i).to("cuda", dtype) for i in (1, 2))
            for add in (False, True):
                tensors = [t.clone().requires_grad_() for t in (x, weight, bias)]
                exact = [t.double().requires_grad_() for t in (x, weight, bias)]
                try:
                    if add:
                        output, total = add_layer_norm(tensors[0], residual, (cols,), *tensors[1:])
                        expected_total = exact[0] + residual.double()
                        # of the sum as it was rounded
                        rounded = expected_total + (total.double() - expected_total).detach()
                    else:
                        output, rounded = layer_norm(tensors[0], (cols,), *tensors[1:]), exact[0]
                except NotImplementedError:  # this path cannot do rows of this length
                    continue
                expected = native.layer_norm(rounded, (cols,), *exact[1:])
                assert_close(output, expected, RELATIVE_NORM[dtype])
                done += 1
                try:
                    grads = torch.autograd.grad(output, tensors, grad_output)
                except NotImplementedError:
                    continue
                expected_grads = torch.autograd.grad(expected, exact, grad_output.double())
                for grad, expected_grad in zip(grads, expected_grads, strict=True):
                    assert_close(grad, expected_grad, 2 * RELATIVE_NORM[dtype])
    finally:
        monkeypatch.delenv("CUDA_OPS_LAYER_NORM_PATH")
        torch.ops.cuda_ops.reload_paths()
    needs_hopper = path == "cluster" and (torch.cuda.get_device_capability()[0] < 9 or dtype == torch.float64)
    assert done > 0 or needs_hopper or (path == "unaligned_row" and dtype == torch.float64)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", CUDA_DTYPES)
@pytest.mark.parametrize("cols", [33, 129, 1001, 1156, 2047, 5501])
@pytest.mark.parametrize("ours, theirs", PAIRS, ids=IDS)
def test_rows_that_are_no_whole_vectors(ours, theirs, cols, dtype):
    """What an element's row does not have stays out of it: NaN in one row is in no other, at either end and within; the
    same bits twice."""
    x, weight = random(700, cols).to("cuda", dtype), random(cols, seed=1).to("cuda", dtype)
    for row, column in [(0, 0), (3, cols - 1), (350, cols // 2), (699, 1), (698, cols - 2)]:
        x[row, column] = float("nan")
    output, expected = ours(x, (cols,), weight), theirs(x.double(), (cols,), weight.double())
    broken = x.isnan().any(1)
    assert output[broken].isnan().all() and not output[~broken].isnan().any()
    assert torch.equal(output[~broken], ours(x, (cols,), weight)[~broken])
    assert_close(output[~broken], expected[~broken], RELATIVE_NORM[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cols", [33, 768, 4096, 40_000])
def test_float32_parameters_beside_halves(dtype, cols):
    x, weight, bias = random(37, cols).to("cuda", dtype), random(cols).float().cuda(), random(cols).float().cuda()
    tensors = [t.clone().requires_grad_() for t in (x, weight, bias)]
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    output, expected = layer_norm(tensors[0], (cols,), *tensors[1:]), native.layer_norm(exact[0], (cols,), *exact[1:])
    assert output.dtype == dtype
    assert_close(output, expected, RELATIVE_NORM[dtype])
    grad_output = random(37, cols, seed=1).to("cuda", dtype)
    grads = torch.autograd.grad(output, tensors, grad_output)
    for grad, tensor, expected_grad in zip(
        grads, tensors, torch.autograd.grad(expected, exact, grad_output.double()), strict=True
    ):
        assert grad.dtype == tensor.dtype
        # Sums over rows are in float32, and so are they stored.
        assert_close(grad, expected_grad, 2e-5 if grad.dtype == torch.float32 else 2 * RELATIVE_NORM[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    """As PyTorch's: layer_norm in float32, rms_norm in the dtype of its input."""
    x, weight = random(4, 40).to("cuda", dtype), random(40).float().cuda()
    with torch.autocast("cuda", dtype=dtype):
        assert layer_norm(x, (40,), weight).dtype == native.layer_norm(x, (40,), weight).dtype == torch.float32
        assert add_layer_norm(x, x, (40,), weight)[0].dtype == torch.float32
        assert rms_norm(x, (40,), weight).dtype == dtype


def test_default_eps_of_rms_norm(device):
    """As PyTorch's: float32's machine epsilon, or float64's."""
    for dtype in (torch.float32, torch.float64):
        x = torch.full((2, 8), 1e-5, device=device, dtype=dtype)
        expected = native.rms_norm(x.cpu(), (8,)).double()
        assert_close(rms_norm(x, (8,)), expected, 1e-6)


@pytest.mark.parametrize("p", [0.25, 1.0])
@pytest.mark.parametrize("cols", [7, 64, 1025, 4096, 20_004])
@pytest.mark.parametrize("function, norm", [(add_layer_norm, layer_norm), (add_rms_norm, rms_norm)], ids=IDS)
def test_addition_drops_as_dropout(device_dtype, function, norm, cols, p):
    """The same seed: the same sum, norm and gradients as the chain of dropout, addition and norm."""
    device, dtype = device_dtype
    x, residual, weight = (random(*s, seed=i).to(device, dtype) for i, s in enumerate([(3, cols), (3, cols), (cols,)]))
    grads_out = [random(3, cols, seed=i).to(device, dtype) for i in (3, 4)]
    results = []
    for fused in (True, False):
        tensors = [t.clone().requires_grad_() for t in (x, residual, weight)]
        torch.manual_seed(5)
        if fused:
            output, total = function(tensors[0], tensors[1], (cols,), tensors[2], eps=1e-5, p=p)
        else:
            total = dropout(tensors[0], p) + tensors[1]
            output = norm(total, (cols,), tensors[2], eps=1e-5)
        results.append([output, total, *torch.autograd.grad((output, total), tensors, grads_out)])
    # The chain rounds what dropout returns, and the gradient of the norm before that of the sum is added.
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 4 * RELATIVE_NORM[dtype])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs.double(), tolerance)
    assert (results[0][2] == 0).float().mean().item() == pytest.approx(p, abs=0.15 if cols > 60 else 1)


def test_addition_of_one_gradient(device):
    """Only the norm, or only the sum, has a gradient; and only one of the inputs wants it."""
    x, residual = (random(3, 9, seed=i).to(device).requires_grad_() for i in (0, 1))
    output, total = add_layer_norm(x, residual, (9,))
    g = random(3, 9, seed=2).to(device)
    for grad in torch.autograd.grad(total, (x, residual), g, retain_graph=True):
        assert_close(grad, g, 1e-12)
    whole = torch.autograd.grad(output, (x, residual), g, retain_graph=True)
    assert torch.equal(whole[0], whole[1])
    assert torch.equal(torch.autograd.grad(output, residual, g)[0], whole[1])


@pytest.mark.parametrize("function", [add_layer_norm, add_rms_norm], ids=IDS)
def test_gradients_with_dropout_numerically(function):
    def call(x, residual, weight):
        torch.manual_seed(3)
        return function(x, residual, (4,), weight, eps=0.5, p=0.5)

    inputs = [random(*s, seed=i).requires_grad_() for i, s in enumerate([(3, 4), (3, 4), (4,)])]
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("arguments", [((8,),), ((3, 8), 1e-3), (8, 1e-5, False)], ids=str)
def test_modules_are_drop_ins(arguments):
    x = random(2, 3, 8).float()
    for ours, theirs in [
        (cuda_ops.nn.LayerNorm, torch.nn.LayerNorm),
        (cuda_ops.nn.RMSNorm, torch.nn.RMSNorm),
    ]:
        module, reference = ours(*arguments), theirs(*arguments)
        assert repr(module) == repr(reference)
        assert module.state_dict().keys() == reference.state_dict().keys()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.uniform_()
        module.load_state_dict(reference.state_dict())
        assert_close(module(x), reference.double()(x.double()), 2e-6)
    assert cuda_ops.nn.LayerNorm(8, bias=False).bias is None


def test_results_are_contiguous():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert layer_norm(x, (5,)).is_contiguous() and rms_norm(x, (4, 5)).is_contiguous()


def test_any_number_of_threads_gives_the_same_bits():
    x, weight = random(3000, 33).float().requires_grad_(), random(33).float().requires_grad_()
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            output = layer_norm(x, (33,), weight)
            results.append((output, *torch.autograd.grad(output.square().sum(), (x, weight))))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def by_formula(x, normalized_shape, eps, centered):
    x = x - x.mean(-1, keepdim=True) if centered else x
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


@pytest.mark.parametrize("function", [layer_norm, rms_norm], ids=IDS)
def test_third_derivative(function):
    """Against the formula: PyTorch's own third derivative of layer_norm takes mean and rstd for constants."""
    x = random(2, 5).requires_grad_()
    results = []
    for norm in (function, functools.partial(by_formula, centered=function is layer_norm)):
        value = norm(x, (5,), eps=0.1)[0, 1]
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = gradient.pow(3).sum()
        results.append(gradient.detach())
    assert_close(*results, 1e-11)


def test_tangents_of_what_backward_saved():
    x, tangent = random(2, 3, 4)
    for ours, theirs in PAIRS:
        results = []
        for function in (ours, theirs):
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(), tangent)
                (grad,) = torch.autograd.grad(function(dual, (4,), eps=1e-3).pow(3).sum(), dual)
                results.append(torch.autograd.forward_ad.unpack_dual(grad).tangent)
        torch.testing.assert_close(*results)
