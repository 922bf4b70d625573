"""attention: which weights dropout takes, its gradients, and when it repeats."""

import math

import pytest
import torch
from support.attention import check_dropout, dropout_factors, operands

from cuda_ops.functional import scaled_dot_product_attention


def dropout_numbers(seed, offset, batch, heads, queries, keys):
    """By the words of attention.h: Philox of 7 rounds, a block of which has 16 bits for each of 8 weights."""
    index = torch.arange(batch * heads).reshape(batch, heads, 1, 1)
    i, j = torch.arange(queries).reshape(-1, 1), torch.arange(keys)
    row = 32 * (index * ((queries + 15) // 16) + i // 16) + 4 * (i % 8) + j % 8 // 2
    low, high = 0xFFFFFFFF, 32
    counter = [torch.full_like(row, offset // 4 & low), (offset // 4 >> high) + (row >> high), row & low]
    counter.append((j // 16).expand_as(row))
    key = seed & low, seed >> high & low
    for n in range(7):
        # Products of 32 bits by 32, of which int64 holds the lower halves of halves.
        products = []
        for multiplier, word in ((0xD2511F53, counter[0]), (0xCD9E8D57, counter[2])):
            lower, upper = multiplier * (word & 0xFFFF), multiplier * (word >> 16)
            middle = upper + (lower >> 16)
            products.append((middle >> 16 & low, (middle & 0xFFFF) << 16 | lower & 0xFFFF))
        key0, key1 = key[0] + n * 0x9E3779B9 & low, key[1] + n * 0xBB67AE85 & low
        (high0, low0), (high1, low1) = products
        counter = [high1 ^ counter[1] ^ key0, low1, high0 ^ counter[3] ^ key1, low0]
    words = torch.stack(counter)
    word = (i % 16 // 8 + j % 16 // 8 * 2).expand_as(row)
    return words.gather(0, word[None])[0] >> (j % 2 * 16) & 0xFFFF


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 33, 70), (1, 2, 200, 130), (3, 1, 5, 300)], ids=str)
def test_which_weights_are_dropped(device_dtype, sizes):
    device, dtype = device_dtype
    seed, offset = 0x1234_5678_9ABC_DEF0, 0x7_0000_0004
    state = torch.tensor([seed, offset], device=device)
    numbers = dropout_numbers(seed, offset, *sizes)
    for p in (0.1, 0.5, 0.999, 1e-6, 1.0, 0.0):
        dropped = int(p * 65536 + 0.5)
        factor = 65536 / (65536 - dropped) if dropped < 65536 else 0.0
        expected = ((numbers >= dropped).double() * factor).to(dtype)
        assert torch.equal(dropout_factors(state, p, sizes, dtype).cpu(), expected)


def test_dropped_weights_are_independent(device):
    """As many as p says, and neighbours in any direction no more alike than chance has it: within five deviations."""
    p, sizes = 0.3, (3, 4, 256, 320)
    kept = dropout_factors(torch.tensor([5, 8], device=device), p, sizes) > 0
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs((~kept).double().mean() - p) < 5 * deviation
    centred = kept.double() - (1 - p)
    steps = [(0, 0, a, b) for a in (0, 1, 7, 8, 9, 16, 64) for b in (0, 1, 2, 7, 8, 9, 16, 128)][1:]
    for step in [*steps, (0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0)]:
        ahead, behind = centred, centred
        for dim, by in enumerate(step):
            ahead = ahead.narrow(dim, by, sizes[dim] - by)
            behind = behind.narrow(dim, 0, sizes[dim] - by)
        correlation = (ahead * behind).mean() / (p * (1 - p))
        assert abs(correlation) < 5 / math.sqrt(ahead.numel()), step
    other = dropout_factors(torch.tensor([5, 12], device=device), p, sizes) > 0
    assert abs(((other.double() - (1 - p)) * centred).mean() / (p * (1 - p))) < 5 / math.sqrt(kept.numel())


@pytest.mark.parametrize("keys", [64, 203])
@pytest.mark.parametrize("window", [(-1, 0), (30, 5), (-1, -1)], ids=["causal", "window", "full"])
def test_dropout(device_dtype, window, keys):
    check_dropout(*device_dtype, 113, keys, window, key_heads=2)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("dtype", "path"),
    [
        *((dtype, path) for dtype in (torch.float16, torch.bfloat16) for path in ("sm90", "mma", "simt")),
        *((torch.float32, path) for path in ("mma_3xtf32", "float32", "simt")),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_dropout_of_paths(force_attention, dtype, head_dim, path):
    if head_dim > {"mma_3xtf32": 64, "float32": 128}.get(path, 256):
        pytest.skip("of rows of up to 128 elements, mma_3xtf32 of up to 64 with gradients")
    if path == "sm90" and (torch.cuda.get_device_capability() != (9, 0) or head_dim > 128):
        pytest.skip("of Hopper alone, and with dropout of rows of up to 128 elements")
    force_attention(path)
    for lengths, window in [
        ((256, 256), (-1, 0)),
        ((257, 331), (-1, -1)),
        ((300, 45), (70, 9)),
        ((1, 600), (-1, 0)),
    ]:
        sizes = {"head_dim": head_dim, "value_dim": head_dim}
        check_dropout("cuda", dtype, *lengths, window, key_heads=2, **sizes)
    check_dropout("cuda", dtype, 130, 130, p=0.9, head_dim=head_dim, value_dim=head_dim)


@pytest.mark.cuda
def test_dropout_of_replays():
    """Each replay of a graph draws its own numbers, and its backward the same ones as its forward."""
    tensors = operands("cuda", torch.bfloat16, 256, 256)
    grad = torch.randn_like(tensors[0])
    options = 0.125, 0, -1, 0, 0.0, 0.2

    def step():
        output, _, state = torch.ops.cuda_ops.attention_forward(*tensors, None, None, *options)
        return output.detach(), state, *torch.autograd.grad(output, tensors, grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    seen = []
    for _ in range(2):
        graph.replay()
        copies = [t.detach().double().requires_grad_() for t in tensors]
        hidden = torch.ones(256, 256, dtype=torch.bool, device="cuda").triu(1)
        weights = torch.softmax((0.125 * copies[0] @ copies[1].mT).masked_fill(hidden, -math.inf), -1)
        output = weights * dropout_factors(found[1], 0.2, (2, 4, 256, 256)) @ copies[2]
        for a, e in zip(found[2:], torch.autograd.grad(output, copies, grad.double()), strict=True):
            assert (a - e).norm() <= 2e-2 * e.norm()
        assert (found[0] - output).norm() <= 2e-2 * output.norm()
        seen.append(found[0].clone())
    assert not torch.equal(*seen)


def test_what_dropout_factors_refuses():
    factors, state = torch.ops.cuda_ops.attention_dropout_factors, torch.zeros(2, dtype=torch.int64)
    for arguments, message in [
        ((state[:1], [1, 1, 1, 1], 0.5, torch.float32), "state to be 2 int64"),
        ((state.double(), [1, 1, 1, 1], 0.5, torch.float32), "state to be 2 int64"),
        ((state, [1, 1, 1], 0.5, torch.float32), "sizes to be 4 numbers"),
        ((state, [1, 1, -1, 1], 0.5, torch.float32), "sizes to be 4 numbers"),
        ((state, [1, 1, 1, 1], 1.5, torch.float32), "dropout to be between 0 and 1"),
        ((state, [1, 1, 1, 1], 0.5, torch.int64), "floating point"),
    ]:
        with pytest.raises((RuntimeError, NotImplementedError), match=message):
            factors(*arguments)


def test_dropout_repeats_with_the_seed_and_only_then(device):
    tensors = operands(device, torch.float32, 40, 50)

    def run(p):
        return scaled_dot_product_attention(*tensors, dropout_p=p)

    torch.manual_seed(3)
    first, second = run(0.5), run(0.5)
    torch.manual_seed(3)
    assert torch.equal(run(0.5), first) and not torch.equal(first, second)
    assert torch.equal(run(1.0), torch.zeros_like(first))
    assert torch.equal(run(0.0), run(0.0))
