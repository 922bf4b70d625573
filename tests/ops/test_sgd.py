"""cuda_ops.optim.SGD beside torch.optim.SGD: values, state, layouts, lists of parameters of every kind, refusals."""

import copy
import pickle

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.opspec import RELATIVE_NORM, assert_close
from support.sgd_cases import SHAPES, assert_same_run, buffers, parameters, random_tensors, set_grads
from torch.optim.optimizer import register_optimizer_step_post_hook

import cuda_ops

SGD = cuda_ops.optim.SGD

OPTIONS = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.2},
    {"lr": 0.1, "maximize": True},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.2, "maximize": True},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.2, "maximize": True},
]


def named(options):
    return "-".join(f"{key}={value}" for key, value in options.items())


all_options = pytest.mark.parametrize("options", OPTIONS, ids=named)


@settings(max_examples=60, deadline=None)
@given(
    lr=st.sampled_from([0.0, 1e-3, 0.5]),
    momentum=st.sampled_from([0, 0.0, 0.5, 0.99, 1]),
    dampening=st.sampled_from([0, 0.3, 1.0]),
    weight_decay=st.sampled_from([0, 0.01, 1]),
    nesterov=st.booleans(),
    maximize=st.booleans(),
    missing=st.lists(st.sets(st.integers(0, len(SHAPES) - 1), max_size=4), min_size=1, max_size=5),
)
def test_run_is_that_of_pytorch(missing, **options):
    """Runs of float64 with any options; parameters go without a gradient now and then."""
    if options["nesterov"]:
        options["dampening"], options["momentum"] = 0, options["momentum"] or 0.9
    mine, theirs = parameters(), parameters()
    ours, native = SGD(mine, **options), torch.optim.SGD(theirs, **options)
    for step, without in enumerate(missing):
        set_grads(mine, step + 1, without)
        set_grads(theirs, step + 1, without)
        ours.step()
        native.step()
        assert_same_run(ours, native)


@all_options
def test_each_step_in_every_dtype(device_dtype, options):
    """Three steps, each against a float64 step from the same values, so that rounding does not add up."""
    device, dtype = device_dtype
    params = parameters(device=device, dtype=dtype)
    ours = SGD(params, **options)
    for step in range(3):
        set_grads(params, step + 1, missing={2} if step == 0 else ())
        reference = [torch.nn.Parameter(p.detach().cpu().double().clone()) for p in params]
        for r, p in zip(reference, params, strict=True):
            r.grad = None if p.grad is None else p.grad.cpu().double().clone()
        native = torch.optim.SGD(reference, **options)
        native.load_state_dict(copy.deepcopy(ours.state_dict()))
        grads = [None if p.grad is None else p.grad.clone() for p in params]
        ours.step()
        native.step()
        assert_same_run(ours, native, RELATIVE_NORM[dtype])
        for p, grad in zip(params, grads, strict=True):
            assert grad is None or torch.equal(p.grad, grad), "a gradient was changed"


@all_options
@pytest.mark.parametrize("direction", ["ours to native", "native to ours"])
def test_state_dict_changes_hands_in_the_middle_of_a_run(device, direction, options):
    """Two steps with one, two with the other from its state_dict, against four steps with PyTorch's."""
    kinds = (SGD, torch.optim.SGD) if direction == "ours to native" else (torch.optim.SGD, SGD)
    params, expected = parameters(device=device), parameters(device=device)
    reference = torch.optim.SGD(expected, **options)
    optimizer = kinds[0](params, **options)
    for step in range(4):
        if step == 2:
            state = copy.deepcopy(optimizer.state_dict())
            assert state.keys() == reference.state_dict().keys()
            assert state["param_groups"] == reference.state_dict()["param_groups"]
            optimizer = kinds[1](params, lr=123.0)
            optimizer.load_state_dict(state)
        set_grads(params, step)
        set_grads(expected, step)
        optimizer.step()
        reference.step()
    assert_same_run(optimizer, reference)


def layouts_of(tensor):
    """The tensor's values under other strides: transposed, channels_last, with gaps, off by one element."""
    yield tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if tensor.dim() == 4:
        yield tensor.contiguous(memory_format=torch.channels_last)
    wide = torch.full(
        (*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"), device=tensor.device, dtype=tensor.dtype
    )
    wide[..., ::2] = tensor
    yield wide[..., ::2]
    buffer = torch.full((tensor.numel() + 1,), float("nan"), device=tensor.device, dtype=tensor.dtype)
    buffer[1:] = tensor.reshape(-1)
    yield buffer[1:].view(tensor.shape)


@pytest.mark.parametrize("shape", [(3, 5), (4, 3, 2, 5), (4, 1, 3, 3), (60, 70)])
@pytest.mark.parametrize("which", ["param", "grad", "buffer", "all"])
def test_layouts(device, shape, which):
    """Strides of parameter, gradient and buffer that differ from one another's, in every mix."""
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    value, grad, buffer = random_tensors([shape] * 3, 0, device)
    for other in range(len(list(layouts_of(value)))):
        param = torch.nn.Parameter(list(layouts_of(value))[other] if which in ("param", "all") else value.clone())
        param.grad = list(layouts_of(grad))[other] if which in ("grad", "all") else grad.clone()
        momentum = list(layouts_of(buffer))[other] if which in ("buffer", "all") else buffer.clone()
        expected = torch.nn.Parameter(value.clone())
        expected.grad = grad.clone()
        ours, native = SGD([param], **options), torch.optim.SGD([expected], **options)
        ours.state[param]["momentum_buffer"] = momentum
        native.state[expected]["momentum_buffer"] = buffer.clone()
        strides = param.stride(), momentum.stride()
        ours.step()
        native.step()
        assert (param.stride(), momentum.stride()) == strides
        assert ours.state[param]["momentum_buffer"] is momentum, "buffers are updated in place"
        assert_same_run(ours, native)


def test_first_buffer_is_a_copy_of_the_gradient():
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.tensor([1.0, 2.0, 3.0])
    optimizer = SGD([param], lr=0.0, momentum=0.9, dampening=0.5)
    optimizer.step()
    buffer = optimizer.state[param]["momentum_buffer"]
    assert torch.equal(buffer, param.grad), "not damped"
    assert buffer.data_ptr() != param.grad.data_ptr()


def test_no_state_without_momentum():
    params = parameters()
    set_grads(params, 1)
    optimizer = SGD(params, lr=0.1)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}


def test_nonfinite_values_travel_as_in_pytorch(device):
    values = [float("nan"), float("inf"), -float("inf"), 0.0, 1.0]
    for options in OPTIONS:
        mine, theirs = (torch.nn.Parameter(torch.tensor(values, device=device).repeat(5)) for _ in range(2))
        ours, native = SGD([mine], **options), torch.optim.SGD([theirs], **options)
        for _ in range(2):
            for p, optimizer in ((mine, ours), (theirs, native)):
                p.grad = torch.tensor(values, device=device).repeat_interleave(5)
                optimizer.step()
        assert_close(mine.detach(), theirs.detach().double(), 1e-6)


def test_groups_and_a_group_that_comes_later(device):
    runs = []
    for kind in (SGD, torch.optim.SGD):
        a, b, c = parameters([(3,), (4, 5), (2,)], device=device)
        optimizer = kind([{"params": [a]}, {"params": [b], "lr": 0.01, "momentum": 0.5, "nesterov": True}], lr=0.1)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [c], "weight_decay": 0.3, "maximize": True})
            set_grads([a, b, c], step)
            optimizer.step()
        runs.append(optimizer)
    assert_same_run(*runs)


def test_mixed_dtypes_in_one_group(device):
    runs = []
    for kind in (SGD, torch.optim.SGD):
        params = parameters([(3,), (2, 2)], 0, device, torch.float32) + parameters([(5,), (0,)], 1, device)
        optimizer = kind(params, lr=0.1, momentum=0.9)
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
        runs.append(optimizer)
    assert_same_run(*runs, 1e-6)


def test_closure_and_zero_grad():
    param = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = SGD([param], lr=0.25)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4
    assert param.item() == 1
    optimizer.zero_grad()
    assert param.grad is None
    assert optimizer.step() is None
    assert param.item() == 1


def test_named_parameters_schedulers_hooks_and_pickle():
    model = torch.nn.Linear(3, 2)
    optimizer = SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert seen == [1]
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    native = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    assert repr(optimizer).splitlines()[0] == repr(native).splitlines()[0]


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lr_may_be_a_tensor(device, shape, dtype):
    for where in {"cpu", device}:
        lr = torch.full(shape, 0.125, dtype=dtype, device=where)
        mine, theirs = parameters(device=device), parameters(device=device)
        ours, native = SGD(mine, lr=lr, momentum=0.9), torch.optim.SGD(theirs, lr=0.125, momentum=0.9)
        for step in range(2):
            set_grads(mine, step)
            set_grads(theirs, step)
            ours.step()
            native.step()
        assert_same_run(ours, native)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("fused", [None, False])
def test_choices_of_implementation_are_kept_and_change_nothing(foreach, fused):
    mine, theirs = parameters(), parameters()
    ours, native = SGD(mine, foreach=foreach, fused=fused), torch.optim.SGD(theirs)
    set_grads(mine, 1)
    set_grads(theirs, 1)
    ours.step()
    native.step()
    assert_same_run(ours, native)
    assert ours.state_dict()["param_groups"][0]["foreach"] is foreach


def test_fused_leaves_gradient_scaling_to_the_scaler():
    optimizer = SGD(parameters(), fused=True)
    assert not optimizer._step_supports_amp_scaling
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer._step_supports_amp_scaling
    with pytest.raises(RuntimeError, match="cannot be `True` together"):
        SGD(parameters(), fused=True, foreach=True)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"momentum": -0.1},
        {"weight_decay": -0.1},
        {"nesterov": True},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        {"lr": torch.ones(2)},
    ],
    ids=named,
)
def test_values_that_pytorch_refuses(options):
    with pytest.raises(ValueError) as native:
        torch.optim.SGD(parameters(), **options)
    with pytest.raises(ValueError) as ours:
        SGD(parameters(), **options)
    assert str(ours.value) == str(native.value)


def test_what_is_not_supported_is_refused_by_name():
    message = "SGD: differentiable=True is not supported"
    with pytest.raises(NotImplementedError, match=message):
        SGD(parameters(), differentiable=True)
    with pytest.raises(NotImplementedError, match=message):
        SGD([{"params": parameters(), "differentiable": True}])
    with pytest.raises(NotImplementedError, match=message):
        SGD(parameters()).load_state_dict(torch.optim.SGD(parameters(), differentiable=True).state_dict())
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        NotImplementedError, match=r"SGD: expected dense gradients, got one of layout torch\.sparse_coo"
    ):
        SGD(embedding.parameters()).step()


def test_a_refused_step_leaves_no_state():
    for dtype in (torch.complex64, torch.complex128):
        params = parameters([(3,)], dtype=dtype)
        set_grads(params, 1)
        optimizer = SGD(params, momentum=0.9)
        with pytest.raises(RuntimeError, match="sgd: expected params to be floating point, got complex"):
            optimizer.step()
        assert optimizer.state_dict()["state"] == {}


def test_backward_through_values_from_before_the_step_is_refused():
    param = torch.nn.Parameter(torch.ones(3))
    loss = (param**2).sum()
    param.grad = torch.ones(3)
    SGD([param], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_sharded_parameters():
    """FSDP2 over one process: parameters, gradients and buffers are DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)).double()
        sharded = torch.nn.Sequential(cuda_ops.nn.Linear(4, 8), cuda_ops.nn.Linear(8, 2)).double()
        sharded.load_state_dict(plain.state_dict())
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        ours = SGD(sharded.parameters(), lr=0.1, momentum=0.9)
        native = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            for model, optimizer in ((sharded, ours), (plain, native)):
                optimizer.zero_grad()
                model(torch.ones(3, 4, dtype=torch.float64)).square().sum().backward()
                optimizer.step()
        for p, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert isinstance(ours.state[p]["momentum_buffer"], DTensor)
            assert_close(p.detach().full_tensor(), expected.detach(), 1e-12)
    finally:
        torch.distributed.destroy_process_group()


def call_op(device="cpu", *, first=None, device_lr=None, momentum=0.9, shapes=((3,), (2, 2), (0,)), **replaced):
    lists = {
        "params": random_tensors(shapes, 1, device),
        "grads": random_tensors(shapes, 2, device),
        "momentum_buffers": random_tensors(shapes, 3, device) if momentum else [],
        **replaced,
    }
    first = [False] * len(lists["momentum_buffers"]) if first is None else first
    return *lists.values(), first, device_lr, 0.1, momentum, 0.0, 0.1, False, False


def test_negative_views():
    """Without momentum, where the optimizer's op looks for the gradients itself."""
    whole = torch.tensor([1 + 2j, 3 - 4j])
    param = whole.conj().imag.requires_grad_()  # its memory holds 2 and -4
    assert param.is_neg()
    param.grad = torch.tensor([1.0, 2.0])
    SGD([param], lr=0.5).step()
    assert param.tolist() == [-2.5, 3.0]
    assert whole.imag.tolist() == [2.5, -3.0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_negative_views_as_gradients(momentum):
    """Of a parameter that is none itself: its memory holds the negative of each value."""
    runs = []
    for optimizer, negative in ((SGD, True), (torch.optim.SGD, False)):
        param = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        optimizer = optimizer([param], lr=0.5, momentum=momentum)
        for step in (1.0, 2.0):
            values = step * torch.tensor([1.0, -2.0, 4.0])
            param.grad = torch._neg_view(-values) if negative else values
            assert param.grad.is_neg() == negative
            optimizer.step()
        runs.append((param.detach(), optimizer.state[param].get("momentum_buffer")))
    torch.testing.assert_close(*runs)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str)
def test_what_a_step_writes_tells_autograd_that_it_changed(options, device):
    params = parameters([(3,), (4, 2)], device=device)
    optimizer = SGD(params, lr=0.1, **options)
    set_grads(params, 1)
    optimizer.step()
    written = [*params, *(b for b in buffers(optimizer).values() if b is not None)]
    assert len(written) == len(params) * (2 if options else 1)
    before = [tensor._version for tensor in written]
    optimizer.step()
    assert all(tensor._version > version for tensor, version in zip(written, before, strict=True))


def test_opcheck(device):
    calls = [call_op(device), call_op(device, momentum=0.0), call_op(device, first=[True, False, True])]
    strided = [t.t() for t in random_tensors([(5, 3)], 2, device)]
    calls.append(call_op(device, shapes=[(3, 5)], grads=strided))
    calls.append(call_op(device, shapes=[(3, 5)], params=[t.clone() for t in strided]))
    if device == "cuda":
        calls.append(call_op(device, device_lr=torch.tensor(0.1, device=device)))
    for call in calls:
        torch.library.opcheck(torch.ops.cuda_ops.sgd_, call)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"grads": [torch.ones(3)]}, "sgd: expected as many grads as params, 3, got 1"),
        ({"momentum_buffers": []}, "sgd: expected 3 momentum_buffers for 3 params and momentum 0.9, got 0"),
        ({"first": [True]}, "sgd: expected 3 values in first for 3 params and momentum 0.9, got 1"),
        (
            {"grads": random_tensors([(3,), (2, 3), (0,)], 0)},
            r"sgd: expected grads to have the shape of params, \[2, 2\], got \[2, 3\]",
        ),
        (
            {"grads": random_tensors([(3,), (2, 2), (0,)], 0, dtype=torch.float32)},
            "sgd: expected grads to have the dtype of params, float64, got float32",
        ),
        (
            {"momentum_buffers": random_tensors([(3,), (2, 2), (0,)], 0, dtype=torch.float32)},
            "sgd: expected momentum_buffers to have the dtype of params, float64, got float32",
        ),
        (
            {"params": [torch.ones(3, dtype=torch.int64)] * 3},
            "sgd: expected params to be floating point, got int64",
        ),
        ({"device_lr": torch.tensor(0.1)}, "sgd: expected device_lr to be one float32 or float64 on a CUDA device"),
    ],
)
def test_bad_lists_are_refused_by_name(replaced, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.cuda_ops.sgd_(*call_op(**replaced))


def test_hooks_are_called_and_profiles_have_the_step():
    """PyTorch's wrapper of step is left out only where there is nothing for it to do."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = SGD([param], lr=0.5)
    calls = []

    def step():
        param.grad = torch.ones(3)
        optimizer.step()

    step()
    before = optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    after = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append("everywhere"))
    step()
    assert calls == ["before", "after", "everywhere"]
    for hook in (before, after, everywhere):
        hook.remove()
    step()
    assert len(calls) == 3 and torch.equal(param.detach(), torch.full((3,), -0.5))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


def test_zero_grad():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = SGD([param, torch.nn.Parameter(torch.ones(1))], lr=0.5)
    param.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(param.grad, torch.zeros(3))
    optimizer.zero_grad()
    assert param.grad is None


@pytest.mark.parametrize(
    "value", ["0.1", [0.1], None, torch.tensor([0.1, 0.2])], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize("name", ["momentum", "dampening", "weight_decay"])
def test_options_that_are_no_numbers(name, value):
    parameters = [torch.nn.Parameter(torch.ones(2))]
    message = f"SGD: expected {name} to be a number, got "
    with pytest.raises(TypeError, match=message):
        cuda_ops.optim.SGD(parameters, **{name: value})
    with pytest.raises(TypeError, match=message):
        cuda_ops.optim.SGD([{"params": parameters, name: value}])
    optimizer = cuda_ops.optim.SGD(parameters)
    parameters[0].grad = torch.ones(2)
    optimizer.param_groups[0][name] = value
    with pytest.raises(TypeError, match=message):
        optimizer.step()


@pytest.mark.parametrize("name", ["nesterov", "maximize"])
def test_options_that_are_no_flags(name):
    parameters = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(TypeError, match=f"SGD: expected {name} to be a bool, got 'True'"):
        cuda_ops.optim.SGD(parameters, momentum=0.9, **{name: "True"})


def test_numbers_of_numpy_and_tensors_are_options():
    runs = []
    for convert in (float, numpy.float32, torch.tensor):
        parameter = torch.nn.Parameter(torch.ones(2))
        options = {"momentum": 0.5, "dampening": 0.25, "weight_decay": 0.125}
        optimizer = cuda_ops.optim.SGD([parameter], lr=0.5, **{n: convert(v) for n, v in options.items()})
        for _ in range(3):
            parameter.grad = torch.tensor([1.0, -1.0])
            optimizer.step()
        runs.append(parameter.detach())
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_parameters_whose_gradient_comes_late():
    """With momentum: some have a buffer, some have none yet, and one loses its gradient again."""
    runs = []
    for optim in (cuda_ops.optim, torch.optim):
        parameters = [torch.nn.Parameter(torch.full((3,), float(i))) for i in range(3)]
        optimizer = optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
        for step in range(5):
            for i, parameter in enumerate(parameters):
                present = step >= i and not (i == 0 and step == 3)
                parameter.grad = torch.full((3,), 1.0 + step) if present else None
            optimizer.step()
        runs.append(([p.detach() for p in parameters], [optimizer.state[p]["momentum_buffer"] for p in parameters]))
    torch.testing.assert_close(*runs)
