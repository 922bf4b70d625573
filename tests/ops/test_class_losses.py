"""nll_loss and cross_entropy: what is special to the losses over classes beside the properties of every op."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.opspec import RELATIVE_NORM, as_tuple, assert_close

import cuda_ops
from cuda_ops.functional import cross_entropy, nll_loss

NATIVE = {nll_loss: torch.nn.functional.nll_loss, cross_entropy: torch.nn.functional.cross_entropy}
LOSSES = pytest.mark.parametrize("loss", list(NATIVE), ids=lambda loss: loss.__name__)
INF, NAN = float("inf"), float("nan")


def compare(device, loss, input, target, weight=None, tolerance=None, dtype=torch.float64, **kwargs):
    """The loss and all gradients against PyTorch's in float64 from the same values."""
    tolerance = tolerance or {torch.float64: 1e-12, torch.float32: 2e-6}[dtype]
    results = []
    for function, where, precision in ((loss, device, dtype), (NATIVE[loss], "cpu", torch.float64)):

        def copy(tensor, where=where, precision=precision):
            if tensor is None or not tensor.is_floating_point():
                return tensor if tensor is None else tensor.to(where)
            return tensor.detach().to(dtype).to(where, precision)  # rounded to dtype for the reference, too

        tensors = [copy(t) for t in (input, target, weight)]
        differentiable = [t for t in tensors[:2] if t.is_floating_point()]
        if len(differentiable) == 2 and weight is not None:  # class probabilities: weights have a gradient, too
            differentiable.append(tensors[2])
        differentiable = [t.requires_grad_() for t in differentiable]
        output = function(*tensors, **kwargs)
        generator = torch.Generator().manual_seed(5)
        grad_output = (torch.rand(output.shape, generator=generator, dtype=torch.float64) - 0.5).to(dtype)
        grads = torch.autograd.grad(output, differentiable, grad_output.to(where, precision))
        results.append((output, *grads))
    for i, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert_close(actual, expected, tolerance, f"{kwargs}: result {i}")


@st.composite
def problems(draw):
    """A call of cross_entropy: shapes with and without batch and further dimensions, both kinds of target, weights,
    ignored indices inside and outside of the classes, smoothing, reductions."""
    classes = draw(st.sampled_from([1, 2, 3, 9, 10, 16, 31, 32, 33, 64, 65]))
    batch = draw(st.sampled_from([None, 1, 2, 5, 17, 70]))
    extra = draw(st.lists(st.integers(1, 9), max_size=3)) if batch is not None else []
    shape = (classes,) if batch is None else (batch, classes, *extra)
    columns = () if batch is None else (batch, *extra)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.1, 3.0, 1e4]))
    input = (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5) * spread
    # With one class the gradient is zero. What rounding makes of that can be told only where it is exact.
    kwargs = {
        "reduction": draw(st.sampled_from(["none", "mean", "sum"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 0.9, 1.0])) if classes > 1 else 0.0,
    }
    weight = torch.rand(classes, generator=generator, dtype=torch.float64) + 0.05 if draw(st.booleans()) else None
    if classes == 1 or draw(st.booleans()):
        target = torch.randint(0, classes, columns, generator=generator)
        kwargs["ignore_index"] = draw(st.sampled_from([-100, -1, 0, classes - 1, classes, 255]))
        ignored = torch.rand(columns, generator=generator) < 0.2
        target = torch.where(ignored, kwargs["ignore_index"], target)
    else:
        target = torch.rand(shape, generator=generator, dtype=torch.float64)
    return input, target, weight, kwargs


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(problem=problems())
def test_cross_entropy_of_drawn_problems(device, problem):
    input, target, weight, kwargs = problem
    compare(device, cross_entropy, input, target, weight, **kwargs)


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems())
def test_nll_loss_of_drawn_problems(device, problem):
    input, target, weight, kwargs = problem
    if target.is_floating_point():
        return
    del kwargs["label_smoothing"]
    compare(device, nll_loss, input, target, weight, **kwargs)


# Class indices out of range


@LOSSES
@pytest.mark.parametrize("bad", [10, 12, -1, 2**40, -(2**63)])
def test_bad_class_index_on_the_cpu(loss, bad):
    target = torch.tensor([1, 9, bad, 0, bad])
    message = rf"{loss.__name__}: expected target to be in \[0, 10\), got {bad} at position "
    for reduction in ("none", "mean", "sum"):
        with pytest.raises(IndexError, match=message + "2$"):
            loss(torch.randn(5, 10), target, reduction=reduction)
    with pytest.raises(IndexError, match=message + "4$"):
        loss(torch.randn(1, 10, 5), torch.tensor([[1, 2, 3, 4, bad]]))
    # The same index is fine where it is to be ignored.
    assert loss(torch.randn(5, 10), target, ignore_index=bad).isfinite()


@LOSSES
@pytest.mark.parametrize("shape", [(5, 10), (5, 2000), (1, 10, 5), (1, 40, 5)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.cuda
def test_bad_class_index_on_cuda(loss, shape, reduction):
    """NaN for the sample, no gradient, no corruption, an error from the next call, and then all is well again."""
    classes = shape[1]
    input = torch.randn(shape, device="cuda", requires_grad=True)
    target = torch.tensor([1, 9, classes + 2, 0, 3], device="cuda").view(shape[0], *shape[2:])
    value = loss(input, target, reduction=reduction)
    torch.cuda.synchronize()
    bad = torch.tensor([False, False, True, False, False]) if reduction == "none" else torch.tensor([True])
    assert torch.equal(value.isnan().view(-1).cpu(), bad)
    message = (
        rf"{loss.__name__}: expected target to be in \[0, {classes}\), got {classes + 2} at position 2 of an earlier "
        r"call \(CUDA tells of it late; with CUDA_OPS_CHECK_INDICES=1 in the environment the call itself raises\)"
    )
    good = torch.zeros_like(target)
    with pytest.raises(IndexError, match=message):
        loss(input, good)
    assert loss(input, good).isfinite()
    # Backward reports it as well, as soon as the record is there.
    value = loss(input, target, reduction=reduction)
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="at position 2 of an earlier call"):
        value.sum().backward(retain_graph=True)
    value.sum().backward()
    moved = input.grad.movedim(1, -1).reshape(5, classes)
    assert torch.equal(moved[2], torch.zeros_like(moved[2]))
    assert moved.isfinite().all()
    assert moved[[0, 1, 3, 4]].ne(0).any(1).all()


@LOSSES
@pytest.mark.cuda
def test_bad_class_index_on_cuda_is_raised_at_once_if_asked_for(loss, monkeypatch):
    monkeypatch.setenv("CUDA_OPS_CHECK_INDICES", "1")
    input, target = torch.randn(3, 10, device="cuda"), torch.tensor([1, -7, 3], device="cuda")
    for _ in range(2):
        with pytest.raises(IndexError, match=r"expected target to be in \[0, 10\), got -7 at position 1$"):
            loss(input, target)
    assert loss(input, target, ignore_index=-7).isfinite()


@LOSSES
@pytest.mark.cuda
def test_bad_class_index_in_a_replayed_graph(loss, monkeypatch):
    """Capture never waits, even if asked for; the replay's error reaches the next eager call."""
    monkeypatch.setenv("CUDA_OPS_CHECK_INDICES", "1")
    input, target = torch.randn(3, 10, device="cuda"), torch.tensor([1, 2, 3], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(input, target)
    graph.replay()
    assert value.isfinite()
    target.fill_(10)
    graph.replay()
    torch.cuda.synchronize()
    assert value.isnan()
    with pytest.raises(IndexError, match=r"got 10 at position [012] of an earlier call"):
        loss(input, target.zero_())


@LOSSES
@pytest.mark.cuda
def test_many_bad_class_indices_do_not_end_the_context(loss):
    input = torch.randn(10_000, 10, device="cuda")
    target = torch.arange(10_000, device="cuda") * 1_000_003 + 10
    assert loss(input, target, reduction="none").isnan().all()
    with pytest.raises(IndexError, match="got "):
        loss(input, target.zero_())
    assert loss(input, target).isfinite()


# Semantics


@LOSSES
def test_mean_over_no_weight_is_nan(loss, device):
    input = torch.randn(3, 4, requires_grad=True)
    for kwargs in ({"weight": torch.zeros(4)}, {"ignore_index": 1}):
        compare(device, loss, input, torch.tensor([1, 1, 1]), dtype=torch.float32, **kwargs)
    value = loss(input.to(device), torch.tensor([1, 1, 1], device=device), ignore_index=1)
    assert value.isnan()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("classes", [3, 40, 1030])
def test_infinite_logits(device, label_smoothing, reduction, classes):
    rows = [[1.0, -INF, 2.0], [1.0, INF, 2.0], [NAN, 0.0, 1.0], [-INF, -INF, -INF], [1e4, -1e4, 0.0]]
    rows = [row + [row[0]] * (classes - 3) for row in rows]
    for target in range(3):
        for ignore_index in (-100, target):
            for row in rows:
                compare(
                    device,
                    cross_entropy,
                    torch.tensor([row, [0.5, 1.0, 2.0] + [1.0] * (classes - 3)]),
                    torch.tensor([target, (target + 1) % 3]),
                    dtype=torch.float32,
                    reduction=reduction,
                    label_smoothing=label_smoothing,
                    ignore_index=ignore_index,
                )


@LOSSES
def test_one_sample_may_have_a_list_of_one_target(loss):
    """PyTorch has this forward, and fails backward."""
    input = torch.randn(9, dtype=torch.float64, requires_grad=True)
    for reduction in ("none", "mean", "sum"):
        results = []
        for target in (torch.tensor([4]), torch.tensor(4)):
            value = loss(input, target, reduction=reduction)
            assert value.shape == NATIVE[loss](input, target, reduction=reduction).shape == ()
            (grad,) = torch.autograd.grad(value, input, create_graph=True)
            # Twice through cross_entropy; nll_loss is linear.
            second = torch.autograd.grad(grad.pow(2).sum(), input) if loss is cross_entropy else ()
            results.append((value, grad, *second))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


@LOSSES
@pytest.mark.parametrize(
    ("size_average", "reduce"), [(True, None), (False, None), (None, False), (None, True), (False, False)]
)
def test_legacy_arguments_warn_and_come_first(loss, size_average, reduce):
    input, target = torch.randn(3, 4), torch.tensor([1, 2, 0])
    kwargs = {"size_average": size_average, "reduce": reduce, "reduction": "nonsense"}
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        value = loss(input, target, **kwargs)
    with pytest.warns(UserWarning):
        expected = NATIVE[loss](input.double(), target, **kwargs)
    assert_close(value, expected, 2e-6)


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.float64])
def test_class_probabilities_promote(target_dtype, weight_dtype):
    input = torch.randn(3, 4, requires_grad=True)
    target = torch.rand(3, 4, dtype=target_dtype, requires_grad=True)
    weight = None if weight_dtype is None else torch.rand(4, dtype=weight_dtype)
    results = []
    for function in (cross_entropy, torch.nn.functional.cross_entropy):
        value = function(input, target, weight, label_smoothing=0.1)
        results.append((value, *torch.autograd.grad(value, (input, target))))
    for ours, native in zip(*results, strict=True):
        assert ours.dtype == native.dtype
        assert_close(ours, native.double(), 2e-6)


def test_weight_may_require_grad_without_grad_mode():
    """As in PyTorch: a frozen module's weight is a parameter now and then."""
    weight = torch.rand(4, requires_grad=True)
    for loss in NATIVE:
        with torch.no_grad():
            loss(torch.randn(2, 4), torch.tensor([0, 3]), weight)


def test_gradient_of_probabilities_alone(device):
    """The logits are constants: the teacher learns."""
    target = torch.rand(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    input = torch.randn(3, 5, dtype=torch.float64, device=device)
    (grad,) = torch.autograd.grad(cross_entropy(input, target), target)
    assert_close(grad, -torch.log_softmax(input.cpu(), 1) / 3, 1e-12)


@LOSSES
def test_mean_of_many_is_accurate(loss, device):
    """A million float32 losses: a plain float sum would be off by 1e-4 and more."""
    input = torch.randn(1_000_000, 3, generator=torch.Generator().manual_seed(0)) + 100
    target = torch.zeros(1_000_000, dtype=torch.int64)
    for reduction in ("mean", "sum"):
        value = loss(input.to(device), target.to(device), reduction=reduction)
        assert_close(value, NATIVE[loss](input.double(), target, reduction=reduction), 2e-7)


def test_fifty_thousand_classes(device):
    input = torch.randn(3, 50_257, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 50_256, 31_415])
    compare(device, cross_entropy, input, target, dtype=torch.float32, label_smoothing=0.1)
    compare(device, cross_entropy, input, target, dtype=torch.float32)
    columns = input.t().reshape(1, 50_257, 3)
    compare(device, cross_entropy, columns, target[None], dtype=torch.float32)


def at_offset(values, offset):
    """A copy of `values` that starts `offset` elements after an allocation does."""
    storage = torch.empty(values.numel() + offset, dtype=values.dtype, device=values.device)
    return storage[offset:].view(values.shape).copy_(values)


# Around what a part of a warp, a warp and a block take; rows that start anywhere against 16 bytes, and vectors of 16
# bytes for a part of the threads in the last round.
ROW_CLASSES = [1, 2, 7, 8, 9, 31, 32, 33, 40, 64, 257, 1000, 1023, 1024, 1025, 1032, 4095, 4096, 4104, 5003, 9001]


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_rows_that_start_anywhere(device_dtype, offset):
    """With every kind of target; the gradient where the input lies, and elsewhere against 16 bytes."""
    device, dtype = device_dtype
    tolerance = RELATIVE_NORM[dtype]
    forward, backward = torch.ops.cuda_ops.cross_entropy_forward, torch.ops.cuda_ops.cross_entropy_backward
    generator = torch.Generator().manual_seed(offset)
    for number, classes in enumerate(ROW_CLASSES):
        rows = (3, 9, 37)[number % 3]
        random = torch.rand(3, rows, classes, generator=generator).to(device, dtype)
        input = at_offset((random[0] - 0.5) * 8, offset)
        target = torch.randint(0, classes, (rows,), generator=generator).to(device)
        weight = at_offset(random[1, 0] + 0.1, offset)
        for kind, (q, w, ignored, smoothing) in {
            "plain": (target, None, -100, 0.0),
            "smoothing": (target, None, -100, 0.1),
            "weight": (target, weight, -100, 0.0),
            "weight, smoothing, ignored": (target, weight, int(target[0]), 0.1),
            "probabilities": (at_offset(random[2], offset), weight, -100, 0.1),
        }.items():
            reduction = (number + len(kind)) % 3  # none, mean, sum
            loss, statistics, total = forward(input, q, w, reduction, ignored, smoothing)
            grad_output = (torch.rand(loss.shape, generator=generator) + 0.5).to(device, dtype)
            # PyTorch's allocator aligns grad_input, so that an input at an offset lies otherwise than it.
            grad = backward(grad_output, input, q, w, statistics, total, reduction, ignored, smoothing)
            copies = [None if t is None else t.cpu().double() for t in (input, w)]
            x = copies[0].requires_grad_()
            exact = torch.nn.functional.cross_entropy(
                x,
                q.cpu().double() if q.is_floating_point() else q.cpu(),
                copies[1],
                ignore_index=ignored,
                label_smoothing=smoothing,
                reduction=("none", "mean", "sum")[reduction],
            )
            (exact_grad,) = torch.autograd.grad(exact, x, grad_output.cpu().double())
            what = f"{kind}, {rows} rows of {classes}"
            assert_close(loss, exact, tolerance, what)
            if classes > 1:  # with one the gradient is nothing but rounding
                assert_close(grad, exact_grad, tolerance, f"gradient of {what}")


@pytest.mark.cuda
@pytest.mark.parametrize("classes", [10, 1000, 5003])
def test_loss_repeats_bitwise(classes):
    for rows in (1, 64, 128, 129, 3000):  # for one block, and for several
        input, target = torch.randn(rows, classes, device="cuda"), torch.randint(0, classes, (rows,), device="cuda")
        first = cross_entropy(input, target)
        assert_close(first, torch.nn.functional.cross_entropy(input.double(), target).cpu(), 2e-6)
        for _ in range(10):
            assert torch.equal(cross_entropy(input, target), first)


def test_results_do_not_depend_on_threads():
    input = torch.randn(3000, 11, requires_grad=True)
    target = torch.randint(0, 11, (3000,))
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            value = cross_entropy(input, target, label_smoothing=0.1)
            results.append((value, *torch.autograd.grad(value, input)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_third_derivative_of_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    p = torch.rand(2, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    for target in (torch.tensor([2, 0]), p):
        results = []
        for function in (cross_entropy, torch.nn.functional.cross_entropy):
            value = function(x, target, label_smoothing=0.2)
            for _ in range(3):
                gradients = as_tuple(torch.autograd.grad(value, (x, p), create_graph=True, allow_unused=True))
                value = sum(g.pow(3).sum() for g in gradients if g is not None)
            results.append([g.detach() for g in gradients if g is not None])
        for ours, native in zip(*results, strict=True):
            assert_close(ours, native, 1e-11)


def test_second_derivative_of_ignored_samples():
    """Their NaN logits are no part of anything."""
    x = torch.tensor([[1.0, 2.0, 0.5], [0.3, 0.2, 0.1]], dtype=torch.float64, requires_grad=True)
    value = cross_entropy(x, torch.tensor([1, 1]), ignore_index=1, reduction="sum")
    (grad,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(grad, torch.zeros_like(grad)) and torch.equal(second, torch.zeros_like(second))


@pytest.mark.parametrize("name", ["NLLLoss", "CrossEntropyLoss"])
@pytest.mark.parametrize("kwargs", [{}, {"ignore_index": 2, "reduction": "sum"}, {"weight": True}])
def test_modules_are_drop_ins(name, kwargs):
    if "weight" in kwargs:
        kwargs = {"weight": torch.tensor([0.5, 1.0, 0.25, 2.0])}
    ours, native = getattr(cuda_ops.nn, name)(**kwargs), getattr(torch.nn, name)(**kwargs)
    assert repr(ours) == repr(native)
    assert list(ours.state_dict()) == list(native.state_dict())
    ours.load_state_dict(native.state_dict(), strict=True)
    native.load_state_dict(ours.state_dict(), strict=True)
    input, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    assert_close(ours(input, target), native.double()(input.double(), target), 2e-6)


def test_module_with_smoothing_and_probabilities():
    ours, native = (module.CrossEntropyLoss(label_smoothing=0.1) for module in (cuda_ops.nn, torch.nn))
    assert repr(ours) == repr(native)
    input, target = torch.randn(5, 4, 2), torch.rand(5, 4, 2)
    assert_close(ours(input, target), native(input.double(), target.double()), 2e-6)


@LOSSES
def test_uint8_targets_compile(loss):
    input, target = torch.randn(3, 4), torch.tensor([1, 0, 3], dtype=torch.uint8)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(input, target), loss(input, target))


@LOSSES
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("probabilities", [False, True])
def test_autocast_computes_in_float32(loss, dtype, probabilities):
    if probabilities and loss is nll_loss:
        pytest.skip("nll_loss takes class indices only")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 10, generator=generator).to("cuda", dtype)
    target = torch.rand(6, 10, generator=generator) if probabilities else torch.arange(6)
    weight = torch.rand(10, generator=generator).to("cuda", dtype)
    results = []
    for function in (loss, NATIVE[loss]):
        input = values.clone().requires_grad_()
        with torch.autocast("cuda", dtype=dtype):
            value = function(input, target.cuda(), weight)
        value.backward()
        results.append((value, input.grad))
    (ours, our_grad), (native, native_grad) = results
    assert ours.dtype == native.dtype == torch.float32
    assert our_grad.dtype == native_grad.dtype == dtype
    # Not against native's value: its cross_entropy asks log_softmax for the dtype of its input, which autocast obeys,
    # and so rounds the log-probabilities to a half.
    exact_target = target.double() if probabilities else target
    exact = NATIVE[loss](values.cpu().double(), exact_target, weight.cpu().double())
    assert_close(ours, exact, 2e-6)
    assert_close(our_grad, native_grad.double(), 1.6e-2 if dtype == torch.bfloat16 else 2e-3)


def test_autocast_on_the_cpu():
    """Losses are in autocast's float32 list, which the CPU backend has."""
    values, target = torch.randn(3, 4), torch.tensor([1, 0, 3])
    for loss in NATIVE:
        input = values.bfloat16().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(input, target)
        value.backward()
        assert value.dtype == torch.float32 and input.grad.dtype == torch.bfloat16
        assert_close(value, NATIVE[loss](values.bfloat16().double(), target), 2e-6)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (4, 3), (2, 3, 0)], ids=str)
def test_losses_over_nothing_are_pytorchs(shape, kind, weighted, label_smoothing, reduction):
    """No samples, no classes, or all targets ignored: the loss, its gradients, and the gradients of these."""
    results = []
    for function in (cross_entropy, torch.nn.functional.cross_entropy):
        leaves = [torch.ones(shape, dtype=torch.float64).cumsum(0)]
        weight = torch.ones(shape[1], dtype=torch.float64) if weighted else None
        target = torch.full((shape[0], *shape[2:]), -100)
        if kind == "probabilities":
            target = torch.ones(shape, dtype=torch.float64).cumsum(-1)
            leaves += [target] + ([weight] if weighted else [])
        leaves = [leaf.requires_grad_() for leaf in leaves]
        loss = function(leaves[0], target, weight=weight, label_smoothing=label_smoothing, reduction=reduction)
        grad_output = torch.ones_like(loss).requires_grad_()
        grads = torch.autograd.grad(loss, leaves, grad_output, create_graph=True, allow_unused=True)
        results.append([loss, *grads])
        for grad in grads:
            if grad is None or not grad.requires_grad:
                results[-1] += [None] * (len(leaves) + 1)
                continue
            total = (grad.square() + grad).sum()
            results[-1] += torch.autograd.grad(total, [*leaves, grad_output], retain_graph=True, allow_unused=True)
    for actual, expected in zip(*results, strict=True):
        shaped = expected if actual is None else actual
        if shaped is not None:  # None is as good as zeros
            actual, expected = (torch.zeros_like(shaped) if t is None else t for t in (actual, expected))
            torch.testing.assert_close(actual, expected, equal_nan=True)
