"""Forwards that torch.fx cannot trace: rewritten, of transformers' blocks and of modules written like them."""

import copy
import pickle

import pytest
import torch
from support.conversion import classes
from test_convert_transformers import attention_masks, tiny

import cuda_ops
from cuda_ops.conversion import fusing_blocks, layers, rewritten

nn = torch.nn
TEXT = ["Llama", "GPT2", "T5"]
OPS = ("layer_norm_rounded_forward", "add_layer_norm_rounded_forward", "rms_norm_rounded_forward")
OPS += ("add_rms_norm_rounded_forward",)


def pair(name, device, smooth=False, **changes):
    """A model, ours and PyTorch's, in float32, and inputs."""
    model, inputs = tiny(name)
    for module in model.modules():
        # One of T5's few ReLUs that falls on the other side of 0 changes gradients by 0.05, in either of the two.
        if smooth and type(module).__name__ == "T5DenseActDense":
            module.act = nn.GELU()
    for attribute, value in changes.items():
        setattr(model.config, attribute, value)
    native = model.float().to(device)
    ours = copy.deepcopy(native)
    report = cuda_ops.convert(ours)
    inputs = {key: value.to(device) for key, value in inputs.items()}
    return ours, native, inputs, report


@pytest.fixture
def counts(monkeypatch):
    found = dict.fromkeys((*OPS, "rotary_embedding"), 0)

    def counted(name, function):
        def call(*arguments):
            found[name] += 1
            return function(*arguments)

        return call

    for name in OPS:
        monkeypatch.setattr(fusing_blocks, name, counted(name, getattr(fusing_blocks, name)))
    function = cuda_ops.functional.rotary_embedding
    monkeypatch.setattr(cuda_ops.functional, "rotary_embedding", counted("rotary_embedding", function))
    return found


def results(model, inputs, dtype, **options):
    model.zero_grad(set_to_none=True)
    with torch.autocast(next(model.parameters()).device.type, dtype, enabled=dtype is not None):
        output = model(**inputs, **options)
        states = output[0]
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2)).to(states.device, states.dtype)
    (states * weights).float().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return states, grads, output


def distance(tensor, reference):
    tensor, reference = tensor.detach().double(), reference.detach().double()
    return float((tensor - reference).norm() / reference.norm().clamp_min(1e-30))


@pytest.mark.parametrize("mask", [None, "right", "left", "pairs"])
@pytest.mark.parametrize("name", TEXT)
def test_autocast(name, mask, device, counts):
    """As near to float32's values as PyTorch's own, in the same dtypes."""
    ours, native, inputs, _ = pair(name, device, smooth=True)
    options = {} if mask is None else {"attention_mask": attention_masks()[mask].to(device)}
    exact, exact_grads, _ = results(native, inputs, None, **options)
    theirs, their_grads, _ = results(native, inputs, torch.bfloat16, **options)
    counts.update(dict.fromkeys(counts, 0))  # convert has asked what transformers' rotation does
    states, grads, _ = results(ours, inputs, torch.bfloat16, **options)
    assert states.dtype == theirs.dtype
    assert distance(states, exact) <= 1.5 * distance(theirs, exact) + 1e-4
    assert {n: (g.dtype, g.shape) for n, g in grads.items()} == {n: (g.dtype, g.shape) for n, g in their_grads.items()}
    errors = [[distance(each[key], exact_grads[key]) for key in grads] for each in (grads, their_grads)]
    assert sum(errors[0]) <= 1.5 * sum(errors[1])
    assert max(errors[0]) <= 2 * max(errors[1])
    if device != "cpu":  # autocast's layer_norm is in halves on the CPU
        expected = {
            "Llama": {"rms_norm_rounded_forward": 2, "add_rms_norm_rounded_forward": 2, "rotary_embedding": 4},
            "GPT2": {"layer_norm_rounded_forward": 2, "add_layer_norm_rounded_forward": 2},
            "T5": {"rms_norm_rounded_forward": 10},
        }
        assert {op: count for op, count in counts.items() if count} == expected[name]


@pytest.mark.parametrize("name", TEXT)
def test_three_steps(name, device):
    ours, native, inputs, _ = pair(name, device)
    for model in (ours, native):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(3):
            results(model, inputs, None)
            optimizer.step()
    for (key, a), b in zip(ours.named_parameters(), native.parameters(), strict=True):
        assert distance(a, b) <= 1e-4, key


@pytest.mark.parametrize("name", TEXT)
def test_outputs_that_are_asked_for(name, device):
    """Hidden states are those between blocks; a hook on a block's layers is given what it was given."""
    ours, native, inputs, _ = pair(name, device)
    seen = {id(ours): [], id(native): []}
    for model in (ours, native):
        block = next(m for m in model.modules() if type(m).__name__ in ("LlamaMLP", "GPT2MLP", "T5DenseActDense"))
        found = seen[id(model)]
        block.register_forward_pre_hook(lambda module, args, found=found: found.append(args[0]))
    outputs = []
    for model in (ours, native):
        with torch.autocast(torch.device(device).type, torch.bfloat16), torch.no_grad():
            outputs.append(model(**inputs, output_hidden_states=True))
    hidden = "encoder_hidden_states" if name == "T5" else "hidden_states"
    assert len(outputs[0][hidden]) == len(outputs[1][hidden]) == 3
    for a, b in zip(outputs[0][hidden], outputs[1][hidden], strict=True):
        assert a.dtype == b.dtype
        assert distance(a, b) <= 2e-2
    for a, b in zip(seen[id(ours)], seen[id(native)], strict=True):
        assert a.dtype == b.dtype
        assert distance(a, b) <= 2e-2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", TEXT)
def test_gradient_checkpointing(name, reentrant, device):
    ours, native, inputs, _ = pair(name, device)
    for model in (ours, native):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
    states, grads, _ = results(ours, inputs, None)
    expected, expected_grads, _ = results(native, inputs, None)
    assert distance(states, expected) <= 1e-5
    assert grads.keys() == expected_grads.keys()
    for key in grads:
        assert distance(grads[key], expected_grads[key]) <= 1e-4, key


@pytest.mark.parametrize("name", TEXT)
def test_caches(name, device):
    """What is kept of a first part, and what comes of the second; in the same dtypes under autocast."""
    ours, native, inputs, _ = pair(name, device, use_cache=True)
    ours.eval(), native.eval()
    key = "decoder_input_ids" if name == "T5" else "input_ids"
    found = []
    for model in (ours, native):
        with torch.no_grad(), torch.autocast(torch.device(device).type, torch.bfloat16):
            first = model(**inputs | {key: inputs[key][:, :4]}, use_cache=True)
            cache = first.cache if "cache" in first else first.past_key_values
            name_of_cache = "cache" if "cache" in first else "past_key_values"
            kept = getattr(cache, "self_attention_cache", cache)
            states = [(layer.keys.clone(), layer.values.clone()) for layer in kept.layers]
            second = model(**inputs | {key: inputs[key][:, 4:]}, use_cache=True, **{name_of_cache: cache})
        found.append([*(t for both in states for t in both), first[0], second[0]])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert distance(a, b) <= 2e-2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies(copied, device):
    ours, native, inputs, _ = pair("Llama", device)
    twin = copied(ours)
    assert classes(twin) == classes(ours)
    assert distance(twin(**inputs)[0], native(**inputs)[0]) <= 1e-5
    assert classes(cuda_ops.revert(twin)) == classes(native)


def test_grouped_heads(device):
    """Keys and values that serve several queries each, under a mask, as they are."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, intermediate_size=48, num_key_value_heads=2, use_cache=False)
    native = transformers.LlamaModel(config).double().to(device)
    ours = copy.deepcopy(native)
    cuda_ops.convert(ours)
    inputs = {"input_ids": torch.randint(50, (2, 7), device=device)}
    for mask in attention_masks().values():
        options = {"attention_mask": mask.to(device)}
        states, grads, _ = results(ours, inputs, None, **options)
        expected, expected_grads, _ = results(native, inputs, None, **options)
        assert distance(states, expected) <= 1e-6
        assert all(distance(grads[key], expected_grads[key]) <= 1e-5 for key in grads)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    mask = {"attention_mask": attention_masks()["pairs"].to(device)}
    assert distance(compiled(**inputs, **mask)[0], native(**inputs, **mask)[0]) <= 1e-6


class Block(nn.Module):
    """Like a block of transformers', with a branch that torch.fx cannot follow."""

    def __init__(self, norm=nn.LayerNorm, consumer=None):
        super().__init__()
        self.first, self.second = norm(16), norm(16)
        self.mix, self.drop = nn.Linear(16, 16), nn.Dropout(0.0)
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
        self.mlp = consumer or MLP()

    def forward(self, x, scale=None, **kwargs):
        y = self.first(x)
        y = self.mix(y)
        if scale is not None:
            y = y * scale
        x = x + self.drop(y)
        y = self.second(x)
        y = self.mlp(y)
        x = x + y
        y = self.up(x)
        y = self.act(y)
        y = self.down(y)
        return x + y


class Writes(Block):
    """Uses what a norm and a sum have returned once more, in place."""

    def forward(self, x, **kwargs):
        y = self.first(x)
        z = self.mlp(y)
        y += z
        x = x + z
        w = self.second(x)
        x = self.mlp(w)
        w *= 2.0
        return w + x + y


class WritesIntoItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x):
        y = self.a(x)
        x += 1.0
        return y + self.a(x)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.a(x) * self.b(x).sigmoid()


class Peeks(MLP):
    """Does something with its input that depends on its dtype."""

    def forward(self, x):
        return self.a(x) + x


def blocks(**options):
    torch.manual_seed(0)
    native = Block(**options)
    ours = copy.deepcopy(native)
    return ours, native, cuda_ops.convert(ours)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_block(norm, scale, device):
    ours, native, report = blocks(norm=norm)
    name = "add_layer_norm" if norm is nn.LayerNorm else "add_rms_norm"
    assert {fusion.op for fusion in report.fusions} == {name, "linear_gelu", "sigmoid"}
    ours, native = ours.to(device), native.to(device)
    x = torch.randn(3, 5, 16, device=device, requires_grad=True)
    for dtype in (None, torch.bfloat16):
        found = []
        for block in (ours, native):
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype is not None):
                output = block(x, scale=scale)
            found.append([output, *torch.autograd.grad(output.square().sum(), [x, *block.parameters()])])
        for a, b in zip(*found, strict=True):
            assert a.dtype == b.dtype
            assert distance(a, b) <= (1e-5 if dtype is None else 3e-2)


def test_inputs_that_are_looked_at_are_not_rounded(device, counts):
    ours, _, _ = blocks(consumer=Peeks())
    assert fusing_blocks.lowered_names(ours.mlp, 0) is None
    assert fusing_blocks.lowered_names(MLP(), 0) == ("a", "b")
    assert fusing_blocks.lowered_names(MLP(), "x") == ("a", "b")
    assert fusing_blocks.lowered_names(MLP(), 1) is None
    assert fusing_blocks.lowered_names(WritesIntoItsInput(), 0) is None
    ours = ours.to(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        ours(torch.randn(3, 5, 16, device=device))
    assert counts["add_layer_norm_rounded_forward"] == 0


def test_values_that_are_used_again(device):
    torch.manual_seed(0)
    native = Writes().to(device)
    ours = copy.deepcopy(native)
    cuda_ops.convert(ours)
    x = torch.randn(3, 5, 16, device=device)
    for enabled in (False, True):
        with torch.no_grad(), torch.autocast(torch.device(device).type, torch.bfloat16, enabled=enabled):
            output, expected = ours(x), native(x)
        assert output.dtype == expected.dtype
        assert distance(output, expected) <= (2e-2 if enabled else 1e-5)
    assert "norm_before" not in rewritten_text(Writes())


def rewritten_text(module):
    cuda_ops.convert(module)
    cuda_ops.revert(module)
    try:
        return rewritten.rewritten(module)[0]
    except rewritten.NotRewritten:
        return ""


def test_hooks_and_other_layers(device, counts):
    ours, native, _ = blocks()
    ours, native = ours.to(device), native.to(device)
    x = torch.randn(3, 5, 16, device=device)
    handle = ours.mlp.a.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    native.mlp.a.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert distance(ours(x), native(x)) <= 1e-5
    handle.remove()
    ours.act = native.act = nn.Tanh()
    assert distance(ours(x), blocks()[1].to(device)(x)) > 1e-3
    ours.second = nn.Identity()
    ours(x)


def test_texts_that_are_not_what_was_compiled():
    class Other(Block):
        pass

    Other.forward = lambda self, x: x
    with pytest.raises(rewritten.NotRewritten):
        rewritten.rewritten(Other())
    namespace = {"Block": Block}
    exec("class Made(Block):\n    def forward(self, x, *rest):\n        return self.mlp(self.first(x))", namespace)
    with pytest.raises(rewritten.NotRewritten):
        rewritten.rewritten(namespace["Made"]())


def test_a_rotation_is_known_by_what_it_does():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    assert fusing_blocks.is_rotation(llama.apply_rotary_pos_emb)

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        return llama.apply_rotary_pos_emb(q, k, sin, cos)

    assert not fusing_blocks.is_rotation(apply_rotary_pos_emb)
    assert not fusing_blocks.is_rotation(layers.takes)
    assert not fusing_blocks.is_rotation(None)


def test_untransposed_products(device_dtype):
    device, dtype = device_dtype
    generator = torch.Generator().manual_seed(0)

    def make(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    op = torch.ops.cuda_ops.linear_untransposed_forward
    for rows, features, outputs in [(5, 7, 9), (64, 32, 48), (130, 72, 200), (1, 8, 1), (0, 8, 4)]:
        arguments = make(rows, features), make(features, outputs), make(outputs)
        output = op(*arguments)
        exact = [tensor.detach().double().requires_grad_() for tensor in arguments]
        expected = exact[0] @ exact[1] + exact[2]
        upstream = torch.randn(output.shape, generator=generator).to(device, dtype)
        grads = torch.autograd.grad(output, arguments, upstream)
        references = torch.autograd.grad(expected, exact, upstream.double())
        limit = {torch.float64: 1e-12, torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        for a, b in zip((output, *grads), (expected, *references), strict=True):
            assert a.shape == b.shape
            assert not a.numel() or distance(a, b) <= limit
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.default, (make(3, 4), make(4, 5), make(5)), test_utils=checks)
    with pytest.raises(RuntimeError, match="linear_untransposed: expected the last dimension of input to be"):
        op(make(3, 4), make(5, 4), None)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("untransposed", [False, True])
def test_products_by_rounded_parameters(half, untransposed, device):
    """Gradients of the parameters in float32, as they were summed; and differentiated further."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    op = torch.ops.cuda_ops.linear_rounded_forward
    for rows, features, outputs in [(5, 7, 9), (64, 32, 48), (130, 72, 200), (1, 8, 1), (0, 8, 4), (2, 3, 50)]:
        x, weight, bias = make(rows, features, dtype=half), make(features, outputs), make(outputs)
        given = weight if untransposed else weight.detach().t().contiguous().requires_grad_()
        output, rounded = op(x, given, bias, untransposed)
        assert rounded.dtype == output.dtype == half
        exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
        exact[1] = weight.detach().to(half).double().requires_grad_()
        expected = exact[0] @ exact[1] + exact[2]
        upstream = torch.randn(output.shape, generator=generator).to(device, half)
        grads = torch.autograd.grad(output, (x, given, bias), upstream)
        assert [grad.dtype for grad in grads] == [half, torch.float32, torch.float32]
        references = list(torch.autograd.grad(expected, exact, upstream.double()))
        references[1] = references[1] if untransposed else references[1].t()
        for a, b, limit in zip((output, *grads), (expected, *references), (1e-2, 1e-2, 1e-5, 1e-5), strict=True):
            assert a.shape == b.shape
            assert not a.numel() or distance(a, b) <= (limit if device != "cpu" else 1e-2)
    x, weight, bias = make(3, 8, dtype=half), make(8, 8), make(8)
    output = op(x, weight, bias, untransposed)[0]
    (grad,) = torch.autograd.grad(output.float().square().sum(), x, create_graph=True)
    second = torch.autograd.grad(grad.float().square().sum(), (x, weight))
    x, weight, bias = (tensor.detach().double().requires_grad_() for tensor in (x, weight, bias))
    output = x @ (weight if untransposed else weight.t()) + bias
    (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    expected = torch.autograd.grad(grad.square().sum(), (x, weight))
    assert all(distance(a, b) <= 2e-2 for a, b in zip(second, expected, strict=True))
    arguments = make(3, 4, dtype=half), make(5, 4), make(5), False
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.default, arguments, test_utils=checks)
    with pytest.raises(RuntimeError, match="linear_rounded: expected input to be float16 or bfloat16, got"):
        op(make(3, 4), make(5, 4), None, False)


def test_gradients_under_autocast_are_not_rounded(device):
    """Of linear layers and of transformers' Conv1D alike."""
    utils = pytest.importorskip("transformers.pytorch_utils")
    if device == "cpu":
        pytest.skip("on the CPU autocast lowers the parameters: linear_rounded is taken on CUDA alone")
    for layer in (nn.Linear(64, 96), utils.Conv1D(96, 64)):
        native = layer.to(device)
        ours = copy.deepcopy(native)
        cuda_ops.convert(ours)
        x = torch.randn(5, 7, 64, device=device)
        for dtype in (torch.bfloat16, torch.float16):
            found = []
            for each in (ours, native):
                with torch.autocast("cuda", dtype):
                    output = each(x)
                found.append([output, *torch.autograd.grad(output.float().square().sum(), list(each.parameters()))])
            assert found[0][1].to(dtype).float().ne(found[0][1]).any()
            for a, b in zip(*found, strict=True):
                assert a.dtype == b.dtype
                assert distance(a, b) <= 1e-2
            with torch.no_grad(), torch.autocast("cuda", dtype):
                assert torch.equal(ours(x).isfinite(), native(x).isfinite())
