"""python -m cuda_ops gpt: the model and its files, the data, the side-by-side run, and everything that can go wrong."""

import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.devices import cuda_param
from support.opspec import assert_close

import cuda_ops
from cuda_ops import _library
from cuda_ops.__main__ import main
from cuda_ops._errors import UserError
from cuda_ops.data import Characters, Windows, read_tokens, shakespeare, write_tokens
from cuda_ops.models import GPT, GPTConfig, _gpt_ops
from cuda_ops.models.gpt import KeyValueCache
from cuda_ops.training.gpt import checkpoint, learner
from cuda_ops.training.gpt.run import load_model
from cuda_ops.training.gpt.settings import RECIPES
from cuda_ops.training.timing import PHASES

ROOT = Path(cuda_ops.__file__).resolve().parents[1]
SMALL = GPTConfig(vocab_size=31, block_size=12, n_layer=2, n_head=2, n_embd=16)
OURS = ["custom", "fused"]
FILES = ["report.json", "report.md", "report.png"]


def same_models(backends, config=SMALL, dtype=torch.float64, device="cpu", seed=0):
    """A model of each backend, of the same weights, biases and all."""
    torch.manual_seed(seed)
    state = GPT("native", config).state_dict()
    for name, tensor in state.items():
        if name != "lm_head.weight":
            tensor += 0.1 * torch.randn_like(tensor)
    models = [GPT(backend, config) for backend in backends]
    for model in models:
        model.load_state_dict(state, strict=True)
    return [model.to(device, dtype) for model in models]


def batch(config=SMALL, length=10, count=3, device="cpu", seed=1):
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(config.vocab_size, (count, length + 1), generator=generator).to(device)
    return both[:, :-1], both[:, 1:]


# The model


@pytest.mark.parametrize("source, target", [("native", "custom"), ("custom", "native"), ("custom", "fused")])
@pytest.mark.parametrize("bias", [True, False])
def test_one_state_dict_fits_all_backends(source, target, bias):
    config = GPTConfig(31, 12, 2, 2, 16, bias=bias)
    state = GPT(source, config).state_dict()
    model = GPT(target, config)
    model.load_state_dict(state, strict=True)
    assert list(model.state_dict()) == list(state)
    assert repr(model) == repr(GPT(source, config))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert any(name.endswith(".bias") for name in state) is bias


@pytest.mark.parametrize("name", RECIPES)
def test_parameters_are_counted_and_so_are_their_operations(name):
    config = RECIPES[name].config
    with torch.device("meta"):
        model = GPT("native", config)
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count
    if name == "gpt2-124m":
        assert config.parameter_count == 124_475_904
        assert config.flops_per_token(1024) == pytest.approx(803e6, rel=1e-3)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("bias", [True, False])
def test_backends_compute_the_same(backend, bias, device):
    config = GPTConfig(31, 12, 2, 2, 16, bias=bias)
    native, model = same_models(["native", backend], config, device=device)
    inputs, targets = batch(device=device)
    assert_close(model(inputs), native(inputs).cpu(), 1e-10, "logits")
    losses = [m(inputs, targets) for m in (native, model)]
    for loss in losses:
        loss.backward()
    assert_close(losses[1], losses[0].cpu(), 1e-10, "loss")
    expected = dict(native.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name].grad.cpu(), 1e-9, name)


def test_native_is_the_formula():
    """A GPT of one block, written down."""
    config = GPTConfig(7, 4, 1, 2, 6)
    (model,) = same_models(["native"], config)
    p = dict(model.named_parameters())
    tokens = torch.tensor([[3, 0, 6]])

    def norm(x, name):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return x * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x, name):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    block = "transformer.h.0"
    x = p["transformer.wte.weight"][tokens[0]] + p["transformer.wpe.weight"][:3]
    query, key, value = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").chunk(3, -1)
    heads = []
    for part in (slice(0, 3), slice(3, 6)):
        scores = query[:, part] @ key[:, part].T / math.sqrt(3)
        scores = scores.masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -math.inf)
        heads.append(scores.softmax(-1) @ value[:, part])
    x = x + linear(torch.cat(heads, -1), f"{block}.attn.c_proj")
    z = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
    z = z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    x = norm(x + linear(z, f"{block}.mlp.c_proj"), "transformer.ln_f")
    assert_close(model(tokens)[0], x @ p["transformer.wte.weight"].T, 1e-12, "logits")


@pytest.mark.parametrize("backend", ["native", *OURS])
def test_weights_begin_as_gpt2s(backend):
    """Deviations of 0.02, and of 0.02 / sqrt(2 * n_layer) where each block adds to the sum, to within chance; biases of
    0."""
    torch.manual_seed(0)
    model = GPT(backend, GPTConfig(100, 50, 3, 2, 64))
    for name, p in model.named_parameters():
        if name.endswith(".bias"):
            assert not p.any(), name
        elif ".ln_" in name:
            assert (p == 1).all(), name
        else:
            expected = 0.02 / math.sqrt(6) if name.endswith("c_proj.weight") else 0.02
            assert abs(p.std().item() / expected - 1) < 0.05, name


@pytest.mark.parametrize("backend", ["native", *OURS])
def test_dropout_is_of_the_training_alone(backend):
    config = GPTConfig(31, 12, 2, 2, 16, dropout=0.3)
    (model,) = same_models([backend], config, torch.float32)
    inputs, targets = batch()
    assert model(inputs, targets) != model(inputs, targets)
    torch.manual_seed(3)
    first = model(inputs, targets)
    torch.manual_seed(3)
    assert model(inputs, targets) == first
    model.eval()
    assert model(inputs, targets) == model(inputs, targets)
    (plain,) = same_models([backend], SMALL, torch.float32)
    assert torch.equal(model(inputs), plain(inputs))


def hooked(model):
    model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda module, args, output: 2 * output)


def replaced(model):
    class Twice(torch.nn.LayerNorm):
        def forward(self, input):
            return 2 * super().forward(input)

    norm = model.transformer.ln_f
    model.transformer["ln_f"] = Twice(16, dtype=torch.float64)
    model.transformer["ln_f"].load_state_dict(norm.state_dict())


def other_activation(model):
    model.transformer.h[0].mlp.gelu = torch.nn.ReLU()


@pytest.mark.parametrize("change", [hooked, replaced, other_activation])
def test_fused_does_what_a_changed_layer_does(change):
    native, fused, untouched = same_models(["native", "fused", "native"])
    for model in (native, fused):
        change(model)
    inputs, targets = batch()
    assert_close(fused(inputs, targets), native(inputs, targets), 1e-10, "loss")
    assert not torch.allclose(native(inputs), untouched(inputs))


@pytest.mark.parametrize("backend", OURS)
def test_one_graph_for_the_compiler(backend):
    (model,) = same_models([backend])
    inputs, targets = batch()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(inputs, targets)
    loss.backward()
    assert_close(loss, model(inputs, targets), 1e-12, "loss")


def test_one_graph_of_halves_for_the_compiler(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(_gpt_ops, "is_rounded", lambda input, *parameters: input.dtype == torch.bfloat16)
    (model,) = same_models(["fused"], dtype=torch.float32, device=device)
    model.recomputed_blocks = 1
    compiled, losses, gradients = torch.compile(model, fullgraph=True, backend="aot_eager"), [], []
    for call in (model, compiled):
        with torch.autocast(device, torch.bfloat16):
            losses.append(call(*batch(device=device)))
        gradients.append(torch.autograd.grad(losses[-1], list(model.parameters())))
    assert torch.equal(*losses)
    for actual, expected in zip(*gradients, strict=True):
        assert_close(actual, expected, 1e-3)


@pytest.mark.parametrize("backend", [cuda_param("custom"), cuda_param("fused")])
def test_autocast_is_as_close_to_float64_as_native(backend):
    native, model, exact = same_models(["native", backend, "native"], dtype=torch.float32, device="cuda")
    inputs, targets = batch(device="cuda")
    exact.double()(inputs, targets).backward()
    for m in (native, model):
        with torch.autocast("cuda", torch.bfloat16):
            m(inputs, targets).backward()
    for name, p in exact.named_parameters():
        theirs, mine = (dict(m.named_parameters())[name].grad for m in (native, model))
        assert mine.dtype == torch.float32
        assert (mine - p.grad).norm() <= 3 * (theirs - p.grad).norm() + 2e-2 * p.grad.norm(), name


def layer_arguments(rows, features, hidden, device, dtype=torch.float64):
    """input, and weight and bias of two linear layers."""
    shapes = (rows, features), (hidden, features), (hidden,), (features, hidden), (features,)
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("with_bias", [True, False])
def test_layers_that_round_their_parameters_have_two_derivatives(device, with_bias):
    """In float64, which there is nothing to round in."""
    input, weight, bias, next_weight, next_bias = layer_arguments(3, 4, 5, device)
    if not with_bias:
        bias = next_bias = None
    for approximate in ("tanh", "none"):
        for function, arguments in (
            (_gpt_ops.RoundedLinear.apply, (input, weight, bias)),
            (
                lambda *a, how=approximate: _gpt_ops.RoundedMLP.apply(*a, how),
                (input, weight, bias, next_weight, next_bias),
            ),
        ):
            assert torch.autograd.gradcheck(function, arguments)
            assert torch.autograd.gradgradcheck(function, arguments)


@pytest.mark.parametrize("with_bias", [True, False])
def test_layers_with_the_norm_behind_them(device, with_bias):
    """In float64 as the chain of layers, whose further derivatives they have too; a gradient may come for either."""
    input, weight, bias, next_weight, next_bias = layer_arguments(3, 4, 5, device)
    norm = layer_arguments(3, 4, 4, device)[0], *layer_arguments(1, 4, 4, device)[2::2]  # residual, weight, bias
    if not with_bias:
        bias = next_bias = None
    first, mlp = (weight[:4], bias), (weight, bias, next_weight, next_bias)
    if with_bias:
        first = weight[:4], bias[:4]
    first = [None if tensor is None else tensor.detach().requires_grad_() for tensor in first]

    def alone(*arguments):
        return _gpt_ops.RoundedLinearAddNorm.apply(*arguments[:3], 1e-5, *arguments[3:])

    def both(*arguments):
        return _gpt_ops.RoundedMLPAddNorm.apply(*arguments[:3], 1e-5, *arguments[3:], "tanh", False)

    def chain_of(layers):
        def chain(residual, norm_weight, norm_bias, *arguments):
            total = residual + layers(*arguments)
            return torch.nn.functional.layer_norm(total, (4,), norm_weight, norm_bias), total

        return chain

    def layers_of_mlp(x, w, b, next_w, next_b):
        hidden = torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b), approximate="tanh")
        return torch.nn.functional.linear(hidden, next_w, next_b)

    for function, layers, parameters in (
        (alone, torch.nn.functional.linear, first),
        (both, layers_of_mlp, mlp),
    ):
        arguments = [*norm, input, *parameters]
        there = [argument for argument in arguments if argument is not None]
        for grads in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
            results = []
            for outputs in (function(*arguments), chain_of(layers)(*arguments)):
                loss = sum(scale * output.square().sum() for scale, output in zip(grads, outputs, strict=True) if scale)
                results.append([*outputs, *torch.autograd.grad(loss, there, allow_unused=True, materialize_grads=True)])
            for actual, expected in zip(*results, strict=True):
                assert_close(actual, expected, 1e-10)
        assert torch.autograd.gradcheck(function, arguments)
        assert torch.autograd.gradgradcheck(function, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ways_of_a_step_in_halves(device, dtype, monkeypatch):
    """Parameters rounded at once or layer by layer, the gradients of biases found by the norms or not, gelu's output
    kept or made again: the same loss to the last bit, and gradients that differ by rounding alone."""
    rounds = []
    at_once = _gpt_ops.round_list
    monkeypatch.setattr(_gpt_ops, "round_list", lambda *arguments: rounds.append(0) or at_once(*arguments))
    if device == "cpu":  # its own way rounds by autograd
        monkeypatch.setattr(_gpt_ops, "is_rounded", lambda input, *parameters: input.dtype == dtype)
    results = {}
    for way in ("at once", "recomputed", "one by one"):
        if way == "one by one":
            monkeypatch.setattr(_gpt_ops, "halves_of", lambda like, layers: [[() for _ in block] for block in layers])
            monkeypatch.setattr(_gpt_ops, "finds_bias", lambda *arguments: False)
        (model,) = same_models(["fused"], dtype=torch.float32, device=device)
        model.recomputed_blocks = 1 if way == "recomputed" else 0
        with torch.autocast(device, dtype):
            loss = model(*batch(device=device))
        (2.0**10 * loss).backward()
        results[way] = loss, {name: parameter.grad for name, parameter in model.named_parameters()}
    assert len(rounds) == 2
    for way in ("recomputed", "one by one"):
        assert torch.equal(results[way][0], results["at once"][0])
        for name, expected in results["at once"][1].items():
            actual = results[way][1][name]
            assert actual.dtype == torch.float32
            assert (actual - expected).norm() <= 1e-2 * expected.norm() + 1e-6, name


def test_blocks_that_are_recomputed_are_those_there_are():
    for count in (-1, 3, True, 1.0):
        with pytest.raises(ValueError, match="GPT: expected recomputed_blocks to be from 0 to n_layer, 2, got"):
            GPT("fused", SMALL, recomputed_blocks=count)


@pytest.mark.cuda
def test_recomputed_blocks_keep_less():
    """8 * n_embd bytes less of each token, in each such block."""
    config, kept = GPTConfig(64, 256, 4, 4, 256), {}
    for count in (0, 3):
        model = GPT("fused", config, recomputed_blocks=count).to("cuda")
        tokens = torch.randint(64, (32, 256), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            before = torch.cuda.memory_allocated()
            loss = model(tokens, tokens)
            kept[count] = torch.cuda.memory_allocated() - before
        loss.backward()
    assert kept[0] - kept[3] == 3 * 32 * 256 * 8 * 256


@pytest.mark.parametrize("wanted", range(5))
def test_layers_that_round_their_parameters_make_the_gradients_that_are_wanted(wanted):
    arguments = layer_arguments(3, 4, 5, "cpu")
    for number, argument in enumerate(arguments):
        argument.requires_grad_(number == wanted)
    input, weight, bias, next_weight, next_bias = arguments
    gelu = torch.nn.functional.gelu(torch.nn.functional.linear(input, weight, bias), approximate="tanh")
    expected = torch.nn.functional.linear(gelu, next_weight, next_bias)
    actual = _gpt_ops.RoundedMLP.apply(*arguments, "tanh")
    assert_close(actual, expected, 1e-12)
    gradients = [torch.autograd.grad(y.square().sum(), arguments[wanted])[0] for y in (actual, expected)]
    assert_close(*gradients, 1e-10)


@pytest.mark.parametrize("dtype", [cuda_param(torch.bfloat16), cuda_param(torch.float16)])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("sizes", [(8192, 768, 3072), (8192 - 60, 760, 3072 - 56), (300, 72, 200), (5, 3, 7)])
def test_layers_that_round_their_parameters_in_halves(dtype, approximate, sizes):
    rows, features, hidden = sizes
    parameters = layer_arguments(rows, features, hidden, "cuda", torch.float32)[1:]
    with torch.no_grad():
        for weight in parameters[::2]:
            weight /= math.sqrt(weight.shape[1])
    input = torch.randn(rows, features, device="cuda", dtype=dtype, requires_grad=True)
    grad_output = torch.randn_like(input)
    arguments = [input, *parameters]
    exact = [argument.detach().to(dtype).double().requires_grad_() for argument in arguments]
    hidden_of_exact = torch.nn.functional.linear(*exact[:3])
    output = torch.nn.functional.linear(torch.nn.functional.gelu(hidden_of_exact, approximate=approximate), *exact[3:])
    expected = [output, *torch.autograd.grad(output, exact, grad_output.double())]
    results = []
    for _ in range(2):
        output = _gpt_ops.RoundedMLP.apply(*arguments, approximate)
        results.append([output, *torch.autograd.grad(output, arguments, grad_output)])
    for actual, again, right in zip(*results, expected, strict=True):
        assert torch.equal(actual, again)
        error = (actual.double() - right).norm() / right.norm()
        assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3), error
    for argument, gradient in zip(arguments, results[0][1:], strict=True):
        assert gradient.dtype == argument.dtype


def test_the_loss_of_stored_logits_is_that_of_the_op():
    """What the fused model takes on CUDA where there are many classes, in half precision; here in float64."""
    logits = torch.randn(20, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (20,))
    targets[3] = -100
    for target in (targets, torch.full((20,), -100)):
        results = []
        for loss in (_gpt_ops.MeanLoss.apply(logits, target), torch.nn.functional.cross_entropy(logits, target)):
            (gradient,) = torch.autograd.grad(3 * loss, logits)
            results.append((loss.detach(), gradient))
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected, 1e-12)
    with pytest.raises(IndexError):
        _gpt_ops.MeanLoss.apply(logits, torch.full((20,), 7))


def test_sizes_that_are_none_are_refused():
    for message, sizes in {
        "GPTConfig: expected n_layer to be from 1 to 2[*][*]31 - 1, got 0": {"n_layer": 0},
        "GPTConfig: expected vocab_size to be from 1 to 2[*][*]31 - 1, got -5": {"vocab_size": -5},
        "GPTConfig: expected n_head to divide n_embd, 768, got 7": {"n_head": 7},
        "GPTConfig: expected dropout to be at least 0 and less than 1, got 1.0": {"dropout": 1.0},
    }.items():
        with pytest.raises(ValueError, match=message):
            GPTConfig(**sizes)
    with pytest.raises(TypeError, match="GPTConfig: expected n_embd to be an int, got '768'"):
        GPTConfig(n_embd="768")
    with pytest.raises(TypeError, match="GPTConfig: expected bias to be a bool, got 1"):
        GPTConfig(bias=1)
    with pytest.raises(ValueError, match="backend: expected one of fused, custom, native, got 'fast'"):
        GPT("fast", SMALL)


def test_calls_that_do_not_fit_are_refused():
    model = GPT("native", SMALL)
    inputs, targets = batch()
    with pytest.raises(ValueError, match=r"GPT: expected input of \(batch, length\), got shape \[10\]"):
        model(inputs[0])
    with pytest.raises(ValueError, match=r"GPT: expected targets of the shape of input, \[3, 10\], got \[3, 9\]"):
        model(inputs, targets[:, 1:])
    with pytest.raises(ValueError, match=r"GPT: expected at most 12 tokens \(block_size\), got 13"):
        model(torch.zeros(1, 13, dtype=torch.int64))
    cache = KeyValueCache(model, 3)
    with pytest.raises(ValueError, match="GPT: expected targets or a cache, got both"):
        model(inputs, targets, cache)
    model(inputs, cache=cache)
    with pytest.raises(ValueError, match="GPT: expected one token to follow those in the cache, got 10"):
        model(inputs, cache=cache)


# Generation


@pytest.mark.parametrize("backend", ["native", *OURS])
def test_generation_with_a_cache_is_that_without(backend):
    """Beyond block_size, too: the cache is given up there, since every token has moved on by one."""
    (model,) = same_models([backend])
    inputs, _ = batch(length=5)
    model.train()
    for count in (0, 1, 7, 11):
        with_cache, without = (
            model.generate(inputs, count, generator=torch.Generator().manual_seed(2), use_cache=use)
            for use in (True, False)
        )
        assert with_cache.shape == (3, 5 + count)
        assert torch.equal(with_cache[:, :5], inputs)
        assert torch.equal(with_cache, without)
    assert model.training
    assert torch.equal(model.generate(batch(length=12)[0], 3, 0.0), model.generate(batch(length=12)[0], 3, 1.0, 1))


@pytest.mark.parametrize("backend", ["native", *OURS])
def test_what_the_cache_gives_are_the_logits(backend):
    (model,) = same_models([backend])
    inputs, _ = batch()
    expected = model(inputs)
    cache = KeyValueCache(model, 3)
    assert_close(model(inputs[:, :4], cache=cache), expected[:, 3:4], 1e-12, "prompt")
    for i in range(4, 10):
        assert_close(model(inputs[:, i : i + 1], cache=cache), expected[:, i : i + 1], 1e-12, f"token {i}")


def test_generation_of_nothing_is_refused():
    model = GPT("native", SMALL)
    with pytest.raises(ValueError, match=r"GPT.generate: expected \(batch, length\) of at least one token"):
        model.generate(torch.zeros(1, 0, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"GPT.generate: expected top_k to be at least 1, got 0"):
        model.generate(torch.zeros(1, 1, dtype=torch.int64), 1, top_k=0)


# Files of weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llmc_round_trip(dtype, tmp_path):
    (model,) = same_models(["fused"], dtype=torch.float32)
    model.save_llmc(tmp_path / "model.bin", dtype)
    content = (tmp_path / "model.bin").read_bytes()
    version = 3 if dtype == torch.float32 else 5
    assert struct.unpack("<8i", content[:32]) == (20240326, version, 12, 31, 2, 2, 16, 128)
    assert len(content) == 1024 + dtype.itemsize * (SMALL.parameter_count + (128 - 31) * 16)
    # The second tensor is wpe, behind wte with its padding; the last one is ln_f's bias.
    kind, size = ("<f4", 4) if dtype == torch.float32 else ("<i2", 2)
    values = torch.from_numpy(np.frombuffer(content[1024:], kind).copy()).view(dtype)
    assert torch.equal(values[31 * 16 : 128 * 16], torch.zeros(97 * 16, dtype=dtype))
    assert torch.equal(values[128 * 16 :][: 12 * 16], model.transformer.wpe.weight.detach().to(dtype).flatten())
    assert torch.equal(values[-16:], model.transformer.ln_f.bias.detach().to(dtype))
    assert size == dtype.itemsize
    loaded = GPT.from_llmc(tmp_path / "model.bin", "native")
    assert loaded.config == SMALL
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(dtype).float()), name


def test_a_model_without_biases_is_written_with_zeros(tmp_path):
    model = GPT("native", GPTConfig(31, 12, 2, 2, 16, bias=False))
    model.save_llmc(tmp_path / "model.bin")
    loaded = GPT.from_llmc(tmp_path / "model.bin", "native")
    inputs, _ = batch()
    assert loaded.config.bias
    assert torch.equal(loaded(inputs), model(inputs))


HEADER = {"magic": 20240326, "version": 3, "length": 12, "vocabulary": 31, "layers": 2, "heads": 2, "features": 16}
HEADER["padded"] = 128
HOSTILE = {
    "another magic": ({"magic": 20240520}, "is no checkpoint of llm.c: it begins with 20240520, expected 20240326"),
    "another version": ({"version": 1}, r"expected version 3 \(float32\) or 5 \(bfloat16\) .*, got 1"),
    "2^32-1 layers": ({"layers": -1}, r"is damaged: expected n_layer to be from 1 to 2\*\*31 - 1, got -1"),
    "2^31-1 layers": ({"layers": 2**31 - 1}, "is damaged or truncated: its header calls for"),
    "negative vocabulary": ({"vocabulary": -31}, "is damaged: expected vocab_size to be"),
    "everything at most": (
        {"length": 2**31 - 1, "vocabulary": 2**31 - 1, "padded": 2**31 - 1, "layers": 2**31 - 1, "heads": 1}
        | {"features": 2**31 - 1},
        "is damaged or truncated: its header calls for",
    ),
    "no features": ({"features": 0}, "is damaged: expected n_embd to be"),
    "heads that do not divide": ({"heads": 3}, "is damaged: expected n_head to divide n_embd, 16, got 3"),
    "less padded than there is": ({"padded": 30}, "is damaged: its vocabulary of 31 is padded to 30"),
    "negative padding": ({"padded": -128}, "is damaged: its vocabulary of 31 is padded to -128"),
    "one token more": ({"padded": 129}, "is damaged or truncated: its header calls for"),
}


@pytest.fixture
def llmc_file(tmp_path):
    path = tmp_path / "model.bin"
    GPT("native", SMALL).save_llmc(path)
    return path


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_checkpoint_of_llmc(case, llmc_file, monkeypatch):
    changes, message = HOSTILE[case]
    content = llmc_file.read_bytes()
    llmc_file.write_bytes(struct.pack("<8i", *(HEADER | changes).values()) + content[32:])
    monkeypatch.setattr(GPT, "__init__", lambda *_: pytest.fail("a model was made of it"))
    with pytest.raises(ValueError, match=message) as caught:
        GPT.from_llmc(llmc_file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 7, 1023, 1024, 5000])
def test_truncated_checkpoint_of_llmc(size, llmc_file):
    llmc_file.write_bytes(llmc_file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"it has|truncated"):
        GPT.from_llmc(llmc_file)


def test_hugging_face_round_trip():
    (model,) = same_models(["fused"], GPTConfig(31, 12, 2, 2, 128), torch.float32)
    state = model.hugging_face_state_dict()
    assert state["transformer.h.0.attn.c_attn.weight"].shape == (128, 384)
    assert state["transformer.h.0.mlp.c_proj.weight"].shape == (512, 128)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in state.items() if name != "lm_head.weight"}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 12, 12), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    for found in (state, bare, bare | masks):
        loaded = GPT.from_hugging_face(found, "native")
        assert loaded.config == model.config
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name


def safetensors(tensors, header=None):
    """The content of a safetensors file, written down."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
    entries, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else bytes(4)
        place = [len(data), len(data) + len(content)]
        entries[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        data += content
    header = json.dumps(entries).encode() if header is None else header
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_a_safetensors_file(dtype, tmp_path):
    (model,) = same_models(["fused"], GPTConfig(31, 12, 2, 2, 128), torch.float32)
    state = {name.removeprefix("transformer."): t.to(dtype) for name, t in model.hugging_face_state_dict().items()}
    del state["lm_head.weight"]
    masks = {"h.0.attn.bias": torch.ones(1, 1, 3, 3, dtype=torch.uint8)}
    (tmp_path / "model.safetensors").write_bytes(safetensors({**masks, **state}))
    loaded = load_model(tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(dtype).float()), name


HEADERS = {
    "no header": (b"", "its header would be 0 bytes long|no JSON"),
    "2^64-1 bytes of header": (b"\xff" * 8 + b"{}", "its header would be 18446744073709551615 bytes long"),
    "no JSON": (safetensors({}, b"[1, 2]"), "its header is no JSON object"),
    "half of it": (safetensors({}, b'{"a": '), "its header is no JSON object"),
    "nested": (safetensors({}, b"[" * 100_000), "its header is no JSON object"),
    "no entry": (safetensors({}, b'{"a": 3}'), "is damaged: a has no dtype, shape and place"),
    "negative size": (
        safetensors({}, b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'),
        "is damaged: a has no dtype, shape and place",
    ),
    "2^62 numbers": (
        safetensors({}, b'{"a": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 0]}}'),
        r"a of shape \[4611686018427387904\] is not where it should be",
    ),
    "beyond the end": (
        safetensors({}, b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}') + bytes(7),
        r"a of shape \[2\] is not where it should be",
    ),
    "another dtype": (
        safetensors({}, b'{"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}') + bytes(8),
        "a has dtype I64, expected one of F32, F16, BF16",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_safetensors_file(case, tmp_path):
    content, message = HEADERS[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_model(tmp_path / "model.safetensors")
    assert "\n" not in str(caught.value)


def test_state_dicts_that_are_none_of_gpt2s(monkeypatch):
    state = GPT("native", SMALL).hugging_face_state_dict()
    monkeypatch.setattr(GPT, "__init__", lambda *_: pytest.fail("a model was made of it"))
    for message, changed in {
        "transformer.wte.weight is missing": {n: t for n, t in state.items() if "wte" not in n},
        "transformer.h.1.ln_2.bias is missing": {n: t for n, t in state.items() if n != "transformer.h.1.ln_2.bias"},
        "transformer.h.2.ln_1.weight is missing": {**state, "transformer.h.9999.ln_1.weight": torch.zeros(16)},
        r"transformer.surplus is no parameter of GPT-2": {**state, "surplus": torch.zeros(1)},
        r"expected transformer.ln_f.bias of shape \[16\], got \[17\]": {
            **state,
            "transformer.ln_f.bias": torch.zeros(17),
        },
        "expected ln_f.bias to be a Tensor, got int": {**state, "ln_f.bias": 3},
        "lm_head.weight differs from transformer.wte.weight": {**state, "lm_head.weight": torch.zeros(31, 16)},
    }.items():
        with pytest.raises(ValueError, match=message):
            GPT.from_hugging_face(changed, n_head=2)
    with pytest.raises(ValueError, match="expected n_head for 16 features, which no heads of 64 divide"):
        GPT.from_hugging_face(state)


# The data


def test_tiny_shakespeare():
    text = shakespeare()
    assert len(text) == 1_115_394
    characters = Characters.of(text)
    assert len(characters) == 65
    assert characters.decode(characters.encode(text[:300])) == text[:300]


def test_token_file_round_trip(tmp_path):
    write_tokens(tmp_path / "tokens.bin", [5, 0, 50256, 65535])
    content = (tmp_path / "tokens.bin").read_bytes()
    assert struct.unpack("<3i", content[:12]) == (20240520, 1, 4)
    assert len(content) == 1024 + 8
    tokens = read_tokens(tmp_path / "tokens.bin", 2**16)
    assert tokens.tolist() == [5, 0, 50256, 65535]
    with pytest.raises(ValueError, match="write_tokens: expected tokens from 0 to 65535"):
        write_tokens(tmp_path / "tokens.bin", [-1])


TOKEN_FILES = {
    "empty": (b"", "it has 0 bytes, and the header of llm.c's token files alone 1024"),
    "of nanoGPT's": (bytes(2000), "is none of llm.c's: it begins with 0, expected 20240520"),
    "version 7": (struct.pack("<3i", 20240520, 7, 4) + bytes(1012 + 8), r"expected version 1 \(uint16\), got 7"),
    "2^32-1 tokens": (struct.pack("<3i", 20240520, 1, -1) + bytes(1012 + 8), "its header counts -1 tokens"),
    "2^31-1 tokens": (struct.pack("<3i", 20240520, 1, 2**31 - 1) + bytes(1012 + 8), "which take 4294968318 bytes"),
    "no token": (struct.pack("<3i", 20240520, 1, 0) + bytes(1012), "its header counts 0 tokens"),
    "truncated": (struct.pack("<3i", 20240520, 1, 5) + bytes(1012 + 9), "is damaged or truncated"),
    "another vocabulary": (
        struct.pack("<3i", 20240520, 1, 2) + bytes(1012) + struct.pack("<2H", 3, 31),
        "has token 31, and the model knows 31: it is of another vocabulary",
    ),
}


@pytest.mark.parametrize("case", TOKEN_FILES)
def test_hostile_token_file(case, tmp_path):
    content, message = TOKEN_FILES[case]
    (tmp_path / "tokens.bin").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_tokens(tmp_path / "tokens.bin", 31)
    assert "\n" not in str(caught.value)


def test_windows(device):
    windows = Windows(np.arange(20, dtype="<u2"), 4, device)
    inputs, targets = windows(torch.tensor([0, 15]))
    assert inputs.device.type == targets.device.type == device
    assert inputs.tolist() == [[0, 1, 2, 3], [15, 16, 17, 18]]
    assert targets.tolist() == [[1, 2, 3, 4], [16, 17, 18, 19]]
    assert len(windows) == 16
    in_order = [part[0].tolist() for part in windows.in_order(3)]
    assert in_order == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], [[12, 13, 14, 15]]]
    assert len(list(windows.in_order(1, most=8))) == 2


# The step


def test_learning_rate():
    recipe = RECIPES["cpu-char"]
    rates = [learner.learning_rate(step, recipe) for step in range(recipe.steps + 1)]
    assert rates[0] == pytest.approx(2e-3 / 101)
    assert rates.index(max(rates)) == 100
    assert rates[100] == 2e-3
    assert rates[1050] == pytest.approx((2e-3 + 2e-4) / 2)
    assert rates[2000] == pytest.approx(2e-4)


def test_matrices_alone_decay():
    model = GPT("native", SMALL)
    groups = learner.parameter_groups(model, RECIPES["cpu-char"])
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert sum(p.numel() for group in groups for p in group["params"]) == SMALL.parameter_count
    assert all(p.dim() == 2 for p in groups[0]["params"])
    assert all(p.dim() == 1 for p in groups[1]["params"])


# The run


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "verses.txt"
    path.write_text(shakespeare()[:3000])
    return path


@pytest.fixture(scope="module")
def quick(text_file):
    return ["gpt", "--device", "cpu", "--text", str(text_file), "--batch", "2", "--length", "16", "--warmup", "2"]


def read(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory, quick):
    """A run of all backends: (folder, exit status, checkpoint, exported weights)."""
    folder = tmp_path_factory.mktemp("run")
    saved, exported = folder / "run.pt", folder / "model.bin"
    files = ["--save", str(saved), "--export", str(exported), "--out", str(folder / "report")]
    status = main([*quick, "--backend", "all", "--steps", "12", "--sample", "40", *files])
    return folder / "report", status, saved, exported


def test_report_json(finished):
    folder, status, *_ = finished
    report = read(folder)
    assert report["problems"] == []
    assert status == 0 and report["ok"] is True
    assert report["steps_done"] == report["steps_planned"] == 12
    assert list(report["backends"]) == ["fused", "custom", "native"]
    assert len(report["sample"]) == 41
    for result in report["backends"].values():
        times = result["milliseconds"]
        assert list(times) == [*PHASES, "whole step"]
        assert result["tokens_per_second"] == pytest.approx(32e3 / times["whole step"]["median"])
        assert 0 < result["share_of_peak"] < 1
        assert result["peak_memory_bytes"] is None, "not known on the CPU"
        assert len(result["losses"]) == 12
        assert [step for step, _ in result["validation"]] == [3, 6, 9, 12]
        assert result["losses"][-1] < result["losses"][0]
    native = report["backends"]["native"]["losses"]
    for name in OURS:
        assert report["backends"][name]["losses"] == pytest.approx(native, rel=1e-4)


@pytest.mark.parametrize("backend", OURS)
def test_backends_within_rounding(finished, backend):
    parity = read(finished[0])["parity"][backend]
    names = [name for name, _ in GPT("native", RECIPES["cpu-char"].config).named_parameters()]
    assert [row["name"] for row in parity["rows"] if row["kind"] == "gradient"] == names
    assert [row["kind"] for row in parity["rows"]].count("update") == 1
    assert max(row["distance"] for row in parity["rows"]) < 1e-4
    assert parity["ok"]


def test_report_md_and_png(finished):
    folder, *_ = finished
    text = (folder / "report.md").read_text()
    for word in (
        *PHASES,
        "tokens/s",
        "share of the peak",
        "validation loss",
        "transformer.h.3.ln_1.weight",
        "report.png",
    ):
        assert word in text
    assert (folder / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(path.name for path in folder.iterdir()) == FILES, "no temporary file is left"


def test_exported_weights_are_those_of_the_first_backend(finished):
    exported = GPT.from_llmc(finished[3], "native").state_dict()
    saved = torch.load(finished[2], weights_only=True)["backends"]["fused"]["model"]
    for name, tensor in saved.items():
        assert torch.equal(exported[name], tensor), name


@pytest.mark.parametrize("options", [["--dropout", "0.2"], ["--precision", "fp64"]], ids=["dropout", "fp64"])
def test_a_resumed_run_goes_on_bit_by_bit(options, quick, tmp_path, monkeypatch):
    """The whole run saves on its way; from there on another one has the same losses and the same weights."""
    save, kept = checkpoint.save_checkpoint, tmp_path / "kept.pt"

    def keep(run, path):
        save(run, kept if run.steps_done == 5 else path)

    monkeypatch.setattr("cuda_ops.gpt.save_checkpoint", keep)
    arguments = ["--backend", "all", "--sample", "0", "--eval-every", "4", "--save-every", "5"]
    whole, resumed = tmp_path / "whole.pt", tmp_path / "resumed.pt"
    out = ["--out", str(tmp_path / "out")]
    assert main([*quick, *options, *arguments, "--steps", "9", "--save", str(whole), *out]) == 0
    text = quick[quick.index("--text") + 1]
    again = ["gpt", "--device", "cpu", "--text", text, *arguments[2:], "--resume", str(kept)]
    assert main([*again, "--save", str(resumed), *out]) == 0
    first, second = (torch.load(path, weights_only=True) for path in (whole, resumed))
    for name, expected in first["backends"].items():
        actual = second["backends"][name]
        assert actual["losses"] == expected["losses"]
        assert len(actual["losses"]) == 9
        assert actual["validation"] == expected["validation"]
        for key in expected["model"]:
            assert torch.equal(actual["model"][key], expected["model"][key]), key
        for number, state in expected["optimizer"]["state"].items():
            for key, tensor in state.items():
                assert torch.equal(actual["optimizer"]["state"][number][key], tensor), (number, key)
    if "--dropout" in options:
        assert first["backends"]["native"]["losses"] != first["backends"]["fused"]["losses"]


def test_a_run_from_weights_of_llmcs(llmc_file, tmp_path):
    write_tokens(tmp_path / "tokens.bin", np.arange(400) % 31)
    arguments = ["gpt", "--device", "cpu", "--tokens", str(tmp_path / "tokens.bin"), "--init", str(llmc_file)]
    assert main([*arguments, "--steps", "3", "--batch", "2", "--out", str(tmp_path / "out")]) == 0
    report = read(tmp_path / "out")
    assert report["settings"]["length"] == 12
    assert report["sample"] is None
    inputs = Windows(read_tokens(tmp_path / "tokens.bin", 31)[:360], 12)
    begins = torch.randint(len(inputs), (2,), generator=torch.Generator().manual_seed(0))
    expected = GPT.from_llmc(llmc_file, "native")(*inputs(begins)).item()
    assert report["backends"]["native"]["losses"][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("precision", [cuda_param(p) for p in ("fp32", "tf32", "bf16", "fp64")])
def test_run_on_cuda(precision, tmp_path):
    arguments = ["gpt", "--device", "cuda", "--steps", "60", "--batch", "16", "--length", "128", "--eval-every", "30"]
    assert main([*arguments, "--precision", precision, "--out", str(tmp_path)]) == 0
    for result in read(tmp_path)["backends"].values():
        assert result["peak_memory_bytes"] > 1e6
        assert result["step_milliseconds"]
        assert result["validation_loss"] < 3.5


# A wrong backend is found out


def wrong_norm():
    class Scaled(cuda_ops.nn.LayerNorm):
        def forward(self, input):
            output = super().forward(input)
            if output.requires_grad:
                output.register_hook(lambda grad: grad * 1.01)
            return output

    return Scaled


def wrong_step():
    class Scaled(cuda_ops.optim.AdamW):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] *= 1.01
            super().step(closure)

    return Scaled


WRONG = {
    "backward": ("nn", "LayerNorm", wrong_norm, "custom: gradient transformer"),
    "update": ("optim", "AdamW", wrong_step, "custom: update of all weights"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_backend_that_is_one_percent_wrong_fails(wrong, quick, monkeypatch, tmp_path, capsys):
    namespace, name, make, message = WRONG[wrong]
    monkeypatch.setattr(getattr(cuda_ops, namespace), name, make())
    arguments = ["--backend", "custom", "native", "--steps", "1", "--sample", "0", "--out", str(tmp_path)]
    assert main([*quick, *arguments]) == 1
    assert f"FAILED: {message}" in capsys.readouterr().out
    assert not read(tmp_path)["ok"]


def test_divergence_exits_1(quick, tmp_path, capsys):
    arguments = ["--backend", "native", "--steps", "6", "--sample", "0", "--lr", "1e30", "--out", str(tmp_path)]
    assert main([*quick, *arguments]) == 1
    assert "training diverged" in capsys.readouterr().out


# Interruption


def test_ctrl_c_leaves_a_report_and_a_checkpoint(quick, tmp_path):
    """A real SIGINT to a real process, in the middle of its run; what it leaves goes on."""
    tell = (
        "import sys; from cuda_ops.training.gpt import learner; step = learner.Learner.step\n"
        "def told(*a, **k):\n    print('step', file=sys.stderr, flush=True); return step(*a, **k)\n"
        "learner.Learner.step = told\n"
        "from cuda_ops.__main__ import main; sys.exit(main())"
    )
    saved, out = tmp_path / "run.pt", tmp_path / "out"
    arguments = [*quick, "--steps", "10000", "--eval-every", "5000", "--save", str(saved), "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-c", tell, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        steps = 0
        for line in process.stderr:
            steps += line == "step\n"
            if steps == 25:
                process.send_signal(signal.SIGINT)
                break
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Interrupted after" in output
    report = read(out)
    assert report["interrupted"] is True
    assert 10 <= report["steps_done"] < 100
    assert report["parity"]["fused"]["ok"]
    assert sorted(path.name for path in out.iterdir()) == FILES
    text = quick[quick.index("--text") + 1]
    again = ["gpt", "--text", text, "--device", "cpu", "--resume", str(saved), "--steps", "30", "--sample", "0"]
    assert main([*again, "--eval-every", "30", "--out", str(out)]) == 0
    assert read(out)["steps_done"] == 30
    for name, result in read(out)["backends"].items():
        before = report["backends"][name]["losses"]
        assert result["losses"][: len(before)] == before


def test_second_ctrl_c_ends_at_once(quick, monkeypatch, tmp_path):
    step = learner.Learner.step

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return step(*args, **kwargs)

    monkeypatch.setattr(learner.Learner, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert main([*quick, "--backend", "native", "--out", str(tmp_path)]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert list(tmp_path.iterdir()) == []


# Mistakes: one line on stderr, exit 2, nothing written

MISTAKES = {
    "unknown device": (["--device", "tpu"], r"--device tpu is unknown: expected auto, cpu, cuda or cuda:N"),
    "batch of nothing": (["--batch", "0"], r"--batch 0: expected a whole number of at least 1"),
    "no steps": (["--steps", "-1"], r"--steps -1: expected a whole number of at least 1"),
    "negative warm-up": (["--warmup", "-1"], r"--warmup -1: expected a whole number of at least 0"),
    "negative lr": (["--lr", "-0.1"], r"--lr -0.1: expected a number above 0"),
    "lr beyond float32": (["--lr", "1e308"], r"--lr 1e\+308: expected at most 3.40282e\+38, the largest of float32"),
    "lr that is no number": (["--min-lr", "nan"], r"--min-lr nan: expected a number of at least 0"),
    "dropout of all": (["--dropout", "1"], r"--dropout 1.0: expected a number from 0 to less than 1"),
    "TF32 on the CPU": (["--precision", "tf32"], r"--precision tf32 needs a GPU: on the CPU take --precision fp32"),
    "more than the model sees": (["--length", "65"], r"--length 65: the model sees at most 64 tokens"),
    "data that is too short": (
        ["--text", "{tmp}/short"],
        r"the training data has 9 tokens, and a sequence takes one more",
    ),
    "empty text": (["--text", "{tmp}/file"], r"text file .*file is empty"),
    "no text": (["--text", "{tmp}/none"], r"text file .*none cannot be read \(No such file or directory\)"),
    "text that is none": (["--text", "{tmp}/binary"], r"binary is no text in UTF-8 \(byte 0\); tokens go by --tokens"),
    "tokens and text": (["--tokens", "{tmp}/file"], r"--tokens and --text: expected one of them"),
    "validation alone": (["--val-tokens", "{tmp}/file"], r"--val-tokens needs --tokens"),
    "nothing to save to": (["--save-every", "5"], r"--save-every needs --save"),
    "no weights": (["--init", "{tmp}/none.bin"], r"--init .*none.bin cannot be read \(No such file or directory\)"),
    "weights that are none": (["--init", "{tmp}/binary"], r"--init: .*binary is no state_dict, or is damaged"),
    "weights of another kind": (["--init", "{tmp}/list.pt"], r"--init: .*list.pt is no state_dict: it holds a list"),
    "no checkpoint": (["--resume", "{tmp}/none"], r"--resume .*none cannot be read \(No such file or directory\)"),
    "checkpoint of another kind": (
        ["--resume", "{tmp}/dict.pt"],
        r"dict.pt is no checkpoint of `python -m cuda_ops gpt",
    ),
    "prompt of another text": (["--prompt", "é"], r"--prompt: verses.txt has no 'é': begin with what it has"),
    "no prompt": (["--prompt", ""], r"--prompt: expected at least one character"),
    "save into a missing folder": (["--save", "{tmp}/none/w.pt"], r"there is no folder .*none: make it first"),
    "export over the checkpoint": (["--save", "{tmp}/a", "--export", "{tmp}/a"], r"is written by --save too"),
    "out below a file": (["--out", "{tmp}/file/out"], r"--out .*file/out cannot be made \(Not a directory\)"),
    "gpt2 without its tokenizer": (["--model", "gpt2-124m"], r"GPT-2's tokenizer needs the package tiktoken"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_told_in_one_line(mistake, quick, tmp_path, capsys, monkeypatch):
    arguments, message = MISTAKES[mistake]
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    (tmp_path / "file").write_text("")
    (tmp_path / "short").write_text("a rose is ")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 100)
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "dict.pt")
    before = sorted(tmp_path.iterdir())
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert main([*quick, "--backend", "native", "--out", str(tmp_path / "out"), *arguments]) == 2
    output = capsys.readouterr()
    assert re.search(message, output.err), output.err
    assert output.err.startswith("python -m cuda_ops gpt: error: ")
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert sorted(tmp_path.iterdir()) == before, "nothing is written"


def test_no_data(tmp_path, capsys):
    assert main(["gpt", "--device", "cpu", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "tinyshakespeare/input.txt is missing: copy it from data/tinyshakespeare" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--backend", "fast"], "argument --backend: invalid choice: 'fast'"),
        (["--model", "gpt5"], "argument --model: invalid choice: 'gpt5'"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_usage_is_told_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["gpt", *arguments])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["gpt", "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    for name in RECIPES:
        assert name in text
    for option in [
        "model",
        "backend",
        "device",
        "tokens",
        "text",
        "steps",
        "lr",
        "precision",
        "compile",
        "save",
        "resume",
        "export",
        "init",
        "out",
    ]:
        assert f"--{option}" in text


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_missing_package(package, quick, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main([*quick, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"{package} is missing" in error and 'run `pip install "cuda_ops[app]"`' in error


def damaged(content, change):
    """A checkpoint in which something is what it should not be."""
    if change == "truncated":
        return None
    if change == "steps":
        content["backends"]["native"]["steps_taken"] = 5
    if change == "layers":
        content["recipe"]["config"]["n_layer"] = -1
    if change == "model":
        content["model"] = "gpt5"
    if change == "weights":
        content["backends"]["native"]["model"]["transformer.wpe.weight"] = torch.zeros(3, 3)
    if change == "device":
        content["device"] = "cuda"
    if change == "corpus":
        content["corpus"] = [1, 2]
    return content


DAMAGE = {
    "truncated": "is no checkpoint, or is damaged",
    "steps": "is damaged .ValueError: its steps are not those of its losses",
    "layers": "expected n_layer to be from 1",
    "model": "names a model, precision or backend that there is not",
    "weights": "is damaged .RuntimeError",
    "device": "--device cpu: .* was trained on cuda, whose random numbers are others",
    "corpus": "was trained on other data than verses.txt",
}


@pytest.mark.parametrize("change", DAMAGE)
def test_damaged_checkpoint(change, finished, quick, tmp_path, capsys):
    path, out = tmp_path / "damaged.pt", tmp_path / "out"
    content = damaged(torch.load(finished[2], weights_only=True), change)
    if content is None:
        path.write_bytes(finished[2].read_bytes()[:100_000])
    else:
        torch.save(content, path)
    text = quick[quick.index("--text") + 1]
    assert main(["gpt", "--device", "cpu", "--text", text, "--resume", str(path), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert re.search(DAMAGE[change], error), error
    assert error.count("\n") == 1


def test_options_that_a_checkpoint_contradicts(finished, quick, capsys):
    for option, message in {
        "--batch 3": "--batch 3: .* was trained with 2",
        "--dropout 0.5": "--dropout 0.5: .* was trained with 0.0",
        "--model char": "--model char: .* is of --model cpu-char",
        "--backend native": "--backend: .* has fused, custom, native: leave it out",
        "--steps 3": "--steps 3: .* has taken 12 already",
    }.items():
        text = quick[quick.index("--text") + 1]
        assert main(["gpt", "--device", "cpu", "--text", text, "--resume", str(finished[2]), *option.split()]) == 2
        assert re.search(message, error := capsys.readouterr().err), error


def test_extension_that_is_not_built(quick, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_library, "problem", "cuda_ops' extension is not built: rebuild it.")
    assert main([*quick, "--out", str(tmp_path / "out")]) == 2
    assert "error: cuda_ops' extension is not built: rebuild it." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
