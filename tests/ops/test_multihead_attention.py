"""multi_head_attention_forward and nn.MultiheadAttention: every option against PyTorch's, in float64."""

import copy
import itertools
import pickle

import pytest
import torch
from support.opspec import assert_close

import cuda_ops

ours_forward = cuda_ops.functional.multi_head_attention_forward
native_forward = torch.nn.functional.multi_head_attention_forward
TOLERANCE = 1e-12
L, S, N, E, H = 5, 7, 3, 12, 4


def pair(**options):
    """Ours and PyTorch's of the same parameters, none of which is 0, in float64."""
    options = {"embed_dim": E, "num_heads": H, "dtype": torch.float64, **options}
    torch.manual_seed(0)
    ours, native = cuda_ops.nn.MultiheadAttention(**options), torch.nn.MultiheadAttention(**options)
    for parameter in native.parameters():
        torch.nn.init.uniform_(parameter, -1, 1)
    ours.load_state_dict(native.state_dict())
    return ours, native


def rows(length, width=E, batch=N, batch_first=False, dtype=torch.float64):
    shape = (length, width) if batch is None else (batch, length, width) if batch_first else (length, batch, width)
    return torch.randn(shape, dtype=dtype).requires_grad_()


def causal(length=L):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def hidden(*shape):
    """Three of ten, but never all keys of a query."""
    mask = torch.rand(shape) < 0.3
    mask[..., 0] = False
    return mask


def assert_gradients_close(actual, expected):
    """Against 1 at least: a bias of the keys adds the same to all scores of a query, and of its gradient there is
    rounding alone."""
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert (a is None) == (e is None)
        if a is not None and e.numel():
            assert (a - e).abs().max().item() <= TOLERANCE * max(1.0, e.abs().max().item()), f"gradient {i}"


def compare(ours, native, inputs, masks=None, **arguments):
    """Outputs, weights and all gradients; `inputs` are the distinct tensors, and which of them is query, key, value."""
    tensors, places = inputs
    masks = masks or {}
    results = []
    for module in (ours, native):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        given = {k: m.detach().clone().requires_grad_(m.is_floating_point()) for k, m in masks.items()}
        output, weights = module(*[leaves[i] for i in places], **given, **arguments)
        outputs = [output] if weights is None else [output, weights]
        torch.manual_seed(1)
        grad_outputs = [torch.randn(o.shape, dtype=o.dtype) for o in outputs]  # randn_like follows the strides
        # What the hint of is_causal leaves unread has no gradient.
        wanted = [*leaves, *[m for m in given.values() if m.requires_grad], *module.parameters()]
        grads = torch.autograd.grad(outputs, wanted, grad_outputs, allow_unused=True)
        results.append((outputs, grads))
    (mine, my_grads), (theirs, their_grads) = results
    assert len(mine) == len(theirs)
    for name, a, b in zip(("output", "weights"), mine, theirs, strict=False):
        assert_close(a, b, TOLERANCE, name)
    assert_gradients_close(my_grads, their_grads)
    return mine


MODULES = {
    "plain": {},
    "one head": {"num_heads": 1},
    "no bias": {"bias": False},
    "more keys": {"add_bias_kv": True},
    "zeros": {"add_zero_attn": True},
    "more keys and zeros": {"add_bias_kv": True, "add_zero_attn": True},
    "widths": {"kdim": 5, "vdim": 9},
    "widths, no bias, more keys": {"kdim": 12, "vdim": 9, "bias": False, "add_bias_kv": True},
}
MASKS = {
    "none": lambda heads: {},
    "attn": lambda heads: {"attn_mask": hidden(L, S)},
    "attn of heads": lambda heads: {"attn_mask": hidden(N * heads, L, S)},
    "added": lambda heads: {"attn_mask": torch.randn(L, S, dtype=torch.float64)},
    "added of heads": lambda heads: {"attn_mask": torch.randn(N * heads, L, S, dtype=torch.float64)},
    "padding": lambda heads: {"key_padding_mask": hidden(N, S)},
    "padding added": lambda heads: {"key_padding_mask": torch.randn(N, S, dtype=torch.float64)},
    "both": lambda heads: {"attn_mask": hidden(L, S), "key_padding_mask": hidden(N, S)},
    "both added": lambda heads: {
        "attn_mask": torch.randn(N * heads, L, S, dtype=torch.float64),
        "key_padding_mask": torch.randn(N, S, dtype=torch.float64),
    },
    "one of each": lambda heads: {
        "attn_mask": torch.randn(L, S, dtype=torch.float64),
        "key_padding_mask": hidden(N, S),
    },
    "one of each, turned": lambda heads: {
        "attn_mask": hidden(N * heads, L, S),
        "key_padding_mask": torch.randn(N, S, dtype=torch.float64),
    },
}
WEIGHTS = {"no weights": {"need_weights": False}, "mean": {}, "of heads": {"average_attn_weights": False}}


@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", MODULES)
def test_options(options, mask):
    options = MODULES[options]
    for batch_first, weights in itertools.product((False, True), WEIGHTS.values()):
        ours, native = pair(batch_first=batch_first, **options)
        key, value = (rows(S, options.get(name, E), batch_first=batch_first) for name in ("kdim", "vdim"))
        inputs = [rows(L, batch_first=batch_first), key, value], (0, 1, 2)
        output, *_ = compare(ours, native, inputs, MASKS[mask](native.num_heads), **weights)
        assert output.is_contiguous()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("places", [(0, 0, 0), (0, 1, 1), (0, 0, 1), (0, 1, 0)])
@pytest.mark.parametrize("batch", [None, 1, N])
def test_tensors_that_are_one(places, weights, batch):
    """Self-attention, that of a decoder to an encoder, and what is neither."""
    for batch_first in (False, True):
        ours, native = pair(batch_first=batch_first)
        inputs = [rows(L, batch=batch, batch_first=batch_first) for _ in range(2)]
        compare(ours, native, (inputs, places), **WEIGHTS[weights])
        mask = {"attn_mask": causal()}
        compare(ours, native, (inputs, places), mask, is_causal=True, **WEIGHTS[weights])


@pytest.mark.parametrize("options", ["plain", "more keys and zeros", "widths"])
def test_without_a_batch(options):
    options = MODULES[options]
    ours, native = pair(**options)
    inputs = [rows(L, batch=None), rows(S, ours.kdim, None), rows(S, ours.vdim, None)], (0, 1, 2)
    for mask in (None, hidden(L, S), hidden(H, L, S)):
        masks = {"key_padding_mask": hidden(S)} | ({} if mask is None else {"attn_mask": mask})
        for weights in WEIGHTS.values():
            compare(ours, native, inputs, masks, **weights)


@pytest.mark.parametrize("options", ["plain", "more keys", "zeros"])
def test_is_causal_is_a_hint(options):
    """It is believed where nothing else has to be merged in: a mask that says otherwise is not read then."""
    ours, native = pair(**MODULES[options])
    inputs = [rows(L)], (0, 0, 0)
    other = {"attn_mask": hidden(L, L)}
    believed = compare(ours, native, inputs, other, is_causal=True, need_weights=False)[0]
    if options == "plain":
        torch.testing.assert_close(believed, ours(*inputs[0] * 3, attn_mask=causal(), need_weights=False)[0])
    compare(ours, native, inputs, other, is_causal=True)
    compare(ours, native, inputs, other | {"key_padding_mask": hidden(N, L)}, is_causal=True, need_weights=False)


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 3, 0), (1, 1, 1), (70, 130, 2), (600, 33, 1)])
@pytest.mark.parametrize("need_weights", [False, True])
def test_sizes(shape, need_weights):
    queries, keys, batch = shape
    ours, native = pair()
    inputs = [rows(queries, batch=batch), rows(keys, batch=batch)], (0, 1, 1)
    if keys:
        compare(ours, native, inputs, need_weights=need_weights)
        return
    # PyTorch's gradient of the weights it returns is NaN or refused where there is no key.
    mine, theirs = (m(inputs[0][0], inputs[0][1], inputs[0][1], need_weights=False)[0] for m in (ours, native))
    assert_close(mine, theirs, TOLERANCE)
    output, weights = ours(inputs[0][0], inputs[0][1], inputs[0][1], need_weights=True)
    assert_close(output, theirs, TOLERANCE)
    assert weights.shape == (batch, queries, 0)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("how", ["bool", "float"])
def test_a_query_that_sees_no_key(need_weights, how):
    """Output and gradients are those of no key at all, never NaN; as PyTorch's, where it returns no weights."""
    ours, native = pair(batch_first=True)
    x, padding = rows(S, batch_first=True), hidden(N, S)
    padding[1] = True
    if how == "float":
        padding = torch.zeros(N, S, dtype=torch.float64).masked_fill(padding, -torch.inf)
    output, weights = ours(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    grads = torch.autograd.grad(output.square().sum(), [x, *ours.parameters()])
    assert all(grad.isfinite().all() for grad in grads)
    expected, _ = native(x, x, x, key_padding_mask=padding, need_weights=False)
    assert_close(output, expected, TOLERANCE)
    assert_gradients_close(grads, torch.autograd.grad(expected.square().sum(), [x, *native.parameters()]))
    if need_weights:
        assert (weights[1] == 0).all()
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(S, dtype=torch.float64))


@pytest.mark.parametrize("mask", ["none", "attn", "attn of heads", "padding", "both"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_fast_path_of_evaluation_agrees(mask, weights):
    """PyTorch's has kernels of its own there: ours gives what it gives in training."""
    ours, native = pair(batch_first=True, dropout=0.3)
    ours.eval(), native.eval()
    x = rows(L, batch_first=True).detach()
    masks = {
        "attn_mask": lambda: hidden(L, L),
        "attn_mask of heads": lambda: hidden(N * H, L, L),
        "key_padding_mask": lambda: hidden(N, L),
    }
    chosen = {"none": [], "attn": ["attn_mask"], "attn of heads": ["attn_mask of heads"]}
    names = chosen.get(mask, ["key_padding_mask"] if mask == "padding" else ["attn_mask", "key_padding_mask"])
    given = {name.removesuffix(" of heads"): masks[name]() for name in names}
    with torch.no_grad():
        mine, theirs = (module(x, x, x, **given, **WEIGHTS[weights]) for module in (ours, native))
    assert_close(mine[0], theirs[0], TOLERANCE)
    assert (mine[1] is None) == (theirs[1] is None)
    if theirs[1] is not None:
        assert_close(mine[1], theirs[1], TOLERANCE)


def test_the_function_has_all_that_the_module_has_not():
    """static_k and static_v, of other lengths too; weights of their own for keys of the width of queries."""
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    query, key = make(L, N, E), make(S, N, E)
    q, k, v, out = make(E, E), make(E, E), make(E, E), make(E, E)
    bias, out_bias, static_k, static_v = make(3 * E), make(E), make(N * H, S, E // H), make(N * H, S, E // H)
    separate = {"use_separate_proj_weight": True, "q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v}
    start = (query, key, key, E, H, None, bias, None, None)
    for statics, zero, need_weights in itertools.product(range(4), (False, True), (False, True)):
        options = {"static_k": static_k} if statics & 1 else {}
        options |= {"static_v": static_v} if statics & 2 else {}
        options |= {**separate, "need_weights": need_weights, "training": False, "attn_mask": hidden(L, S)}
        mine, theirs = (f(*start, zero, 0.5, out, out_bias, **options) for f in (ours_forward, native_forward))
        assert_close(mine[0], theirs[0], TOLERANCE)
        inputs = [query, bias, out, q, *(options[name] for name in ("static_k", "static_v") if name in options)]
        grads = [torch.autograd.grad(o[0].cos().sum(), inputs) for o in (mine, theirs)]
        assert_gradients_close(*grads)


def test_products_beyond_the_range_of_float16(device):
    """Of 102,400 before they are scaled, and 12,800 after it, as PyTorch scales the query first."""
    query, key = torch.full((1, 1, 64), 40.0), torch.full((2, 1, 64), 40.0)
    one, value = torch.eye(64), torch.arange(128.0).reshape(2, 1, 64) / 128

    def run(function, **to):
        arguments = [t.to(**to).requires_grad_() for t in (query, key, value)]
        weights = {f"{name}_proj_weight": one.to(**to) for name in "qkv"}
        output, shares = function(
            *arguments, 64, 1, None, None, None, None, False, 0.0, one.to(**to), None, use_separate_proj_weight=True,
            **weights,
        )  # fmt: skip
        return output, shares, *torch.autograd.grad(output.sum(), arguments)

    found = run(ours_forward, device=device, dtype=torch.float16)
    for actual, expected in zip(found, run(native_forward, dtype=torch.float64), strict=True):
        assert_close(actual, expected, 2e-3)


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_drops_weights(need_weights):
    """As many as it should, scaled, other ones on each call and the same after a seed; none in evaluation."""
    module = cuda_ops.nn.MultiheadAttention(8, 2, dropout=0.25)
    x = torch.randn(64, 4, 8)
    call = lambda: module(x, x, x, need_weights=need_weights, average_attn_weights=False)  # noqa: E731
    torch.manual_seed(0)
    first, weights = call()
    assert not torch.equal(first, call()[0])
    torch.manual_seed(0)
    assert torch.equal(first, call()[0])
    module.eval()
    exact, probabilities = call()
    assert torch.equal(exact, call()[0]) and not torch.equal(exact, first)
    if need_weights:
        dropped = weights == 0
        assert abs(dropped.double().mean() - 0.25) < 0.02
        torch.testing.assert_close(weights[~dropped], (probabilities / 0.75)[~dropped])
    else:
        module.train()
        mean = torch.stack([call()[0] for _ in range(400)]).mean(0)
        torch.testing.assert_close(mean, exact, atol=0.03, rtol=0)


def test_state_dict_repr_and_construction_are_pytorchs():
    for options in MODULES.values():
        torch.manual_seed(3)
        options = {"embed_dim": E, "num_heads": H, **options}
        ours = cuda_ops.nn.MultiheadAttention(**options)
        torch.manual_seed(3)
        native = torch.nn.MultiheadAttention(**options)
        assert isinstance(ours, torch.nn.MultiheadAttention) and repr(ours) == repr(native)
        states = ours.state_dict(), native.state_dict()
        assert list(states[0]) == list(states[1])
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        for source, target in ((ours, native), (native, ours)):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.uniform_(-1, 1)
            target.load_state_dict(source.state_dict())
            x, k, v = torch.randn(L, N, E), torch.randn(S, N, ours.kdim), torch.randn(S, N, ours.vdim)
            torch.testing.assert_close(ours(x, k, v), native(x, k, v), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies(copied):
    ours, _ = pair(add_bias_kv=True, kdim=5)
    x, k, v = rows(L), rows(S, 5), rows(S)
    other = copied(ours)
    assert type(other) is cuda_ops.nn.MultiheadAttention
    assert torch.equal(other(x, k, v)[0], ours(x, k, v)[0])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_sees_through(backend, need_weights):
    ours, native = pair(batch_first=True, add_zero_attn=True)
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    inputs = [rows(L, batch_first=True)], (0, 0, 0)
    masks = {"attn_mask": causal(), "key_padding_mask": hidden(N, L)}
    compare(compiled, native, inputs, masks, need_weights=need_weights)
    compare(compiled, native, inputs, {"attn_mask": causal()}, is_causal=True, need_weights=need_weights)


@pytest.mark.parametrize("need_weights", [False, True])
def test_functional_call_and_grad(need_weights):
    modules = pair(batch_first=True)
    x, mask = rows(L, batch_first=True).detach(), hidden(L, L)

    def loss(module, state, x):
        output = torch.func.functional_call(module, state, (x, x, x), {"attn_mask": mask, "need_weights": need_weights})
        return output[0].cos().sum()

    results = []
    for module in modules:
        state = {name: parameter.detach() for name, parameter in module.named_parameters()}
        results.append(torch.func.grad(lambda state, m=module: loss(m, state, x))(state))
    assert list(results[0]) == list(results[1])
    assert_gradients_close(results[0].values(), results[1].values())


def test_gradients_of_gradients():
    ours, _ = pair(embed_dim=4, num_heads=2)
    for need_weights in (False, True):

        def function(x, mask, need_weights=need_weights):
            outputs = ours(x, x, x, attn_mask=mask, need_weights=need_weights)
            return tuple(o for o in outputs if o is not None)

        inputs = rows(3, 4, 2), torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_self_attention_is_one_product(monkeypatch):
    """And an encoder's output is projected to keys and values in one."""
    import cuda_ops.ops.multihead_attention as module

    calls = []
    linear = module.linear
    monkeypatch.setattr(module, "linear", lambda *arguments: calls.append(arguments[1].shape[0]) or linear(*arguments))
    ours, _ = pair()
    x, memory, other = rows(L), rows(S), rows(S)
    for arguments, products in (((x, x, x), [36, 12]), ((x, memory, memory), [12, 24, 12])):
        calls.clear()
        ours(*arguments)
        assert calls == products
    calls.clear()
    ours(x, memory, other)
    assert calls == [12, 12, 12, 12]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_on_the_cpu(dtype):
    ours, native = (module.float() for module in pair())
    x = rows(L, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(ours(x, x, x)[0], native(x, x, x)[0], rtol=3e-2, atol=3e-2)
    x = x.to(dtype)
    torch.testing.assert_close(ours.to(dtype)(x, x, x)[0], native.to(dtype)(x, x, x)[0], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_autocast_on_cuda(dtype, need_weights):
    ours, native = (module.float().cuda() for module in pair())
    x, mask = rows(L, dtype=torch.float32).cuda(), torch.randn(L, L, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        mine, theirs = (m(x, x, x, attn_mask=mask, need_weights=need_weights) for m in (ours, native))
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, atol=0.05, rtol=0.05)


def test_nested_tensors_are_refused():
    module = cuda_ops.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(2, 8)])
    with torch.no_grad(), pytest.raises(NotImplementedError, match="expected query to be a dense tensor"):
        module(x, x, x)


WRONG = {
    "four dimensions": (lambda x, m: m(x[None], x, x), AssertionError, "query to have 2 or 3 dimensions"),
    "key without a batch": (lambda x, m: m(x, x[:, 0], x), AssertionError, "key to have the 3 dimensions of query"),
    "another width": (lambda x, m: m(x[..., :6], x, x), AssertionError, "query to have embed_dim, 12"),
    "key and value": (lambda x, m: m(x, x, x[:2]), AssertionError, "value to have the shape of key"),
    "another batch": (lambda x, m: m(x, x[:, :1], x[:, :1]), RuntimeError, "key to have the batch of query, 3, got 1"),
    "a mask's shape": (lambda x, m: m(x, x, x, attn_mask=torch.ones(2, 5)), RuntimeError, r"attn_mask .*\[5, 5\], got"),
    "a mask of heads": (lambda x, m: m(x, x, x, attn_mask=torch.ones(3, 5, 5)), RuntimeError, r"\[12, 5, 5\], got"),
    "a mask's dimensions": (lambda x, m: m(x, x, x, attn_mask=torch.ones(5)), AssertionError, "2 or 3 dimensions"),
    "a mask of integers": (
        lambda x, m: m(x, x, x, attn_mask=torch.ones(5, 5).long()),
        AssertionError,
        "attn_mask to be bool or floating point, got int64",
    ),
    "a padding's shape": (
        lambda x, m: m(x, x, x, key_padding_mask=torch.ones(5, 3) > 0),
        AssertionError,
        r"key_padding_mask to have shape \[3, 5\], got \[5, 3\]",
    ),
    "is_causal alone": (lambda x, m: m(x, x, x, is_causal=True), RuntimeError, "attn_mask to be the causal mask"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_named(wrong):
    """By errors of the classes that PyTorch's are of."""
    call, error, message = WRONG[wrong]
    ours, native = pair()
    x = rows(L).detach()
    with pytest.raises(error, match=f"multi_head_attention_forward: expected .*{message}"):
        call(x, ours)
    with pytest.raises(error):
        call(x, native)


def test_what_only_ours_names():
    ours, _ = pair()
    x = rows(L).detach()
    for call, error, message in (
        (lambda: ours([1.0], x, x), TypeError, "expected query to be a Tensor, got list"),
        (lambda: ours(x, x, x, attn_mask=1.0), TypeError, "expected attn_mask to be a Tensor or None"),
        (lambda: ours(x, x, x, need_weights="no"), TypeError, "expected need_weights to be a bool, got 'no'"),
        (
            lambda: ours(x.float(), x.float(), x.float()),
            RuntimeError,
            "linear: expected weight to have the dtype of input",
        ),
        (
            lambda: ours.float()(x.float(), x.float(), x.float(), attn_mask=torch.ones(L, L).half()),
            RuntimeError,
            "expected masks to be bool, float32 or of the dtype of query, float32, got float16",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    "options",
    [{"embed_dim": 0, "num_heads": 1}, {"embed_dim": 4, "num_heads": 3}, {"embed_dim": 4, "num_heads": -1}],
)
def test_the_constructor_refuses_what_pytorchs_does(options):
    errors = []
    for kind in (cuda_ops.nn.MultiheadAttention, torch.nn.MultiheadAttention):
        with pytest.raises((ValueError, AssertionError)) as caught:
            kind(**options)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]
