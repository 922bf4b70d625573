"""cuda_ops.nn.init's numbers: against Philox in Python, their distribution and independence, generators, graphs, and
what is refused."""

import itertools
import math

import pytest
import torch
from ops.test_dropout import ONES, philox, to_int64

import cuda_ops

init = cuda_ops.nn.init
DISTRIBUTIONS = {
    "uniform": (lambda t, **k: init.uniform_(t, -1.0, 3.0, **k), lambda x: (x + 1) / 4, 1.0, 4 / math.sqrt(12)),
    "normal": (
        lambda t, **k: init.normal_(t, 1.0, 2.0, **k),
        lambda x: 0.5 * (1 + torch.erf((x - 1) / math.sqrt(8))),
        1.0,
        2.0,
    ),
}


def words(seed, offset, count):
    low = offset // 4
    return [w for q in range(count) for w in philox([low & ONES, low >> 32, q, 0], [seed & ONES, seed >> 32])]


def seeded(device, seed):
    """A generator, and the key and offset that its next call draws."""
    generator = torch.Generator(device).manual_seed(seed)
    if device == "cuda":
        return generator, seed, 0
    twin = torch.Generator().manual_seed(seed)
    key = torch.empty(1, dtype=torch.int64).random_(-(2**63), None, generator=twin).item()
    return generator, key % 2**64, 0


@pytest.mark.parametrize("seed", [0, 1, 0x299F31D0A409])
def test_numbers_are_philox_of_seed_and_place(device, seed):
    """By the generator that the known answers of tests/ops/test_dropout.py prove."""
    count = 261
    drawn, key, offset = seeded(device, seed)
    x = init.uniform_(torch.empty(count, device=device), generator=drawn).cpu()
    w = words(key, offset, -(-count // 4))
    assert torch.equal(x, torch.tensor([(v >> 8) / 2**24 for v in w[:count]]))
    drawn, key, offset = seeded(device, seed)
    y = init.uniform_(torch.empty(count, device=device, dtype=torch.float64), generator=drawn).cpu()
    w = words(key, offset, -(-count // 2))
    expected = [((w[2 * i] << 32 | w[2 * i + 1]) >> 11) / 2**53 for i in range(count)]
    assert torch.equal(y, torch.tensor(expected, dtype=torch.float64))
    drawn, key, offset = seeded(device, seed)
    z = init.normal_(torch.empty(count, device=device), generator=drawn).cpu().double()
    w = words(key, offset, -(-count // 4))
    for i in range(0, count, 2):
        radius = math.sqrt(-2 * math.log((w[i] + 0.5) / 2**32))
        angle = 2 * math.pi * ((w[i + 1] >> 8) / 2**24)
        assert abs(z[i] - radius * math.cos(angle)) < 2e-5
        assert i + 1 == count or abs(z[i + 1] - radius * math.sin(angle)) < 2e-5


def kolmogorov_smirnov(values, cdf):
    """The largest distance of the empirical distribution from `cdf`, times the root of the number of values: above 2.2
    once in 8,000 times."""
    ordered = cdf(values.sort().values)
    count = len(values)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum((ordered - steps[:-1]).abs().max(), (ordered - steps[1:]).abs().max())
    return distance.item() * math.sqrt(count)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_moments_and_distribution(device_dtype, name):
    device, dtype = device_dtype
    fill, cdf, mean, std = DISTRIBUTIONS[name]
    torch.manual_seed(3)
    count = 400_000
    x = fill(torch.empty(count, device=device, dtype=dtype)).double().cpu()
    rounding = torch.finfo(dtype).eps
    standard = (x - mean) / std
    # Five standard deviations of each estimate; of the fourth power's for both distributions at most 10.
    assert abs(standard.mean()) < 5 / math.sqrt(count) + rounding
    fourth = 1.8 if name == "uniform" else 3.0
    assert abs(standard.square().mean() - 1) < 5 * math.sqrt((fourth - 1) / count) + 2 * rounding
    assert abs(standard.pow(3).mean()) < 5 * math.sqrt(15 / count) + 8 * rounding
    assert abs(standard.pow(4).mean() - fourth) < 5 * math.sqrt(96 / count) + 8 * rounding
    if name == "uniform":
        assert x.min() >= -1 and x.max() <= 3
    if dtype in (torch.float32, torch.float64):  # rounded values are steps, not a distribution
        assert kolmogorov_smirnov(x, cdf) < 2.2
    # Pairs of the same counter, of neighbouring ones, of neighbouring vectors.
    for lag in (1, 2, 3, 4, 5, 8, 128):
        assert abs((standard[lag:] * standard[:-lag]).mean()) < 6 / math.sqrt(count), lag


def test_the_check_of_the_distribution_can_fail():
    x = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert kolmogorov_smirnov(x, lambda v: v) < 2.2
    assert kolmogorov_smirnov(x * 0.98, lambda v: v) > 2.2
    assert kolmogorov_smirnov(x.square(), lambda v: v) > 2.2


def test_tails_of_the_normal_distribution(device):
    """As many beyond 4 standard deviations as there should be, on both sides."""
    torch.manual_seed(0)
    x = init.normal_(torch.empty(4_000_000, device=device))
    expected = 4_000_000 * 0.5 * math.erfc(4 / math.sqrt(2))  # 127
    for side in (x > 4, x < -4):
        assert abs(side.sum().item() - expected) < 5 * math.sqrt(expected)
    assert x.isfinite().all() and x.abs().max() < 6.8


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_seeds_calls_and_offsets(device, name):
    """The same after the same seed; another seed, call or generator gives numbers that have nothing to do with them."""
    fill = DISTRIBUTIONS[name][0]
    x = torch.empty(3, 50_001, device=device)

    def fresh(**kwargs):
        return fill(x.clone(), **kwargs).double().flatten()

    torch.manual_seed(11)
    first, second = fresh(), fresh()
    torch.manual_seed(11)
    assert torch.equal(first, fresh())
    torch.manual_seed(12)
    others = [second, fresh()]
    generator = torch.Generator(device).manual_seed(13)
    others.append(fresh(generator=generator))
    assert not torch.equal(others[-1], fresh(generator=generator))
    assert torch.equal(others[-1], fresh(generator=generator.manual_seed(13)))
    for other in others:
        both = torch.stack([first, other])
        assert abs(torch.corrcoef(both)[0, 1]) < 6 / math.sqrt(first.numel())
        # Nor are they the same numbers some places on.
        assert not torch.isin(other[:1000].float(), first[:1000].float()).float().mean() > 0.01


def test_threads_do_not_change_the_numbers():
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(5)
            results.append((init.normal_(torch.empty(300_007)), init.uniform_(torch.empty(70_001).double())))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_layouts_and_sizes(device_dtype):
    """Every element is written, none beside it, whatever the strides and the address."""
    device, dtype = device_dtype
    for count in (0, 1, 3, 4, 5, 7, 9, 1023, 4099):
        buffer = torch.full((count + 3,), 9.0, device=device, dtype=dtype)
        inner = buffer[1 : count + 1]
        assert init.uniform_(inner) is inner
        assert buffer[0] == 9 and (buffer[count + 1 :] == 9).all() and (inner <= 1).all()
    wide = torch.full((6, 10), 9.0, device=device, dtype=dtype)
    init.uniform_(wide[:, ::2])
    assert (wide[:, ::2] <= 1).all() and (wide[:, 1::2] == 9).all()
    turned = torch.full((6, 10), 9.0, device=device, dtype=dtype).t()
    version = turned._version
    assert (init.uniform_(turned) <= 1).all() and turned._version > version
    assert turned.unique().numel() > 10


@pytest.mark.parametrize("shape", [(300, 200), (40, 30, 3, 3)])
def test_he_and_glorot(device, shape):
    """Standard deviations and bounds are those of torch.nn.init."""
    torch.manual_seed(0)
    options = [{}, {"mode": "fan_out", "nonlinearity": "relu"}, {"a": 0.5}]
    cases = [(name, o) for name in ("kaiming_uniform_", "kaiming_normal_") for o in options]
    cases += [(name, o) for name in ("xavier_uniform_", "xavier_normal_") for o in ({}, {"gain": 2.5})]
    for name, kwargs in cases:
        weight = torch.nn.Parameter(torch.empty(shape, device=device))
        ours = getattr(init, name)(weight, **kwargs)
        assert ours is weight and weight.requires_grad
        theirs = getattr(torch.nn.init, name)(torch.empty(shape), **kwargs)
        torch.testing.assert_close(ours.std().item(), theirs.std().item(), rtol=0.03, atol=0)
        if "uniform" in name:
            torch.testing.assert_close(ours.abs().max().item(), theirs.abs().max().item(), rtol=0.01, atol=0)


def test_what_is_refused(device):
    x = torch.empty(3, 4, device=device)
    with pytest.raises(RuntimeError, match="uniform_: expected a to be at most b, and b - a to be finite, got 1 and 0"):
        init.uniform_(x, 1, 0)
    with pytest.raises(RuntimeError, match="normal_: expected std to be at least 0, got -1"):
        init.normal_(x, 0, -1)
    with pytest.raises(TypeError, match="uniform_: expected a to be a number, got '0'"):
        init.uniform_(x, "0")
    with pytest.raises(TypeError, match="normal_: expected tensor to be a Tensor, got list"):
        init.normal_([1.0])
    with pytest.raises(RuntimeError, match="uniform_: expected tensor to be floating point, got int64"):
        init.uniform_(torch.zeros(3, dtype=torch.int64, device=device))
    with pytest.raises(RuntimeError, match="single memory location"):
        init.uniform_(x[:, :1].expand(3, 4))
    with pytest.raises(ValueError, match="fewer than 2 dimensions"):
        init.xavier_normal_(x[0])
    with pytest.raises(ValueError, match="Mode banana not supported"):
        init.kaiming_normal_(x, mode="banana")
    with pytest.warns(UserWarning, match="zero-element"):
        init.kaiming_uniform_(x[:0])


def test_halves_on_the_cpu_are_rounded_float32():
    for dtype, fill in itertools.product((torch.float16, torch.bfloat16), (init.normal_, init.uniform_)):
        halves, wide = torch.empty(5000, dtype=dtype), torch.empty(5000)
        for tensor in (halves, wide):
            torch.manual_seed(3)
            fill(tensor)
        assert torch.equal(halves, wide.to(dtype))


@pytest.mark.cuda
def test_a_generator_of_another_device_is_refused():
    with pytest.raises(RuntimeError, match="uniform_: expected generator to be one of cuda, got one of cpu"):
        init.uniform_(torch.empty(3, device="cuda"), generator=torch.Generator())


@pytest.mark.parametrize("op", ["uniform_", "normal_"])
def test_schemas_and_fakes(device, op):
    torch.library.opcheck(
        getattr(torch.ops.cuda_ops, op).default,
        (torch.empty(3, 4, device=device), 0.0, 1.0, None),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.cuda
def test_replays_of_a_cuda_graph_draw_anew():
    x, y = torch.empty(10_000, device="cuda"), torch.empty(10_000, device="cuda")

    def step():
        init.normal_(x)
        init.uniform_(y)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    seen = []
    for _ in range(3):
        graph.replay()
        seen += [x.clone(), y.clone()]
    for i in range(len(seen)):
        for j in range(i):
            assert not torch.equal(seen[i], seen[j])
    # A replay goes on where the generator is, as eager calls would.
    torch.manual_seed(21)
    graph.replay()
    torch.cuda.synchronize()
    replayed = x.clone(), y.clone()
    torch.manual_seed(21)
    step()
    assert torch.equal(replayed[0], x) and torch.equal(replayed[1], y)


@pytest.mark.cuda
def test_cuda_numbers_do_not_overlap_with_pytorchs():
    torch.manual_seed(4)
    before = torch.cuda.default_generators[0].get_offset()
    init.uniform_(torch.empty(1000, device="cuda"))
    assert torch.cuda.default_generators[0].get_offset() == before + 4


def test_a_seed_of_all_bits(device):
    seed = to_int64((1 << 64) - 3)
    generator = torch.Generator(device)
    results = [init.uniform_(torch.empty(9, device=device), generator=generator.manual_seed(seed)) for _ in range(2)]
    assert torch.equal(*results)
