"""cuda_ops.optim.Muon beside torch.optim.Muon and beside its iteration in float64: steps, state, refusals."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.opspec import assert_close
from support.sgd_cases import parameters, set_grads

import cuda_ops

Muon = cuda_ops.optim.Muon
needs_native = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")

# Two alike, their transposed, a square one, a row, a column, a single number, and one that is alone.
SHAPES = [(12, 30), (12, 30), (30, 12), (30, 12), (16, 16), (1, 7), (7, 1), (1, 1), (48, 16)]
# By how much the iteration in bfloat16 may differ from itself with roundings in other places: a step multiplies errors
# of small singular values, as it does these. Of one step, singular values of 1 lose most, those of a row or a single
# number: 3.44 - 4.78 + 2.03 is 0.70, and roundings of the square's square, of the polynomial, of its product, of the
# sum and of the gram matrix are up to (2.03 + 2.74 + 2.74 + 0.70 + 0.71) * 2^-9, on either side: 0.05 of it.
ROUNDING = {1: 0.05, 3: 0.03, 5: 0.08}


def changes(before, after):
    """Of all parameters together: small singular values leave single elements with few digits."""
    return torch.cat([(a.detach().double() - b.double()).cpu().reshape(-1) for b, a in zip(before, after, strict=True)])


def values(params):
    return [p.detach().clone() for p in params]


def orthogonal(update, coefficients, steps, eps):
    """The iteration in float64."""
    a, b, c = coefficients
    tall = len(update) > update.shape[1]
    x = update.double().cpu()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


@needs_native
@settings(max_examples=25, deadline=None)
@given(
    lr=st.sampled_from([0.0, 1e-3, 0.5]),
    weight_decay=st.sampled_from([0.0, 0.1, 1.0]),
    momentum=st.sampled_from([0.0, 0.5, 0.95]),
    nesterov=st.booleans(),
    ns_steps=st.sampled_from([1, 5]),
    adjust_lr_fn=st.sampled_from([None, "original", "match_rms_adamw"]),
    missing=st.lists(st.sets(st.integers(0, len(SHAPES) - 1), max_size=4), min_size=1, max_size=3),
)
@example(  # rows, columns and single numbers weigh most: 0.011
    lr=1e-3,
    weight_decay=0.0,
    momentum=0.5,
    nesterov=False,
    ns_steps=1,
    adjust_lr_fn=None,
    missing=[set(), {0, 1, 2, 3}],
)
def test_steps_are_those_of_pytorch(missing, **options):
    """Each from the same values and buffers, so that rounding does not add up."""
    mine = parameters(SHAPES, dtype=torch.float32)
    ours = Muon(mine, **options)
    for step, without in enumerate(missing):
        theirs = [torch.nn.Parameter(p.detach().clone()) for p in mine]
        native = torch.optim.Muon(theirs, **options)
        native.load_state_dict(copy.deepcopy(ours.state_dict()))
        set_grads(mine, step + 1, without)
        set_grads(theirs, step + 1, without)
        before = values(mine)
        ours.step()
        native.step()
        assert_close(changes(before, mine), changes(before, theirs), ROUNDING[options["ns_steps"]])
        states = ours.state_dict()["state"], native.state_dict()["state"]
        assert states[0].keys() == states[1].keys()
        for i, state in states[1].items():
            assert_close(states[0][i]["momentum_buffer"], state["momentum_buffer"].double(), 1e-6)


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_step_is_that_of_float64(device, dtype, adjust_lr_fn):
    coefficients, momentum, lr = (3.0, -3.2, 1.2), 0.9, 0.5
    params = parameters(SHAPES, device=device, dtype=dtype)
    options = {"momentum": momentum, "ns_coefficients": coefficients, "ns_steps": 3, "weight_decay": 0.2}
    ours = Muon(params, lr=lr, adjust_lr_fn=adjust_lr_fn, **options)
    set_grads(params, 1)
    before, grads = values(params), [p.grad.clone() for p in params]
    ours.step()
    expected = []
    for p, grad in zip(before, grads, strict=True):
        buffer = (1 - momentum) * grad.double().cpu()
        update = (1 - momentum) * grad.double().cpu() + momentum * buffer
        rows, columns = p.shape
        factor = 0.2 * math.sqrt(max(rows, columns)) if adjust_lr_fn else math.sqrt(max(1, rows / columns))
        step = orthogonal(update, coefficients, 3, 1e-7)
        expected.append(p.double().cpu() * (1 - lr * 0.2) - lr * factor * step)
    assert_close(changes(before, params), changes(before, [e.to(device) for e in expected]), ROUNDING[3])
    for p, grad in zip(params, grads, strict=True):
        assert torch.equal(p.grad, grad), "a gradient was changed"


def test_matrices_of_a_parameter_are_as_many_parameters(device):
    """Queries, keys and values of one weight."""
    whole = parameters([(48, 16), (48, 16)], device=device, dtype=torch.float32)
    parts = [torch.nn.Parameter(part.detach().clone()) for p in whole for part in p.chunk(3)]
    options = {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    ours, others = Muon(whole, matrices=3, **options), Muon(parts, **options)
    for step in range(3):
        set_grads(whole, step)
        for part, grad in zip(parts, [grad for p in whole for grad in p.grad.chunk(3)], strict=True):
            part.grad = grad.clone()
        ours.step()
        others.step()
    for i, p in enumerate(whole):
        assert torch.equal(p, torch.cat(parts[3 * i : 3 * i + 3]))
    # Not cut: another step.
    params = parameters([(48, 16)], device=device, dtype=torch.float32)
    set_grads(params, 0)
    before = values(params)
    Muon(params, **options).step()
    again = [torch.nn.Parameter(before[0].clone())]
    set_grads(again, 0)
    Muon(again, matrices=3, **options).step()
    assert (changes(before, params) - changes(before, again)).norm() > 0.1 * changes(before, params).norm()


def test_matrices_are_an_option_of_a_group(device):
    first, second = parameters([(48, 16)], device=device), parameters([(30, 12)], device=device)
    optimizer = Muon([{"params": first, "matrices": 3}, {"params": second}])
    set_grads([*first, *second], 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    assert [group.get("matrices") for group in state["param_groups"]] == [3, None]
    again = Muon([{"params": first}, {"params": second, "matrices": 2}])
    again.load_state_dict(state)
    assert [group.get("matrices") for group in again.param_groups] == [None, 2]


@needs_native
@pytest.mark.parametrize("direction", ["ours to native", "native to ours"])
def test_state_dict_changes_hands(device, direction):
    options = {"lr": 0.1, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"}
    kinds = (Muon, torch.optim.Muon) if direction == "ours to native" else (torch.optim.Muon, Muon)
    params = parameters(SHAPES, device=device, dtype=torch.float32)
    first = kinds[0](params, **options)
    set_grads(params, 1)
    first.step()
    state = copy.deepcopy(first.state_dict())
    second = kinds[1](params, lr=123.0)
    assert state["param_groups"][0].keys() == second.state_dict()["param_groups"][0].keys()
    second.load_state_dict(state)
    assert second.state_dict()["param_groups"] == state["param_groups"]
    before = values(params)
    set_grads(params, 2)
    second.step()
    after = values(params)
    for p, value in zip(params, before, strict=True):
        p.data.copy_(value)
    first.step()
    assert_close(changes(before, after), changes(before, params), ROUNDING[5])


def test_rate_in_a_tensor(device):
    """It is read where it is; a copy of the optimizer goes on."""
    mine, theirs = (parameters(SHAPES, device=device, dtype=torch.float32) for _ in range(2))
    rate = torch.tensor(0.1, device=device)
    ours, other = Muon(mine, lr=rate, weight_decay=0.5), Muon(theirs, lr=0.1, weight_decay=0.5)
    for step in range(3):
        set_grads(mine, step)
        set_grads(theirs, step)
        rate.fill_(0.1 * (step + 1))
        other.param_groups[0]["lr"] = 0.1 * (step + 1)
        ours.step()
        other.step()
        ours.param_groups[0]["lr"] = rate
    for p, expected in zip(mine, theirs, strict=True):
        assert_close(p.detach(), expected.detach().double(), 1e-5)
    again = pickle.loads(pickle.dumps(other))
    assert again.param_groups[0]["lr"] == 0.1 * 3


def test_strides(device):
    """Of parameter, gradient and buffer."""
    plain = parameters([(12, 30), (30, 12)], device=device, dtype=torch.float32)
    strange = [torch.nn.Parameter(p.detach().T.contiguous().T) for p in plain]
    for params in (plain, strange):
        optimizer = Muon(params, lr=0.1)
        for step in range(2):
            set_grads(params, step)
            if params is strange:
                for p in params:
                    p.grad = p.grad.T.contiguous().T
            optimizer.step()
    assert not strange[0].is_contiguous()
    for p, expected in zip(strange, plain, strict=True):
        assert_close(p.detach(), expected.detach().double(), 1e-6)


def test_closure_and_gradients_that_are_missing():
    params = parameters([(3, 4), (3, 4)])
    optimizer = Muon(params)
    before = values(params)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}

    def closure():
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss == before[0].square().sum()
    assert not torch.equal(params[0], before[0])
    assert torch.equal(params[1], before[1])


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_parameters_without_elements(shape, adjust_lr_fn, device):
    """PyTorch divides by their columns."""
    params = parameters([shape, (3, 4)], device=device)
    before = values(params)
    set_grads(params, 0)
    Muon(params, adjust_lr_fn=adjust_lr_fn).step()
    assert params[0].shape == shape and not torch.equal(params[1], before[1])


def test_a_gradient_of_zeros_is_no_step(device):
    params = parameters([(3, 4)], device=device)
    before = values(params)
    params[0].grad = torch.zeros_like(params[0])
    Muon(params, weight_decay=0.0).step()
    assert torch.equal(params[0], before[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr to be at least 0, got -1.0"),
        ({"lr": torch.ones(2)}, r"lr to have one element, got shape \[2\]"),
        ({"momentum": -0.1}, "momentum to be at least 0, got -0.1"),
        ({"weight_decay": float("nan")}, "weight_decay to be at least 0, got nan"),
        ({"ns_steps": 100}, "ns_steps to be from 0 to 99, got 100"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients to be 3 numbers"),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn to be one of None, 'original', 'match_rms_adamw', got 'other'"),
        ({"matrices": 0}, "matrices to be at least 1, got 0"),
        ({"matrices": 5}, "matrices to divide the rows of a parameter, 12, got 5"),
    ],
    ids=str,
)
def test_values_that_are_refused(options, message):
    with pytest.raises(ValueError, match=f"Muon: expected {message}"):
        Muon(parameters([(12, 30)]), **options)
    if "lr" not in options:
        with pytest.raises(ValueError, match=f"Muon: expected {message}"):
            Muon([{"params": parameters([(12, 30)]), **options}])


def test_parameters_that_are_refused():
    with pytest.raises(ValueError, match=r"Muon: expected parameters of 2 dimensions, got shape \[3\]"):
        Muon(parameters([(3,)]))
    optimizer = Muon(parameters([(3, 4)]))
    with pytest.raises(ValueError, match=r"Muon: expected parameters of 2 dimensions, got shape \[2, 3, 4\]"):
        optimizer.add_param_group({"params": parameters([(2, 3, 4)])})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(RuntimeError, match="Muon: complex parameters are not supported"):
        Muon([torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64))])
    with pytest.raises(TypeError, match="Muon: expected momentum to be a number, got '1'"):
        Muon(parameters([(3, 4)]), momentum="1")
    sparse = parameters([(3, 4)])
    sparse[0].grad = torch.zeros(3, 4, dtype=torch.float64).to_sparse()
    with pytest.raises(NotImplementedError, match="Muon: expected dense gradients"):
        Muon(sparse).step()


@pytest.mark.cuda
def test_a_graph_follows_rate_and_gradients():
    rate = torch.tensor(0.1, device="cuda")
    mine, theirs = (parameters(SHAPES, device="cuda", dtype=torch.float32) for _ in range(2))
    ours, other = Muon(mine, lr=rate), Muon(theirs, lr=0.1)
    for params in (mine, theirs):
        set_grads(params, 0)
    ours.step()
    other.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for step in range(1, 4):
        for params in (mine, theirs):
            for p, grad in zip(params, parameters(SHAPES, step, "cuda", torch.float32), strict=True):
                p.grad.copy_(grad.detach())
        rate.fill_(0.1 / step)
        other.param_groups[0]["lr"] = 0.1 / step
        graph.replay()
        other.step()
    for p, expected in zip(mine, theirs, strict=True):
        assert_close(p.detach(), expected.detach().double(), 1e-5)


@pytest.mark.cuda
def test_no_state_is_made_in_a_capture():
    params = parameters([(12, 30)], device="cuda", dtype=torch.float32)
    set_grads(params, 0)
    optimizer = Muon(params)
    message = "Muon: expected every parameter to have its state"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_compiled_step():
    mine, theirs = (parameters([(12, 30), (30, 12)], dtype=torch.float32) for _ in range(2))
    ours, other = Muon(mine, lr=0.1), Muon(theirs, lr=0.1)
    compiled, before = torch.compile(ours.step, backend="eager"), values(mine)
    for step in range(3):
        set_grads(mine, step)
        set_grads(theirs, step)
        compiled()
        other.step()
    assert_close(changes(before, mine), changes(before, theirs), ROUNDING[5])
