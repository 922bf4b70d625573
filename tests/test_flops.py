"""What torch.utils.flop_counter counts of our ops, beside what it counts of PyTorch's."""

import subprocess
import sys

import pytest
import torch
from support.opspec import Make
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import cuda_ops
from cuda_ops.models import GPT, GPTConfig, MnistCNN

functional = cuda_ops.functional


def flops(function, *inputs, backward=True):
    """Of the function, and of its gradients for those of the inputs that require any. PyTorch's attention is the one
    whose products the counter knows on the CPU."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = function(*inputs)
        if backward:
            output.sum().backward()
    return counter.get_total_flops()


# Of whole models: the counter's hooks have the fused ones go layer by layer.


@pytest.mark.parametrize("backend", ["custom", "fused"])
@pytest.mark.parametrize("backward", [False, True])
def test_mnist_counts_as_pytorchs(backend, backward):
    images, labels = torch.randn(6, 1, 28, 28), torch.arange(6)
    models = [MnistCNN(name) for name in ("native", backend)]
    native, ours = [flops(model.loss, images, labels, backward=backward) for model in models]
    assert ours == native > 0


@pytest.mark.parametrize("backend", ["custom", "fused"])
@pytest.mark.parametrize("backward", [False, True])
def test_gpt_counts_as_pytorchs(backend, backward):
    config = GPTConfig(vocab_size=65, block_size=24, n_layer=2, n_head=2, n_embd=32)
    tokens = torch.randint(65, (2, 3, 20))
    native, ours = [flops(GPT(name, config), *tokens, backward=backward) for name in ("native", backend)]
    if backward:  # where the scores are made again, as in PyTorch's fused attention on a GPU, in each of two layers
        ours -= 2 * (2 * 3 * 2 * 20 * 20 * 16)
    assert ours == native > 0


def test_converted_models_count_as_before():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3, groups=2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32, 5), torch.nn.GELU()
    )
    images = torch.randn(3, 4, 4, 4, requires_grad=True)
    before = flops(model, images)
    cuda_ops.convert(model)
    assert flops(model, images) == before > 0


make = Make(dtype=torch.float32, requires_grad=True)
CONVOLUTIONS = {
    "conv1d": [(3, 4, 9), (6, 2, 3), {"stride": 2, "padding": 1, "groups": 2}],
    "conv2d": [(3, 4, 9, 7), (6, 2, 3, 2), {"stride": (2, 1), "padding": 1, "dilation": 2, "groups": 2}],
    "conv2d without a batch": [(4, 9, 7), (6, 4, 3, 1), {"padding": "same"}],
    "conv_transpose1d": [(3, 4, 9), (4, 3, 3), {"stride": 2, "padding": 1, "groups": 2}],
    "conv_transpose2d": [(3, 4, 9, 7), (4, 3, 3, 2), {"stride": (2, 1), "output_padding": (1, 0), "groups": 2}],
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("frozen", ["none", "input", "weight"])
def test_convolutions(name, frozen):
    sizes, weight, options = CONVOLUTIONS[name]
    input, weight = make(*sizes), make(*weight)
    for argument, tensor in (("input", input), ("weight", weight)):
        tensor.requires_grad_(argument != frozen)
    name = name.split()[0]
    ours, native = [getattr(f, name) for f in (functional, torch.nn.functional)]
    counts = [flops(lambda x, w, f=f: f(x, w, None, **options), input, weight) for f in (ours, native)]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_blocks_of_convolutions(frozen, training):
    x, w, b = make(3, 4, 9, 7).requires_grad_(not frozen), make(6, 2, 3, 2), make(6)
    mean, var = torch.zeros(6), torch.ones(6)

    def block(x, w):
        return functional.conv_bn_relu_pool(x, w, b, mean, var, b, b, training=training, stride=2, padding=1, groups=2)

    def convolution(x, w):
        return torch.nn.functional.conv2d(x, w, None, 2, 1, 1, 2)

    # The gradient of evaluation, which keeps nothing, makes the convolution's output again.
    again = 0 if training else flops(convolution, x, w, backward=False)
    assert flops(block, x, w) == flops(convolution, x, w) + again > 0


@pytest.mark.parametrize("shapes", [[(5, 4), (4, 3)], [(2, 5, 4), (4, 3)], [(2, 1, 5, 4), (3, 4, 6)]], ids=str)
def test_products(shapes):
    operands = [make(*shape) for shape in shapes]
    assert flops(functional.matmul, *operands) == flops(torch.matmul, *operands) > 0


def test_fused_products():
    x, w, b = make(2, 5, 8), make(6, 8), make(6)
    plain = flops(torch.nn.functional.linear, x, w, b)
    for op in (functional.linear, functional.linear_relu, functional.linear_gelu):
        assert flops(op, x, w, b) == plain == 3 * 2 * 10 * 8 * 6
        assert flops(op, x.detach(), w, b) == 2 * 2 * 10 * 8 * 6
    v = make(8, 6)
    chain = flops(lambda x: torch.nn.functional.linear(torch.nn.functional.linear(x, w, b), v), x, backward=False)
    assert flops(functional.excitation, x.flatten(0, 1), w, b, v, None, backward=False) == chain > 0
    labels = torch.arange(10) % 6
    assert flops(functional.linear_cross_entropy, x.flatten(0, 1), w, labels) == plain
    assert flops(functional.linear_cross_entropy, x.detach().flatten(0, 1), w, labels) == 2 * 2 * 10 * 8 * 6


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_counts_as_pytorchs_fused_one(key_heads):
    query, key, value = make(2, 4, 5, 8), make(2, key_heads, 7, 8), make(2, key_heads, 7, 6)
    shapes = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)
    forward, backward = sdpa_flop_count(*shapes), sdpa_backward_flop_count((2, 4, 5, 6), *shapes)
    attention = functional.scaled_dot_product_attention

    def grouped(*operands):
        return attention(*operands, enable_gqa=key_heads != 4)

    assert flops(grouped, query, key, value, backward=False) == forward
    assert flops(grouped, query, key, value) == forward + backward


def test_packed_attention():
    packed = make(2, 5, 3, 4, 8)
    shape = (2, 4, 5, 8)
    expected = sdpa_flop_count(*[shape] * 3) + sdpa_backward_flop_count(*[shape] * 4)
    assert flops(functional.flash_attention_qkvpacked, packed) == expected
    query, key, value = make(6, 4, 8), make(9, 2, 8), make(9, 2, 8)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 5, 9], dtype=torch.int32)

    def varlen(query, key, value):
        return functional.flash_attention_varlen(query, key, value, *starts, 4, 5)

    expected = 0
    for queries, keys in ((2, 5), (4, 4)):
        shapes = (1, 4, queries, 8), (1, 4, keys, 8), (1, 4, keys, 8)
        expected += sdpa_flop_count(*shapes) + sdpa_backward_flop_count(shapes[0], *shapes)
    assert flops(varlen, query, key, value) == expected
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor.detach()) for tensor in (query, key, value)]
        starts = [mode.from_tensor(tensor) for tensor in starts]
        longest = [(1, 4, 4, 8), (1, 4, 5, 8), (1, 4, 5, 8)]
        assert flops(varlen, *fakes, backward=False) == 2 * sdpa_flop_count(*longest)


def test_attention_to_a_cache():
    query, keys, values = torch.randn(2, 1, 4, 8), torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8)
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    count = flops(functional.flash_attention_with_kvcache, query, keys, values, backward=False)
    assert count == sdpa_flop_count((2, 4, 1, 8), (2, 4, 16, 8), (2, 4, 16, 8))
    pages, table = torch.randn(6, 4, 2, 8), torch.arange(6, dtype=torch.int32).view(2, 3)

    def paged(query):
        return functional.flash_attention_with_kvcache(query, pages, pages, cache_seqlens=lengths, block_table=table)

    assert flops(paged, query, backward=False) == sdpa_flop_count((2, 4, 1, 8), (2, 4, 12, 8), (2, 4, 12, 8))


@pytest.mark.parametrize("order", [("cuda_ops", "torch.utils.flop_counter"), ("torch.utils.flop_counter", "cuda_ops")])
def test_the_counter_may_be_imported_before_or_after(order):
    """Nor does cuda_ops import it, which would take Triton."""
    code = "import sys, torch\n"
    for name in order:
        code += f"import {name}\nloaded = 'torch.utils.flop_counter' in sys.modules\n"
        code += "assert loaded, 1\n" if name != "cuda_ops" or order[0] != name else "assert not loaded, 2\n"
    code += "counter = torch.utils.flop_counter\n"
    code += "with counter.FlopCounterMode(display=False) as mode:\n"
    code += "    cuda_ops.functional.matmul(torch.ones(2, 3), torch.ones(3, 4))\n"
    code += "assert counter.__spec__.loader is counter.__loader__\n"
    code += "assert type(counter.__loader__).__name__ == 'SourceFileLoader', counter.__loader__\n"
    code += "print(mode.get_total_flops())\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "48", done.stderr
