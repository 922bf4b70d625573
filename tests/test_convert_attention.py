"""cuda_ops.convert: calls of scaled_dot_product_attention in forwards that torch.fx cannot trace."""

import copy
import functools
import pickle

import pytest
import torch
from support.conversion import assert_converts, classes, train
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import cuda_ops
from cuda_ops.conversion import attention
from cuda_ops.conversion.layers import native_class

nn = torch.nn
F = torch.nn.functional


class Attention(nn.Module):
    """Its forward asks for sizes, which torch.fx has none of."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(12, 36), nn.Linear(12, 12), dropout

    def heads(self, x):
        batch, length, _ = x.shape
        return [part.view(batch, length, 3, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x, mask=None):
        return self.out(self.attend(*self.heads(x), mask).transpose(1, 2).flatten(2))


class ByAlias(Attention):
    def attend(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


class ByPath(Attention):
    def attend(self, q, k, v, mask):
        return torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask)


class ByPackage(Attention):
    def attend(self, q, k, v, mask):
        p = self.dropout if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(q, k, v, mask, p, scale=0.3)


class ByName(Attention):
    def attend(self, q, k, v, mask):
        return scaled_dot_product_attention(q, k, v, mask)


def attend_with_help(q, k, v, mask, depth=1):
    if depth:
        return attend_with_help(q, k, v, mask, depth - 1)  # it calls itself
    return F.scaled_dot_product_attention(q, k, v, mask)


class ByHelper(Attention):
    def attend(self, q, k, v, mask):
        return attend_with_help(q, k, v, mask)


def logged(function):
    count = 0

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal count
        count += 1
        return function(*args, **kwargs)

    call.count = lambda: count
    return call


class Decorated(Attention):
    @logged
    def forward(self, x, mask=None):
        q, k, v = self.heads(x)
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).flatten(2))


class InCheckpoint(Attention):
    def attend(self, q, k, v, mask):
        return checkpoint(lambda *tensors: F.scaled_dot_product_attention(*tensors, mask), q, k, v, use_reentrant=False)


class Inherited(ByHelper):
    """Has the method, and super(), of another class."""

    def forward(self, x, mask=None):
        return super().forward(x, mask) * 2


WAYS = [ByAlias, ByPath, ByPackage, ByName, ByHelper, Decorated, InCheckpoint, Inherited]


def make(kind):
    torch.manual_seed(0)
    return kind().double()


def sequences():
    return torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def masks():
    generator = torch.Generator().manual_seed(1)
    seen = torch.rand(2, 1, 5, 5, generator=generator) > 0.4
    scores = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    lowest = torch.zeros(2, 1, 5, 5, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    return {"none": None, "bool": seen, "additive": scores, "lowest": lowest}


@pytest.fixture
def calls(monkeypatch):
    """The arguments of our attention's calls."""
    found, function = [], cuda_ops.functional.scaled_dot_product_attention
    monkeypatch.setattr(cuda_ops.functional, "scaled_dot_product_attention", lambda *a: found.append(a) or function(*a))
    return found


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("kind", WAYS, ids=lambda kind: kind.__name__)
def test_attention_is_ours_in_whatever_way_it_is_called(kind, mask, calls):
    report = assert_converts(make(kind), (sequences(), masks()[mask]), ["scaled_dot_product_attention"])
    (fusion,) = [fusion for fusion in report.fusions if fusion.op == "scaled_dot_product_attention"]
    assert (fusion.module, fusion.parts) == ("", ("scaled_dot_product_attention()",))
    assert len(calls) == (7 if kind is InCheckpoint else 4)  # three steps, in which it is called again, and one without


@pytest.mark.parametrize("kind", WAYS, ids=lambda kind: kind.__name__)
def test_other_models_of_the_class_and_reverted_ones_are_pytorchs(kind, calls):
    ours, native = make(kind), make(kind)
    spaces = [dict(vars(module)) for module in ours.modules()]
    cuda_ops.convert(ours)
    native(sequences())
    assert not calls
    ours(sequences())
    assert len(calls) == 1
    cuda_ops.revert(ours)
    ours(sequences())
    assert len(calls) == 1 and classes(ours) == classes(native)
    assert [vars(module).keys() for module in ours.modules()] == [space.keys() for space in spaces]
    assert F.scaled_dot_product_attention is attention.NATIVE and scaled_dot_product_attention is attention.NATIVE


@pytest.mark.parametrize("kind", WAYS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_call_our_attention(kind, copied, calls):
    model = make(kind)
    cuda_ops.convert(model)
    twin = copied(model)
    assert classes(twin) == classes(model) and native_class(twin) is kind
    torch.testing.assert_close(train(twin, (sequences(),)), train(make(kind), (sequences(),)))
    assert calls


@pytest.mark.parametrize("kind", [k for k in WAYS if k is not Decorated], ids=lambda kind: kind.__name__)
def test_compiled_and_exported_attention_is_ours(kind):
    model = make(kind).eval()
    expected = model(sequences())
    cuda_ops.convert(model)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(sequences()), expected)
    if kind is not InCheckpoint:
        program = torch.export.export(model, (sequences(),))
        assert "cuda_ops.attention_forward" in str(program.graph)
        torch.testing.assert_close(program.module()(sequences()), expected)


def test_a_compiled_attention_takes_lengths_of_any_size():
    torch._dynamo.reset()  # the other tests' compilations of this forward count towards the limit of recompilations
    model, native = make(ByAlias), make(ByAlias)
    cuda_ops.convert(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (5, 3, 1):
        x = sequences()[:, :length]
        torch.testing.assert_close(compiled(x), native(x))


def test_decorators_go_on_to_do_what_they_did():
    """The wrapper's own variables are those of all models, and stay one."""
    model = make(Decorated)
    cuda_ops.convert(model)
    before = Decorated.forward.count()
    model(sequences()), make(Decorated)(sequences())
    assert Decorated.forward.count() == type(model).forward.count() == before + 2


def test_helpers_that_are_others_by_the_next_conversion(monkeypatch):
    model = make(ByHelper)
    cuda_ops.convert(model)
    twice = lambda q, k, v, mask: 2 * F.scaled_dot_product_attention(q, k, v)  # noqa: E731
    monkeypatch.setitem(globals(), "attend_with_help", twice)
    cuda_ops.convert(model)
    torch.testing.assert_close(model(sequences()), make(ByHelper)(sequences()))


def test_what_our_attention_does_not_take_is_pytorchs(calls):
    model = make(ByName)
    cuda_ops.convert(model)

    class Tagged(torch.Tensor):
        pass

    tagged = sequences().as_subclass(Tagged)
    assert type(model(tagged)) is Tagged
    assert not calls
    torch.testing.assert_close(model(tagged).as_subclass(torch.Tensor), make(ByName)(sequences()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_halves_and_under_autocast(dtype, calls):
    """As exact as PyTorch's own."""
    ours, native, exact = make(ByAlias).float(), make(ByAlias).float(), make(ByAlias)
    cuda_ops.convert(ours)
    x = sequences().float()

    def check(*outputs):
        assert {output.dtype for output in outputs} == {dtype}
        error, theirs = ((output.double() - exact(x.double())).norm() for output in outputs)
        assert error <= 2 * theirs

    with torch.autocast("cpu", dtype):
        check(ours(x), native(x))
    check(ours.to(dtype)(x.to(dtype)), native.to(dtype)(x.to(dtype)))
    assert len(calls) == 2


def test_dropout_is_of_training_alone(calls):
    model = ByPackage(dropout=0.25)
    cuda_ops.convert(model)
    x = sequences().float()
    torch.manual_seed(0)
    first = model(x)
    torch.manual_seed(0)
    assert torch.equal(model(x), first) and not torch.equal(model(x), first)
    model.eval()
    assert torch.equal(model(x), model(x))
    assert [call[4] for call in calls] == [0.25, 0.25, 0.25, 0.0, 0.0]


class Traced(nn.Module):
    """torch.fx can see through this one."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(query=q, key=k, value=v).relu()


def test_attention_in_a_traced_forward(calls):
    model, tensors = Traced(), [torch.rand(2, 3, 4, 5) for _ in range(3)]
    report = cuda_ops.convert(model)
    assert [fusion.op for fusion in report.fusions] == ["scaled_dot_product_attention", "relu"]
    torch.testing.assert_close(model(*tensors), Traced()(*tensors))
    torch.testing.assert_close(model(q=tensors[0], k=tensors[1], v=tensors[2]), Traced()(*tensors))
    assert len(calls) == 2  # by the trace, and where the call is not as the trace had it


class TwoMeanings(Attention):
    """F is an attribute too, by the same name in its code."""

    def attend(self, q, k, v, mask):
        self.F = F.scaled_dot_product_attention(q, k, v, mask)
        return self.F


class OfBase(Decorated):
    def forward(self, x, mask=None):
        return super().forward(x, mask)


def test_a_call_by_super_is_left_and_named(calls):
    model = make(OfBase)
    report = cuda_ops.convert(model)
    assert [(layer.name, layer.reason) for layer in report.left] == [
        ("", "its attention is that of a base class, called by super()")
    ]
    torch.testing.assert_close(model(sequences()), make(OfBase)(sequences()))
    assert not calls


def test_a_name_of_two_meanings_is_left(calls):
    model = make(TwoMeanings)
    report = cuda_ops.convert(model)
    assert not report.fusions
    torch.testing.assert_close(model(sequences()), make(TwoMeanings)(sequences()))
    assert not calls
