"""dropout: the generator against published numbers, the mask's statistics and reproducibility, and that backward has
forward's mask."""

import copy
import math

import pytest
import torch

import cuda_ops

F = torch.nn.functional
dropout = cuda_ops.functional.dropout
forward = torch.ops.cuda_ops.dropout_forward
backward = torch.ops.cuda_ops.dropout_backward


def philox(counter, key):
    """Philox-4x32-10 in Python's integers, independent of the C header. counter: 4 words, key: 2 words."""
    c, k = list(counter), list(key)
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [product1 >> 32 ^ c[1] ^ k[0], product1 & 0xFFFFFFFF, product0 >> 32 ^ c[3] ^ k[1], product0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


ONES = 0xFFFFFFFF
# The known answers that the generator's authors publish with Random123: zeros, ones, and digits of pi.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES, ONES, ONES, ONES], [ONES, ONES], [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, words):
    assert philox(counter, key) == words


def to_int64(value):
    return value - (1 << 64) if value >= 1 << 63 else value


def expected_keep(seed, offset, count, p):
    """The mask that the header promises, from the Python generator."""
    threshold = min(math.floor(p * 2**32 + 0.5), ONES)
    low = offset // 4
    words = []
    for q in range(-(-count // 4)):
        words += philox([low & ONES, low >> 32, q & ONES, q >> 32], [seed & ONES, seed >> 32])
    return torch.tensor([w >= threshold for w in words[:count]])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    "seed, offset",
    [(0, 0), ((1 << 64) - 1, 4 * ((1 << 61) + 5)), (0x299F31D0A4093822, 4 * 0x0103707344), (1, 4), (1 << 32, 0)],
)
def test_mask_is_philox_of_seed_and_offset(device_dtype, seed, offset, p):
    """Kernels against the generator that the known answers prove; the public backward op takes seed and offset."""
    device, dtype = device_dtype
    count = 261  # whole blocks of the CPU kernel, and a rest that is no multiple of 4
    state = torch.tensor([to_int64(seed), to_int64(offset)], device=device)
    scaled = backward(torch.ones(count, device=device, dtype=dtype), state, p, [1]).cpu()
    keep = expected_keep(seed, offset, count, p)
    scale = torch.tensor(1 / (1 - p), dtype=torch.float64).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    assert torch.equal(scaled, torch.where(keep, scale.to(dtype), torch.tensor(0, dtype=dtype)))


def test_first_words_are_the_known_answer(device):
    """With key and counter of zeros the words are 0x66…, 0xe1…, 0xbc…, 0x9b…: p just below and above each of them."""
    state = torch.zeros(2, dtype=torch.int64, device=device)
    for i, word in enumerate(KNOWN_ANSWERS[0][2]):
        kept = [backward(torch.ones(4, device=device), state, p / 2**32, [1])[i].item() for p in (word, word + 1)]
        assert kept[0] > 0 and kept[1] == 0


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_rate_scale_and_mean(device_dtype, p):
    device, dtype = device_dtype
    count = 400_000
    torch.manual_seed(3)
    x = torch.full((count,), 2.0, device=device, dtype=dtype)
    y = dropout(x, p).double().cpu()
    kept = y != 0
    # Within five standard deviations of the binomial distribution: missed by chance once in two million runs.
    deviation = (p * (1 - p) / count) ** 0.5
    assert abs(kept.double().mean() - (1 - p)) < 5 * deviation
    assert torch.equal(y[kept].unique(), torch.tensor([2 / (1 - p)], dtype=torch.float64).to(dtype).double())
    rounding = torch.finfo(dtype).eps
    assert abs(y.mean() - 2) < 2 * (5 * deviation / (1 - p) + rounding)
    # Neighbours, and elements that share a counter's word number, are independent.
    for lag in (1, 2, 3, 4, 64, 256):
        both = (kept[lag:] & kept[:-lag]).double().mean()
        assert abs(both - (1 - p) ** 2) < 12 * deviation, lag


def test_seed_fixes_the_mask_and_calls_differ(device):
    x = torch.ones(3, 1001, device=device)
    torch.manual_seed(11)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(11)
    again = dropout(x)
    torch.manual_seed(12)
    other = dropout(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second) and not torch.equal(first, other)
    # Half of the elements agree by chance.
    assert 0.45 < (first == second).double().mean() < 0.55


def test_generator_state_moves_and_returns(device):
    x = torch.ones(100, device=device)
    get, put = (
        (torch.get_rng_state, torch.set_rng_state)
        if device == "cpu"
        else (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    )
    state = get()
    first = dropout(x)
    assert not torch.equal(state, get())
    put(state)
    assert torch.equal(first, dropout(x))


def test_threads_do_not_change_the_mask():
    threads = torch.get_num_threads()
    x = torch.randn(300_007)
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(5)
            results.append(dropout(x, 0.3))
        assert all(torch.equal(r, results[0]) for r in results)
    finally:
        torch.set_num_threads(threads)


def layouts(x):
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    buffer = x.new_zeros(x.numel() + 1)
    buffer[1:] = x.flatten()
    return {
        "contiguous": x,
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "transposed": x.transpose(0, 3).contiguous().transpose(0, 3),
        "strided": wide[..., ::2],
        "misaligned": buffer[1:].view(x.shape),
        "expanded": x[:1].expand(x.shape),
    }


def test_gradient_has_the_mask_of_forward_in_every_layout(device_dtype):
    device, dtype = device_dtype
    x = torch.rand(3, 5, 4, 7, dtype=torch.float64).add(0.5).to(dtype).to(device)
    for name, input in layouts(x).items():
        input = input.detach().requires_grad_()
        output = dropout(input, 0.4)
        # Values that differ, so that one that is taken from another's place is seen.
        for grad_name, grad_output in layouts(torch.rand_like(x) + 0.5).items():
            (grad,) = torch.autograd.grad(output, input, grad_output, retain_graph=True)
            assert torch.equal(grad != 0, output != 0), (name, grad_name)
            # d output / d input is the scale where it is kept.
            error = (grad - output / input * grad_output).abs().max()
            assert error <= 16 * torch.finfo(dtype).eps, (name, grad_name)
        if name in ("contiguous", "channels_last", "transposed"):
            assert output.stride() == input.stride(), name


def test_edges_of_p(device):
    x = torch.tensor([1.0, -2.0, 3.0, 0.5, 7.0], device=device, requires_grad=True)
    assert dropout(x, 0.0) is x
    assert dropout(x, 0.5, training=False) is x
    zeros = dropout(x, 1.0)
    assert torch.equal(zeros, torch.zeros_like(x))
    (grad,) = torch.autograd.grad(zeros.sum(), x)
    assert torch.equal(grad, torch.zeros_like(x))
    assert torch.equal(forward(x, 0.0)[0], x)
    for p in (-1e-9, 1 + 1e-9, 2.0):
        for function in (dropout, F.dropout):
            with pytest.raises(ValueError, match="between 0 and 1"):
                function(x, p)


def test_dropped_nonfinite_values_are_nan_as_in_pytorch(device):
    """Dropping multiplies by zero, so that a NaN or an infinity is not hidden."""
    x = torch.full((1000,), float("inf"), device=device)
    x[::2] = float("nan")
    torch.manual_seed(0)
    y = dropout(x, 0.5)
    reference = F.dropout(x, 0.5)
    for result in (y, reference):
        assert result[::2].isnan().all()
        assert set(result[1::2].nan_to_num(nan=-1.0, posinf=1.0).tolist()) == {-1.0, 1.0}


def test_inplace(device):
    leaf = torch.rand(4, 6, device=device).add_(1).requires_grad_()
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[:, ::2]):
        target = view(leaf * 1)
        pointer, before = target.data_ptr(), target.detach().clone()
        torch.manual_seed(2)
        result = dropout(target, 0.5, inplace=True)
        assert result is target and result.data_ptr() == pointer
        torch.manual_seed(2)
        assert torch.equal(result, dropout(before, 0.5))
        (grad,) = torch.autograd.grad(result.sum(), leaf)
        expected = torch.zeros_like(leaf)
        view(expected).copy_(torch.where(result != 0, 2.0, 0.0))
        assert torch.equal(grad, expected)


def test_inplace_spoils_what_was_saved(device):
    """Autograd notices that a value that backward needs was overwritten."""
    x = torch.rand(5, device=device, requires_grad=True)
    y = x * 1
    z = y * y
    dropout(y, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_module_is_drop_in(device):
    ours, theirs = cuda_ops.nn.Dropout(0.3, inplace=False), torch.nn.Dropout(0.3, inplace=False)
    assert isinstance(ours, torch.nn.Dropout) and repr(ours) == repr(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(copy.deepcopy(ours).state_dict(), strict=True)
    x = torch.ones(1000, device=device)
    assert ours(x).unique().numel() == 2
    assert ours.eval()(x) is x
    target = x.clone()
    assert cuda_ops.nn.Dropout(0.3, inplace=True)(target) is target
    with pytest.raises(ValueError, match="between 0 and 1"):
        cuda_ops.nn.Dropout(1.2)


def test_checkpoint_repeats_the_mask(device):
    from torch.utils.checkpoint import checkpoint

    x = torch.rand(50, device=device).add_(1).requires_grad_()
    y = checkpoint(lambda t: dropout(t, 0.5) * t, x, use_reentrant=False)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad != 0, y != 0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_draw_anew(device, dynamic):
    """Two calls in one graph are two masks, another run others, and backward has those of its own forward."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def twice(x):
        return dropout(x, 0.5), dropout(x, 0.5)

    x = torch.rand(20, 30, device=device).add_(1).requires_grad_()
    runs = [twice(x), twice(x)]
    masks = [(y != 0) for run in runs for y in run]
    for i in range(4):
        for j in range(i):
            assert not torch.equal(masks[i], masks[j])
    for first, second in runs:
        ones = torch.ones_like(first)
        (grad,) = torch.autograd.grad((first, second), x, (ones, 10 * ones))
        assert torch.equal(grad, 2.0 * (first != 0) + 20.0 * (second != 0))


@pytest.mark.parametrize("layout", ["transposed", "channels_last"])
def test_compiled_strides(device, layout):
    torch._dynamo.reset()
    compiled = torch.compile(dropout, fullgraph=True, dynamic=True, backend="aot_eager")
    x = layouts(torch.rand(3, 5, 4, 7, device=device) + 1)[layout].requires_grad_()
    y = compiled(x, 0.5)
    assert y.stride() == x.stride()
    (grad,) = torch.autograd.grad(y, x, torch.ones(y.shape, device=device))
    assert torch.equal(grad != 0, y != 0)


@pytest.mark.cuda
def test_replays_of_a_cuda_graph_draw_anew():
    x = torch.rand(10_000, device="cuda").add_(1).requires_grad_()

    def step():
        first, second = dropout(x, 0.5), dropout(x, 0.5)
        return first, second, *torch.autograd.grad((first.sum(), second.sum()), (x,)), first * 1

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second, grad, copy_of_first = step()
    masks = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert not torch.equal(first != 0, second != 0)
        assert torch.equal(first, copy_of_first)
        # The gradient counts how many of the two masks keep the element.
        assert torch.equal(grad, 2.0 * (first != 0) + 2.0 * (second != 0))
        masks += [(first != 0).clone(), (second != 0).clone()]
    for i in range(len(masks)):
        for j in range(i):
            assert not torch.equal(masks[i], masks[j])
    # A replay goes on where the generator is, as eager calls would.
    torch.manual_seed(21)
    graph.replay()
    torch.cuda.synchronize()
    replayed = first.clone(), second.clone()
    torch.manual_seed(21)
    assert torch.equal(replayed[0], dropout(x, 0.5)) and torch.equal(replayed[1], dropout(x, 0.5))


@pytest.mark.cuda
def test_cuda_numbers_do_not_overlap_with_pytorchs():
    """Our call advances the generator's offset: what PyTorch draws next differs, and comes out the same as
    after any other op that takes as much."""
    torch.manual_seed(4)
    before = torch.cuda.default_generators[0].get_offset()
    dropout(torch.ones(1000, device="cuda"))
    assert torch.cuda.default_generators[0].get_offset() == before + 4


@pytest.mark.cuda
@pytest.mark.large
def test_more_than_two_to_the_34_elements():
    """Counters beyond 32 bits: elements 2^34 apart share the low word of theirs, not the high one."""
    count = (1 << 34) + 4096
    x = torch.ones(count, device="cuda", dtype=torch.float16)
    y = dropout(x, 0.5)
    assert not torch.equal(y[:4096], y[1 << 34 :])
    assert 0.45 < (y[1 << 34 :] != 0).double().mean() < 0.55


def test_transforms(device):
    """Tangents and gradients by torch.func have the mask of their forward."""
    x, tangent = torch.randn(3, 50, device=device).t(), torch.randn(50, 3, device=device)
    output, output_tangent = torch.func.jvp(lambda x: dropout(x, 0.25), (x,), (tangent,))
    torch.testing.assert_close(output_tangent, torch.where(output != 0, tangent / 0.75, 0))
    output, backward = torch.func.vjp(lambda x: dropout(x, 0.25), x)
    torch.testing.assert_close(backward(tangent)[0], torch.where(output != 0, tangent / 0.75, 0))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("count", [1, 7, 128, 261, 70_001])
def test_dropout_add_is_dropout_and_a_sum(device_dtype, p, count):
    """With the mask that dropout draws after the same seed, rounded once; gradients likewise."""
    device, dtype = device_dtype
    generator = torch.Generator().manual_seed(0)
    x, residual, g = (torch.randn(count, generator=generator).to(dtype).to(device) for _ in range(3))
    x, residual = x.requires_grad_(), residual.requires_grad_()
    torch.manual_seed(5)
    output = cuda_ops.functional.dropout_add(x, residual, p)
    torch.manual_seed(5)
    keep = dropout(torch.ones_like(x), p).detach() != 0 if p > 0 else torch.ones_like(x, dtype=torch.bool)
    scale = 1 / (1 - p) if p < 1 else 0.0
    exact = x.detach().double() * keep * scale + residual.detach().double()
    torch.testing.assert_close(output.detach(), exact.to(dtype))
    grads = torch.autograd.grad(output, (x, residual), g)
    torch.testing.assert_close(grads[0], (g.double() * keep * scale).to(dtype))
    assert torch.equal(grads[1], g)


def test_dropout_add_out_of_training_is_a_sum(device):
    x, residual = torch.randn(3, 5, device=device), torch.randn(5, 3, device=device).t()
    assert torch.equal(cuda_ops.functional.dropout_add(x, residual, training=False), x + residual)


ours = cuda_ops.functional
OF_CHANNELS = {"dropout1d": (40, 50, 3), "dropout2d": (40, 50, 2, 3), "dropout3d": (40, 50, 2, 1, 3)}


@pytest.mark.parametrize("name", OF_CHANNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_channels_are_zeroed_as_a_whole(name, dtype):
    shape = OF_CHANNELS[name]
    x = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype).requires_grad_()
    torch.manual_seed(0)
    output = getattr(ours, name)(x, 0.3)
    (grad,) = torch.autograd.grad(output.sum(), x)
    factors = grad.flatten(2)
    assert torch.equal(factors, factors[:, :, :1].expand_as(factors))
    assert torch.equal(factors.unique(), torch.tensor([0, 1 / 0.7], dtype=torch.float64).to(dtype))
    assert torch.equal(output, x * grad)
    # Of 2000 channels a share of 0.3, four deviations more or less.
    assert abs((factors[:, :, 0] == 0).double().mean().item() - 0.3) < 4 * math.sqrt(0.21 / 2000)
    torch.manual_seed(0)
    assert torch.equal(getattr(ours, name)(x, 0.3), output)
    assert not torch.equal(getattr(ours, name)(x, 0.3), output)
    if name != "dropout2d":  # PyTorch takes three dimensions for a batch of signals there
        alone = getattr(ours, name)(x[0].detach(), 0.5).flatten(1)
        assert ((alone == 0).all(1) | (alone != 0).all(1)).all() and (alone == 0).any()


@pytest.mark.parametrize("name", OF_CHANNELS)
def test_modules_of_channel_dropout(name):
    x = torch.rand(OF_CHANNELS[name], generator=torch.Generator().manual_seed(0))
    kind = f"D{name[1:]}"
    module, native = getattr(cuda_ops.nn, kind)(0.25, inplace=True), getattr(torch.nn, kind)(0.25, inplace=True)
    assert repr(module) == repr(native)
    assert module.eval()(x) is x
    before = x.clone()
    assert module.train()(x) is x and not torch.equal(x, before)


def test_stochastic_depth():
    x = torch.ones(2000, 3, 2)
    torch.manual_seed(0)
    rows = ours.stochastic_depth(x, 0.3, "row").flatten(1)
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    assert torch.equal(rows.unique(), torch.tensor([0, 1 / 0.7]))
    assert abs((rows[:, 0] == 0).double().mean().item() - 0.3) < 4 * math.sqrt(0.21 / 2000)
    whole = [ours.stochastic_depth(x, 0.5, "batch").unique().tolist() for _ in range(30)]
    assert {tuple(values) for values in whole} == {(0.0,), (2.0,)}
    assert ours.stochastic_depth(x, 0.3, "row", training=False) is x
    assert not ours.stochastic_depth(x, 1.0, "row").any()
    module = cuda_ops.nn.StochasticDepth(0.2, "row")
    assert repr(module) == "StochasticDepth(p=0.2, mode=row)"
    assert module.eval()(x) is x
    assert (module.train()(x) == 0).any()
