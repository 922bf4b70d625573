"""cuda_ops.convert and models of transformers."""

import copy
import pickle

import pytest
import torch
from support.conversion import assert_converts, classes, images, loss_of

import cuda_ops
from cuda_ops.conversion import layers


def tiny(name):
    """A transformers model of two tiny layers with random weights, and its inputs."""
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip install transformers)")
    tokens = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    text = {"input_ids": tokens}
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["intermediate_size"] = 32
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    kinds = {
        "Bert": (lambda t: t.BertModel(t.BertConfig(**sizes, **none)), text),
        "GPT2": (
            lambda t: t.GPT2Model(
                t.GPT2Config(
                    vocab_size=50, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
                )
            ),
            text,
        ),
        "ViT": (
            lambda t: t.ViTModel(
                t.ViTConfig(
                    **{k: v for k, v in sizes.items() if k != "vocab_size"}, **none, image_size=32, patch_size=8
                )
            ),
            {"pixel_values": images(2, 32)},
        ),
        "Llama": (lambda t: t.LlamaModel(t.LlamaConfig(**sizes)), text),
        "T5": (
            lambda t: t.T5Model(
                t.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0)
            ),
            {**text, "decoder_input_ids": tokens},
        ),
    }
    make, inputs = kinds[name]
    torch.manual_seed(0)
    model = make(transformers).double().train()
    if name != "ViT":
        model.config.use_cache = False
    return model, inputs


FUSED = {
    "Bert": ["add_layer_norm", "linear_gelu", "scaled_dot_product_attention"],
    "GPT2": ["add_layer_norm", "linear_gelu", "scaled_dot_product_attention"],
    "ViT": ["add_layer_norm", "linear_gelu", "scaled_dot_product_attention"],
    "Llama": ["add_rms_norm", "rotary_embedding", "swiglu", "scaled_dot_product_attention"],
    "T5": ["linear_relu", "scaled_dot_product_attention"],
}
ATTENTIONS = {"Bert": 2, "GPT2": 2, "ViT": 2, "Llama": 2, "T5": 6}
OF_TEXT = ["Bert", "GPT2", "Llama", "T5"]


@pytest.mark.parametrize("name", FUSED)
def test_transformers(name):
    model, inputs = tiny(name)
    report = assert_converts(model, inputs, FUSED[name])
    assert [layer.kind.rpartition(".")[2] for layer in report.left] == (["LlamaRotaryEmbedding"] * (name == "Llama"))
    fused = [fusion for fusion in report.fusions if fusion.op == "scaled_dot_product_attention"]
    assert {fusion.parts for fusion in fused} == {("sdpa_attention_forward()",)}
    assert len(fused) == ATTENTIONS[name]


def pair(name, **changes):
    """A converted model and one that is not, and inputs."""
    model, inputs = tiny(name)
    for attribute, value in changes.items():
        setattr(model.config, attribute, value)
    native = copy.deepcopy(model)
    cuda_ops.convert(model)
    return model, native, inputs


@pytest.fixture
def calls(monkeypatch):
    """The arguments of our attention's calls."""
    found, function = [], cuda_ops.functional.scaled_dot_product_attention
    monkeypatch.setattr(cuda_ops.functional, "scaled_dot_product_attention", lambda *a: found.append(a) or function(*a))
    return found


def assert_same(ours, native, **inputs):
    results = []
    for model in (ours, native):
        model.zero_grad()
        output = model(**inputs)
        loss_of(output).backward()
        results.append([output[0], *(p.grad for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


def attention_masks():
    """As users give them: of padding on either side, and of every pair, bool and to be added."""
    right, seen = torch.ones(2, 7, dtype=torch.long), torch.ones(7, 7, dtype=torch.bool).tril()
    right[1, 4:] = 0
    seen = (seen & (torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.3)) | torch.eye(7).bool()
    added = torch.zeros(2, 1, 7, 7, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    return {"right": right, "left": right.flip(1), "pairs": seen, "added": added}


@pytest.mark.parametrize("mask", attention_masks())
@pytest.mark.parametrize("name", OF_TEXT)
def test_masks(name, mask, calls):
    ours, native, inputs = pair(name)
    assert_same(ours, native, **inputs, attention_mask=attention_masks()[mask])
    assert len(calls) == ATTENTIONS[name]
    assert any(call[3] is not None for call in calls)


@pytest.mark.parametrize("name", FUSED)
def test_weights_that_are_asked_for(name, calls):
    """Of sdpa there are none, and eager attention, which has them, is left and named."""
    ours, native, inputs = pair(name)
    for model in (ours, native):
        assert not model(**inputs, output_attentions=True).get("attentions")
        model.set_attn_implementation("eager")
    calls.clear()
    outputs = [model(**inputs, output_attentions=True) for model in (ours, native)]
    names = ("encoder_attentions", "decoder_attentions", "cross_attentions") if name == "T5" else ("attentions",)
    for weights in names:
        assert len(outputs[0][weights]) == 2
        torch.testing.assert_close(*(output[weights] for output in outputs), rtol=1e-9, atol=1e-12)
    assert not calls
    report = cuda_ops.convert(ours)
    reasons = [layer.reason for layer in report.left if layer.reason != "not of torch.nn"]
    assert (
        reasons
        == ["its attention is eager, which returns the weights: set_attn_implementation('sdpa')"] * (ATTENTIONS[name])
    )
    for model in (ours, native):
        model.set_attn_implementation("sdpa")
    assert_same(ours, native, **inputs)
    assert len(calls) == ATTENTIONS[name]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}])
@pytest.mark.parametrize("name", ["GPT2", "Llama", "T5"])
def test_generate(name, options, calls):
    transformers = pytest.importorskip("transformers")
    kind = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "T5": "T5ForConditionalGeneration"}[name]
    base, inputs = tiny(name)
    torch.manual_seed(0)
    base.config.bos_token_id = base.config.decoder_start_token_id = 0
    base.config.eos_token_id = base.config.pad_token_id = 1
    base.config.num_key_value_heads = 1  # of Llama
    native = getattr(transformers, kind)(base.config).double().eval()
    ours = copy.deepcopy(native)
    cuda_ops.convert(ours)
    mask = attention_masks()["left"]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "disable_compile": True, **options}
    tokens = [model.generate(inputs["input_ids"], **options) for model in (ours, native)]
    assert torch.equal(*tokens)
    assert calls


@pytest.mark.parametrize("name", FUSED)
def test_one_of_two_models(name, calls):
    modeling_utils = pytest.importorskip("transformers.modeling_utils")
    registered = dict(modeling_utils.ALL_ATTENTION_FUNCTIONS)
    ours, native, inputs = pair(name)
    states = [dict(vars(module)) for module in native.modules()]
    native(**inputs)
    assert not calls
    ours(**inputs)
    assert len(calls) == ATTENTIONS[name]
    assert dict(modeling_utils.ALL_ATTENTION_FUNCTIONS) == registered
    cuda_ops.revert(ours)
    ours(**inputs)
    assert len(calls) == ATTENTIONS[name]
    assert classes(ours) == classes(native)
    assert [vars(module).keys() for module in ours.modules()] == [state.keys() for state in states]
    assert ours.config.to_dict() == native.config.to_dict()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("name", FUSED)
def test_copies(name, copied, calls):
    ours, native, inputs = pair(name)
    twin = copied(ours)
    assert classes(twin) == classes(ours)
    assert_same(twin, native, **inputs)
    assert len(calls) == ATTENTIONS[name]
    assert classes(cuda_ops.revert(twin)) == classes(native)


@pytest.mark.parametrize("name", FUSED)
def test_torch_compile(name, calls):
    ours, native, inputs = pair(name)
    if name == "T5":
        inputs["use_cache"] = False  # else PyTorch cannot trace the making of a cache
    assert_same(torch.compile(ours, backend="aot_eager", fullgraph=True), native, **inputs)
    assert len(calls) == ATTENTIONS[name]


@pytest.mark.parametrize("name", FUSED)
def test_torch_export(name):
    ours, native, inputs = pair(name)
    if name == "T5":
        inputs["use_cache"] = False
    ours.eval(), native.eval()
    program = torch.export.export(ours, (), inputs)
    assert str(program.graph).count("torch.ops.cuda_ops.attention_forward") == ATTENTIONS[name]
    torch.testing.assert_close(program.module()(**inputs)[0], native(**inputs)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_other_precisions(name, dtype, monkeypatch):
    """As exact as PyTorch's own; transformers' norms, which compute in float32, are ours then."""
    norms = []
    for op in ("rms_norm", "add_rms_norm"):
        norm = getattr(cuda_ops.functional, op)
        monkeypatch.setattr(cuda_ops.functional, op, lambda *a, norm=norm: norms.append(a) or norm(*a))
    ours, native, inputs = pair(name)
    images_of = {key: value for key, value in inputs.items() if value.is_floating_point()}
    exact = native(**inputs)[0]
    results = []
    for model in (ours, native):
        model.to(dtype)
        output = model(**inputs | {key: value.to(dtype) for key, value in images_of.items()})[0]
        assert output.dtype == dtype
        output.float().square().sum().backward()
        results.append(output.double())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)
    error, theirs = ((result - exact).norm() for result in results)
    assert error <= 2 * theirs
    assert len(norms) == {"Llama": 5, "T5": 12}.get(name, 0)


def test_norms_that_only_look_alike_are_left():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")

    class Norm(llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    Norm.__module__ = "transformers.models.mine"
    norm = llama.LlamaRMSNorm(4)
    expected = norm(torch.ones(2, 4, dtype=torch.bfloat16))
    cuda_ops.convert(norm)
    result = norm(torch.ones(2, 4, dtype=torch.bfloat16))  # which its weight promotes
    assert result.dtype == expected.dtype == torch.float32 and torch.equal(result, expected)
    report = cuda_ops.convert(torch.nn.Sequential(Norm(4)))
    assert [layer.reason for layer in report.left] == ["a subclass of LlamaRMSNorm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_conv1d(device, dtype):
    """transformers' linear layer, whose weight lies (in, out), has addmm's dtype under autocast too."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(24, 40, device=device, dtype=dtype))
    layer.bias = torch.nn.Parameter(torch.randn(40, device=device, dtype=dtype))
    x = torch.randn(3, 5, 24, device=device, dtype=dtype, requires_grad=True)
    tensors = [x, layer.weight, layer.bias]
    for autocast in (False, True):
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            expected = torch.addmm(layer.bias, x.view(-1, 24), layer.weight).view(3, 5, 40)
            found = layers._conv1d(layer, x)
        assert found.dtype == expected.dtype
        tolerance = {"rtol": 2e-2, "atol": 5e-2} if expected.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(found, expected, **tolerance)
        grad = torch.randn_like(expected)
        for a, e in zip(*(torch.autograd.grad(y, tensors, grad) for y in (found, expected)), strict=True):
            assert a.dtype == e.dtype
            torch.testing.assert_close(a, e, rtol=tolerance["rtol"], atol=5 * tolerance["atol"])
