"""GPT-2's architecture as a model: its backends compute the same, and it generates."""

import math

import pytest
import torch
from support.devices import cuda_param
from support.gpt import OURS, SMALL, batch, same_models
from support.opspec import assert_close

from cuda_ops import functional
from cuda_ops.models import GPT, GPTConfig, _gpt_ops
from cuda_ops.models.gpt import KeyValueCache
from cuda_ops.training.gpt.settings import RECIPES

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
        return _gpt_ops.RoundedLinearAddNorm.apply(*arguments[:3], 1e-5, 0.0, *arguments[3:])

    def both(*arguments):
        return _gpt_ops.RoundedMLPAddNorm.apply(*arguments[:3], 1e-5, 0.0, *arguments[3:], "tanh", False)

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


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [cuda_param(torch.bfloat16), cuda_param(torch.float16)])
def test_layers_with_dropout_and_the_norm_behind_them(dtype, with_bias):
    """Dropout's mask is kept for backward. Values and gradients are those of the ops one by one, after the same seed,
    but for roundings in between; a gradient that is to be differentiated draws the mask again."""
    device, rows, features, p = "cuda", 300, 384, 0.3
    arguments = layer_arguments(rows, features, 2 * features, device, torch.float32)
    input, weight, bias, next_weight, next_bias = (0.2 * argument.detach() for argument in arguments)
    residual, norm_weight, norm_bias = (
        torch.randn(shape, device=device) for shape in ((rows, features), (features,), (features,))
    )
    input, residual = input.to(dtype).requires_grad_(), residual.to(dtype).requires_grad_()
    layers = [t.requires_grad_() if with_bias or t.dim() > 1 else None for t in (weight, bias, next_weight, next_bias)]
    norm = (features,), norm_weight.requires_grad_(), norm_bias.requires_grad_(), 1e-5
    first = layers[0][:features].detach().requires_grad_(), None if layers[1] is None else layers[1][:features]
    grads = [torch.randn(rows, features, device=device).to(dtype) for _ in range(2)]

    def chain(layer):
        return lambda: functional.add_layer_norm(layer(), residual, *norm, p)

    for function, expected, parameters in (
        (
            lambda: _gpt_ops.linear_add_norm(input, first, residual, norm, p),
            chain(lambda: _gpt_ops.linear(input, *first)),
            first,
        ),
        (
            lambda: _gpt_ops.mlp_add_norm(input, layers, "tanh", residual, norm, p, True),
            chain(lambda: _gpt_ops.mlp(input, layers, "tanh")),
            layers,
        ),
    ):
        there = [input, residual, *norm[1:3], *(t for t in parameters if t is not None)]
        results = []
        for call in (function, expected):
            torch.manual_seed(3)
            outputs = call()
            once = torch.autograd.grad(outputs, there, grads, retain_graph=True)
            again = torch.autograd.grad(outputs, there, grads, create_graph=True)
            results.append([*outputs, *once, *again])
        assert type(results[0][0].grad_fn).__name__.startswith("Rounded")
        for actual, wanted in zip(*results, strict=True):
            assert (actual.double() - wanted.double()).norm() <= 4 * torch.finfo(dtype).eps * wanted.double().norm()


@pytest.mark.parametrize("with_bias", [True, False])
def test_attention_with_its_layers_and_the_norm_behind_them(device, with_bias):
    """Likewise; the gradient of the first bias, of which the keys' part is zero, is that of its sums."""
    heads, features = 2, 4
    shapes = [(2, 3, features)] * 2 + [(3 * features, features), (3 * features,), (features, features), (features,)]
    input, residual, weight, bias, next_weight, next_bias = (
        torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for shape in shapes
    )
    norm_weight, norm_bias = layer_arguments(1, 4, 4, device)[2::2]
    if not with_bias:
        bias = next_bias = None

    def fused(*arguments):
        return _gpt_ops.RoundedAttentionAddNorm.apply(*arguments[:3], 1e-5, heads, *arguments[3:])

    def chain(residual, norm_weight, norm_bias, input, weight, bias, next_weight, next_bias):
        parts = torch.nn.functional.linear(input, weight, bias).view(2, 3, 3, heads, 2).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        total = residual + torch.nn.functional.linear(mixed, next_weight, next_bias)
        return torch.nn.functional.layer_norm(total, (features,), norm_weight, norm_bias), total

    arguments = [residual, norm_weight, norm_bias, input, weight, bias, next_weight, next_bias]
    there = [argument for argument in arguments if argument is not None]
    for grads in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
        results = []
        for outputs in (fused(*arguments), chain(*arguments)):
            loss = sum(scale * output.square().sum() for scale, output in zip(grads, outputs, strict=True) if scale)
            results.append([*outputs, *torch.autograd.grad(loss, there, allow_unused=True, materialize_grads=True)])
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected, 1e-10)
    assert torch.autograd.gradcheck(fused, arguments)
    assert torch.autograd.gradgradcheck(fused, arguments)


def test_the_table_of_tokens_has_one_gradient(device):
    """In float64, and of halves bit by bit: what the embedding gives is added to what the head gives."""
    tokens = torch.tensor([[1, 4, 1], [0, 1, 4]], device=device)
    tables = [torch.randn(rows, 5, dtype=torch.float64, device=device, requires_grad=True) for rows in (7, 4)]
    for dtype in (torch.float64, torch.bfloat16):
        if dtype == torch.bfloat16:
            tables = [table.detach().float().requires_grad_() for table in tables]
        results = []
        for is_one in (True, False):
            x, table = tables[0], tables[0]
            if is_one:
                x, table = _gpt_ops.TiedEmbedding.apply(tokens, *tables, dtype)
            else:
                x = _gpt_ops.functional.token_position_embedding(tokens, *tables, dtype)
            loss = x.square().sum() + (table * table).sum()
            results.append([x, *torch.autograd.grad(loss, tables)])
        for actual, expected in zip(*results, strict=True):
            assert torch.equal(actual, expected)
        apart = _gpt_ops.TiedEmbedding.apply(tokens, *tables, dtype)
        for output, least in ((apart[0], 2), (apart[1], 1)):  # a gradient may come for either
            grads = torch.autograd.grad(output.sum(), tables, allow_unused=True, retain_graph=True)
            assert sum(grad is not None for grad in grads) == least
    tables = [table.detach().double().requires_grad_() for table in tables]
    assert torch.autograd.gradgradcheck(
        lambda *t: [y * y for y in _gpt_ops.TiedEmbedding.apply(tokens, *t, torch.float64)], tables
    )


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_the_norm_behind_the_embeddings(device, p):
    """Of dropout's output, and that output, whose gradients the norm's backward adds: as the two functions one after
    the other, further derivatives too; a gradient may come for either."""
    input, _, _, weight, bias = layer_arguments(5, 4, 4, device)
    weight = weight[0].detach().requires_grad_()

    def fused(*arguments):
        torch.manual_seed(1)
        return _gpt_ops.DroppedNorm.apply(*arguments, 1e-5, p)

    def chain(input, weight, bias):
        torch.manual_seed(1)
        dropped = _gpt_ops.functional.dropout(input, p)
        return torch.nn.functional.layer_norm(dropped, (4,), weight, bias), dropped

    for arguments in (
        (input, weight, bias),
        (input, weight, None),
        (input.detach()[:, ::2].repeat(1, 2), weight, bias),
    ):
        there = [argument for argument in arguments if argument is not None and argument.requires_grad]
        for grads in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
            results = []
            for outputs in (fused(*arguments), chain(*arguments)):
                loss = sum(scale * output.square().sum() for scale, output in zip(grads, outputs, strict=True) if scale)
                loss = loss if loss.requires_grad else loss + 0 * weight.sum()
                results.append([*outputs, *torch.autograd.grad(loss, there, allow_unused=True, materialize_grads=True)])
            for actual, expected in zip(*results, strict=True):
                assert_close(actual, expected, 1e-10)
    assert torch.autograd.gradcheck(fused, (input, weight, bias))
    assert torch.autograd.gradgradcheck(fused, (input, weight, bias))


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
        del loss  # whose graph holds parameters and gradients
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
