"""Tensors of more than 2**31 elements: offsets that were computed in 32 bits would wrap. Opt in with --large.

Values are cheap to know in advance (a pattern that repeats), so that no reference of the same size is needed; the last
elements, which lie beyond 2**31, are what is looked at.
"""

import pytest
import torch

import cuda_ops
from cuda_ops import functional as F

pytestmark = [pytest.mark.cuda, pytest.mark.large]

BEYOND = 2**31 + 4096
TAIL = 1000


@pytest.fixture(autouse=True)
def unpoisoned():
    """Filling these outputs with NaN first would double the time and prove nothing more."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.cuda.empty_cache()


def ramp(*shape, dtype=torch.bfloat16):
    """Values in [-1, 1] that differ between neighbours, made without a temporary of a wider dtype."""
    x = torch.empty(shape, device="cuda", dtype=dtype)
    flat = x.view(-1)
    period = torch.linspace(-1, 1, 1021, device="cuda").to(dtype)
    whole = flat.numel() // 1021 * 1021
    flat[:whole].view(-1, 1021).copy_(period)
    flat[whole:] = period[: flat.numel() - whole]
    return x


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (F.square, torch.square),
        (F.relu, torch.relu),
        (F.polynomial, lambda x: x * x + x + 1),
        (lambda x: F.add2(x, x), lambda x: x + x),
    ],
    ids=["square", "relu", "polynomial", "add2"],
)
def test_elementwise(function, reference):
    x = ramp(BEYOND).requires_grad_()
    output = function(x)
    (grad,) = torch.autograd.grad(output.view(-1)[-TAIL:].float().sum(), x)
    tail = x.detach()[-TAIL:].double().requires_grad_()
    expected = reference(tail)
    (expected_grad,) = torch.autograd.grad(expected.sum(), tail)
    torch.testing.assert_close(output[-TAIL:].double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(grad[-TAIL:].double(), expected_grad, atol=2e-2, rtol=2e-2)
    assert grad[:-TAIL].count_nonzero() == 0


def test_dropout():
    x = torch.ones(BEYOND, device="cuda", dtype=torch.bfloat16)
    kept = F.dropout(x, 0.5)[-(2**20) :]
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert abs(kept.float().mean().item() - 1) < 0.01


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images(memory_format):
    """conv2d, batch_norm and pooling: one channel of the last images against the same images alone."""
    batch = 2**31 // (4 * 32 * 32) + 2
    x = ramp(batch, 4, 32, 32).contiguous(memory_format=memory_format)
    few = x[-2:].double()
    weight = torch.randn(4, 4, 3, 3, device="cuda", dtype=torch.bfloat16)
    for ours, native in [
        (F.conv2d(x, weight, padding=1), torch.nn.functional.conv2d(few, weight.double(), padding=1)),
        (F.max_pool2d(x, 2), torch.nn.functional.max_pool2d(few, 2)),
        (F.avg_pool2d(x, 2), torch.nn.functional.avg_pool2d(few, 2)),
        (F.adaptive_avg_pool2d(x, 8), torch.nn.functional.adaptive_avg_pool2d(few, 8)),
        (F.adaptive_max_pool2d(x, 8), torch.nn.functional.adaptive_max_pool2d(few, 8)),
    ]:
        torch.testing.assert_close(ours[-2:].double(), native, atol=5e-2, rtol=2e-2)
        del ours
    mean, variance = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    normalised = F.batch_norm(x, mean, variance, training=True, momentum=1.0)
    period_mean = ramp(1021 * 4).double().mean()
    torch.testing.assert_close(mean.double(), period_mean.expand(4), atol=1e-3, rtol=0)
    expected = (few - mean.double().view(1, 4, 1, 1)) / (variance.double().view(1, 4, 1, 1) + 1e-5).sqrt()
    torch.testing.assert_close(normalised[-2:].double(), expected, atol=2e-2, rtol=2e-2)


def test_linear_and_losses():
    rows, columns = 2**31 // 1024 + 3, 1024
    x = ramp(rows, columns)
    weight = torch.randn(8, columns, device="cuda", dtype=torch.bfloat16) / 32
    output = F.linear(x, weight)
    expected = x[-TAIL:].double() @ weight.double().t()
    torch.testing.assert_close(output[-TAIL:].double(), expected, atol=2e-2, rtol=2e-2)
    log_probabilities = F.log_softmax(x, 1)
    expected = torch.log_softmax(x[-TAIL:].double(), 1)
    torch.testing.assert_close(log_probabilities[-TAIL:].double(), expected, atol=4e-2, rtol=1e-2)
    target = torch.arange(rows, device="cuda") % columns
    losses = F.cross_entropy(x, target, reduction="none")
    expected = torch.nn.functional.cross_entropy(x[-TAIL:].double(), target[-TAIL:], reduction="none")
    torch.testing.assert_close(losses[-TAIL:].double(), expected, atol=4e-2, rtol=1e-2)


# Backward: only the last rows (or images) get a gradient, so that theirs is that of a call of these rows alone, and the
# weights' as well, and all others' is zero.


def check_backward(function, reference, large, small=(), *, tail=TAIL, training=False, atol=2e-2):
    """large: tensors of many rows; small: parameters. training: rows share statistics, and the last rows' gradients
    are compared alone, with those of the statistics that `reference` is given."""
    large = [x.requires_grad_() for x in large]
    small = [x.requires_grad_() for x in small]
    output = function(*large, *small)
    grad_output = torch.zeros_like(output)
    last = ramp(*output[-tail:].shape)
    grad_output[-tail:] = last
    grads = torch.autograd.grad(output, [*large, *small], grad_output)
    del output, grad_output
    few = [x.detach()[-tail:].double().requires_grad_() for x in large]
    parameters = [x.detach().double().requires_grad_() for x in small]
    expected = torch.autograd.grad(reference(*few, *parameters), [*few, *parameters], last.double())
    for x, grad, wanted in zip([*large, *small], grads, expected, strict=True):
        if any(x is one for one in large):
            assert training or grad[:-tail].count_nonzero() == 0
            grad = grad[-tail:]
        scale = wanted.abs().max().item()
        torch.testing.assert_close(grad.double(), wanted, atol=atol * max(scale, 1e-3), rtol=2e-2)


N = torch.nn.functional
ROWS = {
    "softmax": (lambda x: F.softmax(x, 1), lambda x: N.softmax(x, 1), ()),
    "log_softmax": (lambda x: F.log_softmax(x, 1), lambda x: N.log_softmax(x, 1), ()),
    "masked_softmax": (lambda x: F.masked_softmax(x, None, 2.0), lambda x: N.softmax(2 * x, 1), ()),
    "gelu": (F.gelu, N.gelu, ()),
    "silu": (F.silu, N.silu, ()),
    "tanh": (F.tanh, torch.tanh, ()),
    "hardswish": (F.hardswish, N.hardswish, ()),
    "prelu": (F.prelu, N.prelu, [(1024,)]),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (1024,), w, b),
        lambda x, w, b: N.layer_norm(x, (1024,), w, b),
        [(1024,), (1024,)],
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (1024,), w, 1e-5), lambda x, w: N.rms_norm(x, (1024,), w, 1e-5), [(1024,)]),
    "linear": (F.linear, N.linear, [(1024, 1024), (1024,)]),
    "linear_relu": (F.linear_relu, lambda x, w, b: N.relu(N.linear(x, w, b)), [(1024, 1024), (1024,)]),
    "linear_gelu": (F.linear_gelu, lambda x, w, b: N.gelu(N.linear(x, w, b)), [(1024, 1024), (1024,)]),
    "matmul": (F.matmul, torch.matmul, [(1024, 1024)]),
    "logsumexp": (lambda x: F.logsumexp(x, 1), lambda x: torch.logsumexp(x, 1), ()),
    "sum": (lambda x: F.sum(x, 1), lambda x: x.sum(1), ()),
    "var": (lambda x: F.var(x, 1), lambda x: x.var(1), ()),
    "norm": (lambda x: F.norm(x, 2, 1), lambda x: x.norm(2, 1), ()),
    "swiglu": (F.swiglu, lambda x: N.silu(x[:, :512]) * x[:, 512:], ()),
    "geglu": (F.geglu, lambda x: N.gelu(x[:, :512]) * x[:, 512:], ()),
    "dropout_add": (lambda x: F.dropout_add(x, x, 0.0), lambda x: x + x, ()),
    "layer_scale_add": (lambda x, w: F.layer_scale_add(x, x, w), lambda x, w: x + w * x, [(1024,)]),
    "scale_channels": (lambda x: F.scale_channels(x.unsqueeze(2), x), lambda x: (x * x).unsqueeze(2), ()),
    "permute_contiguous": (
        lambda x: F.permute_contiguous(x.view(-1, 32, 32), (0, 2, 1)),
        lambda x: x.view(-1, 32, 32).transpose(1, 2),
        (),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_backward_of_rows(name):
    function, reference, shapes = ROWS[name]
    torch.manual_seed(0)
    small = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 32 for shape in shapes]
    check_backward(function, reference, [ramp(2**31 // 1024 + 3, 1024)], small)


@pytest.mark.parametrize("layer", [True, False])
def test_backward_of_a_residual_norm(layer):
    def ours(x, residual, w, *b):
        if layer:
            return F.add_layer_norm(x, residual, (1024,), w, *b)[0]
        return F.add_rms_norm(x, residual, (1024,), w, 1e-5)[0]

    def native(x, residual, w, *b):
        return N.layer_norm(x + residual, (1024,), w, *b) if layer else N.rms_norm(x + residual, (1024,), w, 1e-5)

    rows = 2**31 // 1024 + 3
    small = [torch.rand(1024, device="cuda", dtype=torch.bfloat16) + 0.5 for _ in range(2 if layer else 1)]
    check_backward(ours, native, [ramp(rows, 1024), ramp(rows, 1024)], small)


LOSSES = {
    "mse_loss": lambda x: x,
    "l1_loss": lambda x: x,
    "smooth_l1_loss": lambda x: x,
    "huber_loss": lambda x: x,
    "binary_cross_entropy_with_logits": lambda x: x.abs_(),
    "kl_div": lambda x: x.abs_(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_backward_of_losses(name):
    target = LOSSES[name](ramp(1024, 2**31 // 1024 + 3).t())

    def native(x):
        return getattr(N, name)(x, target[-TAIL:].double(), reduction="none")

    x = ramp(*target.shape)
    check_backward(lambda x: getattr(F, name)(x, target, reduction="none"), native, [x])


@pytest.mark.parametrize("packed", [False, True])
def test_backward_of_attention(packed):
    """Causal, of sequences of 128 tokens and 16 heads of 64."""
    batch = 2**31 // (128 * 16 * 64 * (3 if packed else 1)) + 2

    def native(*operands):
        q, k, v = (t.transpose(1, 2) for t in operands[0].unbind(2)) if packed else operands
        output = N.scaled_dot_product_attention(q, k, v, is_causal=True)
        return output.transpose(1, 2) if packed else output

    if packed:
        large = [ramp(batch, 128, 3, 16, 64)]
        check_backward(lambda x: F.flash_attention_qkvpacked(x, causal=True), native, large, tail=2)
    else:
        large = [ramp(batch, 16, 128, 64) for _ in range(3)]
        check_backward(lambda q, k, v: F.flash_attention(q, k, v, causal=True), native, large, tail=2)


def test_backward_of_embedding():
    """A table of so many elements, and so many that are taken from a small one."""
    rows = 2**31 // 1024 + 3
    indices = torch.arange(rows - TAIL, rows, device="cuda")
    check_backward(lambda weight: F.embedding(indices, weight), lambda w: w, [ramp(rows, 1024)])
    few = torch.arange(rows, device="cuda") % 7
    weight = ramp(7, 1024).requires_grad_()
    output = F.embedding(few, weight)
    assert torch.equal(output[-TAIL:], weight.detach()[few[-TAIL:]])
    grad_output = torch.zeros_like(output)
    grad_output[-7:] = ramp(7, 1024)
    (grad,) = torch.autograd.grad(output, weight, grad_output)
    expected = torch.zeros(7, 1024, device="cuda", dtype=torch.bfloat16)
    expected[few[-7:]] = grad_output[-7:]
    assert torch.equal(grad, expected)


def test_backward_of_scattered_rows():
    """Into rows beyond 2**31 elements, of as many. scatter_add, which has an index for each, refuses them by name."""
    rows = 2**31 // 1024 + 3
    index = torch.arange(rows, device="cuda").flip(0)
    input, source = ramp(rows, 1024).requires_grad_(), ramp(rows, 1024).requires_grad_()
    output = F.index_add(input, 0, index, source)
    expected = input.detach()[-TAIL:] + source.detach()[:TAIL].flip(0)
    torch.testing.assert_close(output.detach()[-TAIL:], expected)
    grad_output = torch.zeros_like(output)
    grad_output[-TAIL:] = ramp(TAIL, 1024)
    grads = torch.autograd.grad(output, (input, source), grad_output)
    assert torch.equal(grads[0], grad_output)
    assert torch.equal(grads[1][:TAIL].flip(0), grad_output[-TAIL:])
    assert grads[1][TAIL:].count_nonzero() == 0
    with pytest.raises(NotImplementedError, match=r"scatter_add: expected index to have less than 2\^31 - 1 elements"):
        F.scatter_add(input, 0, index.unsqueeze(1).expand(rows, 1024), source)


def test_histograms():
    x = torch.zeros(BEYOND, device="cuda", dtype=torch.uint8)
    x[-TAIL:] = 3
    assert F.bincount(x).tolist() == [BEYOND - TAIL, 0, 0, TAIL]
    # As float32 counts them.
    counts = F.histc(x.to(torch.bfloat16), 4, 0, 4)
    assert counts.tolist() == [float(torch.tensor(BEYOND - TAIL, dtype=torch.bfloat16)), 0, 0, 1000]


@pytest.mark.parametrize("fused", [False, True])
def test_backward_of_cross_entropy(fused):
    rows, columns, classes = 2**31 // 1024 + 3, 1024, 1024
    target = torch.arange(rows, device="cuda") % classes
    small = [torch.randn(classes, columns, device="cuda", dtype=torch.bfloat16) / 32] if fused else []

    def ours(x, *weight):
        if fused:
            return F.linear_cross_entropy(x, *weight, target, reduction="none")
        return F.cross_entropy(x, target, reduction="none")

    def native(x, *weight):
        return N.cross_entropy(N.linear(x, *weight) if fused else x, target[-TAIL:], reduction="none")

    check_backward(ours, native, [ramp(rows, columns)], small)


def test_backward_of_dropout():
    x = torch.ones(BEYOND, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    output = F.dropout(x, 0.5)
    grad_output = torch.zeros_like(x)
    grad_output[-TAIL:] = 3
    (grad,) = torch.autograd.grad(output, x, grad_output)
    assert torch.equal(grad[-TAIL:], output.detach()[-TAIL:] * 3)
    assert grad[:-TAIL].count_nonzero() == 0


IMAGES = {
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), lambda x, w: N.conv2d(x, w, padding=1), [(4, 4, 3, 3)]),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, padding=1),
        lambda x, w: N.conv_transpose2d(x, w, padding=1),
        [(4, 4, 3, 3)],
    ),
    "conv1d": (
        lambda x, w: F.conv1d(x.flatten(2), w, padding=1),
        lambda x, w: N.conv1d(x.flatten(2), w, padding=1),
        [(4, 4, 3)],
    ),
    "instance_norm": (F.instance_norm, N.instance_norm, ()),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), lambda x: N.max_pool2d(x, 2), ()),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), lambda x: N.avg_pool2d(x, 2), ()),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 8), lambda x: N.adaptive_avg_pool2d(x, 8), ()),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 8), lambda x: N.adaptive_max_pool2d(x, 8), ()),
    "conv_bn_relu_pool": (
        lambda x, w: F.conv_bn_relu_pool(x, w, None, **statistics(w), training=False),
        lambda x, w: N.max_pool2d(
            N.relu(N.batch_norm(N.conv2d(x, w, padding=1), *list(statistics(w).values())[:4])), 2
        ),
        [(4, 4, 3, 3)],
    ),
}


def statistics(weight):
    values = torch.linspace(0.5, 1.5, weight.shape[0], device=weight.device, dtype=torch.float32).to(weight.dtype)
    return {"running_mean": values - 1, "running_var": values, "bn_weight": values, "bn_bias": -values, "padding": 1}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", IMAGES)
def test_backward_of_images(name, memory_format):
    function, reference, shapes = IMAGES[name]
    batch = 2**31 // (4 * 32 * 32) + 2
    torch.manual_seed(0)
    small = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 4 for shape in shapes]
    x = ramp(batch, 4, 32, 32).contiguous(memory_format=memory_format)
    check_backward(function, reference, [x], small, tail=2)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_backward_of_batch_norm(memory_format):
    x = ramp(2**31 // (4 * 32 * 32) + 2, 4, 32, 32).contiguous(memory_format=memory_format)
    period = ramp(1021 * 4).double()
    mean, variance = period.mean().expand(4), period.var(correction=0).expand(4)
    small = [torch.linspace(0.5, 1.5, 4, device="cuda"), torch.zeros(4, device="cuda")]
    # Means over so many elements of what two images get are nothing beside what these get.
    check_backward(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        lambda x, w, b: N.batch_norm(x, mean, variance, w, b),
        [x],
        small,
        tail=2,
        training=True,
    )


def test_sgd_updates_the_last_element():
    parameter = torch.zeros(BEYOND, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    cuda_ops.optim.SGD([parameter], lr=0.5).step()
    assert parameter[-1].item() == -0.5
    assert (parameter != -0.5).count_nonzero() == 0


@pytest.mark.parametrize("optimizer", [cuda_ops.optim.Adam, cuda_ops.optim.AdamW])
def test_adam_updates_the_last_element(optimizer):
    parameter = torch.ones(BEYOND, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer([parameter], lr=0.5, weight_decay=0.0).step()
    assert parameter[-1].item() == 0.5
    assert (parameter != 0.5).count_nonzero() == 0


def test_clip_grad_norm():
    parameter = torch.empty(BEYOND, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    parameter.grad[-4:] = 2.0
    norm = cuda_ops.nn.utils.clip_grad_norm_([parameter], 1.0)
    assert norm.item() == 4.0
    assert parameter.grad[-4:].tolist() == [0.5] * 4


def test_reductions():
    """An index and a sum of what lies beyond 2**31, and of its rows and columns."""
    x = torch.zeros(BEYOND, device="cuda", dtype=torch.bfloat16)
    x[-TAIL:] = 1
    x[-7] = 2
    assert F.argmax(x).item() == BEYOND - 7
    assert F.sum(x, dtype=torch.float32).item() == TAIL + 1
    assert F.amax(x).item() == 2
    for dim in (0, 1):
        matrix = x.view(2, -1) if dim == 1 else x.view(-1, 2)
        assert F.sum(matrix, dim, dtype=torch.float32).sum().item() == TAIL + 1


@pytest.mark.parametrize("inner", [1, 4])
def test_cumsum(inner):
    """Of one row, or of columns side by side; sums that bfloat16 holds."""
    x = torch.zeros(BEYOND // inner, inner, device="cuda", dtype=torch.bfloat16)
    x[0] = 1
    x[-7] = 2
    output = F.cumsum(x, 0)
    assert (output[:-7] == 1).all() and (output[-7:] == 3).all()
    backwards = torch.ops.cuda_ops.cumsum_forward(x, 0, None, True)
    assert (backwards[0] == 3).all() and (backwards[1:-6] == 2).all() and not backwards[-6:].any()


@pytest.mark.parametrize("dim", [0, 1])
def test_concat(dim):
    x = ramp(BEYOND // 64, 64)
    parts = (x[:TAIL], x[TAIL:]) if dim == 0 else (x[:, :24], x[:, 24:])
    assert torch.equal(F.concat(parts, dim)[-TAIL:], x[-TAIL:])


def test_permute_contiguous():
    x = ramp(BEYOND // 64, 64)
    output = F.permute_contiguous(x, (1, 0))
    assert torch.equal(output[:, -TAIL:], x[-TAIL:].t()) and torch.equal(output[:, :TAIL], x[:TAIL].t())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_group_norm(memory_format):
    """One group longer than 2**31 elements, and the last of many groups beyond them."""
    for shape, groups in (((1, 4, 8192, 65_600), 1), ((65_600, 8, 64, 64), 4)):
        x = ramp(*shape).contiguous(memory_format=memory_format).requires_grad_()
        output = F.group_norm(x, groups)
        (grad,) = torch.autograd.grad(output, x, x.detach())
        last = x.detach()[-1:].double() if groups > 1 else None
        if last is not None:
            expected = torch.nn.functional.group_norm(last, groups)
            torch.testing.assert_close(output[-1:].double(), expected, atol=2e-2, rtol=2e-2)
        else:
            assert abs(output.detach()[..., -TAIL:].float().std().item() - 1) < 0.1
        assert grad[-1:].isfinite().all()
        del x, output, grad
